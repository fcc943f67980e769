// The panels next to the timeline: an event's card, findings, statistics, and the table of visible events.

const MOST_TABLE = 200; // the most rows in the table for screen readers

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

/** Returns the facts about an event, each as a pair of a name and a text. */
function describe(run, event) {
  const facts = [["rank", `${run.rank[event]}`], ["start", timeText(run.post[event], 6)]];
  const done = run.done[event], wait = run.wait[event];
  if (run.kind(event) !== "mark") facts.push(["end", Number.isNaN(done) ? "never finished" : timeText(done, 6)]);
  if (!Number.isNaN(done)) facts.push(["duration", timeText(done - run.post[event], 4)]);
  const parts = [];
  run.parts(event, (from, until, state) => {
    if (state < SPANS && until > from) parts.push([STATES[state].name, timeText(until - from, 4)]);
  });
  if (run.isOperation(event)) {
    facts.push(...parts);
    if (Number.isNaN(wait)) facts.push(["waited for", "never"]);
    facts.push(["group", run.group(event) || "unknown"]);
    if (run.columns.tag[event] >= 0) facts.push(["tag", `${run.columns.tag[event]}`]);
    const payload = run.payload(event);
    if (payload?.[0]) facts.push(["tensor", `${payload[0]}[${payload[1].join(", ")}], ${bytesText(payload[2])}`]);
    if (run.rate(event)) facts.push([run.kind(event) === "collective" ? "bytes per second" : "bandwidth", `${(run.rate(event) / 1e9).toPrecision(3)} GB/s`]);
  }
  for (const column of ["stage", "microbatch"]) if (run.columns[column][event] >= 0) facts.push([column, `${run.columns[column][event]}`]);
  if (run.place(event)) facts.push(["line", run.place(event)]);
  return facts;
}

/** Returns a sentence about the reason why an operation was blocked, or "" if there is none. */
function reason(run, event) {
  const other = run.partner(event);
  if (run.isMessage(event) && other < 0) return `No matching ${run.kind(event) === "send" ? "recv" : "send"} was found.`;
  if (other < 0 || Number.isNaN(run.wait[event])) return "";
  const late = Math.min(run.post[other], run.endOf(event)) - run.wait[event];
  if (late <= 0) return "The other side was already posted.";
  return `Rank ${run.rank[event]} waited ${timeText(late)} because rank ${run.rank[other]} was late to ${run.kind(event) === "send" ? "receive" : "send"}.`;
}

/** Returns at most four lines about an event; the card in the panel has everything. */
function shortCard(run, event) {
  const begin = run.post[event], done = run.done[event], isMark = run.kind(event) === "mark";
  const times = isMark ? "" : Number.isNaN(done) ? `from ${timeText(begin, 6)}, never finished`
    : `${timeText(begin, 6)} to ${timeText(done, 6)} (${timeText(done - begin, 4)})`;
  const payload = run.payload(event) ? bytesText(run.bytes(event)) : "";
  const about = [run.group(event), payload, run.place(event)].filter(Boolean).join(", ");
  const stage = run.columns.stage[event];
  const where = `rank ${run.rank[event]}${stage < 0 ? "" : `, stage ${stage}`}, ${times || timeText(begin, 6)}`;
  return [run.text(event), where, otherSide(run, event) || about, reason(run, event)].filter(Boolean);
}

/** Returns a line about the other side of a message, or "" if there is none. */
function otherSide(run, event) {
  const other = run.partner(event);
  if (other < 0) return "";
  return `other side: rank ${run.rank[other]}, from ${timeText(run.post[other], 6)} to ${timeText(run.endOf(other), 6)}${run.place(other) && `, ${run.place(other)}`}`;
}

/** Returns the card of an event, followed by that of its other side; `buttons` follow the event's name. */
function card(run, event, goTo, ...buttons) {
  const facts = (which) => make("dl", {}, ...describe(run, which).flatMap(([name, text]) => [make("dt", {}, name), make("dd", {}, text)]));
  const other = run.partner(event);
  const parts = [make("h2", {}, run.text(event), " ", ...buttons), facts(event)];
  const why = reason(run, event);
  if (why) parts.push(make("p", {}, why));
  if (other >= 0) {
    parts.push(make("h2", {}, run.text(other), " ", make("button", { type: "button", title: "go to the other side (Enter)", onclick: () => goTo({ run, event: other }) }, "go there")), facts(other));
  }
  return parts;
}

