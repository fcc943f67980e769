// Reads the data from Python into typed arrays, and finds the lanes of bars and the states of operations.

// LOOKS, the table of meanings from `data/looks.json`, precedes this file. Bars have the states of
// operations, then the meanings of spans.
const BAR_FAMILIES = ["state", "computing", "span"];
const STATES = BAR_FAMILIES.flatMap((family) => Object.values(LOOKS[family]));
const STATE_KEYS = BAR_FAMILIES.flatMap((family) => Object.keys(LOOKS[family]));
const [
  POSTED, TRANSFER, LATE_SENDER, LATE_RECEIVER, BLOCKED, COLLECTIVE, UNWAITED, UNFINISHED, FAILED,
] = Object.keys(LOOKS.state).keys();
const SPANS = Object.keys(LOOKS.state).length; // the first meaning of spans
const SPAN_MEANINGS = [...Object.keys(LOOKS.computing), ...Object.keys(LOOKS.span)];

const PROGRAM = SPANS + SPAN_MEANINGS.indexOf("program");
const LETTERS = "ABCDEFGH"; // the names of several runs
const FONT = "11px system-ui, sans-serif";

const SHORT_WAIT = 1e9; // in ns; in a run that continues, a longer wait has the colour of waits that never finish
const MOST_LANES = { span: 4, operation: 6, step: 1 }; // any further bars share the last lane
const ARRAYS = { i1: Int8Array, i2: Int16Array, i4: Int32Array, f8: Float64Array };

/** Decodes base64. */
function fromBase64(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const letters = atob(text);
  const bytes = new Uint8Array(letters.length);
  for (let i = 0; i < letters.length; i++) bytes[i] = letters.charCodeAt(i);
  return bytes;
}

/** Decompresses gzip data. */
function unpack(bytes) {
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).arrayBuffer();
}

/** Reads the JSON after its length at the start of a buffer; returns the value and its end. */
function readHead(buffer) {
  const end = 4 + new DataView(buffer).getUint32(0, true);
  return [JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, end - 4))), end];
}

/** Reads one trace, which is a head and its columns. */
function readRun(buffer) {
  const [head, end] = readHead(buffer);
  const events = head.counts.reduce((sum, count) => sum + count, 0);
  const columns = {};
  let at = end;
  for (const { name, type } of head.columns) {
    const size = ARRAYS[type].BYTES_PER_ELEMENT * events;
    columns[name] = new ARRAYS[type](buffer.slice(at, at + size)); // the start may not be aligned
    at += size;
  }
  return new Run(head, columns, events);
}

/** One trace, as columns of events ordered by rank and post time. Times are in ns, or NaN if there is none. */
class Run {
  constructor(head, columns, size) {
    this.head = head;
    this.size = size;
    this.ranks = head.counts.length;
    this.columns = columns;
    this.kinds = head.ops.map(([, kind]) => kind); // by operation
    this.first = [0];
    for (const count of head.counts) this.first.push(this.first.at(-1) + count);
    this.readTimes();
    this.isStep = head.labels.map((label) => label.startsWith("step "));
    this.findProgram();
    this.looks = head.meanings.map((meaning) => SPANS + SPAN_MEANINGS.indexOf(meaning));
    this.lane = new Uint8Array(this.post.length); // by event; valid after `lanesOf` its rank
    this.lanes = [];
    this.hosts = head.hosts;
    this.stages = this.findStages();
    this.flags = head.findings.map((finding) => ({
      ...finding, event: finding.events[0] ?? -1,
      look: SLOW_KINDS.has(finding.kind) ? "slow" : "problem",
    }));
  }

  /** Adds up the times, which are stored as differences; they count from the first non-mark. */
  readTimes() {
    const { size, first, kinds } = this, { post, wait, done, op } = this.columns;
    this.rank = new Int32Array(size);
    for (const name of ["post", "wait", "done"]) this[name] = new Float64Array(size);
    this.marks = [];
    let start = Infinity;
    for (let rank = 0; rank < this.ranks; rank++) {
      for (let i = first[rank], time = 0; i < first[rank + 1]; i++) {
        time += post[i];
        this.post[i] = time;
        this.rank[i] = rank;
        if (kinds[op[i]] === "mark") this.marks.push(i);
        else start = Math.min(start, time);
      }
    }
    this.start = start < Infinity && !this.head.progress ? start : 0; // in ns since the start of the run
    let begin = Infinity, end = Math.max(1, this.head.end - this.start);
    for (let i = 0; i < size; i++) {
      const time = (this.post[i] -= this.start);
      this.wait[i] = wait[i] < 0 ? NaN : time + wait[i];
      this.done[i] = done[i] < 0 ? NaN : time + done[i];
      begin = Math.min(begin, time);
      end = Math.max(end, time + Math.max(0, wait[i], done[i]));
    }
    Object.assign(this, { begin: Math.min(begin, end), end });
  }

