// The panels next to the timeline: an event's card, findings, statistics, and the table of visible events.

const MOST_TABLE = 200; // the most rows in the table for screen readers
const SVG = new DOMParser().parseFromString("<svg/>", "text/html").body.firstChild.namespaceURI;

/** Creates an element. Data from a trace is inserted only as text. */
function make(name, properties = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key in element && typeof value !== "string") element[key] = value;
    else element.setAttribute(key, value);
  }
  element.append(...children);
  return element;
}

/** Creates an SVG element. */
function svg(name, attributes, ...children) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

/** Returns the context of a canvas in CSS pixels, empty and with the view's font. */
function setUp(canvas, width, height) {
  const context = canvas.getContext("2d"), ratio = devicePixelRatio || 1;
  [canvas.width, canvas.height] = [width * ratio, height * ratio];
  context.scale(ratio, ratio);
  context.font = FONT;
  context.textBaseline = "middle";
  return context;
}

/** Creates a button. */
function press(text, properties) {
  return make("button", { type: "button", ...properties }, text);
}

/** Returns the facts about an event, each as a pair of a name and a text. */
function describe(run, event) {
  const { rank, post, wait: { [event]: wait }, done: { [event]: done } } = run, isOpen = isNaN(done);
  const facts = [["rank", `${rank[event]}`], ["start", timeText(post[event], 6)]];
  const add = (name, ...values) => facts.push([name, ...values]);
  const addColumn = (name) => {
    if (run.columns[name][event] >= 0) add(name, `${run.columns[name][event]}`);
  };
  if (run.kind(event) !== "mark") add("end", isOpen ? "never finished" : timeText(done, 6));
  if (!isOpen) add("duration", timeText(done - post[event], 4));
  if (run.isOperation(event)) {
    run.parts(event, (from, until, state) => {
      if (until > from) add(STATES[state].name, timeText(until - from, 4));
    });
    if (isNaN(wait)) add("waited for", "never");
    add("group", run.group(event) || "unknown");
    addColumn("tag");
    const [type, shape, bytes] = run.payload(event) ?? [], rate = run.rate(event);
    if (type) add("tensor", `${type}[${shape.join(", ")}], ${bytesText(bytes)}`);
    const name = run.kind(event) === "collective" ? "bytes per second" : "bandwidth";
    if (rate) add(name, `${(rate / 1e9).toPrecision(3)} GB/s`);
  }
  addColumn("stage");
  addColumn("microbatch");
  if (run.place(event)) add("line", run.place(event));
  return facts;
}

/** Returns a sentence about the reason why an operation was blocked, or "" if there is none. */
function reason(run, event) {
  const other = run.partner(event), isSend = run.kind(event) === "send";
  if (run.isMessage(event) && other < 0) return `No matching ${isSend ? "recv" : "send"} was found.`;
  if (other < 0 || Number.isNaN(run.wait[event])) return "";
  const late = Math.min(run.post[other], run.endOf(event)) - run.wait[event];
  if (late <= 0) return "The other side was already posted.";
  return `Rank ${run.rank[event]} waited ${timeText(late)} because rank ${run.rank[other]} `
    + `was late to ${isSend ? "receive" : "send"}.`;
}

/** Returns at most four lines about an event; the card in the panel has everything. */
function shortCard(run, event) {
  const { [event]: begin } = run.post, { [event]: done } = run.done, other = run.partner(event);
  const { [event]: stage } = run.columns.stage, join = (...words) => words.filter(Boolean).join(", ");
  const times = run.kind(event) === "mark" ? timeText(begin, 6)
    : isNaN(done) ? `from ${timeText(begin, 6)}, never finished`
      : `${timeText(begin, 6)} to ${timeText(done, 6)} (${timeText(done - begin, 4)})`;
  const where = join(`rank ${run.rank[event]}`, stage >= 0 && `stage ${stage}`, times);
  const payload = run.payload(event) && bytesText(run.bytes(event));
  const about = other < 0 ? join(run.group(event), payload, run.place(event))
    : join(`other side: rank ${run.rank[other]}`,
      `from ${timeText(run.post[other], 6)} to ${timeText(run.endOf(other), 6)}`, run.place(other));
  return [run.text(event), where, about, reason(run, event)].filter(Boolean);
}

