// Draws around a ring what is in flight at one moment, or for many ranks a matrix of their traffic.

const MOST_ON_RING = 48; // runs with more ranks are shown as a matrix
const MOST_LABELS = 12, MOST_HEADS = 100; // edges with labels, and edges with arrowheads
const SIGNS = {
  waiting: "○ wait", computing: "● compute", ended: "◌ ended", "not started": "· to start",
};

/** The messages of a run, as each rank's sends in time order, and its collectives. */
class Traffic {
  constructor(run) {
    this.run = run;
    this.ranks = Array.from({ length: run.ranks }, (_, rank) => {
      const sends = run.inOrder(rank).filter((i) => run.kind(i) === "send" && run.partner(i) >= 0);
      const begins = Float64Array.from(sends, (send) => run.post[send]);
      let latest = 0;
      const ends = Float64Array.from(sends, (send) => (latest = Math.max(latest, run.endOf(run.partner(send)))));
      return { sends, begins, ends };
    });
    this.calls = run.collectives.map((events) => ({
      events, op: run.op(events[0]), group: run.columns.group[events[0]],
      begin: Math.min(...events.map((i) => run.post[i])),
      end: Math.max(...events.map((i) => // an open call that nobody waited for has no end
        (run.hasFailed(i) || run.isStuck(i) ? Infinity : run.done[i] || run.post[i]))),
      bytes: Math.max(...events.map((i) => run.bytes(i))),
    }));
  }

  /** Calls `each(send, recv)` for the messages in flight at any moment between two times. */
  between(from, until, each) {
    for (const { sends, begins, ends } of this.ranks) {
      for (let k = firstAbove(ends, from); k < sends.length && begins[k] <= until; k++) {
        const send = sends[k], recv = this.run.partner(send);
        if (this.run.endOf(recv) >= from) each(send, recv);
      }
    }
  }

  /** Returns the time at which the next or previous message was sent. */
  step(time, forward) {
    const times = this.ranks.map(({ begins }) => begins[forward ? firstAbove(begins, time + 1) : firstAbove(begins, time) - 1]);
    const there = times.filter((one) => one !== undefined);
    return there.length ? there.reduce((best, one) => (forward ? Math.min(best, one) : Math.max(best, one))) : time;
  }

  /** Returns the bytes and the number of messages on each edge in a window. */
  edges(from, until) {
    const edges = new Map(), { rank, ranks } = this.run;
    this.between(from, until, (send, recv) => {
      const src = rank[send], dst = rank[recv], key = src * ranks + dst;
      const edge = edges.get(key) ?? { src, dst, bytes: 0, count: 0 };
      edges.set(key, edge);
      edge.bytes += this.run.bytes(send);
      edge.count += 1;
    });
    return [...edges.values()];
  }

  /** Returns the collectives in flight at any moment between two times. */
  callsBetween(from, until) {
    return this.calls.filter(({ begin, end }) => begin <= until && end >= from);
  }

  /** Returns the oldest collective in flight of each group, with the ranks that have called it. */
  hubs(time) {
    const hubs = new Map(), { post, rank } = this.run;
    for (const call of this.callsBetween(time, time).filter(({ end }) => end > time)) {
      const here = call.events.filter((i) => post[i] <= time).map((i) => rank[i]);
      const hub = hubs.get(call.group) ?? { ...call, here, more: -1 };
      hubs.set(call.group, { ...hub, more: hub.more + 1 });
    }
    return [...hubs.values()];
  }

  /** Describes how much the messages and the collectives in a window carried, the most first. */
  sums(from, until, edges) {
    const sums = {}, messages = edges.map((edge) => ({ ...edge, op: "messages" }));
    for (const { op, bytes, count = 1 } of [...messages, ...this.callsBetween(from, until)]) {
      sums[op] = [(sums[op]?.[0] ?? 0) + count, (sums[op]?.[1] ?? 0) + bytes];
    }
    const size = (bytes) => (bytes ? `: ${bytesText(bytes)}` : "");
    const most = Object.entries(sums).sort(([, one], [, other]) => other[1] - one[1]);
    return most.map(([op, [count, bytes]]) => `${count} ${op}${size(bytes)}`);
  }
}


