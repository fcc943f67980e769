// Shows the program's code, with each rank's cursor at the playhead's time and arrows between them.

const MOST_COLUMNS = 8; // with more ranks, those that do the same at the same line share a cursor
const [COLUMNS, WIDE] = [160, 64]; // the widths of all narrow columns and of a wide one, in pixels
const NEAR = 6; // the number of lines to show before and after a line with operations
const LEGEND = "Filled: the rank computes. Hollow: it waits for the rank to which its arrow leads. "
  + "Pale: it posts nothing more.";

/** Returns the lines to show: marked lines with their vicinity, and the headers of their blocks. */
function linesToShow(lines, marked) {
  const depth = (k) => (lines[k]?.trim() ? lines[k].search(/\S/) : Infinity), shown = new Set();
  for (const at of [...marked].map((line) => line - 1)) {
    const isInFunction = depth(at) > 0;
    for (let k = at, least = Infinity; k >= 0 && !(isInFunction && least === 0); k--) {
      if (at - k <= NEAR || depth(k) < least) shown.add(k);
      least = Math.min(least, depth(k));
    }
    for (let k = at + 1; k <= at + NEAR && (depth(k) || !isInFunction); k++) shown.add(k);
  }
  return shown;
}

class CodePanel {
  constructor(view) {
    this.view = view;
    this.exists = view.runs.some((run) => Object.keys(run.head.sources).length);
  }

  /** Shows the listing in the panel, and announces what has changed since the last call. */
  show(panel) {
    const run = this.view.runs[this.view.which];
    if (run !== this.run) this.build(run);
    const isNew = this.root.parentNode !== panel;
    if (isNew) panel.replaceChildren(this.root);
    this.update();
    const first = this.here ?? this.cursors.find(({ row }) => row)?.row;
    if (isNew) first?.scrollIntoView({ block: "nearest" });
    if (this.view.playing) return;
    const said = this.cursors.map((cursor) => this.describe(cursor));
    const news = said.filter((one) => !this.said.includes(one));
    if (news.length) this.live.textContent = news.join("; ");
    this.said = said;
  }

  build(run) {
    const files = new Map(Object.keys(run.head.sources).map((file) => [file, new Set()]));
    Object.assign(this, { run, rows: new Map(), said: [] });
    const seen = new Set(), mark = ({ file, line }) => files.get(file)?.add(line);
    for (let event = 0; event < run.size; event++) {
      const place = run.columns.file[event] * 2 ** 32 + run.columns.line[event];
      if (!seen.has(place)) run.places(event).forEach(mark);
      seen.add(place);
    }
    const lists = [...files].flatMap(([file, marked]) =>
      (marked.size ? this.list(file, marked) : []));
    this.live = make("div", { class: "live", "aria-live": "polite" });
    this.art = svg("svg", { "aria-hidden": "true" });
    this.listing = make("div", { onkeydown: (event) => this.onKey(event) }, ...lists, this.art);
    this.root = make("div", { class: "code" }, make("p", {}, LEGEND), this.listing, this.live);
    this.column = run.ranks > MOST_COLUMNS ? WIDE : Math.min(30, COLUMNS / run.ranks);
    this.listing.style.paddingLeft = `${Math.min(run.ranks * this.column, COLUMNS) + 8}px`;
    new ResizeObserver(() => this.update()).observe(this.listing);
  }

  /** Creates the listing of a file, in which lines far from operations are folded. */
  list(file, marked) {
    const lines = this.run.head.sources[file].split("\n"), list = make("ol");
    const shown = linesToShow(lines, marked);
    for (const [k, text] of lines.entries()) {
      const word = placeWord({ file, line: k + 1 }), tabIndex = this.rows.size ? -1 : 0;
      const onclick = () => this.view.ring.filter(`line:${word}`);
      const code = marked.has(k + 1) ? press(text, { tabIndex, onclick }) : make("code", {}, text);
      const row = make("li", { "data-word": word, class: shown.has(k) ? "" : "far" },
        make("span", {}, `${k + 1}`), code, make("span", { class: "live" }));
      if (marked.has(k + 1)) this.rows.set(`${file}:${k + 1}`, row);
      list.append(row);
    }
    const toggle = ({ target }) => { target.ariaPressed = `${list.classList.toggle("all")}`; };
    const all = press("all lines", { "aria-pressed": "false", onclick: toggle });
    return [make("h2", {}, `${file.split("/").at(-1)} `, all), list];
  }