/** Returns the card of an event and that of its other side; `buttons` follow the event's name. */
function card(run, event, goTo, ...buttons) {
  const head = (i, ...more) => make("h2", {}, run.text(i), " ", ...more);
  const facts = (i) => make("dl", {}, ...describe(run, i).flatMap(([name, text]) =>
    [make("dt", {}, name), make("dd", {}, text)]));
  const other = run.partner(event), why = reason(run, event);
  const parts = [head(event, ...buttons), facts(event), ...(why ? [make("p", {}, why)] : [])];
  const about = { title: "go to the other side (Enter)", onclick: () => goTo({ run, event: other }) };
  if (other >= 0) parts.push(head(other, press("go there", about)), facts(other));
  return parts;
}

/** Adds up the selected area by rank: the time of each state, the messages sent and their bytes. */
function sumArea({ rows, runs, tape: [from, until], box }) {
  const [first, last] = box ?? [0, rows.length - 1];
  const all = rows.slice(first, last + 1).flatMap((row) => row.ranks.map((rank) => ({ ...row, rank })));
  return all.map(({ run, rank, number }) => {
    const name = rank + (runs.length > 1 ? LETTERS[number] : "");
    const sum = { name, times: new Float64Array(STATES.length), messages: 0, bytes: 0 };
    run.visit(rank, BANDS, from, until, (event) => {
      run.parts(event, (begin, end, state) => {
        sum.times[state] += Math.max(0, Math.min(end, until) - Math.max(begin, from));
      });
      if (run.kind(event) !== "send" || run.post[event] < from) return;
      sum.messages += 1;
      sum.bytes += run.bytes(event);
    });
    return sum;
  });
}

/** Returns tables of the sums of the selected area; `names` has the names of the states by key. */
function areaTables(timeline, names) {
  const sums = sumArea(timeline), [from, until] = timeline.tape;
  const total = (of) => sums.reduce((sum, one) => sum + of(one), 0);
  const totals = STATES.map((_, state) => total(({ times }) => times[state]));
  const states = [...totals.keys()].filter((state) => totals[state] > 0);
  const name = (state, most = 3) => {
    const all = [...(names.get(STATE_KEYS[state]) ?? [STATES[state].name])];
    return all.slice(0, most).join(", ") + (all.length > most ? " …" : "");
  };
  const share = (time) => `${((100 * time) / ((until - from) * sums.length)).toFixed(1)} %`;
  const sent = ({ messages, bytes }) => `${messages.toLocaleString("en")}, ${bytesText(bytes)}`;
  return [
    make("p", {}, `${timeText(until - from, 4)} from ${timeText(from, 4)} to ${timeText(until, 4)}, `
      + `${countText(sums.length, "rank")}: `
      + `${countText(total(({ messages }) => messages), "message")} sent, `
      + `${bytesText(total(({ bytes }) => bytes))}. `
      + "Nested spans and overlapping operations count in each."),
    table("Time of all ranks", ["state", "time", "share"],
      states.map((state) => [name(state), timeText(totals[state], 4), share(totals[state])])),
    table("By rank", ["rank", ...states.map((state) => STATES[state].short || name(state, 1)), "sent"],
      sums.slice(0, MOST_TABLE).map((one) => [
        one.name, ...states.map((state) => timeText(one.times[state])), sent(one)])),
  ];
}

/** Returns the 60 rows with the most bytes. */
function most(rows) {
  return [...rows].sort((a, b) => b.bytes - a.bytes || b.count - a.count).slice(0, 60);
}

