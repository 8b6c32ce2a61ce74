"use strict";
// One run: its state, curves, pipeline, samples, results and settings, each part drawn again when its data comes.

const UNJUDGED = ["error", "truncated", "no_gold"];

function sampleCard(sample) {
  const unknown = UNJUDGED.includes(sample.status) ? "left out" : "advantage not yet known";
  const advantage = sample.advantage === null ? unknown : `advantage ${sample.advantage >= 0 ? "+" : ""}${sample.advantage.toFixed(3)}`;
  // A kept completion is the whole text judged; it begins with the prefix, less a stop mark.
  const whole = sample.completion || sample.prefix;
  let end = 0;
  while (end < whole.length && whole[end] === sample.prefix[end]) end += 1;
  const answer = make("dd", "", make("mark", "", whole.slice(0, end)), whole.slice(end));
  const entry = (name, text) => {
    const node = text instanceof Node ? text : make("dd", "", text);
    node.dir = "auto";
    return [make("dt", "", name), node];
  };
  return make("article", "sample",
    make("div", "", make("span", `chip ${sample.reward > 0 ? "running" : "failed"}`, `reward ${short(sample.reward)}`), " ",
      make("span", "soft", `${advantage}; iteration ${sample.iteration}, ${sample.parts || sample.status}${sample.rule ? ` by ${sample.rule}` : ""}`)),
    make("dl", "", ...entry("question", sample.question), ...(sample.draft ? entry("draft of the target", sample.draft) : []),
      ...entry(sample.completion ? "answer, the adapter's part marked" : "what the adapter wrote", answer),
      // A reward function of the user's own extracts no answer.
      ...(sample.extracted || sample.status === "no_answer" ? entry("found, and gold", `${sample.extracted || "nothing"}   |   ${sample.gold}`)
        : entry("gold", sample.gold))));
}

class Samples {
  constructor() {
    this.node = make("section");
    this.kind = "";
  }

  draw(samples) {
    const groups = samples.groups.filter((each) => each[1].length);
    if (!groups.some((each) => each[0] === this.kind)) this.kind = groups.length ? groups[0][0] : "";
    const buttons = groups.map(([title]) => {
      const node = make("button", "", title);
      node.type = "button";
      node.setAttribute("aria-pressed", String(title === this.kind));
      node.addEventListener("click", () => { this.kind = title; this.draw(samples); });
      return node;
    });
    const chosen = groups.find((each) => each[0] === this.kind);
    replace(this.node, make("h2", "", "What the adapter writes"),
      samples.fault ? make("p", "soft", samples.fault) : null,
      make("div", "tabs", ...buttons), chosen ? make("div", "samples", ...chosen[1].map(sampleCard)) : null,
      samples.common.length ? make("h3", "", "Commonest texts") : null,
      samples.common.length ? table(["iterations", "text", "share of the rows", "mean reward"], this.commonRows(samples.common), [1]) : null);
  }

  commonRows(common) {
    const named = common.map(span);
    return common.map((each, place) => [named[place] === named[place - 1] ? "" : named[place], each.text || "(nothing)",
      `${(100 * each.share).toFixed(1)} %`, each.reward.toFixed(3)]);
  }
}

class RunView {
  constructor(run, logs) {
    this.run = run;
    this.head = make("section");
    this.alarms = make("section");
    this.live = make("section");
    this.curves = new Curves([run]);
    this.samples = new Samples();
    this.results = make("section");
    this.tables = make("section");
    this.details = make("section");
    this.facts = make("section");
    this.logs = logs ? folded("Ends of the logs", (body) => this.drawLogs(body, logs)) : null;
    this.settings = folded("Settings", (body) => replace(body, table(["", ""], (run.page && run.page.settings) || [], [1])));
    this.node = make("div", "", this.head, this.alarms, this.live, this.results, this.curves.node, this.samples.node, this.tables,
      this.details, this.facts, ...(this.logs ? [this.logs] : []), this.settings);
  }

  // `changed`: names of the parts that came; each belongs to some sections.
  draw(changed) {
    const run = this.run;
    if (["state", "page", "live", "fault"].some((each) => changed.has(each))) this.drawHead();
    if (changed.has("alarms")) this.drawAlarms();
    if (changed.has("live")) {
      replace(this.live, run.live && pipelineOf(run.live, run.curves), run.live && workersOf(run.live.status));
      replace(this.details, run.live && make("h2", "", "Details"), run.live && table(["", ""], run.live.details, [1]));
      if (this.logs) this.logs.refill();
    }
    if (changed.has("page")) this.drawPage();
    if (changed.has("curves") || changed.has("page")) this.curves.draw();
    if (changed.has("samples")) this.samples.draw(run.samples);
  }

