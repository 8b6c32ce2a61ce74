"use strict";
// Curves of one or several runs. A run's columns come thinned: a mean per bucket, with its lowest and highest value.

const SMOOTHED_OVER = 8;
const COLOURS = ["--c0", "--c1", "--c2", "--c3", "--c4", "--c5"];
const DASHES = [[], [6, 4], [2, 3], [10, 3, 2, 3]];
const FIGURES = [
  ["Reward", "mean of an iteration", ["figures/reward"], true],
  ["Reward parts", "what the reward function gave besides", ["figures/reward_part/*"]],
  ["Effective sample size", "of old samples, over their number", ["figures/old_ess_fraction"], true],
  ["KL", "from the reference model, nats per token", ["figures/reference_kl"]],
  ["Entropy", "of the adapter, nats per token", ["figures/entropy"]],
  ["Texts", "share of the commonest in the rows; different texts over rows",
    ["figures/commonest_text_fraction", "figures/distinct_texts_fraction"], true],
  ["Groups without difference", "all their rewards are equal", ["figures/uniform_groups_fraction",
    "figures/all_right_groups_fraction", "figures/all_wrong_groups_fraction"], true],
  ["Problems", "by the outcomes of their groups so far",
    ["pools/mixed", "pools/never_right", "pools/always_right", "pools/not_asked"]],
  ["Age", "of the trained groups, in versions", ["mean_age", "largest age"]],
  ["Gradient norm", "before clipping", ["figures/actor_grad_norm", "figures/critic_grad_norm"]],
  ["Busy", "share of the seats in use, and of the learner's time",
    ["busy_fraction/rollout", "busy_fraction/scorer", "busy_fraction/learner"], true],
  ["Throughput", "tokens per second", ["tokens_per_s/rollout", "tokens_per_s/scorer", "tokens_per_s/learner"]],
  ["Time of the learner", "seconds of an iteration", ["trained_s", "waited_s", "publish_s"]],
  ["Rows that wait", "in the engines for a seat", ["waiting_rows/rollout", "waiting_rows/scorer"]],
].map(([title, note, columns, isShare]) => ({ title, note, columns, isShare: Boolean(isShare) }));

// Take the points from a bucket on into what is known of a run's curves.
function merged(known, added) {
  if (!known || added.from === 0 || known.step !== added.step) return added;
  const found = { step: added.step, from: 0, iteration: known.iteration.slice(0, added.from).concat(added.iteration) };
  for (const part of ["mean", "low", "high"].filter((each) => added[each])) {
    found[part] = {};
    for (const name of new Set([...Object.keys(known[part] || {}), ...Object.keys(added[part])])) {
      const before = (known[part][name] || Array(added.from).fill(null)).slice(0, added.from);
      found[part][name] = before.concat(added[part][name] || Array(added.iteration.length).fill(null));
    }
  }
  return found;
}

// The mean of the newest values at each one; gaps stay gaps.
function smoothed(values) {
  return values.map((value, end) => {
    const recent = values.slice(Math.max(0, end - SMOOTHED_OVER + 1), end + 1).filter((each) => each !== null);
    return value === null ? null : recent.reduce((sum, each) => sum + each, 0) / recent.length;
  });
}

function newest(values) {
  for (let place = values.length - 1; place >= 0; place -= 1) if (values[place] !== null) return values[place];
  return null;
}

function faded(paint) {
  return `color-mix(in srgb, ${paint} 35%, transparent)`;
}

// A figure's columns; one that ends in * stands for all that begin so.
function columnsOf(about, known) {
  const all = Object.keys((known && known.mean) || {});
  return about.columns.flatMap((each) => (each.endsWith("*") ? all.filter((name) => name.startsWith(each.slice(0, -1))) : [each]));
}

class Figure {
  constructor(about, runs) {
    this.about = about;
    this.runs = runs;
    this.keys = make("span");
    this.place = make("div", "plot");
    this.node = make("figure", "", make("h3", "", about.title), make("figcaption", "", about.note, make("br"), this.keys), this.place);
    this.node.dataset.title = about.title;
    this.plot = null;
    this.shape = "";
    new ResizeObserver(() => this.resize()).observe(this.place);
  }

  resize() {
    if (this.plot && this.place.clientWidth) this.plot.setSize({ width: this.place.clientWidth, height: 200 });
  }

  // The lines to draw: a run's column each, with its colour.
  lines() {
    const found = [];
    this.runs.forEach((run, runPlace) => {
      const known = run.curves;
      for (const [place, name] of columnsOf(this.about, known).entries()) {
        const values = known && known.mean && known.mean[name];
        if (!values || newest(values) === null) continue;
        const several = this.runs.length > 1;
        found.push({
          run, name, values, iteration: known.iteration, low: known.low && known.low[name], high: known.high && known.high[name],
          paint: COLOURS[(several ? runPlace : place) % COLOURS.length], dash: several ? DASHES[place % DASHES.length] : [],
          label: (several ? `${run.name}: ` : "") + (columnsOf(this.about, known).length > 1 || !several ? name.split("/").pop().replaceAll("_", " ") : ""),
        });
      }
    });
    return found;
  }

  draw() {
    const lines = this.lines();
    this.node.hidden = !lines.length;
    if (!lines.length) return;
    const tables = lines.map((line) => [line.iteration, ...this.series(line).map((each) => each.values)]);
    const data = tables.length > 1 && this.runs.length > 1 ? uPlot.join(tables) : [tables[0][0], ...tables.flatMap((each) => each.slice(1))];
    const shape = JSON.stringify(lines.map((line) => [line.run.name, line.name, Boolean(line.low)]));
    if (this.shape !== shape || !this.plot) {
      this.shape = shape;
      if (this.plot) this.plot.destroy();
      this.plot = new uPlot(this.options(lines), data, this.place);
    } else {
      this.plot.setData(data);
    }
    this.tell(lines, null);
  }

