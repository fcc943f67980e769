// The panels next to the timeline: an event's card, findings, statistics, and the visible events.

const MOST_TABLE = 200; // the most rows in the table for screen readers
const MOST_ROWS = 60; // the most rows in the other tables
const MOST_DOTS = 50000; // the most messages in the picture of bandwidths
const SVG = new DOMParser().parseFromString("<svg/>", "text/html").body.firstChild.namespaceURI;

/** Adds properties and children to an element. Data from a trace is inserted only as text. */
function furnish(element, properties, children) {
  for (const [key, value] of Object.entries(properties)) {
    if (typeof value === "function") element[key] = value; else element.setAttribute(key, value);
  }
  element.append(...children);
  return element;
}

function make(name, properties = {}, ...children) {
  return furnish(document.createElement(name), properties, children);
}

function svg(name, attributes, ...children) {
  return furnish(document.createElementNS(SVG, name), attributes, children);
}

function press(text, properties, ...more) {
  return make("button", { type: "button", ...properties }, text, ...more);
}

/** Returns the facts about an event, each as a pair of a name and a text. */
function describe(run, event) {
  const { post: { [event]: post }, done: { [event]: done }, wait: { [event]: wait } } = run;
  const kind = run.kind(event), isOpen = isNaN(done), states = [];
  run.parts(event, (from, until, state) => {
    if (until > from) states.push([STATES[state].name, timeText(until - from, 4)]);
  });
  const column = (name) => [name, run.columns[name][event] >= 0 && `${run.columns[name][event]}`];
  const [type, shape, bytes] = run.payload(event) ?? [], rate = run.rate(event);
  const operation = [
    ...states, ["waited for", isNaN(wait) && "never"], ["group", run.group(event) || "unknown"],
    column("tag"), ["tensor", type && `${type}[${shape.join(", ")}], ${bytesText(bytes)}`],
    [kind === "collective" ? "bytes per second" : "bandwidth",
      rate && `${(rate / 1e9).toPrecision(3)} GB/s`],
  ];
  return [
    ["rank", `${run.rank[event]}`], ["start", timeText(post, 6)],
    ["end", kind !== "mark" && (isOpen ? "never finished" : timeText(done, 6))],
    ["duration", !isOpen && timeText(done - post, 4)],
    ...(run.isMessage(event) || kind === "collective" ? operation : []),
    column("stage"), column("microbatch"), ["line", run.place(event)],
  ].filter(([, text]) => text);
}

/** Returns a sentence about the reason why an operation was blocked, or "" if there is none. */
function reason(run, event) {
  const other = run.partner(event), isSend = run.kind(event) === "send";
  const missing = `No matching ${isSend ? "recv" : "send"} was found.`;
  if (other < 0) return run.isMessage(event) ? missing : "";
  if (isNaN(run.wait[event])) return "";
  const late = Math.min(run.post[other], run.endOf(event)) - run.wait[event];
  if (late <= 0) return "The other side was already posted.";
  return `Rank ${run.rank[event]} waited ${timeText(late)} because rank ${run.rank[other]} `
    + `was late to ${isSend ? "receive" : "send"}.`;
}

/** Returns at most four lines about an event; the card in the panel has everything. */
function shortCard(run, event) {
  const { rank, start, end, duration, stage, line } = Object.fromEntries(describe(run, event));
  const times = duration ? `${start} to ${end} (${duration})` : `from ${start}, ${end}`;
  const other = run.partner(event), size = run.payload(event) && bytesText(run.bytes(event));
  const about = other < 0 ? [run.group(event), size, line]
    : [`other side: rank ${run.rank[other]}`,
      `from ${timeText(run.post[other], 6)} to ${timeText(run.endOf(other), 6)}`, run.place(other)];
  const where = [`rank ${rank}`, stage && `stage ${stage}`, end ? times : start];
  const lines = [[run.text(event)], where, about, [reason(run, event)]];
  return lines.map((words) => words.filter(Boolean).join(", ")).filter(Boolean);
}

