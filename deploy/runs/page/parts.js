"use strict";
// Elements and numbers. Every text goes through `make`, which makes text nodes of it: none is ever markup.

const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]/g;

function printable(text) {
  return String(text).replace(HIDDEN, (one) => "\\u" + one.charCodeAt(0).toString(16).padStart(4, "0"));
}

function make(tag, classes = "", ...children) {
  const node = document.createElement(tag);
  if (classes) node.className = classes;
  node.append(...children.filter((each) => each !== null).map((each) => (each instanceof Node ? each : printable(each))));
  return node;
}

function replace(node, ...children) {
  node.replaceChildren(...children.filter(Boolean));
}

function link(text, target) {
  const node = make("a", "", text);
  node.href = target;
  return node;
}

// A part that is filled when it is opened, again at each opening.
function folded(title, fill) {
  const node = make("details", "", make("summary", "", title));
  const body = make("div");
  node.append(body);
  node.addEventListener("toggle", () => node.open && fill(body));
  node.refill = () => node.open && fill(body);
  return node;
}

function table(columns, rows, texts = []) {
  const head = columns.some(Boolean) ? [make("tr", "", ...columns.map((each) => make("th", "", each)))] : [];
  const cell = (each, place) => {
    const node = make("td", texts.includes(place) ? "text" : "", each);
    if (texts.includes(place)) node.dir = "auto";
    return node;
  };
  return make("div", "wide", make("table", "", ...head, ...rows.map((row) => make("tr", "", ...row.map(cell)))));
}

function bar(share) {
  const filled = make("span");
  filled.style.width = `${Math.max(0, Math.min(1, share)) * 100}%`;
  return make("div", "bar", filled);
}

function short(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  for (const [size, unit] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (Math.abs(value) >= size) return `${Number((value / size).toPrecision(3))}${unit}`;
  }
  return String(Number(value.toPrecision(3)));
}

function percent(share) {
  return `${(100 * share).toFixed(0)} %`;
}

function duration(seconds) {
  const minutes = Math.round(seconds / 60);
  if (seconds < 90) return `${seconds.toFixed(0)} s`;
  return minutes < 90 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} min`;
}

function span(part) {
  return part.last > part.first ? `${part.first}–${part.last}` : String(part.first);
}

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}
