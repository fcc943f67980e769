// Finds the stretches in which ranks ran their own program, as `traces/program.py` does: the time
// on a rank's first thread, between its events, that is neither in a span nor in a wait.

/** Up to `most` intervals, sorted by their begins. They must be added almost in order. */
class Intervals {
  constructor(most) {
    this.count = 0;
    [this.begins, this.ends] = [new Float64Array(most), new Float64Array(most)];
    this.events = new Int32Array(most);
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

  /** Calls `each(from, until, before, after)` for the gaps; returns the end of all intervals. */
  gaps(each) {
    const { begins, ends, events, count } = this;
    let free = begins[0];
    for (let k = 0, last = 0; k < count; k++) {
      if (begins[k] > free) each(free, begins[k], events[last], events[k]);
      if (ends[k] < free) continue;
      free = ends[k];
      last = k;
    }
    return free;
  }
}

/** Returns the intervals in which a rank's program did not run, from a range of its events. */
function findBusy(run, low, high, left, right) {
  const { busy, done, intervals } = run;
  intervals.count = 0;
  intervals.add(left, left, -1);
  for (let i = low; i < high; i++) {
    if (busy[i] < right && !(done[i] <= left)) intervals.add(busy[i], run.openEndOf(i), i);
  }
  return intervals;
}

/** Calls `each(from, until)` for the time in a window in which a rank ran its own program. */
function eachFree(run, rank, from, until, each) {
  const [[begin], [end]] = run.rowsOf("program", rank);
  const left = Math.max(from, begin), right = Math.min(until, end);
  if (!(left < right)) return;
  const [low, high] = run.rangeOf(rank, left, right);
  const free = findBusy(run, low, high, left, right).gaps(each);
  if (free < right) each(free, right);
}

/** Returns the intervals of a rank's waits and spans, and the moments at which it posted. */
function findMoments(run, from, until) {
  const { post, busy, isMark, intervals, columns: { thread, op } } = run;
  intervals.count = 0;
  for (let i = from; i < until; i++) {
    if (thread[i] || isMark[op[i]]) continue;
    intervals.add(post[i], post[i], i);
    if (busy[i] >= 0) intervals.add(busy[i], run.openEndOf(i), i);
  }
  if (run.head.progress) intervals.add(run.end, run.end, until - 1); // the program continues
  return intervals;
}

/** Returns the stretches of a rank as a lane; each ends when something begins or is posted. */
function findProgram(run, rank) {
  const { size, post, done, first: { [rank]: from, [rank + 1]: until } } = run;
  const lane = new Lane().reserve(2 * (until - from));
  run.before ??= new Int32Array(2 * size); // by stretch, the event that ended last
  run.after ??= new Int32Array(2 * size); // by stretch, the event that ends it
  findMoments(run, from, until).gaps((begin, end, before, after) => {
    const place = 2 * from + lane.size, event = size + place;
    lane.add(event, begin, end);
    [post[event], done[event]] = [begin, end];
    [run.before[place], run.after[place]] = [before, after];
    run.rank[event] = rank;
  });
  for (const name of ["events", "begins", "ends"]) lane[name] = lane[name].slice(0, lane.size);
  return lane;
}