/** Returns the card of an event and that of its other side; `buttons` follow the event's name. */
function card(run, event, goTo, ...buttons) {
  const head = (i, ...more) => make("h2", {}, run.text(i), " ", ...more);
  const facts = (i) => make("dl", {}, ...describe(run, i).flatMap(([name, text]) =>
    [make("dt", {}, name), make("dd", {}, text)]));
  const other = run.partner(event), why = reason(run, event);
  const parts = [head(event, ...buttons), facts(event), ...(why ? [make("p", {}, why)] : [])];
  if (other < 0) return parts;
  const go = { title: "go to the other side (Enter)", onclick: () => goTo({ run, event: other }) };
  return [...parts, head(other, press("go there", go)), facts(other)];
}

/** Adds up the selected area by rank: the time of each state, the messages sent and their bytes. */
function sumArea({ rows, runs, tape: [from, until], box }) {
  const [first, last] = box ?? [0, rows.length - 1], chosen = rows.slice(first, last + 1);
  return chosen.flatMap(({ run, number, ranks }) => ranks.map((rank) => {
    const name = rank + (runs.length > 1 ? LETTERS[number] : ""), sends = [];
    const times = new Float64Array(STATES.length);
    run.visit(rank, BANDS, from, until, (event) => {
      run.parts(event, (begin, end, state) => {
        times[state] += Math.max(0, Math.min(end, until) - Math.max(begin, from));
      });
      if (run.kind(event) === "send" && run.post[event] >= from) sends.push(event);
    });
    return { name, times, messages: sends.length, bytes: sumOf(sends, (i) => run.bytes(i)) };
  }));
}

/** Returns tables of the sums of the selected area; `names` has the names of the states by key. */
function areaTables(timeline, names) {
  const sums = sumArea(timeline), [from, until] = timeline.tape;
  const totals = STATES.map((_, state) => sumOf(sums, ({ times }) => times[state]));
  const states = [...totals.keys()].filter((state) => totals[state] > 0);
  const name = (state, most = 3) => {
    const all = [...(names.get(STATE_KEYS[state]) ?? [STATES[state].name])];
    return all.slice(0, most).join(", ") + (all.length > most ? " …" : "");
  };
  const share = (time) => `${((100 * time) / ((until - from) * sums.length)).toFixed(1)} %`;
  const [length, begin, end] = [until - from, from, until].map((time) => timeText(time, 4));
  const sent = countText(sumOf(sums, ({ messages }) => messages), "message");
  const size = bytesText(sumOf(sums, ({ bytes }) => bytes));
  return [
    make("p", {}, `${length} from ${begin} to ${end}, ${countText(sums.length, "rank")}: `
      + `${sent} sent, ${size}. Nested spans and overlapping operations count in each.`),
    table("Time of all ranks", ["state", "time", "share"],
      states.map((state) => [name(state), timeText(totals[state], 4), share(totals[state])])),
    table("By rank", ["rank", ...states.map((one) => STATES[one].short || name(one, 1)), "sent"],
      sums.slice(0, MOST_TABLE).map((one) => [
        one.name, ...states.map((state) => timeText(one.times[state])),
        `${one.messages.toLocaleString("en")}, ${bytesText(one.bytes)}`])),
  ];
}

function most(rows) {
  return [...rows].sort((a, b) => b.bytes - a.bytes || b.count - a.count).slice(0, MOST_ROWS);
}

function statisticsTable(run, from, until) {
  const all = run.operationsIn(from, until), { op, group } = run.columns;
  const byName = Map.groupBy(all, (i) => op[i] + run.head.ops.length * group[i]);
  const rows = [...byName.values()].map((own) =>
    ({ own, count: own.length, bytes: sumOf(own, (i) => run.bytes(i)) }));
  const cells = ({ own, count, bytes }) => {
    const blocked = own.map((i) => run.done[i] - run.wait[i]).filter((time) => time >= 0);
    const rates = own.map((i) => run.rate(i)).filter((rate) => rate > 0);
    return [run.op(own[0]), run.group(own[0]), count.toLocaleString("en"), bytesText(bytes),
      blocked.length ? `${timeText(median(blocked))}, ${timeText(sumOf(blocked))}` : "–",
      rates.length ? `${(median(rates) / 1e9).toPrecision(2)} GB/s` : "–"];
  };
  return table(`Operations from ${timeText(from, 4)} to ${timeText(until, 4)}`,
    ["operation", "group", "count", "bytes", "blocked: median, total", "median rate"],
    most(rows).map(cells));
}