/** Returns the state of an event's bar at a time. */
function barAt(run, i, time) {
  let found = UNFINISHED;
  run.parts(i, (from, _, state) => { if (from <= time && state !== FAILED) found = state; });
  return found;
}

/** Describes what a rank does, as in "rank 0 waits for rank 1". */
function describeRank(run, { state, event, for: others }, rank) {
  const why = others.length ? `for rank${others.length > 1 ? "s" : ""} ${others.join(", ")}` : "";
  if (state === "waiting") return `rank ${rank} waits ${why || `in ${run.text(event)}`}`;
  return `rank ${rank} ${state === "computing" ? "computes" : `has ${state}`}`;
}

/** Returns the ranks of a circle of waits, such as [0, 1, 0], or an empty list. */
function circleOf(waits, ranks = [...waits.keys()], path = [], seen = new Set()) {
  return ranks.reduce((found, rank) => {
    if (!found.length && path.includes(rank)) return [...path, rank].slice(path.indexOf(rank));
    const isDone = found.length || seen.has(rank);
    return isDone ? found : circleOf(waits, waits[rank].for, [...path, rank], seen.add(rank));
  }, []);
}

/** Returns points around a point, from the nearest to the furthest. */
function around([x, y], least) {
  const turns = [2, 6, 0, 4, 1, 3, 5, 7].map((turn) => (turn * Math.PI) / 4);
  return [0, 12, 24, 36, 48].flatMap((more) => turns.map((turn) =>
    [x + 1.8 * (least + more) * Math.cos(turn), y + (least + more) * Math.sin(turn)]));
}

/** Returns the box around a point. */
function boxAround([x, y], width, height = width) {
  return { x: x - width / 2, y: y - height / 2, width, height };
}

/** Returns whether two boxes overlap. */
function overlap(one, other) {
  return one.x < other.x + other.width && other.x < one.x + one.width
    && one.y < other.y + other.height && other.y < one.y + one.height;
}

class RingPicture {
  /** @param search the field for searching; a click writes a filter into it. */
  constructor(canvas, timeline, search) {
    Object.assign(this, { canvas, timeline, search, focus: -1, targets: [], found: new Map() });
    this.asMatrix = timeline.runs.some((run) => run.ranks > MOST_ON_RING);
    canvas.addEventListener("pointermove", (event) => this.point(event));
    canvas.addEventListener("click", (event) => this.point(event));
    canvas.addEventListener("keydown", (event) => this.onKey(event));
  }

  /** Returns the messages of a run, which are found when first needed. */
  traffic(number) {
    if (!this.found.has(number)) this.found.set(number, new Traffic(this.timeline.runs[number]));
    return this.found.get(number);
  }

  draw(number = 0) {
    const { canvas, timeline: view } = this, traffic = this.traffic(number), { run } = traffic;
    const width = canvas.clientWidth || 300, height = canvas.clientHeight || width;
    const { from, until, head } = view, key = `${from},${until},${number}`;
    const context = setUp(canvas, width, height);
    context.textAlign = "center";
    if (key !== this.key) {
      const edges = traffic.edges(from, until).sort((one, other) => one.bytes - other.bytes);
      Object.assign(this, { key, edges, sums: traffic.sums(from, until, edges) });
    }
    const waits = waitsAt(run, head), circle = circleOf(waits), time = `at ${timeText(head, 5)}`;
    Object.assign(this, { number, run, context, width, height, waits, circle });
    Object.assign(this, { boxes: [], points: [], targets: [] }); // what is drawn, and what reacts
    const said = waits.slice(0, 64).map((one, rank) => describeRank(run, one, rank)).join(", ");
    canvas.setAttribute("aria-label", `${time}: ${said}`);
    const count = (state) => waits.filter((one) => one.state === state).length;
    const name = (state) => SIGNS[state].replace(" ", ` ${count(state)} `);
    const states = Object.keys(SIGNS).filter(count).map(name);
    this.write([[time, ...states].join("   ")], [[width / 2, 8]]);
    this.names = circle.map((rank, k) => (k < circle.length - 1 ? `${rank} waits for` : `${rank}`));
    const rest = circle.length - 4;
    if (rest > 4) this.names.splice(2, rest, `… ${rest} more …`);
    if (this.asMatrix) this.drawMatrix(traffic, view);
    else this.drawRing(traffic, view);
  }

