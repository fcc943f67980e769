// Shows the program's code, with each rank's cursor at the playhead's time and arrows between them.

const MOST_COLUMNS = 8; // with more ranks, those that do the same at the same line share a cursor
const [COLUMNS, WIDE] = [160, 64]; // the widths of all narrow columns and of a wide one, in pixels
const NEAR = 6; // the number of lines to show before and after a line with operations
const LEGEND = "Filled: the rank computes. Hollow: it waits for the rank to which its arrow leads. "
  + "Pale: it posts nothing more.";

/** Returns the lines to show: marked lines with their vicinity, and the headers of their blocks. */
function linesToShow(lines, marked) {
  const depth = (k) => (lines[k]?.trim() ? lines[k].search(/\S/) : Infinity), shown = new Set();
  for (const line of marked) {
    for (const step of [-1, 1]) {
      for (let k = line - 1; Math.abs(k - line + 1) <= NEAR; k += step) {
        if (depth(k) || k < line) shown.add(k);
        if (!depth(k) && depth(line - 1)) break; // the end or the begin of a function
      }
    }
    for (let k = line - 1, least = depth(k); k >= 0; k--) {
      if (depth(k) < least) shown.add(k);
      least = Math.min(least, depth(k));
    }
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
    if (this.root.parentNode === panel) this.update();
    else {
      panel.replaceChildren(this.root);
      this.update(true);
      const first = this.here ?? this.cursors.find(({ row }) => row)?.row;
      first?.scrollIntoView({ block: "nearest" });
    }
    if (this.view.playing) return;
    const said = this.cursors.map((cursor) => this.describe(cursor));
    const news = said.filter((one) => !this.said.includes(one));
    if (news.length) this.live.textContent = news.join("; ");
    this.said = said;
  }

  build(run) {
    const files = new Map(Object.keys(run.head.sources).map((file) => [file, new Set()]));
    Object.assign(this, { run, rows: new Map(), said: [] });
    const seen = new Set();
    for (let event = 0; event < run.size; event++) {
      const place = run.columns.file[event] * 2 ** 32 + run.columns.line[event];
      const places = seen.has(place) ? [] : run.places(event);
      for (const { file, line } of places) files.get(file)?.add(line);
      seen.add(place);
    }
    const used = [...files].filter(([, marked]) => marked.size);
    const lists = used.flatMap(([file, marked]) => this.list(file, marked));
    this.live = make("div", { class: "live", "aria-live": "polite" });
    this.art = svg("svg", { "aria-hidden": "true" });
    this.listing = make("div", { onkeydown: (event) => this.onKey(event) }, ...lists, this.art);
    this.root = make("div", { class: "code" },
      make("p", {}, LEGEND), this.listing, this.live);
    this.column = run.ranks > MOST_COLUMNS ? WIDE : Math.min(30, COLUMNS / run.ranks);
    this.listing.style.paddingLeft = `${Math.min(run.ranks * this.column, COLUMNS) + 8}px`;
    this.buttons = [...this.listing.querySelectorAll("li > button")];
    if (this.buttons.length) this.buttons[0].tabIndex = 0;
    new ResizeObserver(() => this.update(true)).observe(this.listing);
  }

  /** Creates the listing of a file, in which lines far from operations are folded. */
  list(file, marked) {
    const lines = this.run.head.sources[file].split("\n"), list = make("ol");
    const shown = linesToShow(lines, marked);
    for (const [k, text] of lines.entries()) {
      const word = placeWord({ file, line: k + 1 }), onclick = () => this.mark(word);
      const code = marked.has(k + 1) ? press(text, { tabIndex: -1, onclick })
        : make("code", {}, text);
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
    const at = this.buttons.indexOf(event.target);
    const by = { ArrowDown: 1, ArrowUp: -1, Enter: 0, " ": 0 }[event.key];
    if (at < 0 || by === undefined) return;
    event.stopPropagation(); // these keys also belong to the timeline
    if (by === 0) return; // the button's own keys
    event.preventDefault();
    const next = this.buttons[at + by] ?? event.target;
    event.target.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }

  /** Searches for a line's operations, so that all others fade; a repetition ends the search. */
  mark(word) {
    const search = this.view.part("search"), text = word && `line:${word}`;
    search.value = search.value === text ? "" : text;
    this.view.search(search.value);
    this.update();
  }

  /** Returns the row in the listing that an event came from, or undefined. */
  rowOf(event) {
    const keys = this.run.places(event).map(({ file, line }) => `${file}:${line}`);
    return this.rows.get(keys.find((key) => this.rows.has(key)));
  }

  /** Moves the cursors to the playhead's time, and marks the selected event's line. */
  update(isNew = false) {
    if (!this.root?.isConnected) return;
    const { view, run } = this, { selected, head } = view.timeline, states = waitsAt(run, head);
    const search = view.part("search").value;
    const now = JSON.stringify([states, selected?.event, search]);
    if (now === this.drawn && !isNew) return;
    this.drawn = now;
    const here = selected?.run === run ? this.rowOf(selected.event) : null;
    for (const row of this.rows.values()) {
      row.children[1].ariaPressed = `${search === `line:${row.dataset.word}`}`;
      row.classList.toggle("here", row === here);
      row.lastChild.textContent = "";
    }
    if (here !== this.here) here?.scrollIntoView({ block: "nearest" });
    this.here = here;
    this.ofRank = this.findCursors(states);
    this.cursors = [...new Set(this.ofRank)];
    this.drawCursors();
  }

  /** Returns the cursor of each rank; cursors without a line are at the top. */
  findCursors(states) {
    const { column } = this, cursors = new Map(), isMany = column === WIDE;
    return states.map(({ event, state, for: others }, rank) => {
      const row = this.rowOf(event), key = isMany ? `${row?.dataset.word} ${state}` : rank;
      const x = column * (0.5 + (isMany ? Number(state !== "waiting") : rank));
      const y = 10 + (row?.offsetTop ?? 0), isNew = !cursors.has(key);
      if (isNew) cursors.set(key, { event, state, row, x, y, ranks: [], for: [] });
      const cursor = cursors.get(key);
      cursor.ranks.push(rank);
      cursor.for = [...new Set([...cursor.for, ...others])];
      return cursor;
    });
  }

  describe(cursor) {
    const word = (rank) => this.ofRank[rank].row?.dataset.word;
    const at = (rank) => (word(rank) ? ` at ${word(rank)}` : "");
    return describeRanks(this.run, cursor.ranks, cursor, at);
  }

  /** Draws the cursors next to their lines, and arrows to the ranks that they wait for. */
  drawCursors() {
    const half = this.column === WIDE ? WIDE / 2 - 3 : 8;
    const arrows = this.cursors.flatMap((from) => {
      const awaited = new Set(from.for.map((rank) => this.ofRank[rank]));
      const kind = this.run.isStuck(from.event) ? "stuck" : "";
      return [...awaited].map((to) => svg("path", {
        d: arrowPath(from, to), class: kind, "marker-end": "url(#code-tip)",
      }));
    });
    const marks = this.cursors.map((cursor) => {
      const { x, y, ranks, state, row } = cursor, said = this.describe(cursor), text = fewOf(ranks);
      row?.lastChild.append(`, ${said}`);
      return svg("g", { class: DOES[state].replaceAll(" ", "-") }, svg("title", {}, said),
        svg("rect", { x: x - half, y: y - 8, width: 2 * half, height: 16, rx: 8 }),
        svg("text", { x, y: y + 4 }, text.length > 7 ? `${ranks.length} ranks` : text));
    });
    this.art.replaceChildren(makeTip("code-tip"), ...arrows, ...marks);
  }
}

/** Returns the path of an arrow between two cursors; arrows within a line are curved. */
function arrowPath(from, to) {
  const down = Math.sign(to.y - from.y), side = down || (from.x > to.x ? 1 : -1);
  const apart = from === to ? 9 : 0, [x0, x1] = [from.x - apart, to.x + apart];
  const [y0, y1] = [from.y + side * 8, to.y + (down ? -8 : 8) * side];
  const bend = down ? 0 : side * (12 + Math.abs(x1 - x0) / 5);
  return `M${x0},${y0} Q${(x0 + x1) / 2},${(y0 + y1) / 2 + bend} ${x1},${y1}`;
}

/** Creates the tip of arrows, which is some pixels before the ends of their lines. */
function makeTip(id, before = -1) {
  return svg("marker", { id, refX: 8 + before, refY: 4, orient: "auto", markerWidth: 8,
    markerHeight: 8, markerUnits: "userSpaceOnUse" }, svg("path", { d: "M0,0 L8,4 L0,8 Z" }));
}