  /**
   * Finds the stretches in which ranks ran their own program, as `traces/program.py` does: the time
   * on the first thread that is neither in a span nor in a wait. They become events after the last.
   */
  findProgram() {
    const { size, first, kinds, post, wait, done } = this, { op, thread, label } = this.columns;
    const isMark = kinds.map((kind) => kind === "mark"), isSpan = kinds.map((kind) => kind === "span");
    const room = 2 * size + this.ranks;
    const [begins, ends] = [new Float64Array(room), new Float64Array(room)];
    const [before, after] = [new Int32Array(room), new Int32Array(room)];
    const most = 2 * Math.max(0, ...this.head.counts) + 1;
    const start = new Float64Array(most), end = new Float64Array(most), event = new Int32Array(most);
    let count = 0, found = 0;
    const add = (i, begin, until) => { // keeps the moments sorted; they come almost in order
      let at = count++;
      for (; at && start[at - 1] > begin; at--) {
        start[at] = start[at - 1];
        end[at] = end[at - 1];
        event[at] = event[at - 1];
      }
      start[at] = begin;
      end[at] = until;
      event[at] = i;
    };
    this.programs = []; // for each rank, its first stretch and the one after its last
    for (let rank = 0; rank < this.ranks; rank++) {
      const from = size + found;
      count = 0;
      for (let i = first[rank]; i < first[rank + 1]; i++) {
        if (thread[i] || isMark[op[i]]) continue;
        const span = isSpan[op[i]], covers = span && !this.isStep[label[i]];
        const until = done[i] >= 0 ? done[i] : Infinity;
        add(i, post[i], covers ? until : post[i]);
        if (!span && wait[i] >= 0) add(i, wait[i], until);
        else if (span && !covers && done[i] >= 0) add(i, done[i], done[i]);
      }
      if (count && this.head.progress) add(event[count - 1], this.end, this.end); // it runs on
      for (let k = 0, free = start[0], last = event[0]; k < count; k++) {
        if (start[k] > free) {
          begins[found] = free;
          ends[found] = start[k];
          before[found] = last;
          after[found++] = event[k];
        }
        if (end[k] >= free) {
          free = end[k];
          last = event[k];
        }
      }
      this.programs.push([from, size + found]);
    }
    this.addEvents(...[begins, ends, before, after].map((column) => column.subarray(0, found)));
  }

  /** Adds the stretches of the ranks' own program as events after the last. */
  addEvents(begins, ends, before, after) {
    const { size, kinds } = this;
    const grow = (column, value, values = []) => {
      const grown = new column.constructor(size + begins.length).fill(value, size);
      grown.set(column);
      grown.set(values, size);
      return grown;
    };
    const ranks = before.map((i) => this.rank[i]), names = Object.keys(this.columns);
    [this.before, this.after, this.rank] = [before, after, grow(this.rank, 0, ranks)];
    [this.post, this.done] = [grow(this.post, 0, begins), grow(this.done, 0, ends)];
    this.wait = grow(this.wait, NaN);
    for (const name of names) this.columns[name] = grow(this.columns[name], -1);
    this.columns.partner.fill(0, size);
    this.columns.op.fill(kinds.push("program") - 1, size);
    this.head.ops.push(["program", "program"]);
    this.bands = Uint8Array.from(kinds, (kind) => (kind === "span" || kind === "program" ? 0 : 1));
  }

  /** Returns the lowest stage of each rank, or -1; or undefined for a run without stages. */
  findStages() {
    const stages = new Int32Array(this.ranks).fill(-1), { stage } = this.columns;
    for (let i = 0; i < this.size; i++) {
      const least = stages[this.rank[i]]; // -1 is above all stages as an unsigned number
      if (stage[i] >= 0 && stage[i] < least >>> 0) stages[this.rank[i]] = stage[i];
    }
    return stages.some((one) => one >= 0) ? stages : undefined;
  }

  /** Returns whether two ranks are on two different known hosts. */
  crosses(src, dst) {
    const [one, other] = [src, dst].map((rank) => this.hosts?.[rank] ?? -1);
    return one !== other && one >= 0 && other >= 0;
  }

