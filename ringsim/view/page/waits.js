// Finds what each rank does at a time, and which ranks it waits for.

/** Finds the events of each collective: the k-th calls on all ranks of a group belong together. */
function findCalls(run) {
  const calls = new Map(), counts = new Map(), callOf = new Map(), members = new Map();
  const { group, peer } = run.columns;
  const join = (which, rank) =>
    members.get(which)?.add(rank) ?? members.set(which, new Set([rank]));
  for (let i = 0; i < run.size; i++) {
    if (!run.isOperation(i)) continue;
    join(group[i], run.rank[i]);
    if (peer[i] >= 0) join(group[i], peer[i]);
    if (run.isMessage(i)) continue;
    const own = `${run.rank[i]} ${group[i]}`, key = `${group[i]} ${counts.get(own) ?? 0}`;
    counts.set(own, (counts.get(own) ?? 0) + 1);
    calls.get(key)?.push(i) ?? calls.set(key, [i]);
    callOf.set(i, calls.get(key));
  }
  for (const { kind, ranks, event } of run.flags) { // a missing member may have used no operation
    if (kind === "missing_participant") for (const rank of ranks) join(group[event], rank);
  }
  const world = run.head.groups.indexOf("world");
  for (let rank = 0; members.has(world) && rank < run.ranks; rank++) join(world, rank);
  return { calls: [...calls.values()], callOf, members };
}

/** Returns the ranks without which an operation cannot continue at a time. */
function awaited(run, i, now) {
  const { callOf, members } = (run.calls ??= findCalls(run)), other = run.partner(i);
  if (callOf.has(i)) {
    const missing = new Set(members.get(run.columns.group[i]));
    for (const one of callOf.get(i)) if (run.post[one] <= now) missing.delete(run.rank[one]);
    return [...missing];
  }
  if (other >= 0) return run.post[other] > now ? [run.rank[other]] : [];
  return [run.columns.peer[i]].filter((rank) => rank >= 0);
}

/** Returns {state, event, for} by rank: what it does at a time, and the ranks that it waits for. */
function waitsAt(run, time) {
  const now = Math.min(time, run.end), { post, wait, done } = run;
  return Array.from({ length: run.ranks }, (_, rank) => {
    let last = -1, span = -1, blocked = -1, goesOn = false;
    for (const lane of BANDS.flatMap((band) => run.lanesOf(rank)[band])) {
      const next = firstAbove(lane.begins, Math.floor(now) + 1), newest = lane.events[next - 1];
      if (next > 0 && !(post[newest] < post[last])) last = newest;
      goesOn ||= next < lane.events.length;
      run.between(lane, now, now, (i) => {
        if (done[i] <= now) return;
        if (run.kind(i) === "span") span = post[i] < post[span] ? span : i;
        else if (wait[i] <= now && !(wait[i] < wait[blocked])) blocked = i;
        else goesOn ||= done[i] > now;
      });
    }
    if (!goesOn && last >= 0 && run.columns.status[last] === run.head.error) blocked = last;
    if (blocked >= 0) return { state: "waiting", event: blocked, for: awaited(run, blocked, now) };
    const state = last < 0 ? "not started" : goesOn || span >= 0 ? "computing" : "ended";
    return { state, event: span >= 0 ? span : last, for: [] };
  });
}
