// Reads the data from Python into typed arrays, and finds lanes of bars and states of operations.

// LOOKS, the table in `data/looks.json`, and INKS, the colours of texts on it, precede this file.
const BARS = { ...LOOKS.state, ...LOOKS.computing, ...LOOKS.span };
const [STATE_KEYS, STATES] = [Object.keys(BARS), Object.values(BARS)];
const [
  POSTED, TRANSFER, LATE_SENDER, LATE_RECEIVER, BLOCKED, COLLECTIVE, UNWAITED, UNFINISHED, FAILED,
] = Object.keys(LOOKS.state).keys();
const SPANS = Object.keys(LOOKS.state).length; // the first meaning of spans
const PROGRAM = STATE_KEYS.indexOf("program");
const LETTERS = "ABCDEFGH"; // the names of several runs
const FONT = "11px system-ui, sans-serif";
const SHORT_WAIT = 1e9; // in ns; longer ones look stuck in a run that continues
const BANDS = ["span", "operation", "step", "program"]; // the last is on the first lane of spans
// The first lane of each band among all lanes, and their number; further bars share the last lane.
const LANES = [0, 4, 10, 11];
// The names of the states of operations that may still end, in a run that continues.
const NOT_YET = { stuck: "waiting for more than 1 s", unwaited: "not waited for yet" };
const MOST_NAMED = 200000; // the most events in which names for the legend are searched
const ARRAYS = { i1: Int8Array, i2: Int16Array, i4: Int32Array, f8: Float64Array };

function fromBase64(text) { // the second way is ten times slower
  return Uint8Array.fromBase64?.(text) ?? Uint8Array.from(atob(text), (one) => one.charCodeAt(0));
}

function unpack(bytes) {
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).arrayBuffer();
}

/** Reads the JSON after its length at the start of a buffer; returns the value and its end. */
function readHead(buffer) {
  const end = 4 + new DataView(buffer).getUint32(0, true);
  return [JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, end - 4))), end];
}

/** Reads one trace, which is a head, the columns of its events, and tables. */
function readRun(buffer) {
  const columns = {}, tables = {};
  let [head, at] = readHead(buffer);
  for (const { name, type, size } of head.columns) {
    const column = new ARRAYS[type](buffer, at, size), [table, number] = name.split(" ");
    if (number) (tables[table] ??= [])[number] = column; // such as "bubbles 0"
    else columns[name] = column;
    at += (column.byteLength + 7) & -8; // the columns are aligned
  }
  return new Run(head, columns, tables, columns.post.length);
}

// Events are ordered by rank and post time. Times are in ns, or NaN. The stretches in which a rank
// runs its own program are also events, after all others, with only times and ranks.
class Run {
  constructor(head, columns, tables, size) {
    const { start, first: begin, marks, hosts, stages } = head, end = Math.max(1, head.end);
    Object.assign(this, { head, columns, tables, size, start, begin, end, marks, hosts, stages });
    this.ranks = head.counts.length;
    this.kinds = head.ops.map(([, kind]) => kind); // by operation
    this.isMark = this.kinds.map((kind) => kind === "mark");
    this.isSpan = this.kinds.map((kind) => kind === "span");
    this.isStep = head.labels.map((label) => label.startsWith("step "));
    this.looks = head.meanings.map((meaning) => STATE_KEYS.indexOf(meaning, SPANS));
    this.first = [0];
    for (const count of head.counts) this.first.push(this.first.at(-1) + count);
    this.readTimes();
    this.lane = new Uint8Array(this.post.length); // by event; valid after `lanesOf` its rank
    this.moments = new Int32Array(2 * Math.max(0, ...head.counts)); // of one rank at a time
    [this.lanes, this.programs] = [[], []]; // by rank, found when first needed
    this.flags = head.findings.map((finding) => ({
      ...finding, event: finding.events[0] ?? -1,
      look: SLOW_KINDS.has(finding.kind) ? "slow" : "problem",
    }));
  }

