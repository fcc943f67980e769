// Handles the pointer, the wheel, keys, searching and playing. Subclasses define `remember()` and `restore()`.

const SPEEDS = [0.1, 0.2, 0.5, 1, 2, 5]; // windows per ten seconds
const CALM_MS = 700; // the pause between messages if the reader prefers reduced motion
const MOST_AT_ONCE = 20000; // in runs with fewer events, the messages in the window are added up in every frame
const TABS = ["selection", "findings", "statistics", "bandwidth", "steps", "table"];
const KEYS = [
  ["W, S or Ctrl+wheel", "zoom in or out"], ["A, D or Shift+wheel", "move earlier or later"], ["wheel", "scroll through the ranks"], ["+, -", "make rows taller or shorter"],
  ["F", "show the whole run"], ["drag", "move the view; with Shift, zoom to a box; on the ruler, measure a time"], ["arrow keys", "go to the previous or next event, or to the rank above or below"],
  ["Home, End", "go to the rank's first or last event"], ["PageUp, PageDown", "scroll by a page"],
  ["Enter", "go to the other side of a message; in the search box, go to the next hit"], ["P", "pin or unpin the card"], ["C, B", "show or hide the critical path or the bubbles"], ["M", "set a mark, which shows the time since the previous mark"], ["space", "play or pause"], [", and .", "go to the previous or next message"],
  ["/", "search"], ["Esc", "clear the selection, the marks and the search"],
];

class View {
  constructor(root, runs) {
    this.root = root;
    this.runs = runs;
    const part = (name) => root.querySelector(`[data-part="${name}"]`);
    this.part = part;
    this.timeline = new Timeline(part("bars"), part("overlay"), part("overview"), runs);
    this.ring = new RingPicture(part("ring"), this.timeline, part("search"));
    // a run with a fault is first shown at its end
    if (runs.some(({ flags }) => flags.some(({ kind }) => !SLOW_KINDS.has(kind)))) this.timeline.head = this.timeline.end;
    this.which = 0; // the run that the panels show
    this.speed = 3;
    this.pins = []; // pinned cards: {run, event}
    this.tab = runs.some((run) => run.flags.length) ? "findings" : "selection";
    this.describeRuns();
    this.showMatrix(this.ring.asMatrix);
    this.listen();
    new ResizeObserver(() => this.layOut()).observe(part("stage"));
  }

  /** Opens the view with a theme, and restores its state. */
  open(dark) {
    this.setTheme(dark);
    this.layOut();
    this.restore();
    return this;
  }

  describeRuns() {
    const heads = this.runs.map(({ head }, number) => (this.runs.length > 1 ? `${"ABCDEFGH"[number]}: ` : "") + `${head.title} · ${head.source}`);
    this.part("source").textContent = heads.join("  |  ");
    this.part("keys").replaceChildren(...KEYS.flatMap(([key, what]) => [make("dt", {}, key), make("dd", {}, what)]));
    this.part("tabs").replaceChildren(...TABS.map((tab) => make("button", {
      type: "button", role: "tab", id: `tab-${tab}`, "aria-controls": "panel", onclick: () => this.showTab(tab),
    }, tab)));
    this.part("which").replaceChildren(...this.runs.map((_, number) => make("option", { value: `${number}` }, `run ${"ABCDEFGH"[number]}`)));
    const groupings = ["rank", ...this.timeline.groupings()];
    this.part("by").replaceChildren(...groupings.map((by) => make("option", { value: by }, `rows by ${by}`)));
    this.part("by").hidden = groupings.length < 2;
    this.part("bubbles").hidden = !this.timeline.steps.some((steps) => steps.length);
    this.part("which").hidden = this.runs.length < 2;
  }

  /** Stops all timers, before a new view replaces this one. */
  close() {
    this.closed = true;
    this.playing = false;
    clearTimeout(this.later);
    cancelAnimationFrame(this.waiting);
    return this;
  }