  kind(i) { return this.kinds[this.columns.op[i]]; }
  op(i) { return this.head.ops[this.columns.op[i]][0]; }
  partner(i) { return this.columns.partner[i] ? i + this.columns.partner[i] : -1; }
  label(i) { return this.columns.label[i] < 0 ? "" : this.head.labels[this.columns.label[i]]; }
  group(i) { return this.columns.group[i] < 0 ? "" : this.head.groups[this.columns.group[i]]; }
  payload(i) { return this.columns.payload[i] < 0 ? null : this.head.payloads[this.columns.payload[i]]; }
  bytes(i) { return Math.max(0, this.payload(i)?.[2] ?? 0); }
  endOf(i) { return isNaN(this.done[i]) ? this.end : this.done[i]; }
  isMessage(i) { const kind = this.kind(i); return kind === "send" || kind === "recv"; }
  isOperation(i) { return this.isMessage(i) || this.kind(i) === "collective"; }

  hasFailed(i) { return this.columns.status[i] === this.head.error; }

  /** Returns whether an operation never finished, or failed while its rank waited. */
  isStuck(i) { return this.wait[i] >= 0 && (isNaN(this.done[i]) || this.hasFailed(i)); }

  bandOf(i) { return BANDS[this.bandNumber(i)]; }

  /** Returns the place of an event's band in BANDS. */
  bandNumber(i) {
    const number = this.bands[this.columns.op[i]], label = this.columns.label[i];
    return number === 0 && label >= 0 && this.isStep[label] ? 2 : number;
  }

  /** Returns the bytes per second of a finished message or collective, or NaN if there is no such rate. */
  rate(i) {
    const other = this.partner(i);
    const begin = other < 0 ? this.post[i] : Math.max(this.post[i], this.post[other]);
    const bytes = this.bytes(i), time = this.done[i] - begin;
    return bytes > 0 && time > 0 ? (bytes / time) * 1e9 : NaN;
  }

  /** Returns an event's place in the program, such as "train.py:12", or "" if unknown. */
  place(i) {
    if (i >= this.size) { // between two lines
      const [from, to] = [this.before, this.after].map((side) => this.place(side[i - this.size]));
      return from === to ? from : [from, to].filter(Boolean).join(" to ");
    }
    const file = this.columns.file[i];
    return file < 0 ? "" : `${this.head.files[file].split("/").at(-1)}:${this.columns.line[i]}`;
  }

  /** Returns the lines that an event came from: the caller of a thin wrapper, and its own line. */
  places(i) {
    this.calls ??= this.head.files.map((name) => /^(?:(.*):(\d+) > )?(.*)$/.exec(name));
    const [, caller, line, file] = this.calls[this.columns.file[i]] ?? [];
    if (file === undefined) return [];
    const own = { file, line: this.columns.line[i] };
    return caller ? [{ file: caller, line: Number(line) }, own] : [own];
  }

