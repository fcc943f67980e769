// Finds what each rank does at a time, and the ranks that it waits for.

/** Returns the ranks that an operation waits for at a time, because they have not joined it yet. */
function awaited(run, event, time) {
  if (!run.isMessage(event)) {
    const members = run.head.members[run.columns.group[event]] ?? [];
    const call = run.collectives[run.columns.call[event]] ?? [];
    const joined = new Set(call.filter((i) => run.post[i] <= time).map((i) => run.rank[i]));
    return members.filter((rank) => !joined.has(rank));
  }
  const other = run.partner(event), peer = run.columns.peer[event];
  if (other < 0) return peer < 0 ? [] : [peer];
  return run.post[other] > time ? [run.rank[other]] : [];
}

/** Returns {state, event}: what a rank does at a time, and the latest event or its wait. */
function stateAt(run, rank, now) {
  const [first, last] = [run.first[rank], run.first[rank + 1]], { post, wait, done } = run;
  let blocked = -1, isOpen = false;
  run.visit(rank, ["span", "operation", "step"], now, now, (i) => {
    if (done[i] <= now) return;
    isOpen = true;
    if (wait[i] <= now) blocked = Math.max(blocked, i);
  });
  const event = first + firstAbove(post.subarray(first, last), now + 0.5) - 1;
  const isOver = !isOpen && event === last - 1;
  if (isOver && event >= first && run.hasFailed(event)) blocked = event;
  if (blocked >= 0) return { state: "waits", event: blocked };
  if (event < first) return { state: "has not started", event: -1 };
  return { state: isOver ? "has ended" : "computes", event };
}

/** Returns {state, event, for} by rank; `for` lists the ranks that a rank waits for. */
function waitsAt(run, time) {
  const now = Math.min(time, run.end), found = new Map();
  const others = (event) => { // all ranks in a call wait for the same ranks
    const key = run.collectives[run.columns.call[event]] ?? event;
    if (!found.has(key)) found.set(key, awaited(run, event, now));
    return found.get(key);
  };
  return Array.from({ length: run.ranks }, (_, rank) => {
    const one = stateAt(run, rank, now);
    return { ...one, for: one.state === "waits" ? others(one.event) : [] };
  });
}