  // -- the pointer and keys

  /** Describes what is under the pointer; a click filters by it, or shows all again. */
  point({ offsetX, offsetY, type }) {
    const isNear = ([x, y]) => Math.hypot(offsetX - x, offsetY - y) < 7;
    const isAt = ({ box, points }) =>
      (box ? overlap(box, boxAround([offsetX, offsetY], 0)) : points.some(isNear));
    const target = this.targets.findLast(isAt);
    if (type === "click" && target) this.filter(target.query);
    const what = this.search.value === target?.query ? "show all" : "filter";
    this.canvas.title = target ? `${target.text}; click to ${what}` : "";
    this.canvas.style.cursor = target ? "pointer" : "";
  }

  filter(query) {
    this.search.value = this.search.value === query ? "" : query;
    this.search.dispatchEvent(new Event("input"));
  }

  /** The arrow keys go from rank to rank, and Enter filters by a rank. */
  onKey(event) {
    const by = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    const { ranks } = this.run;
    if (!by && (event.key !== "Enter" || this.focus < 0)) return;
    event.preventDefault();
    event.stopPropagation();
    if (!by) return this.filter(`rank:${this.focus}`);
    this.focus = this.focus < 0 ? 0 : (this.focus + by + ranks) % ranks;
    const live = this.canvas.closest(".ringsim").querySelector('[data-part="live"]');
    live.textContent = describeRank(this.run, this.waits[this.focus], this.focus);
    this.draw(this.number);
  }

  // -- positions

  place(rank, radius = this.radius) {
    const { ranks } = this.run, first = ranks === 2 ? Math.PI : Math.PI / 2;
    const angle = (2 * Math.PI * rank) / ranks - first;
    return [this.width / 2 + radius * Math.cos(angle), this.height / 2 + radius * Math.sin(angle)];
  }

  /** Returns a point on the curve between two points; the two directions have different curves. */
  onWay([x0, y0], [x1, y1], share, bend = 0.12) {
    const [bendX, bendY] = [(x0 + x1) / 2 + (y1 - y0) * bend, (y0 + y1) / 2 - (x1 - x0) * bend];
    const mix = (a, b, c) => (1 - share) ** 2 * a + 2 * (1 - share) * share * b + share ** 2 * c;
    return [mix(x0, bendX, x1), mix(y0, bendY, y1)];
  }

  /** Returns the points of the curve between two points that are outside the circles of ranks. */
  way(from, to, bend) {
    const isFar = ([x, y], [x1, y1]) => Math.hypot(x - x1, y - y1) > this.node + 2;
    return Array.from({ length: 61 }, (_, k) => this.onWay(from, to, k / 60, bend))
      .filter((one) => isFar(one, from) && isFar(one, to));
  }

  isFree([x, y], width, height = width) {
    const own = boxAround([x, y], width, height), isInside = own.x > 0 && own.x + width < this.width;
    return isInside && !this.boxes.some((box) => overlap(box, own));
  }

  // -- parts of the picture

  /** Reserves a box around a point, in which no text may be written. */
  reserve(middle, width, height = width, text = "") {
    this.boxes.push({ ...boxAround(middle, width, height), text });
    return this.boxes.at(-1);
  }