/** Adds up the selected area by rank: the time of each state, the messages sent and their bytes. */
function sumArea({ rows, runs, tape: [from, until], box }) {
  const [first, last] = box ?? [0, rows.length - 1];
  const all = rows.slice(first, last + 1).flatMap((row) => row.ranks.map((rank) => ({ ...row, rank })));
  return all.map(({ run, rank, number }) => {
    const name = `${rank}${runs.length > 1 ? " ABCDEFGH"[number + 1] : ""}`;
    const sum = { name, times: new Float64Array(STATES.length), messages: 0, bytes: 0 };
    for (const lane of BANDS.flatMap((band) => run.lanesOf(rank)[band])) {
      run.between(lane, from, until, (event) => {
        run.parts(event, (begin, end, state) => {
          sum.times[state] += Math.max(0, Math.min(end, until) - Math.max(begin, from));
        });
        if (run.kind(event) !== "send" || run.post[event] < from) return;
        sum.messages += 1;
        sum.bytes += run.bytes(event);
      });
    }
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
  const count = (number, what) => `${number.toLocaleString("en")} ${what}${number === 1 ? "" : "s"}`;
  const sent = ({ messages, bytes }) => `${messages.toLocaleString("en")}, ${bytesText(bytes)}`;
  return [
    make("p", {}, `${timeText(until - from, 4)} from ${timeText(from, 4)} to ${timeText(until, 4)}, `
      + `${count(sums.length, "rank")}: ${count(total((one) => one.messages), "message")} sent, `
      + `${bytesText(total(({ bytes }) => bytes))}. `
      + "Nested spans and overlapping operations count in each."),
    table("Time of all ranks", ["state", "time", "share"],
      states.map((state) => [name(state), timeText(totals[state], 4), share(totals[state])])),
    table("By rank", ["rank", ...states.map((state) => STATES[state].short || name(state, 1)), "sent"],
      sums.slice(0, MOST_TABLE).map((one) => [
        one.name, ...states.map((state) => timeText(one.times[state])), sent(one)])),
  ];
}

/** Returns statistics of the operations in a window, as rows with a name, a count, bytes, blocked times and bandwidths. */
function statistics(run, from, until) {
  const rows = new Map();
  for (let rank = 0; rank < run.ranks; rank++) {
    for (const lane of run.lanesOf(rank).operation) {
      run.between(lane, from, until, (i) => {
        const key = run.columns.op[i] + run.head.ops.length * run.columns.group[i];
        let row = rows.get(key);
        if (!row) rows.set(key, (row = { op: run.op(i), group: run.group(i), count: 0, bytes: 0, blocked: [], rates: [] }));
        row.count += 1;
        row.bytes += run.bytes(i);
        if (run.done[i] >= run.wait[i]) row.blocked.push(run.done[i] - run.wait[i]);
        const rate = run.rate(i);
        if (rate) row.rates.push(rate);
      });
    }
  }
  return [...rows.values()].sort((a, b) => b.bytes - a.bytes || b.count - a.count);
}

function median(values) {
  return values.length ? Float64Array.from(values).sort()[values.length >> 1] : NaN;
}

/** Creates a table with a caption. */
function table(caption, names, rows) {
  return make("table", {}, make("caption", {}, caption), make("thead", {}, make("tr", {}, ...names.map((name) => make("th", { scope: "col" }, name)))),
    make("tbody", {}, ...rows.map((row) => make("tr", {}, ...row.map((cell) => make("td", {}, cell))))));
}

function statisticsTable(run, from, until) {
  const rows = statistics(run, from, until).slice(0, 60).map((row) => [
    row.op, row.group, row.count.toLocaleString("en"), bytesText(row.bytes),
    row.blocked.length ? `${timeText(median(row.blocked))}, ${timeText(row.blocked.reduce((sum, one) => sum + one, 0))}` : "–",
    row.rates.length ? `${(median(row.rates) / 1e9).toPrecision(2)} GB/s` : "–",
  ]);
  const caption = `Operations from ${timeText(from, 4)} to ${timeText(until, 4)}`;
  return table(caption, ["operation", "group", "count", "bytes", "blocked: median, total", "median rate"], rows);
}

/** Creates a table of the traffic on each edge, in descending order. */
function edgesTable(edges) {
  const rows = [...edges].sort((a, b) => b.bytes - a.bytes || b.count - a.count).slice(0, 60);
  return table("Messages by edge", ["from", "to", "messages", "bytes"],
    rows.map(({ src, dst, count, bytes }) => [`rank ${src}`, `rank ${dst}`, count.toLocaleString("en"), bytesText(bytes)]));
}

const RATES = [[1e9, "GB/s"], [1e6, "MB/s"], [1e3, "kB/s"], [1, "B/s"]];

/** Formats bytes per second, as in "10 GB/s". */
function rateText(rate) {
  const [size, unit] = RATES.find(([size]) => rate > 0.999 * size) ?? RATES[3];
  return `${Number((rate / size).toPrecision(3))} ${unit}`;
}

/** Returns the bytes, rate and kind of the operations in a window that moved data. */
function bandwidths(timeline, run) {
  const points = [];
  for (let rank = 0; rank < run.ranks; rank++) {
    for (const lane of run.lanesOf(rank).operation) {
      run.between(lane, timeline.from, timeline.until, (i) => {
        const kind = run.kind(i), rate = kind === "recv" || kind === "collective" ? run.rate(i) : NaN;
        if (rate && points.length < 50000) points.push([run.bytes(i), rate, kind]);
      });
    }
  }
  return points;
}

/** Draws the bandwidth of the messages in a window against their size, on logarithmic axes. */
function drawBandwidth(canvas, timeline, ...runs) {
  const width = canvas.clientWidth || 300, height = canvas.clientHeight || 180;
  const ratio = devicePixelRatio || 1, context = canvas.getContext("2d");
  [canvas.width, canvas.height] = [width * ratio, height * ratio];
  context.scale(ratio, ratio);
  context.font = "11px system-ui, sans-serif";
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
    context.fillText(bytesText(2 ** power), x(2 ** power), height - 7);
  }
  context.textAlign = "right";
  for (let power = y0; power <= y1; power++) {
    context.strokeRect(62, y(10 ** power), width - 84, 0);
    context.fillText(rateText(10 ** power), 58, y(10 ** power) + 4);
  }
  for (const [number, points] of several.entries()) {
    const name = runs.length > 1 ? "ABCDEFGH"[number] : "";
    drawPoints(context, timeline, points, x, y, name);
  }
}

/** Draws the points of one run; those of several runs are joined, named, and hollow after the first. */
function drawPoints(context, timeline, points, x, y, name) {
  const hollow = name > "A";
  for (const [at, [bytes, rate, kind]] of points.entries()) {
    const colour = timeline.colours[kind === "collective" ? COLLECTIVE : TRANSFER];
    context.fillStyle = context.strokeStyle = colour;
    context.beginPath();
    if (name && at) {
      context.moveTo(x(points[at - 1][0]), y(points[at - 1][1]));
      context.lineTo(x(bytes), y(rate));
      context.stroke();
      context.beginPath();
    }
    if (kind === "collective") context.rect(x(bytes) - 2, y(rate) - 2, 4, 4);
    else context.arc(x(bytes), y(rate), hollow ? 4 : 2.2, 0, 7);
    if (hollow) context.stroke();
    else context.fill();
    if (at === points.length - 1) context.fillText(name, x(bytes) + 16, y(rate) + 4);
  }
}

/** Returns a table of the visible events, or of only the first if there are many. */
function visibleTable(timeline) {
  const rows = [];
  for (let index = Math.max(0, timeline.rowAt(RULER)); index < timeline.rows.length && index <= timeline.rowAt(timeline.height - 1); index++) {
    const { run, rank } = timeline.rows[index];
    for (const band of BANDS) {
      for (const lane of run.lanesOf(rank)[band]) {
        run.between(lane, timeline.from, timeline.until, (i) => {
          if (rows.length < MOST_TABLE) {
            rows.push([`${rank}`, run.text(i), timeText(run.post[i], 6), Number.isNaN(run.done[i]) ? "never" : timeText(run.done[i], 6), run.place(i)]);
          }
        });
      }
    }
  }
  const caption = `Events from ${timeText(timeline.from, 4)} to ${timeText(timeline.until, 4)}${rows.length >= MOST_TABLE ? `, the first ${MOST_TABLE}` : ""}`;
  return table(caption, ["rank", "event", "start", "end", "line"], rows);
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