  /** Adds up the times, which are stored as differences; they count from the first non-mark. */
  readTimes() {
    const { size, first, start, isMark, isSpan, isStep } = this;
    const { post, wait, done, op, thread, label, call } = this.columns;
    const all = 3 * size; // an event begins at most two of the program's stretches
    [this.post, this.done] = [new Float64Array(all), new Float64Array(all)];
    [this.wait, this.busy] = [new Float64Array(size), new Float64Array(size)];
    this.rank = new Int32Array(all);
    this.collectives = []; // the events of each call
    for (let rank = 0; rank < this.ranks; rank++) {
      this.rank.fill(rank, first[rank], first[rank + 1]);
      for (let i = first[rank], sum = -start; i < first[rank + 1]; i++) {
        sum += post[i];
        this.post[i] = sum;
        if (call[i] >= 0) (this.collectives[call[i]] ??= []).push(i);
        this.wait[i] = wait[i] < 0 ? NaN : sum + wait[i];
        this.done[i] = done[i] < 0 ? NaN : sum + done[i];
        // when the first thread began to wait or to run a span; a step is not a part of its program
        this.busy[i] = thread[i] || isMark[op[i]] ? NaN
          : !isSpan[op[i]] ? this.wait[i] : isStep[label[i]] ? this.done[i] : sum;
      }
    }
  }

  rowsOf(table, rank) {
    const [ranks, ...columns] = this.tables[table];
    const [from, until] = [firstAbove(ranks, rank), firstAbove(ranks, rank + 1)];
    return columns.map((column) => column.subarray(from, until));
  }

  crosses(src, dst) {
    const { [src]: one, [dst]: other } = this.hosts ?? {};
    return one !== other && one >= 0 && other >= 0;
  }

  kind(i) { return i < this.size ? this.kinds[this.columns.op[i]] : "program"; }
  op(i) { return this.head.ops[this.columns.op[i]][0]; }
  partner(i) { return this.columns.partner[i] ? i + this.columns.partner[i] : -1; }
  label(i) { return this.head.labels[this.columns.label[i]] ?? ""; }
  group(i) { return this.head.groups[this.columns.group[i]] ?? ""; }
  payload(i) { return this.head.payloads[this.columns.payload[i]] ?? null; }
  bytes(i) { return Math.max(0, this.payload(i)?.[2] ?? 0); }
  endOf(i) { return isNaN(this.done[i]) ? this.end : this.done[i]; }
  openEndOf(i) { return this.done[i] >= 0 ? this.done[i] : Infinity; }
  isMessage(i) { const kind = this.kind(i); return kind === "send" || kind === "recv"; }
  hasFailed(i) { return this.columns.status[i] === this.head.error; }

  /** Returns whether an operation never finished, or failed while its rank waited. */
  isStuck(i) { return this.wait[i] >= 0 && (isNaN(this.done[i]) || this.hasFailed(i)); }

  bandOf(i) { return i < this.size ? BANDS[this.bandNumber(i)] : "program"; }

  /** Returns the place in BANDS of the band of an event that is not the program's. */
  bandNumber(i) {
    return !this.isSpan[this.columns.op[i]] ? 1 : this.isStep[this.columns.label[i]] ? 2 : 0;
  }

  /** Returns the bytes per second of a finished message or collective, or NaN if unknown. */
  rate(i) {
    const other = this.partner(i);
    const begin = other < 0 ? this.post[i] : Math.max(this.post[i], this.post[other]);
    const bytes = this.bytes(i), time = this.done[i] - begin;
    return bytes > 0 && time > 0 ? (bytes / time) * 1e9 : NaN;
  }

  /** Returns an event's place in the program, such as "train.py:12", or "" if unknown. */
  place(i) {
    if (i >= this.size) return this.stretch(this.before[i - this.size], this.after[i - this.size]);
    const file = this.columns.file[i];
    return file < 0 ? "" : `${this.head.files[file].split("/").at(-1)}:${this.columns.line[i]}`;
  }

  /** Returns the place of the program between two events, such as "step, train.py:12 to 14". */
  stretch(...sides) {
    const { file, line } = this.columns, places = sides.map((i) => this.place(i));
    const names = sides.map((i) => this.head.functions[`${file[i]}:${line[i]}`]);
    const [from, to] = names.map((name, k) => (name ? `${name}, ${places[k]}` : places[k]));
    if (from === to) return from;
    const isNear = names[0] === names[1] && file[sides[0]] === file[sides[1]];
    return isNear ? `${from} to ${line[sides[1]]}` : [from, to].filter(Boolean).join(" to ");
  }