  /** Writes lines at the first of some points where they are on nothing else; returns their box. */
  write(lines, spots) {
    const { context, timeline: view } = this, height = 14 * lines.length;
    const widths = lines.map((line) => context.measureText(line).width + 4);
    const width = Math.min(this.width - 2, Math.max(...widths));
    const free = spots.filter((spot) => this.isFree(spot, width, height));
    const isOff = (spot) => !this.points.some((one) =>
      overlap(boxAround(spot, width, height), boxAround(one, 0)));
    const spot = free.find(isOff) ?? free[0]; // on a line only if necessary
    if (!spot) return null;
    const box = this.reserve(spot, width, height, lines.join(" "));
    context.fillStyle = view.ground;
    context.fillRect(box.x, box.y, width, height);
    context.fillStyle = view.ink;
    lines.forEach((line, k) => context.fillText(line, spot[0], box.y + 14 * k + 7, width));
    return box;
  }

  /** Writes what the ranks wait for and what the window carried, as far as there is room. */
  writeSums(...texts) {
    texts.push(...this.sums);
    const isWide = () => this.context.measureText(texts.join(" · ")).width > this.width - 6;
    while (texts.length > 1 && isWide()) texts.pop();
    this.write([texts.join(" · ")], [[this.width / 2, this.height - 8]]);
  }

  /** Draws a path, such as "M0,0L9,9". */
  ink(path, strokeStyle, lineWidth, dash = [], fillStyle = "transparent") {
    Object.assign(this.context, { strokeStyle, lineWidth, fillStyle });
    this.context.setLineDash(dash);
    this.context.fill(new Path2D(path));
    this.context.stroke(new Path2D(path));
  }

  disc([x, y], r, ...look) {
    this.ink(`M${x - r},${y}a${r},${r} 0 1 0 ${2 * r},0a${r},${r} 0 1 0 ${-2 * r},0`, ...look);
  }

  /** Draws a line through points, with an arrowhead if `head` is its size. */
  line(points, colour, width, head = 0, dash = []) {
    if (points.length < 5) return;
    this.points.push(...points);
    this.ink(`M${points.join("L")}`, colour, width, dash);
    if (!head) return;
    const [x, y] = points.at(-1), [x0, y0] = points.at(-4);
    const [dx, dy] = [x - x0, y - y0].map((one) => (one * head) / Math.hypot(x - x0, y - y0));
    const side = (k) => [x - dx - k * dy, y - dy + k * dx];
    this.ink(`M${[[x, y], side(0.45), side(-0.45)].join("L")}Z`, colour, 1, [], colour);
    this.reserve([x - dx / 2, y - dy / 2], head);
  }

  // -- the ring

  drawRing(traffic, view) {
    const { run, waits, circle, edges } = this, { ranks } = run, { head } = view;
    const outside = ranks > 24 ? 16 : 0; // the space for names outside the ring
    const room = Math.min(this.width, this.height - 32) / 2;
    this.node = Math.min(13, (2 * (room - outside)) / ranks);
    this.radius = ranks > 1 ? room - this.node - outside - 5 : 0;
    this.places = waits.map((_, rank) => this.place(rank));
    const { places, node } = this, big = Math.min(11, node + 1);
    const most = Math.max(1, edges.at(-1)?.bytes ?? 0);
    this.writeSums();
    for (const place of places) this.reserve(place, 2 * node + 4);
    const [least, heads] = edges.length > MOST_HEADS ? [0.3, 0] : [1, big - 2];
    for (const edge of edges) {
      const points = this.way(places[edge.src], places[edge.dst]);
      const dash = run.crosses(edge.src, edge.dst) ? [7, 4] : [];
      this.line(points, view.muted, least * (1 + (2 * edge.bytes) / most), heads, dash);
      this.addEdge(edge, { points });
    }
    const next = new Map(circle.slice(1).map((other, k) => [circle[k], other]));
    for (const [rank, { event, for: others }] of waits.entries()) {
      for (const other of others.filter((one) => run.isMessage(event) || next.get(rank) === one)) {
        const state = next.get(rank) === other ? UNFINISHED : barAt(run, event, head);
        const points = this.way(places[rank], places[other], 0.3);
        this.line(points, view.colours[state], 2.5, big);
        this.react(`rank:${rank} peer:${other}`, describeRank(run, waits[rank], rank), { points });
      }
    }
    const labels = traffic.hubs(head).map((hub) => this.drawHub(hub, view));
    for (const rank of places.keys()) this.drawNode(rank, view, next.has(rank), outside);
    const names = circle.length > 3 ? this.names : [this.names.join(" ")];
    if (circle.length) labels.unshift([names, around([this.width / 2, this.height / 2], 0)]);
    for (const [lines, spots] of labels) this.write(lines, spots);
    const unnamed = edges.at(-MOST_LABELS - 1)?.bytes ?? 0; // of many, only the biggest have labels
    for (const edge of edges.filter(({ bytes }) => bytes > unnamed).reverse()) {
      const near = (share) =>
        around(this.onWay(places[edge.src], places[edge.dst], share), 12).slice(0, 24);
      const spots = [0.5, 0.4, 0.6, 0.3, 0.7].flatMap(near);
      const box = this.write([bytesText(edge.bytes)], spots);
      if (box) this.addEdge(edge, { box });
    }
    traffic.between(head, head, (send, recv) => {
      const share = (head - run.post[send]) / Math.max(1, run.endOf(recv) - run.post[send]);
      const at = this.onWay(places[run.rank[send]], places[run.rank[recv]], Math.min(1, share));
      this.disc(at, Math.min(5, node), view.ground, 1.5, [], view.marks.message);
    });
  }