function sumOf(list, of = (one) => one) { return list.reduce((sum, one) => sum + of(one), 0); }
function median(values) { return Float64Array.from(values).sort()[values.length >> 1]; }

function table(caption, names, rows) {
  const cell = (text) => make("td", { class: /^[\d.]+( \S+)?$/.test(text) ? "number" : "" }, text);
  const row = ([name, ...cells]) =>
    make("tr", {}, make("th", { scope: "row" }, name), ...cells.map(cell));
  const head = make("tr", {}, ...names.map((name) => make("th", { scope: "col" }, name)));
  return make("table", {}, ...(caption ? [make("caption", {}, caption)] : []),
    make("thead", {}, head), make("tbody", {}, ...rows.map(row)));
}

function edgesTable(edges) {
  const cells = ({ src, dst, count, bytes }) =>
    [`rank ${src}`, `rank ${dst}`, count.toLocaleString("en"), bytesText(bytes)];
  return table("Messages by edge", ["from", "to", "messages", "bytes"], most(edges).map(cells));
}

/** Returns the bytes, rate and kind of the operations in a window that moved data. */
function bandwidths({ from, until }, run) {
  const moved = run.operationsIn(from, until).filter((i) => run.kind(i) !== "send" && run.rate(i));
  return moved.slice(0, MOST_DOTS).map((i) => [run.bytes(i), run.rate(i), run.kind(i)]);
}

function bandwidthPanel(timeline, run, width) {
  const label = "bandwidth against size for the visible messages";
  return [bandwidthChart(timeline, [run], label, width, 180), make("p", {}, "Each dot is a visible "
    + "message, and each square is a visible collective. If a rank began to wait late, the "
    + "bandwidth is a lower bound.")];
}

/** Returns a logarithmic axis between two pixels: a scale, and at most some powers of a base. */
function makeAxis(values, base, from, to, most) {
  const log = (value) => Math.log2(value) / Math.log2(base);
  const logs = Float64Array.from(values, log).sort(), low = Math.floor(logs[0] + 1e-6);
  const high = Math.max(low + 1, Math.ceil(logs.at(-1) - 1e-6));
  const at = (value) => from + ((log(value) - low) / (high - low)) * (to - from);
  const step = Math.max(1, Math.ceil((high - low) / most)), ticks = [];
  for (let power = low; power <= high; power += step) ticks.push(base ** power);
  return { at, ticks };
}

function bandwidthChart(timeline, runs, label, width, height) {
  const several = runs.map((run) => bandwidths(timeline, run)), all = several.flat();
  if (!all.length) return make("p", {}, "No message with data ended in this window.");
  const [left, right, top, bottom] = [62, width - 22, 12, height - 22];
  const x = makeAxis(all.map(([bytes]) => bytes), 2, left, right, (right - left) / 56);
  const y = makeAxis(all.map(([, rate]) => rate), 10, bottom, top, Infinity);
  const parts = [
    ...x.ticks.map((bytes) => `<path d="M${x.at(bytes)},${top}V${bottom}"/>`
      + `<text x="${x.at(bytes)}" y="${height - 8}">${bytesText(bytes)}</text>`),
    ...y.ticks.map((rate) => `<path d="M${left},${y.at(rate)}H${right}"/>`
      + `<text class="rate" x="58" y="${y.at(rate) + 4}">${rateText(rate)}</text>`),
    ...several.map((points, number) => drawPoints(
      points.map(([bytes, rate, kind]) => [x.at(bytes), y.at(rate), kind]),
      runs.length > 1 ? LETTERS[number] : "")),
  ];
  const viewBox = `0 0 ${width} ${height}`;
  const chart = svg("svg", { class: "chart", role: "img", "aria-label": label, viewBox });
  chart.innerHTML = parts.join("");
  return chart;
}