  /** Returns the lines that an event came from: the caller of a thin wrapper, and its own line. */
  places(i) {
    this.calls ??= this.head.files.map((name) => /^(?:(.*):(\d+) > )?(.*)$/.exec(name));
    const [, caller, line, file] = this.calls[this.columns.file[i]] ?? [];
    if (file === undefined) return [];
    const own = { file, line: this.columns.line[i] };
    return caller ? [{ file: caller, line: Number(line) }, own] : [own];
  }

  text(i) {
    const kind = this.kind(i), microbatch = this.columns.microbatch[i], peer = this.columns.peer[i];
    if (kind === "program") return LOOKS.computing.program.name;
    if (kind === "mark") return this.label(i) || kind;
    if (kind === "span") return (this.label(i) || kind) + (microbatch < 0 ? "" : ` ${microbatch}`);
    if (kind === "collective") return this.op(i);
    return `${this.op(i)} ${kind === "send" ? "to" : "from"} ${peer >= 0 ? peer : "any rank"}`;
  }

  /** Calls `each(from, until, state)` for the parts of an event's bar. */
  parts(i, each) {
    if (i >= this.size) return each(this.post[i], this.done[i], PROGRAM);
    const kind = this.kind(i), isCollective = kind === "collective";
    const finished = !isNaN(this.done[i]), post = this.post[i];
    const wait = this.wait[i], done = this.done[i], end = this.endOf(i);
    if (kind === "span") return each(post, end, this.looks[this.columns.label[i]] ?? SPANS);
    if (this.hasFailed(i)) return each(post, end, FAILED);
    const unwaited = !finished ? UNWAITED : isCollective ? COLLECTIVE : POSTED;
    if (isNaN(wait)) return each(post, end, unwaited);
    if (wait > post) each(post, wait, POSTED);
    if (!finished) {
      const late = this.head.progress ? Math.min(wait + SHORT_WAIT, end) : wait;
      const reason = isCollective ? COLLECTIVE : kind === "send" ? LATE_RECEIVER : LATE_SENDER;
      if (late > wait) each(wait, late, reason);
      return late < end && each(late, end, UNFINISHED);
    }
    if (isCollective) return each(wait, done, COLLECTIVE);
    const other = this.partner(i);
    if (other < 0) return each(wait, done, BLOCKED);
    const met = Math.min(Math.max(this.post[other], wait), done);
    if (met > wait) each(wait, met, kind === "send" ? LATE_RECEIVER : LATE_SENDER);
    if (done > met) each(met, done, TRANSFER);
  }

  /** Returns pairs of a state and a name for everything that bars show. */
  drawnNames() {
    const { columns: { label }, looks } = this, states = new Set(), labels = new Set();
    for (let i = 0; i < Math.min(this.size, MOST_NAMED); i++) {
      const kind = this.kind(i);
      if (kind === "span") labels.add(label[i]);
      else if (kind !== "mark") this.parts(i, (_, __, state) => states.add(state));
    }
    if (this.tables.program[0].length) states.add(PROGRAM);
    const open = this.head.progress ? NOT_YET : {}, named = [...states].map((state) => [state, ""]);
    for (const one of labels) named.push([looks[one] ?? SPANS, this.head.labels[one] ?? ""]);
    return named.map(([state, name]) => [state, STATE_KEYS[state] in LOOKS.span ? name
      : open[STATE_KEYS[state]] ?? STATES[state].name]);
  }

  /** Returns the lanes of a rank's bars by band; bars on a lane do not overlap. */
  lanesOf(rank) { return (this.lanes[rank] ??= this.layOut(rank)); }

  /** Returns the lanes of a band; that of the program is found when first needed. */
  lanesIn(rank, band) {
    return band === "program" ? [this.programs[rank] ??= findProgram(this, rank)]
      : this.lanesOf(rank)[band];
  }

  /** Returns a rank's first event that may overlap a time range, and the one after the last. */
  rangeOf(rank, from, until) {
    const { span, operation } = this.lanesOf(rank);
    const ends = [...span, ...operation].map(({ events, begins, ends }) =>
      [events[firstAbove(ends, from)] ?? Infinity, events[firstAbove(begins, until) - 1] ?? -1]);
    const low = Math.min(...ends.map(([one]) => one));
    return [low, Math.max(low, ...ends.map(([, one]) => one + 1))];
  }