  /** Makes a part of the picture react to the pointer as an edge. */
  addEdge({ src, dst, bytes, count }, part) {
    const text = `rank ${src} to rank ${dst}: ${bytesText(bytes)} in ${countText(count, "message")}`;
    this.react(`from:${src} to:${dst}`, text, part);
  }

  /** Makes a part of the picture react to the pointer: it shows a text, and filters by a query. */
  react(query, text, part) { this.targets.push({ query, text, ...part }); }

  /** Draws a collective with lines to its members, dashed to missing ones; returns its label. */
  drawHub({ op, group, here, bytes, more, end }, view) {
    const { run, places, width, height } = this, members = run.head.members[group] ?? here;
    const missing = members.filter((rank) => !here.includes(rank));
    const name = run.head.groups[group] ?? "", rest = more ? `, ${more} more` : "";
    const mean = (k) => members.reduce((sum, rank) => sum + places[rank][k], 0) / members.length;
    const spots = around([width / 2, height / 2].map((one, k) => 0.25 * one + 0.75 * mean(k)), 0);
    const free = (size) => spots.find((one) => this.isFree(one, size));
    const spot = free(44) ?? free(20) ?? spots[0], solid = view.colours[COLLECTIVE];
    const late = view.colours[end === Infinity ? UNFINISHED : LATE_SENDER];
    for (const rank of here) this.line(this.way(spot, places[rank], 0), solid, 2);
    for (const rank of missing) this.line(this.way(spot, places[rank], 0), late, 2, 11, [4, 4]);
    const look = missing.length ? [late, 2, [4, 3], view.ground] : [view.ink, 1, [], solid];
    this.ink(`M${spot[0] - 8},${spot[1] - 8}h16v16h-16Z`, ...look);
    const query = `op:${op}${/^\S+$/.test(name) ? ` group:${name}` : ""}`;
    const lines = [`${op} ${here.length}/${members.length}`, bytesText(bytes) + rest];
    const text = `${lines.join(", ")}${name && `, group ${name}`}`;
    this.react(query, text, { box: this.reserve(spot, 18) });
    return [lines, around(spot, 26)];
  }

