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
    parts.push(make("h2", {}, run.text(other), " ", make("button", { type: "button", onclick: () => goTo({ run, event: other }) }, "go there")), facts(other));
  }
  return parts;
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
    row.blocked.length ? timeText(median(row.blocked)) : "–",
    row.blocked.length ? timeText(row.blocked.reduce((sum, one) => sum + one, 0)) : "–",
    row.rates.length ? `${(median(row.rates) / 1e9).toPrecision(2)} GB/s` : "–",
  ]);
  const caption = `Operations from ${timeText(from, 4)} to ${timeText(until, 4)}`;
  return table(caption, ["operation", "group", "count", "bytes", "blocked (median)", "blocked (total)", "bandwidth (median)"], rows);
}

/** Creates a table of the traffic on each edge, in descending order. */
function edgesTable(edges) {
  const rows = [...edges].sort((a, b) => b.bytes - a.bytes || b.count - a.count).slice(0, 60);
  return table("Messages by edge", ["from", "to", "messages", "bytes"],
    rows.map(({ src, dst, count, bytes }) => [`rank ${src}`, `rank ${dst}`, count.toLocaleString("en"), bytesText(bytes)]));
}

/** Draws the bandwidth of the messages in a window against their size, on logarithmic axes. */
function drawBandwidth(canvas, timeline, run) {
  const width = canvas.clientWidth || 300, height = 180, ratio = devicePixelRatio || 1;
  [canvas.width, canvas.height] = [width * ratio, height * ratio];
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  context.font = "10px system-ui, sans-serif";
  const points = [];
  for (let rank = 0; rank < run.ranks; rank++) {
    for (const lane of run.lanesOf(rank).operation) {
      run.between(lane, timeline.from, timeline.until, (i) => {
        const rate = run.kind(i) === "recv" || run.kind(i) === "collective" ? run.rate(i) : NaN;
        if (rate && points.length < 50000) points.push([Math.log10(run.bytes(i)), Math.log10(rate), run.kind(i)]);
      });
    }
  }
  context.fillStyle = timeline.muted;
  if (!points.length) return context.fillText("no message with data ended in this window", 10, height / 2);
  const range = (at) => [Math.floor(Math.min(...points.map((one) => one[at]))), Math.ceil(Math.max(...points.map((one) => one[at])) + 1e-9)];
  const [x0, x1] = range(0), [y0, y1] = range(1);
  const x = (value) => 46 + ((value - x0) / Math.max(1, x1 - x0)) * (width - 60), y = (value) => height - 24 - ((value - y0) / Math.max(1, y1 - y0)) * (height - 40);
  context.strokeStyle = timeline.grid;
  for (let power = x0; power <= x1; power++) {
    context.strokeRect(x(power), 12, 0, height - 36);
    context.fillText(`1e${power} B`, x(power) - 10, height - 10);
  }
  for (let power = y0; power <= y1; power++) {
    context.strokeRect(46, y(power), width - 60, 0);
    context.fillText(`${(10 ** power / 1e9).toPrecision(1)} GB/s`, 0, y(power) + 3);
  }
  for (const [size, rate, kind] of points) {
    context.fillStyle = timeline.colours[kind === "collective" ? COLLECTIVE : TRANSFER];
    if (kind === "collective") context.fillRect(x(size) - 2, y(rate) - 2, 4, 4);
    else {
      context.beginPath();
      context.arc(x(size), y(rate), 2.2, 0, 7);
      context.fill();
    }
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

/** Converts a search text to a test for events. The text consists of words, or of terms such as `rank:2 op:recv peer:3 group:x tag:7 size>1024 stage:1 microbatch:0 label:loss`. */
function parseSearch(text) {
  const tests = text.trim().toLowerCase().split(/\s+/).filter(Boolean).map((word) => {
    const [, name, sign, value] = /^(\w+)(:|<|>)(.+)$/.exec(word) ?? [];
    const number = Number(value);
    const compare = (one) => (sign === "<" ? one < number : sign === ">" ? one > number : one === number);
    if (name === "rank") return (run, i) => compare(run.rank[i]);
    if (["peer", "tag", "stage", "microbatch"].includes(name)) return (run, i) => compare(run.columns[name][i]);
    if (name === "from" || name === "to") return (run, i) => run.isMessage(i) && compare((run.kind(i) === "send") === (name === "from") ? run.rank[i] : run.columns.peer[i]);
    if (name === "size") return (run, i) => run.payload(i) !== null && compare(run.bytes(i));
    if (name === "op") return (run, i) => run.op(i).includes(value);
    if (name === "label") return (run, i) => run.label(i).toLowerCase().includes(value);
    if (name === "group") return (run, i) => (run.head.groups.includes(value) ? run.group(i) === value : run.group(i).toLowerCase().includes(value));
    return (run, i) => run.text(i).toLowerCase().includes(word) || run.place(i).toLowerCase().includes(word);
  });
  return (run, i) => tests.every((test) => test(run, i));
}
