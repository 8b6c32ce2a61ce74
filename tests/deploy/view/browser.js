// What the browser test asks of a page. Each returns what it saw, as the test wants it.
({
  // The widths of the page and of the window: a page that is wider scrolls sideways.
  widths: () => [document.documentElement.scrollWidth, window.innerWidth],
  // The newest value in the caption of a figure, and the number of its drawn pictures.
  figure: (title) => {
    const node = document.querySelector(`figure[data-title="${title}"]`);
    return [node.querySelector(".series").textContent, node.querySelectorAll("canvas").length];
  },
  chip: () => document.querySelector("h1 .chip").textContent,
  // Titles of the figures that are drawn.
  drawn: () => [...document.querySelectorAll(".figures > figure")].filter((node) => node.getClientRects().length).map((node) => node.dataset.title),
  marked: () => [...document.querySelectorAll("mark")].map((node) => node.textContent),
  // Elements that only the text of a model or of a run's name could have made.
  planted: () => document.querySelectorAll("main script, main img, main b i").length,
  alarms: () => [...document.querySelectorAll("[data-alarm]")].map((node) => node.textContent),
})