  /** Draws a rank: solid if it computes, hollow if it waits, and dashed if it has ended. */
  drawNode(rank, view, isInCircle, outside) {
    const { run, context, node } = this, [x, y] = this.places[rank];
    const { state, event } = this.waits[rank];
    const green = view.running, query = `rank:${rank}`;
    const isSelected = view.selected?.run === run && run.rank[view.selected.event] === rank;
    const isMarked = rank === this.focus || this.search.value === query;
    if (isMarked || isSelected) {
      this.disc([x, y], node + 3, isMarked ? view.marks.focus : view.ink, 2, [], view.ground);
    }
    if (state === "waiting") {
      const look = view.colours[isInCircle ? UNFINISHED : barAt(run, event, view.head)];
      this.disc([x, y], node - 1, look, 3, [], view.ground);
    } else if (state === "computing") this.disc([x, y], node, green, 1, [], green);
    else this.disc([x, y], node, view.muted, 1.2, state === "ended" ? [4, 3] : [1, 3], view.ground);
    const step = Math.ceil((20 * run.ranks) / (2 * Math.PI * this.radius)); // names must not touch
    context.fillStyle = state === "computing" ? readableInk(green) : view.ink;
    const spots = [9, 12, 15].map((far) => this.place(rank, this.radius + node + far));
    if (!outside) context.fillText(rank, x, y + 0.5);
    else if (rank % step === 0) this.write([`${rank}`], spots);
    const box = boxAround([x, y], 2 * node);
    this.react(query, describeRank(run, this.waits[rank], rank), { box });
  }

  // -- the matrix

  /** Draws the traffic: rows send, columns receive, and the diagonal shows the ranks themselves. */
  drawMatrix(traffic, view) {
    const { run, context, edges, waits, circle } = this, { ranks } = run, left = 36, top = 36;
    const awaited = [...new Set(waits.flatMap((one) => one.for))].join(", ");
    const named = circle.length ? this.names.join(" ") : `waits for ${awaited}`;
    this.writeSums(...(awaited && named.length < 60 ? [named] : []));
    const side = Math.min(this.width - left - 4, this.height - top - 20);
    const most = Math.max(1, edges.at(-1)?.bytes ?? 0);
    const cells = Math.min(ranks, Math.floor(side)); // no more cells than pixels
    const width = Math.max(1.5, side / cells), thick = Math.min(2, width / 3);
    const at = (rank) => (Math.floor((rank * cells) / ranks) * side) / cells;
    const cell = (src, dst) => ({ x: left + at(dst), y: top + at(src), width, height: width });
    const fill = ({ x, y }, fillStyle, globalAlpha = 1) => {
      Object.assign(context, { fillStyle, globalAlpha });
      context.fillRect(x, y, width, width);
    };
    const frame = (src, dst, strokeStyle) => {
      const { x, y } = cell(src, dst);
      Object.assign(context, { strokeStyle, lineWidth: thick, globalAlpha: 1 });
      context.strokeRect(x + thick / 2, y + thick / 2, width - thick, width - thick);
    };
    context.fillStyle = view.stripe;
    context.fillRect(left, top, side, side);
    for (const edge of edges) {
      const box = cell(edge.src, edge.dst);
      fill(box, view.stripe);
      fill(box, view.colours[TRANSFER], 0.25 + (0.75 * edge.bytes) / most);
      this.addEdge(edge, { box });
    }
    const { rank: rankOf } = run, { head } = view;
    traffic.between(head, head, (send, recv) => frame(rankOf[send], rankOf[recv], view.ink));
    for (const [rank, { state, event, for: others }] of waits.entries()) {
      const box = cell(rank, rank), isMessage = event >= 0 && run.isMessage(event);
      const colour = event < 0 ? view.muted : view.colours[barAt(run, event, head)];
      if (state === "computing") fill(box, view.running);
      if (state === "waiting") frame(rank, rank, colour);
      for (const other of isMessage ? others : []) {
        frame(...(run.kind(event) === "send" ? [rank, other] : [other, rank]), colour);
      }
      this.react(`rank:${rank}`, describeRank(run, waits[rank], rank), { box });
    }
    this.write([`to rank 0 … ${ranks - 1}`], [[left + side / 2, top - 9]]);
    context.fillStyle = view.ink;
    context.rotate(-Math.PI / 2);
    const darkest = edges.length ? `, darkest: ${bytesText(most)}` : "";
    context.fillText(`from rank 0 … ${ranks - 1}${darkest}`, -(top + side / 2), left - 14, side);
  }
}