  onKey(event) {
    const by = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    const buttons = [...this.listing.querySelectorAll("li > button")];
    const next = buttons[buttons.indexOf(event.target) + by];
    if (!next) return;
    event.preventDefault();
    for (const button of buttons) button.tabIndex = button === next ? 0 : -1;
    next.focus();
  }

  rowOf(event) {
    const keys = this.run.places(event).map(({ file, line }) => `${file}:${line}`);
    return this.rows.get(keys.find((key) => this.rows.has(key)));
  }

  /** Moves the cursors to the playhead's time, and marks the selected event's line. */
  update() {
    if (!this.root?.isConnected) return;
    const { view, run } = this, { selected, head } = view.timeline;
    const search = view.part("search").value;
    const here = selected?.run === run ? this.rowOf(selected.event) : undefined;
    for (const row of this.rows.values()) {
      row.children[1].ariaPressed = `${search === `line:${row.dataset.word}`}`;
      row.classList.toggle("here", row === here);
      row.lastChild.textContent = "";
    }
    if (here !== this.here) here?.scrollIntoView({ block: "nearest" });
    this.here = here;
    this.cursors = this.findCursors(waitsAt(run, head));
    this.ofRank = []; // the cursor of each rank
    for (const cursor of this.cursors) for (const rank of cursor.ranks) this.ofRank[rank] = cursor;
    this.drawCursors();
  }

  /** Returns the cursors for the states of all ranks; those without a line are at the top. */
  findCursors(states) {
    const { column } = this, isMany = column === WIDE;
    const rows = states.map(({ event }) => this.rowOf(event));
    const key = (rank) => (isMany ? `${rows[rank]?.dataset.word} ${states[rank].state}` : rank);
    return [...Map.groupBy(states.keys(), key).values()].map((ranks) => {
      const { [ranks[0]]: row } = rows, { event, state } = states[ranks[0]];
      const x = column * (0.5 + (isMany ? Number(state !== "waits") : ranks[0]));
      const all = new Set(ranks.flatMap((rank) => states[rank].for));
      return { event, state, row, ranks, x, y: 10 + (row?.offsetTop ?? 0), for: [...all] };
    });
  }

  describe(cursor) {
    const word = (rank) => this.ofRank[rank].row?.dataset.word;
    const at = (rank) => (word(rank) ? ` at ${word(rank)}` : "");
    return describeRanks(this.run, cursor.ranks, cursor, at);
  }

  drawCursors() {
    const half = this.column === WIDE ? WIDE / 2 - 3 : 8;
    const arrows = this.cursors.flatMap((from) => {
      const awaited = new Set(from.for.map((rank) => this.ofRank[rank]));
      const kind = this.run.isStuck(from.event) ? "stuck" : "";
      return [...awaited].map((to) => svg("path", { d: arrowPath(from, to), class: kind }));
    });
    const marks = this.cursors.map((cursor) => {
      const { x, y, ranks, state, row } = cursor, said = this.describe(cursor), text = fewOf(ranks);
      row?.lastChild.append(`, ${said}`);
      return svg("g", { class: state.replaceAll(" ", "-") }, svg("title", {}, said),
        svg("rect", { x: x - half, y: y - 8, width: 2 * half, height: 16, rx: 8 }),
        svg("text", { x, y: y + 4 }, text.length > 7 ? `${ranks.length} ranks` : text));
    });
    this.art.replaceChildren(...arrows, ...marks);
  }
}

function arrowPath(from, to) {
  const down = Math.sign(to.y - from.y), side = down || (from.x > to.x ? 1 : -1);
  const apart = from === to ? 9 : 0, [x0, x1] = [from.x - apart, to.x + apart];
  const [y0, y1] = [from.y + side * 8, to.y + (down ? -8 : 8) * side];
  const bend = down ? 0 : side * (12 + Math.abs(x1 - x0) / 5);
  return `M${x0},${y0} Q${(x0 + x1) / 2},${(y0 + y1) / 2 + bend} ${x1},${y1}`;
}
