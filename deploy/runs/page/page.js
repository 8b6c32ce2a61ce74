"use strict";
// Where the data comes from: the page itself (report.html), or the server, which tells what changes.
// The part of the address behind # names the runs that are shown, joined by &; without any it is the list of all.

const LIST_EVERY_MS = 5000;
const main = document.getElementById("main");
const trouble = document.getElementById("trouble");
let runs = new Map();
let view = null;
let stream = null;
let timer = null;

function told(text) {
  trouble.hidden = !text;
  replace(trouble, document.createTextNode(text));
}

// Take a message: what changed, by run and part.
function take(message) {
  const changed = new Set();
  for (const [name, parts] of Object.entries(message)) {
    const run = runs.get(name);
    if (!run) continue;
    for (const [part, value] of Object.entries(parts)) {
      run[part] = part === "curves" ? merged(run.curves, value) : value;
      changed.add(part);
    }
  }
  view.draw(changed);
}

function show(names, logs) {
  runs = new Map(names.map((name) => [name, { name, alarms: [] }]));
  const all = [...runs.values()];
  view = all.length > 1 ? new Comparison(all) : new RunView(all[0], logs);
  main.append(view.node);
}

async function asked(path) {
  const answer = await fetch(path);
  if (!answer.ok) throw new Error(`${path}: ${answer.status} ${await answer.text()}`);
  return answer.json();
}

function follow(names) {
  const query = names.map((name) => `run=${encodeURIComponent(name)}`).join("&");
  const back = link("all runs", "#");
  replace(main, make("p", "", "← ", back));
  show(names, (name) => asked(`api/logs?run=${encodeURIComponent(name)}`));
  stream = new EventSource(`api/follow?${query}`);
  stream.onmessage = (event) => { told(""); take(JSON.parse(event.data)); };
  stream.onerror = () => told(stream.readyState === EventSource.CLOSED
    ? "The dashboard knows no such run, or does not let this page ask." : "The dashboard does not answer; what is shown is the last that came. Trying again.");
}

async function list() {
  const chosen = new Set([...main.querySelectorAll("input:checked")].map((each) => each.value));
  try {
    const found = await asked("api/runs");
    told("");
    if (location.hash.length > 1) return;
    drawList(found, chosen);
  } catch (error) {
    told(`The dashboard does not answer: ${error.message}`);
  }
  timer = setTimeout(list, LIST_EVERY_MS);
}

function drawList(found, chosen) {
  const compare = make("button", "pick", "Show the chosen runs over each other");
  compare.type = "button";
  const boxes = [];
  const update = () => { compare.hidden = boxes.filter((each) => each.checked).length < 2; };
  compare.addEventListener("click", () => {
    location.hash = boxes.filter((each) => each.checked).map((each) => encodeURIComponent(each.value)).join("&");
  });
  const rows = found.runs.map((run) => {
    const box = make("input");
    Object.assign(box, { type: "checkbox", value: run.name, checked: chosen.has(run.name), ariaLabel: `choose ${printable(run.name)}` });
    box.addEventListener("change", update);
    boxes.push(box);
    const total = run.total_iterations;
    return [box, link(run.name, `#${encodeURIComponent(run.name)}`), make("span", `chip ${run.state}`, run.replay_of ? `${run.state} replay` : run.state),
      make("span", "", `${run.iterations ?? ""}${total ? `/${total}` : ""}`, total ? bar(run.iterations / total) : ""), short(run.reward), short(run.accuracy.trained_adapter), run.reason];
  });
  update();
  document.title = "prefixrl";
  replace(main, make("h1", "", "Runs"), make("p", "soft", found.folder),
    found.runs.length ? table(["", "run", "state", "iterations", "reward", "trained, held out", "last words"], rows, [6]) : make("p", "", "no run yet"), compare);
}

function route() {
  if (stream) stream.close();
  clearTimeout(timer);
  stream = timer = null;
  told("");
  const names = location.hash.slice(1).split("&").filter(Boolean).map(decodeURIComponent);
  if (names.length) { follow(names); return; }
  replace(main);
  list();
}

const held = document.getElementById("data");
if (held) {
  const message = JSON.parse(held.textContent);
  show(Object.keys(message), null);
  take(message);
} else {
  window.addEventListener("hashchange", route);
  route();
}
