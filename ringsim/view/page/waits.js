// Finds what each rank does at a time, and the ranks that it waits for.

/**
 * Returns a function from an event to the events of all ranks in the same call of a collective, or
 * undefined; the k-th calls on all ranks of a group belong together.
 */
function collectiveCalls(run) {
  const calls = new Map(), keys = new Float64Array(run.size);
  for (let rank = 0; rank < run.ranks; rank++) {
    const counts = new Map(); // by group
    for (let i = run.first[rank]; i < run.first[rank + 1]; i++) {
      if (run.kind(i) !== "collective") continue;
      const group = run.columns.group[i] + 2, count = counts.get(group) ?? 0;
      keys[i] = group * 2 ** 32 + count;
      counts.set(group, count + 1);
      const call = calls.get(keys[i]);
      if (call) call.push(i); else calls.set(keys[i], [i]);
    }
  }
  return (i) => calls.get(keys[i]);
}

/** Returns the ranks that an operation waits for at a time, because they have not joined it yet. */
function awaited(run, call, event, time) {
  if (!run.isMessage(event)) {
    const members = run.head.members[run.columns.group[event]] ?? [];
    const joined = new Set(call?.filter((i) => run.post[i] <= time).map((i) => run.rank[i]));
    return members.filter((rank) => !joined.has(rank));
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