  /** Puts each of a rank's bars on the first lane where it fits, so that spans can nest. */
  layOut(rank) {
    const order = this.inOrder(rank), places = new Uint8Array(order.length);
    const own = this.rowsOf("program", rank)[0].length; // 1 if the program needs the first lane
    const lanes = Array.from(this.placeBars(order, places, own), (size) => new Lane(size));
    for (let k = 0; k < order.length; k++) {
      lanes[places[k]].add(order[k], this.post[order[k]], this.endOf(order[k]));
    }
    const [span, operation, step] = LANES.slice(1).map((end, band) => lanes.slice(LANES[band], end)
      .filter(({ size }, place) => size || LANES[band] + place < own));
    return { span, operation, step };
  }

  /** Finds the place of each bar among all lanes; returns the number of bars by place. */
  placeBars(order, places, own) { // only the first thread uses the first `own` places
    const { post, lane, columns: { thread } } = this;
    const sizes = new Int32Array(LANES.at(-1)), ends = new Float64Array(sizes.length);
    ends.fill(-Infinity);
    for (let k = 0; k < order.length; k++) {
      const i = order[k], band = this.bandNumber(i), last = LANES[band + 1] - 1;
      let place = LANES[band] + (band === 0 && thread[i] ? own : 0);
      while (place < last && ends[place] > post[i]) place++;
      ends[place] = Math.max(ends[place], this.endOf(i));
      sizes[place]++;
      lane[i] = place - LANES[band];
      places[k] = place;
    }
    return sizes;
  }

  /** Returns a rank's events except marks, sorted by post time, unlike those of several threads. */
  inOrder(rank) {
    const { post, isMark, first: { [rank]: from, [rank + 1]: until } } = this;
    const order = new Int32Array(until - from);
    let size = 0, sorted = true;
    for (let i = from; i < until; i++) {
      if (isMark[this.columns.op[i]]) continue;
      sorted &&= !(size && post[i] < post[order[size - 1]]);
      order[size++] = i;
    }
    const own = order.subarray(0, size);
    return sorted ? own : own.sort((a, b) => post[a] - post[b]);
  }

  between({ events, begins, ends }, from, until, each) {
    const { length } = events;
    for (let k = firstAbove(ends, from); k < length && begins[k] <= until; k++) each(events[k]);
  }

  visit(rank, bands, from, until, each) {
    for (const band of bands) {
      for (const lane of this.lanesIn(rank, band)) this.between(lane, from, until, each);
    }
  }

  operationsIn(from, until) {
    const found = [], add = (i) => found.push(i);
    for (const rank of this.head.counts.keys()) this.visit(rank, ["operation"], from, until, add);
    return found;
  }
}

/** Bars in the order of their begins; `ends` has the latest end so far. */
class Lane {
  constructor(room) {
    [this.size, this.end, this.events] = [0, 0, new Int32Array(room)];
    [this.begins, this.ends] = [new Float64Array(room), new Float64Array(room)];
  }

  add(event, begin, end) {
    this.end = Math.max(this.end, end);
    this.events[this.size] = event;
    this.begins[this.size] = begin;
    this.ends[this.size++] = this.end;
  }
}

/** Returns the first index of an ascending list whose value is at least `value`. */
function firstAbove(list, value) {
  let low = 0, high = list.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (list[middle] < value) low = middle + 1; else high = middle;
  }
  return low;
}

/** Returns a place in a program as one word, such as "train.py:14" or "In[5]:3". */
function placeWord({ file, line }) { return `${file.split(/[/\\ ]/).at(-1)}:${line}`; }

const TIMES = [[1e9, "s"], [1e6, "ms"], [1e3, "µs"], [1, "ns"]];
const RATES = [[1e9, "GB/s"], [1e6, "MB/s"], [1e3, "kB/s"], [1, "B/s"]];
const SIZES = [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [1024, "KiB"], [1, "B"]];

/** Formats a value with the largest unit that it contains, as in "1.25 ms". */
function scaledText(value, units, digits) {
  const [size, unit] = units.find(([size]) => Math.abs(value) >= size) ?? units.at(-1);
  return `${Number((value / size).toPrecision(digits))} ${unit}`;
}

function timeText(ns, digits = 3) { return scaledText(ns, TIMES, digits); }
function rateText(rate) { return scaledText(rate, RATES, 3); }
function bytesText(bytes) { return scaledText(bytes, SIZES, 4); }

function countText(number, what) {
  return `${number.toLocaleString("en")} ${what}${number === 1 ? "" : "s"}`;
}
