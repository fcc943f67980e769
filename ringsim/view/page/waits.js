// Finds what each rank does at a time, and the ranks that it waits for.

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

/** Returns what a rank does at a time, and the latest event or the one in which the rank waits. */
function stateAt(run, rank, time) {
  const [first, last] = [run.first[rank], run.first[rank + 1]];
  let blocked = -1, isOpen = false;
  for (const lane of Object.values(run.lanesOf(rank)).flat()) {
    run.between(lane, time, time, (event) => {
      if (run.done[event] <= time) return;
      isOpen = true;
      if (run.wait[event] <= time) blocked = Math.max(blocked, event);
    });
  }
  if (blocked >= 0) return { event: blocked, does: "waits" };
  const event = first + firstAbove(run.post.subarray(first, last), time + 0.5) - 1;
  if (event < first) return { event: -1, does: "has posted nothing" };
  const isOver = !isOpen && event === last - 1;
  return { event, does: isOver ? "has posted its last operation" : "computes" };
}
