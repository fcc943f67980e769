// Shows the pipeline steps of a run, which Python found: their bubbles and live activations.

const MOST_STRIPS = 64; // the most ranks whose activations are drawn
const MOST_STEPS = 50; // the most steps in the table
const NO_STEPS = "This run contains no complete pipeline step. train_step_pipeline records steps, "
  + "and you can also record them with your own spans of the same names.";
const ABOUT_LIVE = "Live activations of the visible ranks: the data that each stage keeps for its "
  + "microbatches' backward passes.";

function liveIn(run, rank, from, until) {
  const columns = run.rowsOf("live", rank), [times] = columns;
  const first = Math.max(0, firstAbove(times, from) - 1), last = firstAbove(times, until);
  return columns.map((column) => column.subarray(first, last));
}

function drawActivations(timeline, run, width) {
  const { from, until, span } = timeline, right = width - 24;
  const rows = timeline.rowsInView().filter((row) => row.run === run);
  const ranks = rows.map(({ rank }) => rank).filter((rank) => run.rowsOf("live", rank)[0].length);
  ranks.splice(MOST_STRIPS);
  const strip = Math.max(12, Math.min(40, 180 / ranks.length)), height = strip * ranks.length;
  const lives = ranks.map((rank) => liveIn(run, rank, from, until));
  const peaks = lives.map(([, live]) => live.reduce((most, one) => Math.max(most, one), 0));
  const x = (time) => 52 + ((Math.min(Math.max(time, from), until) - from) / span) * (right - 52);
  const strips = ranks.map((rank, row) => {
    const floor = (row + 1) * strip - 1, [times, live] = lives[row];
    const y = (count) => floor - ((strip - 3) * Math.max(0, count)) / Math.max(1, ...peaks);
    const line = Array.from(times, (time, k) => `H${x(time)}V${y(live[k])}`).join("");
    const text = (at, look, name) =>
      `<text class="${look}" x="${at}" y="${floor - strip / 2}">${name}</text>`;
    return text(0, "", `rank ${rank}`) + text(width, "most", `≤ ${peaks[row]}`)
      + path("floor", `M52,${floor}H${right}`) + path("", `M52,${floor}${line}H${right}V${floor}`);
  });
  const said = ranks.map((rank, row) => `rank ${rank} at most ${peaks[row]}`);
  const picture = svg("svg", {
    class: "activations", role: "img", viewBox: `0 0 ${width} ${height}`,
    "aria-label": `live activations: ${said.join(", ")}`,
  });
  picture.innerHTML = strips.join("");
  return picture;
}

function stepsPanel(timeline, run, width) {
  const { from, until } = timeline, steps = [...run.head.steps.entries()];
  if (!steps.length) return [make("p", {}, NO_STEPS)];
  const seen = steps.filter(([, { begin, end }]) => begin < until && end > from);
  const rows = seen.slice(0, MOST_STEPS).map(([number, { name, begin, end, bubble }]) => [
    `${number}`, name, timeText(begin, 4), timeText(end - begin, 4),
    `${(100 * bubble).toFixed(1)} %`,
  ]);
  return [make("p", {}, ABOUT_LIVE), drawActivations(timeline, run, width),
    table("Visible steps", ["step", "schedule", "start", "duration", "bubble"], rows)];
}