  /** Explains the colours of the states that occur in the runs. */
  drawLegend() {
    const used = new Set();
    for (const run of this.runs) for (let i = 0; i < Math.min(run.size, 200000); i++) if (run.kind(i) !== "span") run.parts(i, (_, __, state) => used.add(state));
    const legend = STATES.slice(0, SPANS).map((state, number) => [state, number]).filter(([, number]) => used.has(number));
    this.part("legend").replaceChildren(...legend.map(([state, number]) => {
      const swatch = make("span", { class: "swatch", "data-state": `${number}` }, state.texture || "\u00a0");
      swatch.style.backgroundColor = this.timeline.colours[number];
      return make("span", {}, swatch, ` ${state.name}`);
    }), ...(this.runs.some((run) => run.hosts) ? [make("span", {}, "- - from host to host")] : []));
  }

  /** Shows or hides the critical path or the bubbles. */
  toggle(name) {
    const { shown } = this.timeline;
    if (!shown.delete(name)) shown.add(name);
    for (const one of ["path", "bubbles"]) this.part(one).setAttribute("aria-pressed", `${shown.has(one)}`);
    this.draw();
  }

  /** Shows the traffic between ranks as a matrix or as a ring. */
  showMatrix(yes) {
    this.ring.asMatrix = yes;
    this.part("matrix").setAttribute("aria-pressed", `${yes}`);
    this.draw();
  }

  groupBy(by) {
    this.part("by").value = by;
    this.timeline.groupBy(by);
    this.timeline.scroll(0);
    this.draw();
  }

  setTheme(dark) {
    this.root.dataset.theme = dark ? "dark" : "light";
    this.timeline.setTheme(dark);
    if (this.frame !== undefined) this.drawLegend();
    this.draw();
  }

  layOut() {
    const { clientWidth, clientHeight } = this.part("stage");
    if (clientWidth < 50 || clientHeight < 50) return;
    this.timeline.resize(clientWidth, clientHeight);
    this.draw();
  }

  /** Requests one drawing of everything at the next frame. */
  draw() {
    if (this.waiting || !this.timeline.width) return;
    this.waiting = requestAnimationFrame(() => {
      this.waiting = 0;
      const begin = performance.now();
      this.timeline.draw();
      this.frame = performance.now() - begin;
      const small = this.runs[this.which].size < MOST_AT_ONCE;
      if (small) this.ring.draw(this.which);
      clearTimeout(this.later);
      this.later = setTimeout(() => { // once the view has settled
        this.later = 0;
        if (!this.part("legend").children.length) this.drawLegend();
        if (!small) this.ring.draw(this.which);
        this.drawPanel();
        this.remember();
        this.refine();
      }, 120);
    });
  }

  /** Computes finer bins while the page is idle, a few at a time. */
  refine() {
    const begin = performance.now(), { timeline } = this;
    let rows = 0;
    while (timeline.pyramids.some((pyramid) => pyramid.run.size > MOST_BARS && pyramid.refine())) {
      rows += 1;
      if (performance.now() - begin > 8) return setTimeout(() => this.waiting || this.later || this.refine());
    }
    if (rows) timeline.draw();
  }

  // -- panels

  drawPanel() {
    const { timeline } = this, run = this.runs[this.which], panel = this.part("panel");
    for (const button of this.part("tabs").children) {
      button.setAttribute("aria-selected", `${button.id === `tab-${this.tab}`}`);
      button.tabIndex = button.id === `tab-${this.tab}` ? 0 : -1;
    }
    panel.setAttribute("aria-labelledby", `tab-${this.tab}`);
    const { from, until } = timeline;
    if (this.tab === "selection") {
      const one = timeline.selected;
      const cards = this.pins.filter((pin) => !isSame(pin, one)).flatMap((pin) => this.card(pin));
      panel.replaceChildren(...(one ? this.card(one) : [make("p", {}, "Click a bar or press an arrow key to select an event."), make("pre", {}, run.head.summary)]), ...cards);
    } else if (this.tab === "findings") {
      const notes = run.head.notes.map((note) => make("p", {}, note));
      const said = [...run.flags.map((flag) => this.finding(run, flag)), ...notes];
      panel.replaceChildren(...(said.length ? said : [make("p", {}, "Nothing wrong was found in this run.")]));
    } else if (this.tab === "statistics") {
      panel.replaceChildren(statisticsTable(run, Math.max(0, from), Math.min(timeline.end, until)), edgesTable(this.ring.traffic(this.which).edges(from, until)));
    } else if (this.tab === "bandwidth") {
      const canvas = make("canvas", { role: "img", "aria-label": "bandwidth against size for the visible messages" });
      panel.replaceChildren(canvas, make("p", {}, "Each dot is a visible message, and each square is a visible collective. If a rank began to wait late, the bandwidth is a lower bound."));
      drawBandwidth(canvas, timeline, run);
    } else if (this.tab === "steps") {
      const steps = timeline.steps[this.which];
      panel.replaceChildren(...stepsPanel(timeline, run, steps));
      if (steps.length) drawActivations(panel.querySelector("canvas"), timeline, run, steps);
    } else {
      panel.replaceChildren(visibleTable(timeline));
    }
  }

