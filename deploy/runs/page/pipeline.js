"use strict";
// The way of a group as a picture: prompts, rollouts, scorers, ledger, learner, weights. Says who works and who waits.

const MOST_WORKERS = 64;

function stage(title, figure, lines, state = "", why = "", share = null) {
  const parts = lines.filter(Boolean).map((each) => make("div", "soft", each));
  return make("li", state, title, make("b", "", figure), share === null ? null : bar(share), ...parts, why ? make("div", "why", why) : null);
}

// The workers of a role together, by the broker's document.
function crew(status, role) {
  const workers = status.workers.filter((each) => each.role === role);
  const sum = (name) => workers.reduce((total, each) => total + each[name], 0);
  const versions = [...new Set(workers.map((each) => each.version).filter((each) => each >= 0))].sort((one, other) => one - other);
  return { workers, seats: sum("seats"), rows: sum("rows"), waiting: sum("waiting_rows"), speed: sum("tokens_per_s"), versions,
    loading: workers.filter((each) => each.phase === "loading").length, busy: status.busy_fraction[role] };
}

function crewStage(title, role, status, reason) {
  const found = crew(status, role);
  if (!found.workers.length) return stage(title, "none", ["no worker is connected"], "waits");
  const inSeats = Math.min(found.rows - found.waiting, found.seats);
  const isIdle = found.rows === 0;
  const why = found.loading ? `${found.loading} loading` : isIdle ? `waits for ${reason}` : "";
  return stage(
    `${title} (${found.workers.length})`, `${short(found.speed)} tok/s`,
    [`${Math.max(0, inSeats)} of ${found.seats} seats in use`, found.waiting ? `${found.waiting} rows wait for a seat` : "",
      found.busy === undefined ? "" : `busy ${percent(found.busy)} of the time`],
    isIdle ? "waits" : "works", why, found.busy ?? 0,
  );
}

function pipelineOf(live, curves) {
  const status = live.status;
  const queued = (name) => status.queues[name] || 0;
  const groups = status.groups;
  const busy = (curves && curves.mean && curves.mean["busy_fraction/learner"]) || [];
  const isWaiting = status.learner_phase === "waiting";
  const holders = crew(status, "rollout").versions;
  const scorersWaitFor = queued("sampling") ? "prefixes" : "groups";
  return make("section", "", make("h2", "", "Pipeline"), make("ol", "pipeline",
    stage("Prompts", short(groups.issued), ["groups begun so far", `${queued("queued")} queued`]),
    crewStage("Rollouts", "rollout", status, queued("queued") ? "weights" : "room in the window"),
    crewStage("Scorers", "scorer", status, scorersWaitFor),
    stage("Ledger", `${queued("scored")} scored`, [`${queued("sampling")} being sampled, ${queued("sampled")} sampled`,
      `${queued("scoring")} being scored`, `${groups.outstanding} under way; window ${status.window}`]),
    stage("Learner", live.phase || "idle", [`iteration ${status.iteration} of ${status.total_iterations}`,
      `${groups.trained} groups trained, mean age ${status.mean_age.toFixed(2)}`],
      isWaiting ? "waits" : "works", isWaiting && status.waiting_for ? `waits for ${status.waiting_for}` : "", busy.length ? newest(busy) : null),
    stage("Weights", `version ${status.iteration}`, [holders.length ? `rollouts hold ${holders.join(", ")}` : "", "pulled by rollouts ↺"]),
  ));
}

function workersOf(status) {
  const rows = status.workers.slice(0, MOST_WORKERS).map((each) => [each.name, each.host, each.phase, each.role === "rollout" && each.version >= 0 ? each.version : "",
    `${each.rows - each.waiting_rows}/${each.seats}`, each.waiting_rows, each.busy_fraction === null ? "" : percent(each.busy_fraction),
    short(each.tokens_per_s), each.tasks_done, each.state]);
  const names = ["worker", "host", "phase", "version", "seats in use", "waiting", "busy", "tokens/s", "tasks done", "state"];
  const memory = Object.entries(status.memory).map(([name, each]) => `${name} ${short(each.share_bytes / 2 ** 20)} MiB`);
  return make("section", "", make("h2", "", "Workers"), table(names, rows),
    status.workers.length > MOST_WORKERS ? make("p", "soft", `and ${status.workers.length - MOST_WORKERS} more`) : null,
    memory.length ? make("p", "soft", `memory, shared pages divided: ${memory.join(", ")}`) : null);
}