/** Draws a run's points; those of several runs are joined, named, and hollow after the first. */
function drawPoints(places, name) {
  const [squares, dots] = [true, false].map((isSquare) => places.filter(([, , kind]) =>
    isSquare === (kind === "collective")).map(([x, y]) => `M${x},${y}h0.01`).join(""));
  const line = places.map(([x, y]) => [x, y]).join("L"), [x, y] = places.at(-1) ?? [];
  const named = `<path class="line" d="M${line}"/><text x="${x + 14}" y="${y + 4}">${name}</text>`;
  const hole = name > "A" ? `<path class="hole" d="${dots}"/>` : "";
  return (name && places.length ? named : "") + `<path class="squares" d="${squares}"/>`
    + `<path class="dots ${hole && "hollow"}" d="${dots}"/>${hole}`;
}

function visibleTable(timeline) {
  const rows = [], { from, until } = timeline;
  for (const { run, rank } of timeline.rowsInView()) {
    run.visit(rank, BANDS, from, until, (i) => {
      if (rows.length >= MOST_TABLE) return;
      const end = isNaN(run.done[i]) ? "never" : timeText(run.done[i], 6);
      rows.push([`${rank}`, run.text(i), timeText(run.post[i], 6), end, run.place(i)]);
    });
  }
  const few = rows.length < MOST_TABLE ? "" : `, the first ${MOST_TABLE}`;
  return table(`Events from ${timeText(from, 4)} to ${timeText(until, 4)}${few}`,
    ["rank", "event", "start", "end", "line"], rows);
}

const COLUMN_FIELDS = ["peer", "tag", "stage", "microbatch"];
const FIELDS = new Map(Object.entries({ // of a run's event, for a search
  rank: (run, i) => run.rank[i],
  size: (run, i) => (run.payload(i) ? run.bytes(i) : NaN),
  from: (run, i) => sideOf(run, i, "send"),
  to: (run, i) => sideOf(run, i, "recv"),
  ...Object.fromEntries(COLUMN_FIELDS.map((name) => [name, (run, i) => run.columns[name][i]])),
  op: (run, i) => run.op(i),
  label: (run, i) => run.label(i),
  group: (run, i) => run.group(i),
  line: (run, i) => run.places(i).map((place) => placeWord(place).toLowerCase()),
}));

/** Returns the sender ("send") or the receiver ("recv") of a message, or NaN for other events. */
function sideOf(run, i, kind) {
  const side = run.kind(i) === kind ? run.rank[i] : run.columns.peer[i];
  return run.isMessage(i) ? side : NaN;
}

/** Returns whether a value of an event fits a term of a search, such as `rank:2` or `size>1024`. */
function fits(own, sign, value, isWhole) {
  if (Array.isArray(own)) return own.includes(value);
  if (typeof own === "string") return isWhole ? own === value : own.toLowerCase().includes(value);
  const number = value ? Number(value) : NaN;
  return sign === ":" ? own === number : sign === "<" ? own < number : own > number;
}

/** Converts words and terms, such as `size>1024`, to a test for events and an unknown field. */
function parseSearch(text) {
  let unknown;
  const tests = text.trim().toLowerCase().split(/\s+/).filter(Boolean).map((word) => {
    const [, name, sign, value] = /^([a-z]+)(:|<|>)(.*)$/.exec(word) ?? [], read = FIELDS.get(name);
    if (name && !read) unknown ??= name;
    const isGroup = (run) => name === "group" && run.head.groups.includes(value);
    if (read) return (run, i) => fits(read(run, i), sign, value, isGroup(run));
    return (run, i) => [run.text(i), run.place(i)].some((own) => own.toLowerCase().includes(word));
  });
  return { test: (run, i) => tests.every((test) => test(run, i)), unknown };
}