/** Returns a table of the operations in a window. */
function statisticsTable(run, from, until) {
  const rows = new Map();
  run.visitAll(from, until, (i) => {
    const key = run.columns.op[i] + run.head.ops.length * run.columns.group[i];
    const row = rows.get(key)
      ?? { op: run.op(i), group: run.group(i), count: 0, bytes: 0, blocked: [], rates: [] };
    rows.set(key, row);
    row.count += 1;
    row.bytes += run.bytes(i);
    if (run.done[i] >= run.wait[i]) row.blocked.push(run.done[i] - run.wait[i]);
    if (run.rate(i)) row.rates.push(run.rate(i));
  });
  const sum = (values) => values.reduce((all, one) => all + one, 0);
  const cells = ({ op, group, count, bytes, blocked, rates }) => [
    op, group, count.toLocaleString("en"), bytesText(bytes),
    blocked.length ? `${timeText(median(blocked))}, ${timeText(sum(blocked))}` : "–",
    rates.length ? `${(median(rates) / 1e9).toPrecision(2)} GB/s` : "–",
  ];
  return table(`Operations from ${timeText(from, 4)} to ${timeText(until, 4)}`,
    ["operation", "group", "count", "bytes", "blocked: median, total", "median rate"],
    most(rows.values()).map(cells));
}

/** Returns the median, or NaN if there are no values. */
function median(values) {
  return values.length ? Float64Array.from(values).sort()[values.length >> 1] : NaN;
}

/** Creates a table with a caption. */
function table(caption, names, rows) {
  const row = (cells) => make("tr", {}, ...cells.map((cell) => make("td", {}, cell)));
  const heads = names.map((name) => make("th", { scope: "col" }, name));
  return make("table", {}, make("caption", {}, caption),
    make("thead", {}, make("tr", {}, ...heads)), make("tbody", {}, ...rows.map(row)));
}

/** Creates a table of the traffic on each edge, in descending order. */
function edgesTable(edges) {
  const cells = ({ src, dst, count, bytes }) =>
    [`rank ${src}`, `rank ${dst}`, count.toLocaleString("en"), bytesText(bytes)];
  const names = ["from", "to", "messages", "bytes"];
  return table("Messages by edge", names, most(edges).map(cells));
}

/** Returns the bytes, rate and kind of the operations in a window that moved data. */
function bandwidths(timeline, run) {
  const points = [];
  run.visitAll(timeline.from, timeline.until, (i) => {
    const kind = run.kind(i), rate = kind === "send" ? NaN : run.rate(i);
    if (rate && points.length < 50000) points.push([run.bytes(i), rate, kind]);
  });
  return points;
}

/** Draws the bandwidth of the messages in a window against their size, on logarithmic axes. */
function drawBandwidth(canvas, timeline, ...runs) {
  const width = canvas.clientWidth || 300, height = canvas.clientHeight || 180;
  const context = setUp(canvas, width, height);
  context.fillStyle = timeline.muted;
  const several = runs.map((run) => bandwidths(timeline, run)), all = several.flat();
  if (!all.length) return context.fillText("no message with data ended in this window", 10, height / 2);
  const range = (at, log) => {
    const values = all.map((one) => log(one[at]) + 1e-9);
    const [low, high] = [Math.min, Math.max].map((end) => values.reduce((a, b) => end(a, b)));
    return [Math.floor(low), Math.max(Math.floor(low) + 1, Math.ceil(high - 1e-6))];
  };
  const [x0, x1] = range(0, Math.log2), [y0, y1] = range(1, Math.log10);
  const x = (bytes) => 62 + ((Math.log2(bytes) - x0) / (x1 - x0)) * (width - 84);
  const y = (rate) => height - 22 - ((Math.log10(rate) - y0) / (y1 - y0)) * (height - 34);
  context.strokeStyle = timeline.grid;
  const step = Math.ceil((x1 - x0) / Math.max(1, Math.floor((width - 84) / 56)));
  context.textAlign = "center";
  for (let power = x0; power <= x1; power += step) {
    context.strokeRect(x(2 ** power), 12, 0, height - 34);
    context.fillText(bytesText(2 ** power), x(2 ** power), height - 11);
  }
  context.textAlign = "right";
  for (let power = y0; power <= y1; power++) {
    context.strokeRect(62, y(10 ** power), width - 84, 0);
    context.fillText(rateText(10 ** power), 58, y(10 ** power));
  }
  for (const [number, points] of several.entries()) {
    const name = runs.length > 1 ? LETTERS[number] : "";
    drawPoints(context, timeline, points.map(([bytes, rate, kind]) => [x(bytes), y(rate), kind]), name);
  }
}