  showTab(tab) {
    this.tab = tab;
    this.draw();
    this.drawPanel();
  }

  card(one) {
    const pinned = this.pins.some((pin) => isSame(pin, one));
    const pin = make("button", { type: "button", onclick: () => this.pin(one) }, pinned ? "unpin" : "pin");
    return card(one.run, one.event, (target) => this.select(target, true), pin);
  }

  /** Pins or unpins the card of an event. */
  pin(one) {
    const rest = this.pins.filter((pin) => !isSame(pin, one));
    this.pins = rest.length < this.pins.length ? rest : [...rest, one];
    this.timeline.pins = this.pins;
    this.tab = "selection";
    this.draw();
  }

  finding(run, flag) {
    const jump = make("button", { type: "button", disabled: flag.event < 0, onclick: () => this.select({ run, event: flag.event }, true) }, "show");
    return make("div", { class: "finding" }, make("h2", {}, flag.kind.replaceAll("_", " "), " ", ...(flag.event < 0 ? [] : [jump])), make("p", {}, flag.text));
  }

  /** Selects an event and announces it to screen readers; if `reveals` is true, also scrolls it into view. */
  select(one, reveals = false) {
    this.timeline.selected = one;
    if (one) {
      this.which = this.runs.indexOf(one.run);
      this.part("which").value = `${this.which}`;
      if (reveals) this.timeline.reveal(one);
      if (reveals || this.timeline.head === 0) this.timeline.head = one.run.post[one.event];
      this.tab = "selection";
      this.part("live").textContent = `rank ${one.run.rank[one.event]}: ${one.run.text(one.event)}, ${describe(one.run, one.event).slice(1, 4).map((fact) => fact.join(" ")).join(", ")}`;
    }
    this.draw();
  }

  // -- the pointer