  // Thin lines are the values, or the edges of a band where a point stands for many; the thick one is smooth.
  series(line) {
    const edges = line.low ? [{ values: line.high, isThin: true }, { values: line.low, isThin: true }] : [{ values: line.values, isThin: true }];
    return [...edges, { values: smoothed(line.values), isThin: false }];
  }

  options(lines) {
    const series = [{}], bands = [];
    for (const line of lines) {
      const paint = colour(line.paint);
      if (line.low) bands.push({ series: [series.length, series.length + 1], fill: faded(paint) });
      for (const each of this.series(line)) {
        series.push({
          stroke: each.isThin ? faded(paint) : paint, width: each.isThin ? (line.low ? 0 : 1) : 2, dash: line.dash,
          points: { show: line.iteration.length < 2 && !each.isThin }, spanGaps: this.runs.length > 1,
        });
      }
    }
    const axis = { stroke: colour("--soft"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
    const range = this.about.isShare ? () => [0, 1] : (plot, low, high) => {
      const [least, most] = [Math.min(0, low ?? 0), Math.max(0, high ?? 0)];
      return [least, most > least ? most + (most - least) * 0.04 : least + 1];
    };
    return {
      width: this.place.clientWidth || 340, height: 200, legend: { show: false }, series, bands,
      scales: { x: { time: false, range: (plot, low, high) => [low, high > low ? high : low + 1] }, y: { range } },
      axes: [{ ...axis, space: 60, size: 28 }, { ...axis, size: 48, values: (plot, ticks) => ticks.map(short) }],
      cursor: { sync: { key: "iterations" }, drag: { x: true, y: false }, points: { size: 6 } },
      hooks: {
        setCursor: [(plot) => this.tell(this.lines(), plot.cursor.idx === null ? null : plot.data[0][plot.cursor.idx])],
        draw: [(plot) => this.about.columns[0] === "figures/reward" && this.drawJudged(plot)],
      },
    };
  }

  // What was judged on held-out problems, with its 95% interval, at the version it is of.
  drawJudged(plot) {
    const pen = plot.ctx;
    this.runs.forEach((run, place) => {
      for (const point of (run.page && run.page.judged) || []) {
        const at = Math.min(plot.scales.x.max, Math.max(plot.scales.x.min, point.version));
        const [across, up, low, high] = [plot.valToPos(at, "x", true), ...[point.accuracy, ...point.ci95].map((each) => plot.valToPos(each, "y", true))];
        pen.strokeStyle = pen.fillStyle = colour(this.runs.length > 1 ? COLOURS[place % COLOURS.length] : "--text");
        pen.lineWidth = 1.5 * devicePixelRatio;
        pen.beginPath(); pen.moveTo(across, low); pen.lineTo(across, high); pen.stroke();
        pen.beginPath(); pen.arc(across, up, 3.5 * devicePixelRatio, 0, 2 * Math.PI); pen.fill();
      }
    });
  }

  // The caption: every line's name, with its value at the cursor or its newest.
  tell(lines, at) {
    const parts = lines.map((line) => {
      const place = at === null ? -1 : line.iteration.findLastIndex((each) => each <= at);
      const key = make("span", "key");
      key.style.background = `var(${line.paint})`;
      return make("span", "series", key, `${line.label} ${short(place < 0 ? newest(line.values) : line.values[place])}`.trim());
    });
    if (at !== null) parts.push(make("span", "series", `at ${at}`));
    if (this.about.columns[0] === "figures/reward" && this.runs.some((run) => run.page && run.page.judged.length)) {
      parts.push(make("span", "series", "points: held out, greedy, with 95% interval"));
    }
    replace(this.keys, ...parts);
  }
}

class Curves {
  constructor(runs) {
    this.runs = runs;
    this.figures = FIGURES.map((about) => new Figure(about, runs));
    this.others = new Map();
    this.more = make("div", "figures");
    this.note = make("p", "soft");
    this.rest = folded("Every other column", (body) => { replace(body, this.more); this.drawOthers(); });
    this.node = make("section", "", make("h2", "", "Curves"), this.note, make("div", "figures", ...this.figures.map((each) => each.node)), this.rest);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw(true));
  }

  all() {
    return [...this.figures, ...this.others.values()];
  }

  draw(isAnew = false) {
    const widest = Math.max(1, ...this.runs.map((run) => (run.curves ? run.curves.step : 1)));
    const thin = widest > 1 ? `band: from the lowest to the highest of ${widest} iterations` : "thin: each iteration";
    replace(this.note, `${thin}; thick: mean of the newest ${SMOOTHED_OVER}${widest > 1 ? " such means" : ""}. Drag to zoom, double click to go back.`);
    if (isAnew) this.all().forEach((each) => { each.shape = ""; });
    this.node.hidden = !this.runs.some((run) => run.curves && run.curves.iteration.length);
    if (this.node.hidden) return;
    this.figures.forEach((each) => each.draw());
    if (this.rest.open) this.drawOthers();
  }

  drawOthers() {
    const shown = new Set(FIGURES.flatMap((each) => this.runs.flatMap((run) => columnsOf(each, run.curves))));
    const names = this.runs.flatMap((run) => Object.keys((run.curves && run.curves.mean) || {}));
    for (const name of [...new Set(names)].sort()) {
      if (shown.has(name) || this.others.has(name)) continue;
      this.others.set(name, new Figure({ title: name, note: "", columns: [name], isShare: false }, this.runs));
      this.more.append(this.others.get(name).node);
    }
    this.others.forEach((each) => each.draw());
  }
}
