// Finds the critical path, backwards from the event that ended last. The path stays on a rank until a wait, and then moves to the rank that caused the wait.

/** Returns the rank that an operation waited for and the end of that wait, as {rank, time}, or null if it waited for no rank. */
function holdUp(run, i, last) {
  const { post, wait, done } = run;
  if (!(done[i] > wait[i])) return null; // the comparison is also false if a time is missing
  const other = run.isMessage(i) ? run.partner(i) : -1;
  const cause = other >= 0 ? { rank: run.rank[other], time: post[other] } : last;
  if (!cause || cause.rank === run.rank[i] || cause.time <= post[i] || cause.time > done[i]) return null;
  // A message already in flight counts only if the rank waited for at least half its travel time, because returning also takes a moment.
  return cause.time > wait[i] || 2 * (done[i] - wait[i]) >= done[i] - cause.time ? cause : null;
}

/** Returns a function that finds the last rank to call a collective, as {rank, time}. */
function lastToCome(run) {
  const { callOf } = collectivesOf(run), lasts = new Map();
  return (i) => {
    const call = callOf(i);
    if (call && !lasts.has(call)) {
      const last = call.reduce((one, other) => (run.post[other] > run.post[one] ? other : one));
      lasts.set(call, { rank: run.rank[last], time: run.post[last] });
    }
    return lasts.get(call);
  };
}

/** Returns the critical path as segments in time order: {rank, from, until} on one rank, or {rank, to, from, until} between two ranks. */
function findCriticalPath(run) {
  const last = lastToCome(run), held = Array.from({ length: run.ranks }, () => []);
  let end = 0;
  for (let i = 0; i < run.size; i++) {
    if (run.done[i] > run.done[end] || Number.isNaN(run.done[end])) end = i;
    const cause = run.isOperation(i) ? holdUp(run, i, last(i)) : null;
    if (cause) held[run.rank[i]].push({ ...cause, done: run.done[i] });
  }
  if (!(run.done[end] >= 0)) return [];
  for (const own of held) own.sort((a, b) => a.done - b.done);
  const path = [];
  for (let rank = run.rank[end], time = run.done[end]; ;) {
    while (held[rank].length && held[rank].at(-1).done > time) held[rank].pop();
    const cause = held[rank].pop();
    path.push({ rank, from: cause?.done ?? Math.min(time, run.post[run.first[rank]]), until: time });
    if (!cause) return path.reverse();
    path.push({ rank: cause.rank, to: rank, from: cause.time, until: cause.done });
    [rank, time] = [cause.rank, cause.time];
  }
}
