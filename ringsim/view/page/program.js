// Finds the time of ranks' first threads in no span and no wait, as `traces/program.py` does.

// Calls `each(begin, end, before, after)` for the times when a rank's program ran, found from some
// of its events. If `splits` is true, such a time also ends when something is posted.
function visitFree(run, [low, high], from, until, splits, each) {
  const { post, busy, done, isMark, moments, columns: { thread, op } } = run;
  const beginOf = (moment) => (moment & 1 ? busy[moment >> 1] : post[moment >> 1]);
  let count = 0, free = from, last = -1;
  const add = (moment) => { // in the order of begins, which most already have
    const begin = beginOf(moment);
    let at = count++;
    for (; at && beginOf(moments[at - 1]) > begin; at--) moments[at] = moments[at - 1];
    moments[at] = moment;
  };
  for (let i = low; i < high; i++) {
    if (splits && !thread[i] && !isMark[op[i]]) add(2 * i);
    if (busy[i] < until && !(done[i] <= from)) add(2 * i + 1);
  }
  for (let k = 0; k < count; k++) {
    const event = moments[k] >> 1, begin = beginOf(moments[k]);
    const end = moments[k] & 1 ? run.openEndOf(event) : begin;
    if (begin > free) each(free, begin, last, event);
    if (end < free) continue;
    free = end;
    last = event;
  }
  if (free < until) each(free, until, last, high - 1);
}

/** Calls `each(begin, end)` for the times in a window when a rank ran its own program. */
function findFree(run, rank, from, until, each) {
  const [[begin], [end]] = run.rowsOf("program", rank);
  const left = Math.max(from, begin), right = Math.min(until, end);
  if (left < right) visitFree(run, run.rangeOf(rank, left, right), left, right, false, each);
}

/** Returns the stretches of a rank as a lane; each ends when something begins or is posted. */
function findProgram(run, rank) {
  const { size, post, done, first: { [rank]: low, [rank + 1]: high } } = run;
  const first = size + 2 * low, until = run.head.progress ? run.end : Infinity;
  run.before ??= new Int32Array(2 * size); // by stretch, the event that ended last
  run.after ??= new Int32Array(2 * size); // by stretch, the event that ends it
  let next = first;
  visitFree(run, [low, high], NaN, until, true, (begin, end, before, after) => {
    if (end === Infinity) return; // the time after the last event is unknown
    [post[next], done[next]] = [begin, end];
    [run.before[next - size], run.after[next - size]] = [before, after];
    next++;
  });
  run.rank.fill(rank, first, next);
  const events = Int32Array.from({ length: next - first }, (_, k) => first + k);
  return { events, begins: post.subarray(first, next), ends: done.subarray(first, next) };
}