  drawHead() {
    const { state, live, name, page } = this.run;
    const known = state || {};
    const total = known.total_iterations;
    const done = live ? live.status.iteration : known.iterations;
    const remaining = live && live.iteration_s !== null ? live.iteration_s * (total - done) : 0;
    const left = remaining > 0 ? `, training left ${duration(remaining)}` : "";
    const share = total ? done / total : 0;
    replace(this.head, make("h1", "", name, " ", make("span", `chip ${known.state || ""}`, known.state || "")),
      page ? make("p", "soft", page.directory) : null,
      total ? make("div", "progress", bar(share), make("p", "soft", `${done} of ${total} iterations, ${percent(share)}${left}`)) : null,
      live ? make("p", "", live.line) : known.words ? make("p", "words", known.words) : null,
      this.run.fault ? make("p", "alarm", this.run.fault) : null);
    document.title = `${name} – ${known.state || "prefixrl"}`;
  }

  drawAlarms() {
    replace(this.alarms, ...this.run.alarms.map((each) => {
      const node = make("p", "alarm", make("b", "", `${each.last > each.first ? "iterations" : "iteration"} ${span(each)}`), `: ${each.text}`);
      node.dataset.alarm = each.kind;
      return node;
    }));
  }

  drawPage() {
    const page = this.run.page;
    const [first, ...others] = page.tables.map(([title, note, columns, rows]) =>
      [make("h2", "", title), note ? make("p", "soft", note) : null, table(columns, rows)]);
    replace(this.results, ...(first || []), page.gain ? make("p", "gain", page.gain) : null);
    replace(this.tables, ...others.flat());
    const starts = page.starts.map((each) => [each.time, each.iteration, each.host, each.commit || "no checkout",
      Object.entries({ python: each.python, ...each.packages }).map((pair) => pair.join(" ")).join(", ")]);
    replace(this.facts, page.facts.length ? make("h2", "", "Run") : null, page.facts.length ? table(["", ""], page.facts, [0, 1]) : null,
      starts.length ? make("h2", "", "Software") : null,
      starts.length ? table(["start (UTC)", "at iteration", "host", "commit", "software"], starts, [3, 4]) : null);
    this.settings.refill();
  }

  async drawLogs(body, logs) {
    const found = await logs(this.run.name);
    replace(body, ...Object.entries(found).flatMap(([name, lines]) => [make("h3", "", name), make("pre", "", lines.join("\n"))]));
  }
}

// Several runs: curves over each other, and the settings in which they differ.
class Comparison {
  constructor(runs) {
    this.runs = runs;
    this.head = make("section");
    this.curves = new Curves(runs);
    this.settings = make("section");
    this.node = make("div", "", this.head, this.curves.node, this.settings);
  }

  draw(changed) {
    if (changed.has("state") || changed.has("alarms")) this.drawHead();
    if (changed.has("page")) this.drawSettings();
    if (changed.has("curves") || changed.has("page")) this.curves.draw();
  }

  drawHead() {
    const rows = this.runs.map((run, place) => {
      const key = make("span", "key");
      key.style.background = `var(${COLOURS[place % COLOURS.length]})`;
      const state = run.state || {};
      return [make("span", "", key, link(run.name, `#${encodeURIComponent(run.name)}`)), make("span", `chip ${state.state || ""}`, state.replay_of ? `${state.state} replay` : state.state || ""),
        `${state.iterations ?? ""}`, short(state.reward), state.accuracy ? short(state.accuracy.trained_adapter) : "", (run.alarms || []).map((each) => each.kind).join(", ")];
    });
    replace(this.head, make("h1", "", `${this.runs.length} runs`), table(["run", "state", "iterations", "reward", "trained, held out", "alarms"], rows));
  }

  drawSettings() {
    const settings = this.runs.map((run) => new Map((run.page && run.page.settings) || []));
    const names = [...new Set(settings.flatMap((each) => [...each.keys()]))];
    const rows = names.map((name) => [name, ...settings.map((each) => each.get(name) ?? "")])
      .filter(([, ...values]) => new Set(values).size > 1);
    replace(this.settings, make("h2", "", "Settings that differ"),
      rows.length ? table(["", ...this.runs.map((run) => run.name)], rows) : make("p", "soft", "none"));
  }
}