  /** Describes an event in one line. */
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
    const kind = this.kind(i), finished = !isNaN(this.done[i]), isCollective = kind === "collective";
    const post = this.post[i], wait = this.wait[i], done = this.done[i], end = this.endOf(i);
    if (kind === "span") return each(post, end, this.looks[this.columns.label[i]] ?? SPANS);
    if (this.hasFailed(i)) return each(post, end, FAILED);
    if (isNaN(wait)) return each(post, end, !finished ? UNWAITED : isCollective ? COLLECTIVE : POSTED);
    if (wait > post) each(post, wait, POSTED);
    if (!finished) {
      const late = this.head.progress ? Math.min(wait + SHORT_WAIT, end) : wait; // in a run that continues
      if (late > wait) each(wait, late, isCollective ? COLLECTIVE : kind === "send" ? LATE_RECEIVER : LATE_SENDER);
      return late < end && each(late, end, UNFINISHED);
    }
    if (isCollective) return each(wait, done, COLLECTIVE);
    const other = this.partner(i);
    if (other < 0) return each(wait, done, BLOCKED);
    const met = Math.min(Math.max(this.post[other], wait), done);
    if (met > wait) each(wait, met, kind === "send" ? LATE_RECEIVER : LATE_SENDER);
    if (done > met) each(met, done, TRANSFER);
  }

  /** Returns the lanes of a rank's bars, on which bars do not overlap. */
  lanesOf(rank) { return (this.lanes[rank] ??= this.layOut(rank)); }

  /** Puts each of a rank's bars on the first lane where it fits, so that nested spans have their own. */
  layOut(rank) {
    const order = this.inOrder(rank), { post, done, end } = this;
    const bands = BANDS.map(() => []), numbers = new Uint8Array(order.length);
    for (let k = 0; k < order.length; k++) {
      const i = order[k], band = this.bandNumber(i), lanes = bands[band];
      numbers[k] = band;
      let number = 0;
      while (number < lanes.length && lanes[number].end > post[i]) number++;
      if (number === MOST_LANES[BANDS[band]]) number--;
      const lane = (lanes[number] ??= { size: 0, end: 0 });
      lane.end = Math.max(lane.end, done[i] >= 0 ? done[i] : end);
      lane.size++;
      this.lane[i] = number;
    }
    for (const lane of bands.flat()) {
      lane.events = new Int32Array(lane.size);
      [lane.begins, lane.ends] = [new Float64Array(lane.size), new Float64Array(lane.size)];
      lane.size = lane.end = 0;
    }
    for (let k = 0; k < order.length; k++) {
      const i = order[k], lane = bands[numbers[k]][this.lane[i]], at = lane.size++;
      lane.end = Math.max(lane.end, done[i] >= 0 ? done[i] : end);
      lane.events[at] = i;
      lane.begins[at] = post[i];
      lane.ends[at] = lane.end;
    }
    return Object.fromEntries(BANDS.map((band, number) => [band, bands[number]]));
  }

  /** Returns a rank's events except marks, sorted by post time, unlike those of several threads. */
  inOrder(rank) {
    const [from, until] = this.programs[rank], { post } = this;
    const order = new Int32Array(this.first[rank + 1] - this.first[rank] + until - from);
    let size = 0, sorted = true, gap = from;
    for (let i = this.first[rank]; i < this.first[rank + 1]; i++) {
      if (this.kinds[this.columns.op[i]] === "mark") continue;
      while (gap < until && post[gap] < post[i]) order[size++] = gap++;
      sorted &&= !(size && post[i] < post[order[size - 1]]);
      order[size++] = i;
    }
    while (gap < until) order[size++] = gap++;
    const own = order.subarray(0, size);
    return sorted ? own : own.sort((a, b) => post[a] - post[b]);
  }

  /** Calls `each(event)` for the bars of a lane between two times. */
  between({ events, begins, ends }, from, until, each) {
    for (let k = firstAbove(ends, from); k < events.length && begins[k] <= until; k++) each(events[k]);
  }

  /** Calls `each(event)` for the bars of a rank's bands between two times. */
  visit(rank, bands, from, until, each) {
    const lanes = this.lanesOf(rank);
    for (const lane of bands.flatMap((band) => lanes[band])) this.between(lane, from, until, each);
  }

  /** Calls `each(event)` for the operations of all ranks between two times. */
  visitAll(from, until, each) {
    for (let rank = 0; rank < this.ranks; rank++) this.visit(rank, ["operation"], from, until, each);
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

/** Returns the relative luminance of a colour "#rrggbb" (WCAG 2.1). */
function luminance(colour) {
  const linear = [1, 3, 5].map((at) => {
    const share = parseInt(colour.slice(at, at + 2), 16) / 255;
    return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
}

/** Returns black or white, whichever is easier to read on a colour. */
function readableInk(colour) {
  const isLight = (luminance(colour) + 0.05) ** 2 > 1.05 * 0.05;
  return LOOKS.paper[isLight ? "on_light" : "on_dark"].light;
}

const UNITS = [[1e9, "s"], [1e6, "ms"], [1e3, "µs"], [1, "ns"]];
const RATES = [[1e9, "GB/s"], [1e6, "MB/s"], [1e3, "kB/s"], [1, "B/s"]];


/** Formats a time in ns with a suitable unit, as in "1.25 ms". */
function timeText(ns, digits = 3) {
  const [size, unit] = UNITS.find(([size]) => Math.abs(ns) >= size) ?? UNITS[3];
  return `${Number((ns / size).toPrecision(digits))} ${unit}`;
}

/** Formats bytes per second, as in "10 GB/s". */
function rateText(rate) {
  const [size, unit] = RATES.find(([size]) => rate > 0.999 * size) ?? RATES[3];
  return `${Number((rate / size).toPrecision(3))} ${unit}`;
}

/** Formats a number of things, as in "2 messages". */
function countText(number, what) {
  return `${number.toLocaleString("en")} ${what}${number === 1 ? "" : "s"}`;
}

/** Formats a number of bytes, as in "64 KiB". */
function bytesText(bytes) {
  const power = Math.min(4, Math.max(0, Math.floor(Math.log2(Math.max(1, bytes)) / 10)));
  return `${Number((bytes / 1024 ** power).toPrecision(4))} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
}
