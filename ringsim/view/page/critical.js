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

/**
 * Returns a map from each collective's event to the events of all ranks in the same call, by rank;
 * the k-th calls on all ranks of a group belong together.
 */
function collectiveCalls(run) {
  const calls = new Map(), counts = new Map(), found = new Map();
  for (let i = 0; i < run.size; i++) {
    if (run.kind(i) !== "collective") continue;
    const own = `${run.rank[i]} ${run.columns.group[i]}`, count = counts.get(own) ?? 0;
    const key = `${run.columns.group[i]} ${count}`;
    counts.set(own, count + 1);
    if (!calls.has(key)) calls.set(key, new Map());
    found.set(i, calls.get(key).set(run.rank[i], i));
  }
  return found;
}

/** Returns a function that finds the last rank to call a collective. */
function lastToCome(run) {
  const calls = collectiveCalls(run), lasts = new Map();
  for (const call of new Set(calls.values())) {
    let last = null;
    for (const [rank, i] of call) if (!last || run.post[i] > last.time) last = { rank, time: run.post[i] };
    lasts.set(call, last);
  }
  return (i) => lasts.get(calls.get(i));
}

/** Returns the ranks that an operation waits for at a time, because they have not joined it yet. */
function awaited(run, call, event, time) {
  if (!run.isMessage(event)) {
    const members = run.head.members[run.columns.group[event]] ?? [];
    return members.filter((rank) => !(run.post[call?.get(rank)] <= time));
  }
  const other = run.partner(event), peer = run.columns.peer[event];
  if (other < 0) return peer < 0 ? [] : [peer];
  return run.post[other] > time ? [run.rank[other]] : [];
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
