// Draws around a ring what is in flight at one moment, or for many ranks a matrix of their traffic.

const MOST_ON_RING = 48; // runs with more ranks are shown as a matrix
const [MOST_LABELS, MOST_HEADS] = [12, 100]; // edges with labels, and edges with arrowheads
const BEND = 0.12; // of the curves of edges
const MOST_SAID = 8; // the most ranks that are named at the same time
const SIGNS = { // of what ranks do
  waits: ["○", "wait"], computes: ["●", "compute"],
  "has ended": ["◌", "ended"], "has not started": ["·", "to start"],
};

/** The messages of a run, as lanes of each rank's sends, and its collectives. */
class Traffic {
  constructor(run) {
    this.run = run;
    this.lanes = Array.from({ length: run.ranks }, (_, rank) => {
      const sends = run.inOrder(rank).filter((i) => run.kind(i) === "send" && run.partner(i) >= 0);
      const lane = new Lane(sends.length);
      for (const send of sends) lane.add(send, run.post[send], run.endOf(run.partner(send)));
      return lane;
    });
    this.begins = Float64Array.from(this.lanes.flatMap((lane) => [...lane.begins])).sort();
    this.calls = run.collectives.map((events) => ({
      events, op: run.op(events[0]), group: run.columns.group[events[0]],
      begin: Math.min(...events.map((i) => run.post[i])),
      end: Math.max(...events.map((i) => // an open call that nobody waited for has no end
        (run.hasFailed(i) || run.isStuck(i) ? Infinity : run.done[i] || run.post[i]))),
      bytes: Math.max(...events.map((i) => run.bytes(i))),
    }));
  }

  /** Returns the messages in flight at any moment between two times. */
  between(from, until) {
    const { run } = this, { rank, post } = run, found = [];
    const add = (send) => {
      const recv = run.partner(send), [src, dst] = [rank[send], rank[recv]], end = run.endOf(recv);
      if (end >= from) found.push({ src, dst, begin: post[send], end, bytes: run.bytes(send) });
    };
    for (const lane of this.lanes) run.between(lane, from, until, add);
    return found;
  }

  /** Returns the time at which the next or previous message was sent, or else the time itself. */
  step(time, forward) {
    const next = forward ? firstAbove(this.begins, time + 1) : firstAbove(this.begins, time) - 1;
    return this.begins[next] ?? time;
  }

  edges(from, until) {
    const all = this.between(from, until), key = ({ src, dst }) => src * this.run.ranks + dst;
    return [...Map.groupBy(all, key).values()].map((own) =>
      ({ ...own[0], op: "messages", count: own.length, bytes: sumOf(own, ({ bytes }) => bytes) }));
  }

  /** Returns the oldest collective in flight of each group, with the ranks that have called it. */
  hubs(time) {
    const { post, rank } = this.run;
    const open = this.calls.filter(({ begin, end }) => begin <= time && end > time);
    return [...Map.groupBy(open, ({ group }) => group).values()].map(([call, ...more]) => {
      const here = call.events.filter((i) => post[i] <= time).map((i) => rank[i]);
      return { ...call, here, more: more.length };
    });
  }

  /** Describes how much the messages and the collectives in a window carried, the most first. */
  sums(from, until, edges) {
    const calls = this.calls.filter(({ begin, end }) => begin <= until && end >= from);
    const sums = [...Map.groupBy([...edges, ...calls], ({ op }) => op)].map(([op, own]) =>
      [op, sumOf(own, ({ count = 1 }) => count), sumOf(own, ({ bytes }) => bytes)]);
    return sums.sort(([, , one], [, , other]) => other - one).map(([op, count, bytes]) =>
      `${count} ${op}${bytes ? `: ${bytesText(bytes)}` : ""}`);
  }
}

function fewOf(words) {
  const more = words.length > MOST_SAID ? ` and ${words.length - MOST_SAID} more` : "";
  return words.slice(0, MOST_SAID).join(", ") + more;
}