  listen() {
    const stage = this.part("stage"), { timeline } = this;
    stage.addEventListener("wheel", (event) => this.onWheel(event), { passive: false });
    stage.addEventListener("pointerdown", (event) => this.onDown(event));
    stage.addEventListener("pointermove", (event) => this.onMove(event));
    stage.addEventListener("pointerup", (event) => this.onUp(event));
    stage.addEventListener("pointercancel", () => this.pointers.clear());
    stage.addEventListener("pointerleave", () => { timeline.hovered = null; this.part("tip").hidden = true; });
    stage.addEventListener("keydown", (event) => this.onKey(event));
    this.pointers = new Map();
    this.part("overview").addEventListener("pointerdown", (event) => {
      const jump = ({ offsetX }) => {
        const time = ((offsetX - GUTTER) / (timeline.overview.width - GUTTER)) * timeline.end, half = (timeline.until - timeline.from) / 2;
        timeline.show(time - half, time + half);
        this.draw();
      };
      event.target.setPointerCapture(event.pointerId);
      event.target.onpointermove = jump;
      event.target.onpointerup = () => { event.target.onpointermove = null; };
      jump(event);
    });
    this.part("tabs").addEventListener("keydown", (event) => {
      const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!by) return;
      this.tab = TABS[(TABS.indexOf(this.tab) + by + TABS.length) % TABS.length];
      this.drawPanel();
      this.part("tabs").querySelector('[aria-selected="true"]').focus();
    });
    const search = this.part("search");
    search.addEventListener("input", () => this.search(search.value));
    search.addEventListener("keydown", (event) => {
      event.stopPropagation();
      if (event.key === "Enter") this.nextHit(event.shiftKey ? -1 : 1);
      if (event.key === "Escape") { search.value = ""; this.search(""); stage.focus(); }
    });
    const act = { fit: () => this.fit(), in: () => this.zoom(0.5), out: () => this.zoom(2), play: () => this.play(), before: () => this.step(false),
      next: () => this.step(true), path: () => this.toggle("path"), bubbles: () => this.toggle("bubbles"),
      matrix: () => this.showMatrix(!this.ring.asMatrix), theme: () => this.setTheme(!timeline.dark) };
    for (const button of this.root.querySelectorAll("[data-act]")) button.addEventListener("click", act[button.dataset.act]);
    this.part("speed").addEventListener("input", (event) => { this.speed = Number(event.target.value); });
    this.part("by").addEventListener("change", (event) => this.groupBy(event.target.value));
    this.part("which").addEventListener("change", (event) => { this.which = Number(event.target.value); this.draw(); this.drawPanel(); });
  }

  onWheel(event) {
    event.preventDefault();
    const { timeline } = this, by = event.deltaY || event.deltaX;
    const tall = timeline.rows.length * timeline.rowHeight > timeline.height - RULER;
    if (event.ctrlKey || event.metaKey || (!event.shiftKey && !tall && Math.abs(event.deltaY) >= Math.abs(event.deltaX))) {
      timeline.zoom(Math.exp(by * 0.002), timeline.time(Math.max(GUTTER, event.offsetX)));
    } else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      this.pan((by / timeline.width) * 0.7);
    } else timeline.scroll(event.deltaY);
    this.draw();
  }

  onDown(event) {
    this.pointers.set(event.pointerId, event);
    event.currentTarget.setPointerCapture(event.pointerId);
    this.beginDrag(event);
  }

  beginDrag(event) {
    const { timeline } = this;
    const begin = { x: event.offsetX, y: event.offsetY, from: timeline.from, until: timeline.until, top: timeline.top, time: timeline.time(event.offsetX) };
    this.drag = { ...begin, mode: event.offsetY < RULER ? "measure" : event.shiftKey ? "box" : "move", moved: false };
  }

  onMove(event) {
    const { timeline, drag } = this;
    if (!this.pointers.has(event.pointerId)) return this.hover(event);
    if (this.pointers.size === 2) return this.pinch(event);
    this.pointers.set(event.pointerId, event);
    const [dx, dy] = [event.offsetX - drag.x, event.offsetY - drag.y];
    drag.moved ||= Math.hypot(dx, dy) > 4;
    if (!drag.moved) return;
    if (drag.mode === "move") {
      const by = (dx / (timeline.width - GUTTER)) * (drag.until - drag.from);
      timeline.show(drag.from - by, drag.until - by);
      timeline.top = drag.top;
      timeline.scroll(-dy);
      this.draw();
    } else {
      timeline.tape = [drag.time, timeline.time(event.offsetX)];
      timeline.box = drag.mode === "box" && Math.abs(dy) > 20 ? [drag.y, event.offsetY] : null; // a flat box zooms only the time
      timeline.drawOverlay();
    }
  }

  pinch(event) {
    const { timeline } = this, width = () => { const [a, b] = [...this.pointers.values()]; return Math.max(20, Math.abs(a.offsetX - b.offsetX)); };
    const before = width();
    this.pointers.set(event.pointerId, event);
    const [a, b] = [...this.pointers.values()];
    timeline.zoom(before / width(), timeline.time((a.offsetX + b.offsetX) / 2));
    this.drag.moved = true;
    this.draw();
  }

  onUp(event) {
    const { timeline, drag } = this;
    this.pointers.delete(event.pointerId);
    if (!drag) return;
    if (this.pointers.size) return this.beginDrag([...this.pointers.values()][0]); // the remaining finger continues from here
    if (!drag.moved) {
      const flag = event.offsetY < RULER ? timeline.flags().find(({ x }) => Math.abs(x - event.offsetX) < 7) : null;
      timeline.tape = null;
      if (flag) return this.select({ run: flag.run, event: flag.event }, true);
      timeline.head = Math.max(0, timeline.time(event.offsetX));
      this.select(timeline.hit(event.offsetX, event.offsetY));
    } else if (drag.mode === "box") {
      const [from, until] = [...timeline.tape].sort((a, b) => a - b);
      timeline.show(from, until);
      if (timeline.box) timeline.showRows(...timeline.box);
      timeline.tape = timeline.box = null;
    }
    this.draw();
  }

  hover(event) {
    const { timeline } = this, one = timeline.hit(event.offsetX, event.offsetY), tip = this.part("tip");
    const same = isSame(one, timeline.hovered);
    this.mouse = event.offsetX;
    tip.hidden = !one;
    if (one) {
      if (!same) {
        const facts = describe(one.run, one.event).map(([name, text]) => `${name}: ${text}`);
        tip.textContent = [one.run.text(one.event), ...facts, otherSide(one.run, one.event), reason(one.run, one.event)].filter(Boolean).join("\n");
      }
      tip.style.left = `${Math.min(event.offsetX + 14, timeline.width - tip.offsetWidth - 4)}px`;
      tip.style.top = `${Math.min(event.offsetY + 14, timeline.height - tip.offsetHeight - 4)}px`;
    }
    if (same) return;
    timeline.hovered = one;
    timeline.drawOverlay();
  }

  // -- keys

  onKey(event) {
    const { timeline } = this;
    const act = {
      w: () => this.zoom(0.7), s: () => this.zoom(1 / 0.7), a: () => this.pan(-0.15), d: () => this.pan(0.15), f: () => this.fit(),
      "+": () => timeline.setRowHeight(timeline.rowHeight * 1.25), "-": () => timeline.setRowHeight(timeline.rowHeight / 1.25),
      c: () => this.toggle("path"), b: () => this.toggle("bubbles"),
      p: () => timeline.selected && this.pin(timeline.selected), m: () => timeline.notes.push(timeline.head), " ": () => this.play(), ",": () => this.step(false), ".": () => this.step(true),
      "/": () => this.part("search").focus(), escape: () => this.clear(), enter: () => this.goAcross(),
      arrowright: () => this.walk(1), arrowleft: () => this.walk(-1), arrowdown: () => this.changeRow(1), arrowup: () => this.changeRow(-1),
      home: () => this.walk(-Infinity), end: () => this.walk(Infinity),
      pagedown: () => timeline.scroll(timeline.height - RULER), pageup: () => timeline.scroll(RULER - timeline.height),
    }[event.key.toLowerCase()];
    if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    act();
    this.draw();
  }

  zoom(factor) {
    const { timeline } = this;
    timeline.zoom(factor, this.mouse > GUTTER ? timeline.time(this.mouse) : (timeline.from + timeline.until) / 2);
    this.draw();
  }

  pan(share) {
    const { timeline } = this, by = share * (timeline.until - timeline.from);
    timeline.show(timeline.from + by, timeline.until + by);
    this.draw();
  }

  fit() {
    this.timeline.fit();
    this.draw();
  }

  clear() {
    Object.assign(this.timeline, { selected: null, tape: null, notes: [] });
    this.part("search").value = "";
    this.search("");
  }

  /** Moves the selection along the events of its rank. */
  walk(by) {
    const { timeline } = this, one = timeline.selected;
    if (!one) return this.changeRow(0);
    const { run } = one, rank = run.rank[one.event];
    const event = Math.min(Math.max(run.first[rank], one.event + by), run.first[rank + 1] - 1);
    this.select({ run, event }, true);
  }

  /** Selects the event that is current at the same time on the rank above or below. */
  changeRow(by) {
    const { timeline } = this, one = timeline.selected;
    const row = one ? timeline.rowOf(one.run, one.run.rank[one.event]) + by : Math.max(0, timeline.rowAt(RULER));
    const target = timeline.rows[row];
    if (!target || target.run.first[target.rank] === target.run.first[target.rank + 1]) return;
    const time = one ? one.run.post[one.event] : timeline.from, { run, rank } = target;
    const posts = run.post.subarray(run.first[rank], run.first[rank + 1]);
    const event = run.first[rank] + Math.max(0, firstAbove(posts, time + 1) - 1);
    this.select({ run, event }, true);
  }

  goAcross() {
    const one = this.timeline.selected;
    if (one && one.run.partner(one.event) >= 0) this.select({ run: one.run, event: one.run.partner(one.event) }, true);
  }

  // -- search

  search(text) {
    const { timeline } = this;
    let hits = 0;
    timeline.found = null;
    if (text.trim()) {
      const test = parseSearch(text);
      timeline.found = new Map();
      for (const run of this.runs) {
        const found = new Uint8Array(run.size);
        for (let event = 0; event < run.size; event++) {
          found[event] = test(run, event);
          hits += found[event];
        }
        timeline.found.set(run, found);
      }
    }
    this.part("hits").textContent = text.trim() ? `${hits.toLocaleString("en")} found` : "";
    this.draw();
  }

  /** Selects the next or previous hit in time order; the first hit follows the last. */
  nextHit(by) {
    const { found, selected } = this.timeline;
    if (!found) return;
    const after = (one, other) => by * (one.run.post[one.event] - other.run.post[other.event] || this.runs.indexOf(one.run) - this.runs.indexOf(other.run)
      || one.event - other.event);
    let next = null, first = null;
    for (const run of this.runs) {
      const marks = found.get(run), one = { run };
      for (one.event = marks.indexOf(1); one.event >= 0; one.event = marks.indexOf(1, one.event + 1)) {
        if (!first || after(one, first) < 0) first = { ...one };
        if (selected && after(one, selected) > 0 && (!next || after(one, next) < 0)) next = { ...one };
      }
    }
    if (next ?? first) this.select(next ?? first, true);
  }

  // -- playing

  play() {
    this.playing = !this.playing;
    this.part("play").textContent = this.playing ? "❚❚" : "▶";
    this.part("play").setAttribute("aria-label", this.playing ? "pause" : "play");
    cancelAnimationFrame(this.frame); // otherwise a pending frame would continue in parallel
    clearTimeout(this.timer);
    if (!this.playing) return;
    const { timeline } = this;
    if (timeline.head < timeline.from || timeline.head >= Math.min(timeline.until, timeline.end)) timeline.head = Math.max(0, timeline.from);
    if (matchMedia("(prefers-reduced-motion: reduce)").matches) return this.playCalmly();
    let last = performance.now();
    const tick = (now) => {
      timeline.head += ((now - last) / 10000) * SPEEDS[this.speed] * (timeline.until - timeline.from);
      last = now;
      timeline.drawOverlay();
      this.ring.draw(this.which);
      if (timeline.head >= Math.min(timeline.until, timeline.end)) return this.play();
      this.frame = requestAnimationFrame(tick);
    };
    this.frame = requestAnimationFrame(tick);
  }

  /** Plays without motion, from message to message. */
  playCalmly() {
    const before = this.timeline.head;
    this.step(true);
    if (this.timeline.head === before) return this.play();
    this.timer = setTimeout(() => this.playCalmly(), CALM_MS / SPEEDS[this.speed]);
  }

  /** Moves to the next or previous message. */
  step(forward) {
    const { timeline } = this;
    timeline.head = this.ring.traffic(this.which).step(timeline.head, forward);
    if (timeline.head < timeline.from || timeline.head > timeline.until) {
      const half = (timeline.until - timeline.from) / 2;
      timeline.show(timeline.head - half, timeline.head + half);
    }
    this.draw();
  }
}

/** Returns whether two selections are the same event. */
function isSame(one, other) { return one?.run === other?.run && one?.event === other?.event; }
