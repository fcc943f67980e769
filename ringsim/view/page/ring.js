// Draws the messages in flight at one moment around the ring, or for many ranks a matrix of their traffic.

const MOST_ON_RING = 48; // runs with more ranks are shown as a matrix

/** The messages of a run, as each rank's sends in time order. */
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
      const key = rank[send] * ranks + rank[recv];
      let edge = edges.get(key);
      if (!edge) edges.set(key, (edge = { src: rank[send], dst: rank[recv], bytes: 0, count: 0 }));
      edge.bytes += this.run.bytes(send);
      edge.count += 1;
    });
    return [...edges.values()];
  }
}

class RingPicture {
  constructor(canvas, timeline) {
    Object.assign(this, { canvas, timeline });
    this.found = new Map();
    this.asMatrix = timeline.runs.some((run) => run.ranks > MOST_ON_RING);
    canvas.addEventListener("pointermove", (event) => { canvas.title = this.asMatrix ? this.cellText(event.offsetX, event.offsetY) : ""; });
  }

  /** Returns the messages of a run, which are found when first needed. */
  traffic(number) {
    if (!this.found.has(number)) this.found.set(number, new Traffic(this.timeline.runs[number]));
    return this.found.get(number);
  }

  draw(number = 0) {
    const size = this.canvas.clientWidth || 300, ratio = devicePixelRatio || 1;
    this.canvas.width = this.canvas.height = size * ratio;
    const context = this.canvas.getContext("2d");
    context.scale(ratio, ratio);
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    context.textAlign = "center";
    const traffic = this.traffic(number), { from, until } = this.timeline;
    const key = `${from},${until},${number}`;
    if (key !== this.key) [this.key, this.edges] = [key, traffic.edges(from, until)];
    if (this.asMatrix) this.drawMatrix(context, traffic, size);
    else this.drawRing(context, traffic, size);
  }

  place(rank, ranks, size) {
    const angle = (2 * Math.PI * rank) / ranks - Math.PI / 2;
    return [size / 2 + size * 0.38 * Math.cos(angle), size / 2 + size * 0.38 * Math.sin(angle)];
  }

  /** Returns a point on the curve between two ranks; the two directions have different curves. */
  onWay(src, dst, share, ranks, size) {
    const [x0, y0] = this.place(src, ranks, size), [x1, y1] = this.place(dst, ranks, size);
    const [bendX, bendY] = [(x0 + x1) / 2 + (y1 - y0) * 0.12, (y0 + y1) / 2 - (x1 - x0) * 0.12];
    const rest = 1 - share;
    return [rest * rest * x0 + 2 * rest * share * bendX + share * share * x1, rest * rest * y0 + 2 * rest * share * bendY + share * share * y1];
  }

  drawRing(context, traffic, size) {
    const { run } = traffic, { ranks } = run, view = this.timeline;
    const most = Math.max(1, ...this.edges.map((edge) => edge.bytes));
    for (const { src, dst, bytes } of this.edges) {
      context.strokeStyle = view.muted;
      context.lineWidth = 1 + (4 * bytes) / most;
      context.globalAlpha = 0.6;
      context.setLineDash(run.crosses(src, dst) ? [7, 4] : []);
      context.beginPath();
      for (let share = 0; share <= 1.001; share += 0.1) context.lineTo(...this.onWay(src, dst, share, ranks, size));
      context.stroke();
      context.setLineDash([]);
      context.globalAlpha = 1;
      if (this.edges.length <= 16) {
        context.fillStyle = view.muted;
        const [x, y] = this.onWay(src, dst, 0.5, ranks, size);
        context.fillText(bytesText(bytes), x, y - 7);
      }
    }
    for (let rank = 0; rank < ranks; rank++) {
      const [x, y] = this.place(rank, ranks, size), radius = ranks > 24 ? 8 : 13;
      context.fillStyle = view.stripe;
      context.strokeStyle = view.ink;
      context.lineWidth = view.selected?.run === run && run.rank[view.selected.event] === rank ? 3 : 1.2;
      context.beginPath();
      context.arc(x, y, radius, 0, 2 * Math.PI);
      context.fill();
      context.stroke();
      context.fillStyle = view.ink;
      context.fillText(rank, x, y + 0.5);
    }
    traffic.between(view.head, view.head, (send, recv) => {
      const begin = run.post[send], end = run.endOf(recv);
      const [x, y] = this.onWay(run.rank[send], run.rank[recv], Math.min(1, (view.head - begin) / Math.max(1, end - begin)), ranks, size);
      context.fillStyle = view.marks.message;
      context.strokeStyle = view.ground;
      context.lineWidth = 1.5;
      context.beginPath();
      context.arc(x, y, 6, 0, 2 * Math.PI);
      context.fill();
      context.stroke();
    });
    context.fillStyle = view.muted;
    context.fillText(timeText(view.head, 5), size / 2, size / 2);
  }

  /** Draws the traffic between ranks: rows send, columns receive, and a frame marks the messages in flight at the time of the line. */
  drawMatrix(context, traffic, size) {
    const view = this.timeline, { ranks } = traffic.run, side = size - 40, most = Math.max(1, ...this.edges.map((edge) => edge.bytes));
    context.fillStyle = view.stripe;
    context.fillRect(36, 20, side, side);
    const cells = Math.min(ranks, Math.floor(side)), width = Math.max(1.5, side / cells); // no more cells than pixels
    const place = (rank) => (Math.floor((rank * cells) / ranks) * side) / cells;
    this.cells = new Map(); // the busiest edge in each cell
    for (const edge of this.edges) {
      const key = `${Math.floor((edge.src * cells) / ranks)},${Math.floor((edge.dst * cells) / ranks)}`;
      if (!(this.cells.get(key)?.bytes >= edge.bytes)) this.cells.set(key, edge);
    }
    this.cellSize = side / cells;
    context.fillStyle = view.colours[TRANSFER];
    for (const { src, dst, bytes } of this.cells.values()) {
      context.globalAlpha = 0.25 + (0.75 * bytes) / most;
      context.fillRect(36 + place(dst), 20 + place(src), width, width);
    }
    context.globalAlpha = 1;
    context.strokeStyle = view.ink;
    const { rank } = traffic.run;
    traffic.between(view.head, view.head, (send, recv) => context.strokeRect(36 + place(rank[recv]), 20 + place(rank[send]), width, width));
    context.fillStyle = view.muted;
    context.fillText(`to rank 0 … ${ranks - 1}`, 36 + side / 2, 9);
    context.save();
    context.translate(12, 20 + side / 2);
    context.rotate(-Math.PI / 2);
    context.fillText(`from rank 0 … ${ranks - 1}, darkest: ${bytesText(most)}`, 0, 0);
    context.restore();
  }
  /** Describes the cell of the matrix under a point. */
  cellText(x, y) {
    const edge = this.cells?.get([y - 20, x - 36].map((one) => Math.floor(one / this.cellSize)).join());
    return edge ? `rank ${edge.src} to rank ${edge.dst}: ${bytesText(edge.bytes)} in ${edge.count.toLocaleString("en")} message${edge.count === 1 ? "" : "s"}` : "";
  }
}