/** Describes what ranks do, as in "rank 0 waits for rank 1"; `at` returns where a rank is. */
function describeRanks(run, ranks, { state, event, for: others }, at = () => "") {
  const isOne = ranks.length === 1, why = fewOf(others.map((rank) => `rank ${rank}${at(rank)}`));
  const does = isOne ? state : state.replace("has", "have").replace(/s$/, "");
  const where = at(ranks[0]) || (state === "waits" && !why ? ` in ${run.text(event)}` : "");
  return `rank${isOne ? "" : "s"} ${fewOf(ranks)} ${does}${where}${why && ` for ${why}`}`;
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

function boxAround([x, y], width, height = width) {
  return { x: x - width / 2, y: y - height / 2, width, height };
}

function overlap(one, other) {
  return one.x < other.x + other.width && other.x < one.x + one.width
    && one.y < other.y + other.height && other.y < one.y + one.height;
}

/** Returns the point at a share of the way around a circle. */
function placeOn([x, y], radius, share) {
  const angle = 2 * Math.PI * (share - 0.25);
  return [x + radius * Math.cos(angle), y + radius * Math.sin(angle)];
}

/** Returns the point at a share of the curve between two points; both directions differ. */
function onCurve(from, to, share, bend = BEND) {
  const [dx, dy] = [to[0] - from[0], to[1] - from[1]], aside = 2 * share * (1 - share) * bend;
  return [from[0] + share * dx + aside * dy, from[1] + share * dy - aside * dx];
}

class RingPicture {
  constructor(canvas, view, search) {
    Object.assign(this, { canvas, view, search, focus: -1, found: [] });
    this.asMatrix = view.runs.some((run) => run.ranks > MOST_ON_RING);
    canvas.onpointermove = canvas.onclick = (event) => this.point(event);
    canvas.onkeydown = (event) => this.onKey(event);
  }

  traffic(number) { return (this.found[number] ??= new Traffic(this.view.runs[number])); }
  describe(rank) { return describeRanks(this.run, [rank], this.waits[rank]); }

  draw(number = 0) {
    const { canvas, view: { from, until, head } } = this, traffic = this.traffic(number);
    const { run } = traffic, key = `${from},${until},${number}`;
    const width = canvas.clientWidth || 300, height = canvas.clientHeight || width;
    if (key !== this.key) {
      const edges = traffic.edges(from, until).sort((one, other) => one.bytes - other.bytes);
      const most = edges.at(-1)?.bytes || 1, sums = traffic.sums(from, until, edges);
      Object.assign(this, { key, edges, most, sums });
    }
    const context = canvas.getContext("2d"), waits = waitsAt(run, head), ratio = devicePixelRatio;
    [canvas.width, canvas.height] = [width * ratio, height * ratio]; // also empties the canvas
    context.scale(ratio, ratio);
    Object.assign(context, { font: FONT, textBaseline: "middle", textAlign: "center" });
    const circle = circleOf(waits);
    this.looks = waits.map(({ event }, rank) => { // the colours of their waits
      let shown = UNFINISHED;
      const note = (begin, _, state) => { if (begin <= head && state !== FAILED) shown = state; };
      if (!circle.includes(rank)) run.parts(event, note);
      return this.view.colours[shown];
    });
    Object.assign(this, { number, run, context, width, height, waits, circle });
    Object.assign(this, { boxes: [], points: [], targets: [] }); // what is drawn, and what reacts
    const time = `at ${timeText(head, 5)}`, said = [...waits.keys()].slice(0, 64);
    canvas.ariaLabel = `${time}: ${said.map((rank) => this.describe(rank)).join(", ")}`;
    const counts = Map.groupBy(waits, ({ state }) => state);
    const shown = Object.entries(SIGNS).filter(([state]) => counts.has(state)).map(
      ([state, [sign, name]]) => `${sign} ${counts.get(state).length} ${name}`);
    this.write([[time, ...shown].join("   ")], [[width / 2, 8]]);
    if (this.asMatrix) this.drawMatrix(traffic);
    else this.drawRing(traffic);
  }

  nameCircle() {
    const { circle } = this, more = circle.length - 4;
    const names = circle.map((rank, k) => (k < more + 3 ? `${rank} waits for` : `${rank}`));
    if (more > 4) names.splice(2, more, `… ${more} more …`);
    return names;
  }

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

  onKey(event) {
    const by = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!by && (event.key !== "Enter" || this.focus < 0)) return;
    event.preventDefault();
    if (!by) return this.filter(`rank:${this.focus}`);
    this.focus = this.focus < 0 ? 0 : (this.focus + by + this.run.ranks) % this.run.ranks;
    const live = this.canvas.closest(".ringsim").querySelector('[data-part="live"]');
    live.textContent = this.describe(this.focus);
    this.draw(this.number);
  }

  place(rank, radius = this.radius) {
    const { width, height, run: { ranks } } = this, turn = ranks === 2 ? 0.25 : 0;
    return placeOn([width / 2, height / 2], radius, rank / ranks - turn);
  }

  isFree(middle, width, height = width) {
    const own = boxAround(middle, width, height);
    return own.x > 0 && own.x + width < this.width && !this.boxes.some((box) => overlap(box, own));
  }

  /** Reserves a box around a point, in which no text may be written. */
  reserve(middle, width, height = width, text = "") {
    this.boxes.push({ ...boxAround(middle, width, height), text });
    return this.boxes.at(-1);
  }

  /** Writes lines at the first of some points where they are on nothing else; returns their box. */
  write(lines, spots) {
    const { context, view } = this, height = 14 * lines.length;
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

  ink(path, strokeStyle, lineWidth, dash = [], fillStyle = "transparent") {
    Object.assign(this.context, { strokeStyle, lineWidth, fillStyle });
    this.context.setLineDash(dash);
    this.context.fill(new Path2D(path));
    this.context.stroke(new Path2D(path));
  }

  disc([x, y], r, ...look) {
    this.ink(`M${x - r},${y}a${r},${r} 0 1 0 ${2 * r},0a${r},${r} 0 1 0 ${-2 * r},0`, ...look);
  }

  square({ x, y, width }, ...look) { this.ink(`M${x},${y}h${width}v${width}h${-width}Z`, ...look); }

  /** Draws a curve between the circles at two points; returns its points. */
  line(from, to, bend, colour, width, head = 0, dash = []) { // `head` is the arrowhead's size
    const isFar = ([x, y], [x1, y1]) => Math.hypot(x - x1, y - y1) > this.node + 2;
    const all = Array.from({ length: 61 }, (_, k) => onCurve(from, to, k / 60, bend));
    const points = all.filter((one) => isFar(one, from) && isFar(one, to));
    if (points.length < 5) return points;
    this.points.push(...points);
    this.ink(`M${points.join("L")}`, colour, width, dash);
    if (!head) return points;
    const [x, y] = points.at(-1), [x0, y0] = points.at(-4);
    const [dx, dy] = [x - x0, y - y0].map((one) => (one * head) / Math.hypot(x - x0, y - y0));
    const side = (k) => [x - dx - k * dy, y - dy + k * dx];
    this.ink(`M${[[x, y], side(0.45), side(-0.45)].join("L")}Z`, colour, 1, [], colour);
    this.reserve([x - dx / 2, y - dy / 2], head);
    return points;
  }

  /** Makes a part of the picture react to the pointer: it shows a text, and filters by a query. */
  react(query, text, part) { this.targets.push({ query, text, ...part }); }

  addEdge({ src, dst, bytes, count }, part) {
    const size = `${bytesText(bytes)} in ${countText(count, "message")}`;
    this.react(`from:${src} to:${dst}`, `rank ${src} to rank ${dst}: ${size}`, part);
  }

  drawRing(traffic) {
    const { run, view, waits, looks, circle, edges } = this, { ranks } = run, { head } = view;
    const outside = ranks > 24 ? 16 : 0; // the space for names outside the ring
    const room = Math.min(this.width, this.height - 32) / 2;
    this.node = Math.min(13, (2 * (room - outside)) / ranks);
    this.radius = ranks > 1 ? room - this.node - outside - 5 : 0;
    this.places = waits.map((_, rank) => this.place(rank));
    const { places, node } = this, big = Math.min(11, node + 1);
    this.writeSums();
    for (const place of places) this.reserve(place, 2 * node + 4);
    const [least, heads] = edges.length > MOST_HEADS ? [0.3, 0] : [1, big - 2];
    for (const edge of edges) {
      const dash = run.crosses(edge.src, edge.dst) ? [7, 4] : [];
      const { [edge.src]: from, [edge.dst]: to } = places;
      const width = least * (1 + (2 * edge.bytes) / this.most);
      this.addEdge(edge, { points: this.line(from, to, BEND, view.muted, width, heads, dash) });
    }
    const next = new Map(circle.slice(1).map((other, k) => [circle[k], other]));
    for (const [rank, { event, for: others }] of waits.entries()) {
      for (const other of others.filter((one) => run.isMessage(event) || next.get(rank) === one)) {
        const points = this.line(places[rank], places[other], 0.3, looks[rank], 2.5, big);
        this.react(`rank:${rank} peer:${other}`, this.describe(rank), { points });
      }
    }
    const labels = traffic.hubs(head).map((hub) => this.drawHub(hub));
    for (const rank of places.keys()) this.drawNode(rank, outside);
    const names = this.nameCircle(), lines = circle.length > 3 ? names : [names.join(" ")];
    if (circle.length) labels.unshift([lines, around([this.width / 2, this.height / 2], 0)]);
    for (const label of labels) this.write(...label);
    const unnamed = edges.at(-MOST_LABELS - 1)?.bytes ?? 0; // of many, only the biggest have labels
    for (const edge of edges.filter(({ bytes }) => bytes > unnamed).reverse()) {
      const { [edge.src]: from, [edge.dst]: to } = places, shares = [0.5, 0.4, 0.6, 0.3, 0.7];
      const spots = shares.flatMap((share) => around(onCurve(from, to, share), 12).slice(0, 24));
      const box = this.write([bytesText(edge.bytes)], spots);
      if (box) this.addEdge(edge, { box });
    }
    for (const { src, dst, begin, end } of traffic.between(head, head)) {
      const share = Math.min(1, (head - begin) / Math.max(1, end - begin));
      const at = onCurve(places[src], places[dst], share);
      this.disc(at, Math.min(5, node), view.ground, 1.5, [], view.colourOf.message);
    }
  }

  /** Draws a collective with lines to its members, dashed to missing ones; returns its label. */
  drawHub({ op, group, here, bytes, more, end }) {
    const { run, view, places, width, height } = this, members = run.head.members[group] ?? here;
    const missing = members.filter((rank) => !here.includes(rank));
    const name = run.head.groups[group] ?? "", rest = more ? `, ${more} more` : "";
    const mean = (k) => sumOf(members, (rank) => places[rank][k]) / members.length;
    const spots = around([width / 2, height / 2].map((one, k) => 0.25 * one + 0.75 * mean(k)), 0);
    const free = (size) => spots.find((one) => this.isFree(one, size));
    const spot = free(44) ?? free(20) ?? spots[0], solid = view.colours[COLLECTIVE];
    const late = view.colours[end === Infinity ? UNFINISHED : LATE_SENDER];
    for (const rank of here) this.line(spot, places[rank], 0, solid, 2);
    for (const rank of missing) this.line(spot, places[rank], 0, late, 2, 11, [4, 4]);
    const look = missing.length ? [late, 2, [4, 3], view.ground] : [view.ink, 1, [], solid];
    this.square(boxAround(spot, 16), ...look);
    const query = `op:${op}${/^\S+$/.test(name) ? ` group:${name}` : ""}`;
    const lines = [`${op} ${here.length}/${members.length}`, bytesText(bytes) + rest];
    const text = `${lines.join(", ")}${name && `, group ${name}`}`;
    this.react(query, text, { box: this.reserve(spot, 18) });
    return [lines, around(spot, 26)];
  }

  /** Draws a rank: solid if it computes, hollow if it waits, and dashed if it has ended. */
  drawNode(rank, outside) {
    const { run, view, context, node, places: { [rank]: place } } = this, query = `rank:${rank}`;
    const { state } = this.waits[rank], { ground, ink, muted, running, selected } = view;
    const isSelected = selected?.run === run && run.rank[selected.event] === rank;
    const isMarked = rank === this.focus || this.search.value === query;
    const halo = isMarked ? view.colourOf.focus : ink;
    if (isMarked || isSelected) this.disc(place, node + 3, halo, 2, [], ground);
    const look = {
      waits: [this.looks[rank], 3, [], ground], computes: [running, 1, [], running],
      "has ended": [muted, 1.2, [4, 3], ground], "has not started": [muted, 1.2, [1, 3], ground],
    }[state];
    this.disc(place, state === "waits" ? node - 1 : node, ...look);
    const step = Math.ceil((20 * run.ranks) / (2 * Math.PI * this.radius)); // names must not touch
    context.fillStyle = state === "computes" ? INKS[running] : ink;
    const spots = [9, 12, 15].map((far) => this.place(rank, this.radius + node + far));
    if (!outside) context.fillText(rank, place[0], place[1] + 0.5);
    else if (rank % step === 0) this.write([`${rank}`], spots);
    this.react(query, this.describe(rank), { box: boxAround(place, 2 * node) });
  }

  /** Draws the traffic: rows send, columns receive, and the diagonal shows the ranks themselves. */
  drawMatrix(traffic) {
    const { run, view, context, edges, waits, looks, circle } = this, { ranks } = run;
    const [left, top] = [36, 36], side = Math.min(this.width - left - 4, this.height - top - 20);
    const awaited = [...new Set(waits.flatMap((one) => one.for))].join(", ");
    const named = circle.length ? this.nameCircle().join(" ") : `waits for ${awaited}`;
    this.writeSums(...(awaited && named.length < 60 ? [named] : []));
    const cells = Math.min(ranks, Math.floor(side)); // no more cells than pixels
    const width = Math.max(1.5, side / cells), thick = Math.min(2, width / 3);
    const at = (rank) => (Math.floor((rank * cells) / ranks) * side) / cells;
    const cell = (src, dst, inner = 0) =>
      boxAround([left + at(dst) + width / 2, top + at(src) + width / 2], width - 2 * inner);
    const fill = (box, colour) => this.square(box, "transparent", 0, [], colour);
    const frame = (src, dst, colour) => this.square(cell(src, dst, thick / 2), colour, thick);
    fill({ x: left, y: top, width: side }, view.stripe);
    for (const edge of edges) {
      const box = cell(edge.src, edge.dst);
      fill(box, view.stripe);
      context.globalAlpha = 0.25 + (0.75 * edge.bytes) / this.most;
      fill(box, view.colours[TRANSFER]);
      context.globalAlpha = 1;
      this.addEdge(edge, { box });
    }
    for (const { src, dst } of traffic.between(view.head, view.head)) frame(src, dst, view.ink);
    for (const [rank, { state, event, for: others }] of waits.entries()) {
      const box = cell(rank, rank);
      if (state === "computes") fill(box, view.running);
      if (state === "waits") frame(rank, rank, looks[rank]);
      for (const other of run.isMessage(event) ? others : []) {
        frame(...(run.kind(event) === "send" ? [rank, other] : [other, rank]), looks[rank]);
      }
      this.react(`rank:${rank}`, this.describe(rank), { box });
    }
    this.write([`to rank 0 … ${ranks - 1}`], [[left + side / 2, top - 9]]);
    context.fillStyle = view.ink;
    context.rotate(-Math.PI / 2);
    const darkest = edges.length ? `, darkest: ${bytesText(this.most)}` : "";
    context.fillText(`from rank 0 … ${ranks - 1}${darkest}`, -(top + side / 2), left - 14, side);
  }
}