/** Draws a run's points; those of several runs are joined, named, and hollow after the first. */
function drawPoints(context, timeline, points, name) {
  const hollow = name > "A";
  for (const [at, [x, y, kind]] of points.entries()) {
    const colour = timeline.colours[kind === "collective" ? COLLECTIVE : TRANSFER];
    context.fillStyle = context.strokeStyle = colour;
    if (name && at) strokeLine(context, points[at - 1], [x, y]);
    context.beginPath();
    if (kind === "collective") context.rect(x - 2, y - 2, 4, 4);
    else context.arc(x, y, hollow ? 4 : 2.2, 0, 7);
    if (hollow) context.stroke();
    else context.fill();
    if (at === points.length - 1) context.fillText(name, x + 16, y);
  }
}

/** Returns a table of the visible events, or of only the first if there are many. */
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

const NUMBERS = { // of a run's event, for a search
  rank: (run, i) => run.rank[i], size: (run, i) => (run.payload(i) ? run.bytes(i) : NaN),
  from: (run, i) => sideOf(run, i, "send"), to: (run, i) => sideOf(run, i, "recv"),
  ...Object.fromEntries(["peer", "tag", "stage", "microbatch"].map((name) => [name, (run, i) => run.columns[name][i]])),
};
/** Returns the sender ("send") or the receiver ("recv") of a message, or NaN for other events. */
function sideOf(run, i, kind) {
  if (!run.isMessage(i)) return NaN;
  return run.kind(i) === kind ? run.rank[i] : run.columns.peer[i];
}

const TEXTS = {
  op: (run, i) => run.op(i), label: (run, i) => run.label(i), group: (run, i) => run.group(i),
};
const FIELDS = [...Object.keys(NUMBERS), ...Object.keys(TEXTS), "line"];

/**
 * Converts a search text to {test, unknown}: a test for events, and the first field that does not
 * exist. The text consists of words, or of terms such as `rank:2 op:recv size>1024`.
 */
function parseSearch(text) {
  let unknown;
  const tests = text.trim().toLowerCase().split(/\s+/).filter(Boolean).map((word) => {
    const [, name, sign, value] = /^([a-z]+)(:|<|>)(.*)$/.exec(word) ?? [];
    const number = value ? Number(value) : NaN, { [name]: read } = { ...NUMBERS, ...TEXTS };
    if (name && !FIELDS.includes(name)) unknown ??= name;
    if (name === "line") return (run, i) => run.places(i).some((one) => placeWord(one).toLowerCase() === value);
    if (name in NUMBERS && sign === ":") return (run, i) => read(run, i) === number;
    if (name in NUMBERS) return (run, i) => (sign === "<" ? read(run, i) < number : read(run, i) > number);
    if (name in TEXTS) {
      return (run, i) => {
        const isGroup = name === "group" && run.head.groups.includes(value);
        return isGroup ? run.group(i) === value : read(run, i).toLowerCase().includes(value);
      };
    }
    return (run, i) => run.text(i).toLowerCase().includes(word) || run.place(i).toLowerCase().includes(word);
  });
  return { test: (run, i) => tests.every((test) => test(run, i)), unknown };
}
