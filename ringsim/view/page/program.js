// Finds the stretches in which ranks ran their own program, as `traces/program.py` does: the time
// on a rank's first thread, between its events, that is neither in a span nor in a wait.

/** Up to `most` intervals, sorted by their begins. They must be added almost in order. */
class Intervals {
  constructor(most) {
    this.count = 0;
    [this.begins, this.ends] = [new Float64Array(most), new Float64Array(most)];
    [this.events, this.afters] = [new Int32Array(most), new Int32Array(most)];
  }

  add(begin, end, event) {
    const { begins, ends, events } = this;
    let at = this.count++;
    for (; at && begins[at - 1] > begin; at--) {
      begins[at] = begins[at - 1];
      ends[at] = ends[at - 1];
      events[at] = events[at - 1];
    }
    begins[at] = begin;
    ends[at] = end;
    events[at] = event;
  }

  /** Replaces the intervals by the gaps between them; `events` then precede, `afters` follow. */
  invert() {
    const { begins, ends, events, afters, count } = this;
    this.count = 0;
    for (let k = 0, free = begins[0], last = events[0]; k < count; k++) {
      const begin = begins[k], end = ends[k], event = events[k];
      if (begin > free) {
        begins[this.count] = free;
        ends[this.count] = begin;
        events[this.count] = last;
        afters[this.count++] = event;
      }
      if (end < free) continue;
      free = end;
      last = event;
    }
    return this;
  }

  /** Calls `each(begin, end, ...more)` for all intervals. */
  visit(each, more) {
    const { begins, ends, count } = this;
    for (let k = 0; k < count; k++) each(begins[k], ends[k], more);
  }
}

/** Adds the intervals in which a rank's program did not run, from a range of its events. */
function addBusy(run, low, high, left, right) {
  const { busy, done, intervals } = run;
  for (let i = low; i < high; i++) {
    if (busy[i] < right && !(done[i] <= left)) intervals.add(busy[i], run.openEndOf(i), i);
  }
}

/** Returns the time in a window in which a rank ran its own program, as intervals. */
function findFree(run, rank, from, until) {
  const [[begin], [end]] = run.rowsOf("program", rank), { intervals } = run;
  const left = Math.max(from, begin), right = Math.min(until, end);
  intervals.count = 0;
  if (!(left < right)) return intervals;
  intervals.add(left, left, -1);
  addBusy(run, ...run.rangeOf(rank, left, right), left, right);
  intervals.add(right, right, -1);
  return intervals.invert();
}

/** Adds the intervals of a rank's waits and spans, and the moments at which it posted. */
function addMoments(run, from, until) {
  const { post, busy, isMark, intervals, columns: { thread, op } } = run;
  for (let i = from; i < until; i++) {
    if (thread[i] || isMark[op[i]]) continue;
    intervals.add(post[i], post[i], i);
    if (busy[i] >= 0) intervals.add(busy[i], run.openEndOf(i), i);
  }
  if (run.head.progress) intervals.add(run.end, run.end, until - 1); // the program continues
}

/** Returns the stretches of a rank as a lane; each ends when something begins or is posted. */
function findProgram(run, rank) {
  const { size, intervals, first: { [rank]: from, [rank + 1]: until } } = run;
  intervals.count = 0;
  addMoments(run, from, until);
  const { begins, ends, events, afters, count } = intervals.invert(), first = size + 2 * from;
  run.before ??= new Int32Array(2 * size); // by stretch, the event that ended last
  run.after ??= new Int32Array(2 * size); // by stretch, the event that ends it
  run.before.set(events.subarray(0, count), 2 * from);
  run.after.set(afters.subarray(0, count), 2 * from);
  run.post.set(begins.subarray(0, count), first);
  run.done.set(ends.subarray(0, count), first);
  run.rank.fill(rank, first, first + count);
  const own = Int32Array.from({ length: count }, (_, k) => first + k);
  return { events: own, begins: begins.slice(0, count), ends: ends.slice(0, count) };
}
