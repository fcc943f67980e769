// Finds pipeline steps in spans, as `traces/steps.py` does: the computations, the bubbles between them, and the live activations.

const COMPUTES = { forward: "F", backward: "B", input_grad: "I", weight_grad: "W" };
const MOST_STRIPS = 64; // the most ranks whose activations are drawn
const MOST_STEPS = 50; // the most steps in the table

/** Returns the steps that ended on every rank, as {name, begin, end, computes}; `computes` lists each rank's events in order of their start. */
function findSteps(run) {
  const { label, stage, microbatch } = run.columns, byRank = new Map();
  for (let rank = 0; rank < run.ranks; rank++) {
    const own = [];
    for (let i = run.first[rank]; i < run.first[rank + 1]; i++) {
      if (run.kind(i) !== "span") continue;
      if (run.isStep[label[i]]) own.push({ event: i, computes: [] });
      else if (own.length && COMPUTES[run.label(i)] && stage[i] >= 0 && microbatch[i] >= 0 && run.done[i] >= 0) {
        const last = own.at(-1); // the innermost step, because a user's own loop may also have spans named "step ..."
        if (run.post[i] <= run.done[last.event]) last.computes.push(i);
      }
    }
    if (own.length) byRank.set(rank, own.filter((step) => step.computes.length));
  }
  const steps = [];
  for (let k = 0; byRank.size && [...byRank.values()].every((own) => k < own.length); k++) {
    const step = { name: "", begin: Infinity, end: -Infinity, computes: new Map() };
    for (const [rank, own] of byRank) {
      step.name ||= run.label(own[k].event).slice(5);
      step.computes.set(rank, own[k].computes);
      for (const i of own[k].computes) [step.begin, step.end] = [Math.min(step.begin, run.post[i]), Math.max(step.end, run.done[i])];
    }
    steps.push(step);
  }
  return steps;
}

/** Calls `each(from, until)` for the times of a step in which a rank does not compute. */
function bubbles(run, step, rank, each) {
  let last = step.begin;
  for (const i of step.computes.get(rank) ?? []) {
    if (run.post[i] > last) each(last, run.post[i]);
    last = Math.max(last, run.done[i]);
  }
  if (step.end > last) each(last, step.end);
}

/** Returns the share of a step's time, over all of its ranks, in which they did not compute. */
function bubbleShare(run, step) {
  let idle = 0;
  for (const rank of step.computes.keys()) bubbles(run, step, rank, (from, until) => { idle += until - from; });
  return idle / Math.max(1, (step.end - step.begin) * step.computes.size);
}

/** Returns the times, ascending, at which a rank's number of live activations changes, each with the new number. */
function liveActivations(run, steps, rank) {
  const changes = [];
  for (const step of steps) {
    for (const i of step.computes.get(rank) ?? []) {
      const kind = COMPUTES[run.label(i)];
      if (kind === "F") changes.push([run.post[i], 1]);
      else if (kind !== "I") changes.push([run.done[i], -1]);
    }
  }
  changes.sort(([a, up], [b, down]) => a - b || up - down); // at the same moment, ends come before begins
  let live = 0;
  return changes.map(([time, by]) => [time, (live += by)]);
}

/** Returns the largest number of live activations in a window. */
function peakIn(changes, from, until) {
  const isIn = ([time], k) => time <= until && !(changes[k + 1]?.[0] <= from);
  return Math.max(0, ...changes.filter(isIn).map(([, live]) => live));
}

/** Draws the live activations of the visible ranks, one strip per rank, over the visible time. */
function drawActivations(canvas, timeline, run, steps) {
  const rows = timeline.rowsInView().filter((row) => row.run === run).map(({ rank }) => rank);
  const ranks = rows.filter((rank) => steps[0].computes.has(rank)).slice(0, MOST_STRIPS);
  const strip = Math.max(12, Math.min(40, 180 / ranks.length)), ratio = devicePixelRatio || 1;
  const width = canvas.clientWidth || 300, context = setUp(canvas, width, strip * ranks.length);
  canvas.style.height = `${strip * ranks.length}px`;
  const lives = ranks.map((rank) => liveActivations(run, steps, rank));
  const peaks = lives.map((live) => peakIn(live, timeline.from, timeline.until)), most = Math.max(1, ...peaks);
  const x = (time) => 52 + ((Math.min(Math.max(time, timeline.from), timeline.until) - timeline.from) / (timeline.until - timeline.from)) * (width - 76);
  for (const [row, live] of lives.entries()) {
    const floor = (row + 1) * strip - 1;
    context.fillStyle = timeline.muted;
    context.fillText(`rank ${ranks[row]}`, 0, floor - strip / 2);
    context.fillText(`≤ ${peaks[row]}`, width - 22, floor - strip / 2);
    context.fillRect(52, floor, width - 76, 0.5);
    context.fillStyle = timeline.colourOf.activations;
    for (const [k, [time, count]] of live.entries()) {
      const next = live[k + 1]?.[0] ?? timeline.until;
      if (count > 0 && next > timeline.from && time < timeline.until) {
        const height = ((strip - 3) * count) / most;
        const [x0, x1] = [x(time), x(next)].map((one) => Math.round(one * ratio) / ratio); // avoids gaps
        context.fillRect(x0, floor - height, Math.max(0.5, x1 - x0), height);
      }
    }
  }
  canvas.setAttribute("aria-label", `live activations: ${ranks.map((rank, row) => `rank ${rank} at most ${peaks[row]}`).join(", ")}`);
}

/** Returns the panel for the visible steps, with live activations and the bubble of each step. */
function stepsPanel(timeline, run, steps) {
  if (!steps.length) return [make("p", {}, "This run contains no complete pipeline step. train_step_pipeline records steps, and you can also record them with your own spans of the same names.")];
  const canvas = make("canvas", { role: "img" });
  const rows = steps.filter((step) => step.begin < timeline.until && step.end > timeline.from).slice(0, MOST_STEPS).map((step) => [
    `${steps.indexOf(step)}`, step.name, timeText(step.begin, 4), timeText(step.end - step.begin, 4), `${(100 * bubbleShare(run, step)).toFixed(1)} %`,
  ]);
  return [make("p", {}, "Live activations of the visible ranks: the data that each stage keeps for its microbatches' backward passes."), canvas,
    table("Visible steps", ["step", "schedule", "start", "duration", "bubble"], rows)];
}
