// Shows the pipeline steps of a run, which Python found: their bubbles and live activations.

const MOST_STRIPS = 64; // the most ranks whose activations are drawn
const MOST_STEPS = 50; // the most steps in the table
const NO_STEPS = "This run contains no complete pipeline step. train_step_pipeline records steps, "
  + "and you can also record them with your own spans of the same names.";
const ABOUT_LIVE = "Live activations of the visible ranks: the data that each stage keeps for its "
  + "microbatches' backward passes.";

/** Returns the largest number of live activations of a rank in a window. */
function peakIn(run, rank, from, until) {
  const [times, live] = run.rowsOf("live", rank);
  const first = Math.max(0, firstAbove(times, from) - 1), last = firstAbove(times, until);
  return live.subarray(first, last).reduce((most, one) => Math.max(most, one), 0);
}

/** Draws the live activations of the visible ranks, one strip per rank, over the visible time. */
function drawActivations(canvas, timeline, run) {
  const { from, until, muted, colourOf } = timeline;
  const rows = timeline.rowsInView().filter((row) => row.run === run);
  const ranks = rows.map(({ rank }) => rank).filter((rank) => run.rowsOf("live", rank)[0].length);
  ranks.splice(MOST_STRIPS);
  const strip = Math.max(12, Math.min(40, 180 / ranks.length)), ratio = devicePixelRatio || 1;
  const width = canvas.clientWidth || 300, context = setUp(canvas, width, strip * ranks.length);
  canvas.style.height = `${strip * ranks.length}px`;
  const peaks = ranks.map((rank) => peakIn(run, rank, from, until));
  const highest = Math.max(1, ...peaks);
  const x = (time) => { // at a whole pixel, which avoids gaps
    const share = (Math.min(Math.max(time, from), until) - from) / (until - from);
    return Math.round((52 + share * (width - 76)) * ratio) / ratio;
  };
  for (const [row, rank] of ranks.entries()) {
    const floor = (row + 1) * strip - 1, [times, live] = run.rowsOf("live", rank);
    context.fillStyle = muted;
    context.fillText(`rank ${rank}`, 0, floor - strip / 2);
    const most = `≤ ${peaks[row]}`;
    context.fillText(most, width - context.measureText(most).width, floor - strip / 2);
    context.fillRect(52, floor, width - 76, 0.5);
    context.fillStyle = colourOf.activations;
    for (const [k, time] of times.entries()) {
      const next = times[k + 1] ?? until, height = ((strip - 3) * live[k]) / highest;
      if (live[k] <= 0 || next <= from || time >= until) continue;
      context.fillRect(x(time), floor - height, Math.max(0.5, x(next) - x(time)), height);
    }
  }
  const said = ranks.map((rank, row) => `rank ${rank} at most ${peaks[row]}`);
  canvas.setAttribute("aria-label", `live activations: ${said.join(", ")}`);
}

/** Returns the panel for the visible steps, with live activations and the bubble of each step. */
function stepsPanel(timeline, run) {
  const steps = [...run.head.steps.entries()];
  if (!steps.length) return [make("p", {}, NO_STEPS)];
  const seen = steps.filter(([, { begin, end }]) => begin < timeline.until && end > timeline.from);
  const rows = seen.slice(0, MOST_STEPS).map(([number, { name, begin, end, bubble }]) => [
    `${number}`, name, timeText(begin, 4), timeText(end - begin, 4),
    `${(100 * bubble).toFixed(1)} %`,
  ]);
  return [make("p", {}, ABOUT_LIVE), make("canvas", { role: "img" }),
    table("Visible steps", ["step", "schedule", "start", "duration", "bubble"], rows)];
}
