// Handles the pointer, the wheel, keys, searching and playing. Subclasses define `remember()` and `restore()`.

const SPEEDS = [0.1, 0.2, 0.5, 1, 2, 5]; // windows per ten seconds
const CALM_MS = 700; // the pause between messages if the reader prefers reduced motion
const MOST_AT_ONCE = 20000; // in runs with fewer events, the messages in the window are added up in every frame
const TABS = {
  selection: "the selected event or area", findings: "what ringsim found, and notes",
  statistics: "operations and traffic in the visible time",
  bandwidth: "bandwidth against size in the visible time",
  steps: "pipeline steps in the visible time", code: "your code, with a cursor for each rank",
  table: "the visible events",
};
const KEYS = [
  ["W, S; Ctrl + wheel", "zoom in or out"],
  ["A, D; Shift + wheel; drag", "move earlier or later"],
  ["wheel; PageUp, PageDown", "scroll through the ranks"],
  ["F", "show the whole run, with rows that fill the window"],
  ["+, -", "make rows taller or shorter"],
  ["arrow keys", "go to the previous or next event, or to the rank above or below"],
  ["Home, End", "go to the rank's first or last event"],
  ["Enter", "go to the other side of a message; in the search box, go to the next hit"],
  ["drag on the ruler; Shift + drag", "select an area, for which the panel shows sums"],
  ["Shift + arrow keys", "extend the area from event to event"],
  ["Z", "zoom to the selected area"],
  ["U; click on a row's name", "show the ranks of a row one by one, or in one row"],
  ["C, B", "show or hide the critical path or the bubbles"],
  ["M", "set a mark, which shows the time since the previous mark"],
  [", and .", "go to the previous or next message"], ["space", "play or pause"],
  ["P", "pin or unpin the card"], ["Q", "show or hide the side panel"], ["/", "search"],
  ["Esc", "clear the selection, the area, the marks and the search"], ["?", "show the keys"],
];
const HINT = "ringsim-hint"; // the name under which a browser remembers that the hint was read
const [LEAST_SIDE, LEAST_LEFT] = [240, 300]; // the least widths of the panel and of the timeline
const GLYPHS = { // in the legend, for what is not a bar
  bubble: "▨", critical_path: "━", message: "→", across: "⇢", problem: "▼", slow: "▼", mark: "□",
  your_mark: "│", recorded: "▭", much_earlier: "▬", earlier: "▬", alike: "▬", later: "▬",
  much_later: "▬",
};
const SHORTCUTS = { bubble: "B", critical_path: "C" };

class View {
  constructor(root, runs) {
    this.root = root;
    this.runs = runs;
    const part = (name) => root.querySelector(`[data-part="${name}"]`);
    this.part = part;
    this.timeline = new Timeline(part("bars"), part("overlay"), part("overview"), runs);
    this.ring = new RingPicture(part("ring"), this.timeline, part("search"));
    // a run with a fault is first shown at its end
    const hasFault = runs.some(({ flags }) => flags.some(({ look }) => look === "problem"));
    if (hasFault) this.timeline.head = this.timeline.end;
    this.which = 0; // the run that the panels show
    this.speed = 3;
    this.pins = []; // pinned cards: {run, event}
    this.code = new CodePanel(this);
    this.tabs = Object.keys(TABS).filter((tab) => tab !== "code" || this.code.exists);
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
    this.openHint();
    this.restore();
    this.drawLegend(); // some of it may be hidden now
    return this;
  }

  describeRuns() {
    const heads = this.runs.map(({ head }, number) => {
      const name = this.runs.length > 1 ? `${LETTERS[number]}: ` : "";
      const early = head.begin && ` · started ${timeText(head.begin)} before the first event`;
      return `${name}${head.title}${early || ""}`;
    });
    const sources = new Set(this.runs.map(({ head }) => head.source));
    this.part("source").textContent = [...heads, ...sources].join(" · ");
    this.part("keys").replaceChildren(...KEYS.flatMap(([key, what]) => [make("dt", {}, key), make("dd", {}, what)]));
    this.part("tabs").replaceChildren(...this.tabs.map((tab) => press(tab, {
      role: "tab", id: `tab-${tab}`, "aria-controls": "panel", title: TABS[tab],
      onclick: () => this.showTab(tab),
    })));
    this.part("which").replaceChildren(...this.runs.map((_, number) =>
      make("option", { value: `${number}` }, `run ${LETTERS[number]}`)));
    const groupings = ["rank", ...this.timeline.groupings()];
    this.part("by").replaceChildren(...groupings.map((by) => make("option", { value: by }, `rows by ${by}`)));
    this.part("by").hidden = groupings.length < 2;
    this.part("which").hidden = this.runs.length < 2;
  }

  /** Stops all timers, before a new view replaces this one. */
  close() {
    this.closed = true;
    this.playing = false;
    for (const timer of [this.later, this.timer]) clearTimeout(timer);
    for (const frame of [this.waiting, this.moving]) cancelAnimationFrame(frame);
    removeEventListener("keydown", this.heard, true);
    return this;
  }

  /** Returns pairs of a key and names, for everything that is drawn in the runs. */
  drawnNames() {
    const { timeline, runs } = this, names = new Map(), used = new Set();
    for (const run of runs) {
      for (const [state, name] of run.drawnNames()) {
        if (!names.has(STATE_KEYS[state])) names.set(STATE_KEYS[state], new Set());
        names.get(STATE_KEYS[state]).add(name);
      }
      for (const { event, look } of run.flags) if (event >= 0) used.add(look);
      if (run.marks.length) used.add("mark");
      if (run.columns.partner.some(Boolean)) used.add("message");
      if (run.hosts) used.add("across");
      if (run.size > run.marks.length) used.add("critical_path");
    }
    if (runs.some((run) => run.head.steps.length)) used.add("bubble");
    if (timeline.ghost) used.add("recorded");
    for (const [, late] of timeline.lags) for (const lag of late) used.add(lagKey(lag, runs[1]));
    const looks = { ...LOOKS.mark, ...LOOKS.comparison, mark: { name: "mark in the program" } };
    const marks = Object.keys(GLYPHS).filter((key) => used.has(key));
    return [...STATE_KEYS.filter((key) => names.has(key)).map((key) => [key, names.get(key)]),
      ...marks.map((key) => [key, [looks[key].name]])];
  }

  /** Explains everything that is drawn in the runs; a click on an entry hides or shows it. */
  drawLegend() {
    const { timeline } = this, { marks, muted, ink } = timeline, colours = { ...marks, bubble: muted };
    this.names ??= new Map(this.drawnNames());
    this.part("legend").replaceChildren(...[...this.names].map(([key, names]) => {
      const state = STATE_KEYS.indexOf(key), all = [...names].join(", ");
      const swatch = make("span", { class: "swatch", "aria-hidden": "true" });
      swatch.textContent = (key === "step" ? "⊓" : GLYPHS[key] ?? STATES[state].texture) || "\u00a0";
      if (state >= 0 && key !== "step") {
        swatch.style.backgroundColor = timeline.colours[state];
        swatch.style.color = readableInk(timeline.colours[state]);
      } else swatch.style.color = colours[key] ?? ink;
      const few = names.size > 3 ? `${[...names].slice(0, 2).join(", ")}, …` : all;
      const shortcut = SHORTCUTS[key] ? ` (${SHORTCUTS[key]})` : "";
      return make("button", {
        type: "button", "data-key": key, "aria-pressed": `${!timeline.hidden.has(key)}`,
        title: `show or hide: ${all}${shortcut}`, onclick: () => this.toggle(key),
      }, swatch, ` ${few}`);
    }));
  }

  /** Shows or hides what has a key of the legend. */
  toggle(key) {
    const { hidden } = this.timeline, entry = this.part("legend").querySelector(`[data-key="${key}"]`);
    if (!hidden.delete(key)) hidden.add(key);
    entry?.setAttribute("aria-pressed", `${!hidden.has(key)}`);
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

  /** Draws everything in the light or the dark theme. */
  setTheme(dark) {
    this.root.dataset.theme = dark ? "dark" : "light";
    this.timeline.setTheme(dark);
    this.drawLegend();
    this.draw();
  }

  layOut() {
    const { clientWidth, clientHeight } = this.part("stage");
    if (clientWidth < 50 || clientHeight < 50) return;
    this.timeline.resize(clientWidth, clientHeight);
    if (this.frame !== undefined) this.timeline.draw(); // at once, since the canvas is now empty
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
    const panel = this.part("panel");
    for (const button of this.part("tabs").children) {
      const isChosen = button.id === `tab-${this.tab}`;
      button.setAttribute("aria-selected", `${isChosen}`);
      button.tabIndex = isChosen ? 0 : -1;
    }
    panel.setAttribute("aria-labelledby", `tab-${this.tab}`);
    if (this.tab === "code") this.code.show(panel);
    else panel.replaceChildren(...this.contents());
    const canvas = panel.querySelector("canvas"), run = this.runs[this.which], { timeline } = this;
    if (canvas && this.tab === "bandwidth") drawBandwidth(canvas, timeline, run);
    else if (canvas) drawActivations(canvas, timeline, run);
  }

  /** Returns what the panel shows in the current tab. */
  contents() {
    const { timeline, tab } = this, { from, until, selected } = timeline, run = this.runs[this.which];
    if (tab === "findings") {
      const said = run.flags.map((flag) => this.finding(run, flag));
      said.push(...run.head.notes.map((note) => make("p", {}, note)));
      return said.length ? said : [make("p", {}, "Nothing wrong was found in this run.")];
    }
    if (tab === "statistics") {
      return [statisticsTable(run, Math.max(0, from), Math.min(timeline.end, until)),
        edgesTable(this.ring.traffic(this.which).edges(from, until))];
    }
    if (tab === "bandwidth") {
      const label = "bandwidth against size for the visible messages";
      return [make("canvas", { role: "img", "aria-label": label }), make("p", {}, "Each dot is a "
        + "visible message, and each square is a visible collective. If a rank began to wait late, "
        + "the bandwidth is a lower bound.")];
    }
    if (tab === "steps") return stepsPanel(timeline, run);
    if (tab === "table") return [visibleTable(timeline)];
    const cards = this.pins.filter((pin) => !isSame(pin, selected)).flatMap((pin) => this.card(pin));
    const area = timeline.tape ? this.areaCard() : [];
    const how = make("p", {}, "Click a bar or press an arrow key to select an event.");
    const own = selected ? this.card(selected)
      : area.length ? [] : [how, make("pre", {}, run.head.summary)];
    return [...area, ...own, ...cards];
  }

  showTab(tab) {
    this.tab = tab;
    this.draw();
    this.drawPanel();
  }

  card(one) {
    const about = { title: "pin or unpin the card (P)", onclick: () => this.pin(one) };
    const pin = press(this.pins.some((pin) => isSame(pin, one)) ? "unpin" : "pin", about);
    return card(one.run, one.event, (target) => this.select(target, true), pin);
  }

  /** Returns the sums of the selected area, with a button that zooms to it. */
  areaCard() {
    const zoom = { title: "zoom to the area (Z)", onclick: () => this.zoomToArea() };
    const title = make("h2", {}, "Selected area ", press("zoom to it", zoom));
    return [title, ...areaTables(this.timeline, this.names)];
  }

  /** Selects the area between two times, on the rows from `first` to `last`, or on all rows. */
  selectArea(from, until, first, last) {
    const { timeline } = this;
    timeline.tape = [Math.min(from, until), Math.max(from, until)];
    timeline.box = first === undefined ? null : [Math.min(first, last), Math.max(first, last)];
    this.tab = "selection";
    this.part("live").textContent = `selected area: ${timeText(Math.abs(until - from), 4)}`;
    this.draw();
  }

  /** Makes the selected area fill the view. */
  zoomToArea() {
    const { timeline } = this;
    if (!timeline.tape) return;
    timeline.show(...timeline.tape);
    if (timeline.box) timeline.showRows(...timeline.box);
    timeline.tape = timeline.box = null;
    this.draw();
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
    const onclick = () => this.select({ run, event: flag.event }, true);
    const title = make("h2", {}, flag.kind.replaceAll("_", " "), " ");
    if (flag.event >= 0) title.append(press("show", { title: "go to the event", onclick }));
    return make("div", { class: "finding" }, title, make("p", {}, flag.text));
  }

  /** Selects an event and announces it to screen readers; if `reveals` is true, also scrolls it into view. */
  select(one, reveals = false) {
    this.timeline.selected = one;
    if (one) {
      this.which = this.runs.indexOf(one.run);
      this.part("which").value = `${this.which}`;
      if (reveals) this.timeline.reveal(one);
      if (reveals || this.timeline.head === 0) this.timeline.head = one.run.post[one.event];
      if (this.tab !== "code") this.tab = "selection";
      const { run, event } = one, facts = describe(run, event).slice(1, 4);
      const said = [run.text(event), ...facts.map((fact) => fact.join(" "))].join(", ");
      this.part("live").textContent = `rank ${run.rank[event]}: ${said}`;
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
    this.heard = (event) => this.hears(event) && this.onKey(event);
    addEventListener("keydown", this.heard, true); // before the notebook, which has keys of its own
    this.root.addEventListener("click", (event) => {
      this.closeHint();
      // After a click, the space bar plays the run, instead of pressing the button again.
      if (event.detail && event.target.closest("button:not(dialog *)")) stage.focus({ preventScroll: true });
    });
    this.listenToDivider();
    this.pointers = new Map();
    whileDragged(this.part("overview"), ({ offsetX }) => {
      timeline.centre(((offsetX - GUTTER) / (timeline.overview.width - GUTTER)) * timeline.end);
      this.draw();
    });
    this.part("tabs").addEventListener("keydown", (event) => {
      const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!by) return;
      this.tab = this.tabs[(this.tabs.indexOf(this.tab) + by + this.tabs.length) % this.tabs.length];
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
    const act = {
      fit: () => this.fit(), in: () => this.zoom(0.5), out: () => this.zoom(2),
      play: () => this.play(), before: () => this.step(false), next: () => this.step(true),
      matrix: () => this.showMatrix(!this.ring.asMatrix), theme: () => this.setTheme(!timeline.dark),
      side: () => this.toggleSide(), keys: () => this.part("help").showModal(),
      close: () => this.part("help").close(), hint: () => this.closeHint(),
    };
    for (const button of this.root.querySelectorAll("[data-act]")) button.addEventListener("click", act[button.dataset.act]);
    this.part("speed").addEventListener("input", (event) => { this.speed = Number(event.target.value); });
    this.part("by").addEventListener("change", (event) => this.groupBy(event.target.value));
    this.part("which").addEventListener("change", (event) => { this.which = Number(event.target.value); this.draw(); this.drawPanel(); });
  }

  /** Lets the divider between the timeline and the panel be dragged, or moved with arrow keys. */
  listenToDivider() {
    const divider = this.part("divider"), side = this.part("side");
    const widen = (width) => {
      const most = Math.max(LEAST_SIDE, this.root.clientWidth - LEAST_LEFT);
      const value = Math.round(Math.max(LEAST_SIDE, Math.min(width, most)));
      this.root.style.setProperty("--side", `${value}px`);
      divider.setAttribute("aria-valuenow", `${value}`);
      divider.setAttribute("aria-valuemax", `${most}`);
    };
    whileDragged(divider, ({ clientX }) => widen(side.getBoundingClientRect().right - clientX));
    divider.addEventListener("keydown", ({ key }) => {
      const by = { ArrowLeft: 24, ArrowRight: -24, Home: Infinity, End: -Infinity }[key];
      if (by) widen(side.clientWidth + by);
    });
  }

  /** Folds or unfolds the side panel. */
  toggleSide() {
    const side = this.part("side");
    side.hidden = this.part("divider").hidden = !side.hidden;
    this.part("fold").setAttribute("aria-expanded", `${!side.hidden}`);
  }

  /** Shows the hint until the reader has closed it or used the view, in this or an earlier page. */
  openHint() {
    let isKnown = false;
    try { isKnown = localStorage.getItem(HINT) !== null; } catch { /* a frame without storage */ }
    this.part("hint").hidden = isKnown;
  }

  closeHint() {
    if (this.part("hint").hidden) return;
    this.part("hint").hidden = true;
    try { localStorage.setItem(HINT, "read"); } catch { /* a frame without storage */ }
  }

  onWheel(event) {
    event.preventDefault();
    this.closeHint();
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
    timeline.hovered = null;
    this.part("tip").hidden = true;
    if (drag.mode === "move") {
      const by = (dx / (timeline.width - GUTTER)) * (drag.until - drag.from);
      timeline.show(drag.from - by, drag.until - by);
      timeline.top = drag.top;
      timeline.scroll(-dy);
      this.draw();
    } else {
      const rows = [drag.y, event.offsetY].map((y) => timeline.rowAt(Math.max(RULER, y)));
      const within = rows.map((row) => Math.min(row, timeline.rows.length - 1));
      const times = [drag.time, timeline.time(Math.max(GUTTER, event.offsetX))];
      this.selectArea(...times, ...(drag.mode === "box" ? within : []));
    }
  }

  pinch(event) {
    const { timeline } = this, places = () => [...this.pointers.values()].map((one) => one.offsetX);
    const width = ([a, b]) => Math.max(20, Math.abs(a - b)), before = width(places());
    this.pointers.set(event.pointerId, event);
    const [a, b] = places();
    timeline.zoom(before / width([a, b]), timeline.time((a + b) / 2));
    this.drag.moved = true;
    this.draw();
  }

  onUp(event) {
    const { timeline, drag } = this;
    this.pointers.delete(event.pointerId);
    if (!drag) return;
    if (this.pointers.size) return this.beginDrag([...this.pointers.values()][0]); // the remaining finger continues from here
    if (!drag.moved && drag.x < GUTTER && drag.y > RULER) timeline.unfold(timeline.rowAt(drag.y));
    else if (!drag.moved) {
      const flag = event.offsetY < RULER ? timeline.flags().find(({ x }) => Math.abs(x - event.offsetX) < 7) : null;
      timeline.tape = timeline.box = null;
      this.part("tip").hidden = true;
      if (flag) return this.select({ run: flag.run, event: flag.event }, true);
      timeline.head = Math.max(0, timeline.time(event.offsetX));
      this.select(timeline.hit(event.offsetX, event.offsetY));
    }
    this.draw();
  }

  /** Shows the short card of the bar under the pointer; a selected bar has its card in the panel. */
  hover(event) {
    const { timeline } = this, one = timeline.hit(event.offsetX, event.offsetY), tip = this.part("tip");
    const same = isSame(one, timeline.hovered);
    this.mouse = event.offsetX;
    tip.hidden = !one || isSame(one, timeline.selected);
    if (!tip.hidden) {
      if (!same) tip.textContent = shortCard(one.run, one.event).join("\n");
      this.placeTip(tip, one, event.offsetX, event.offsetY);
    }
    if (same) return;
    timeline.hovered = one;
    timeline.drawOverlay();
  }

  /** Places the short card near the pointer, where it covers neither the bar nor its other side. */
  placeTip(tip, { run, event }, x, y) {
    const { timeline } = this, other = run.partner(event), { offsetWidth, offsetHeight } = tip;
    const bars = [event, ...(other < 0 ? [] : [other])].map((i) => [
      timeline.x(run.post[i]), timeline.x(run.endOf(i)), ...timeline.placeOf(run, i),
    ]);
    const places = [14, -14 - offsetHeight].flatMap((dy) => [14, -14 - offsetWidth].map((dx) => [
      Math.max(4, Math.min(x + dx, timeline.width - offsetWidth - 4)),
      Math.max(4, Math.min(y + dy, timeline.height - offsetHeight - 4)),
    ]));
    const covers = ([left, top]) => bars.filter(([x0, x1, y0, y1]) =>
      x0 < left + offsetWidth && x1 > left && y0 < top + offsetHeight && y1 > top).length;
    const [left, top] = places.sort((a, b) => covers(a) - covers(b))[0];
    [tip.style.left, tip.style.top] = [`${left}px`, `${top}px`];
  }

  // -- keys

  /** Returns whether a key is meant for the view, and not for a field, a control or the dialog. */
  hears(event) {
    const [at] = event.composedPath(), field = "select, textarea, input:not([type=range])";
    if (this.part("help").open || at.matches?.(field) || at.isContentEditable) return false;
    const control = at.closest?.("button, a, input, summary, [tabindex]");
    const isLetter = event.key.length === 1 && event.key !== " ";
    return isLetter || event.key === "Escape" || !control || control === this.part("stage");
  }

  onKey(event) {
    const { timeline } = this, grows = event.shiftKey;
    const act = {
      w: () => this.zoom(0.7), s: () => this.zoom(1 / 0.7), a: () => this.pan(-0.15),
      d: () => this.pan(0.15), f: () => this.fit(), z: () => this.zoomToArea(),
      "+": () => timeline.setRowHeight(timeline.rowHeight * 1.25),
      "-": () => timeline.setRowHeight(timeline.rowHeight / 1.25),
      c: () => this.toggle("critical_path"), b: () => this.toggle("bubble"),
      p: () => timeline.selected && this.pin(timeline.selected), m: () => this.setMark(),
      " ": () => this.play(), ",": () => this.step(false), ".": () => this.step(true),
      u: () => timeline.unfold(timeline.selectedRow()),
      "/": () => this.part("search").focus(), "?": () => this.part("help").showModal(),
      q: () => this.toggleSide(), escape: () => this.clear(), enter: () => this.goAcross(),
      arrowright: () => this.walk(1, grows), arrowleft: () => this.walk(-1, grows),
      arrowdown: () => this.changeRow(1, grows), arrowup: () => this.changeRow(-1, grows),
      home: () => this.walk(-Infinity, grows), end: () => this.walk(Infinity, grows),
      pagedown: () => timeline.scroll(timeline.height - RULER),
      pageup: () => timeline.scroll(RULER - timeline.height),
    }[event.key.toLowerCase()];
    if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    event.stopImmediatePropagation();
    this.closeHint();
    act();
    this.draw();
  }

  setMark() {
    this.timeline.notes.push(this.timeline.head);
    this.names.set("your_mark", [LOOKS.mark.your_mark.name]);
    this.drawLegend();
  }

  zoom(factor) {
    const { timeline } = this;
    timeline.zoom(factor, this.mouse > GUTTER ? timeline.time(this.mouse) : undefined);
    this.draw();
  }

  pan(share) {
    const { timeline } = this, by = share * (timeline.until - timeline.from);
    timeline.show(timeline.from + by, timeline.until + by);
    this.draw();
  }

  fit() {
    this.timeline.fit();
    this.timeline.hasOwnHeight = false;
    this.layOut();
  }

  clear() {
    Object.assign(this.timeline, { selected: null, tape: null, box: null, notes: [] });
    this.part("search").value = "";
    this.search("");
  }

  /** Extends the selected area, so that it contains two events. */
  extend(...events) {
    const { tape, box } = this.timeline, rows = box ?? [];
    const times = events.flatMap(({ run, event }) => [run.post[event], run.endOf(event)]);
    const own = events.map(({ run, event }) => this.timeline.rowOf(run, run.rank[event]));
    const ends = (list) => [Math.min(...list), Math.max(...list)];
    this.selectArea(...ends([...(tape ?? []), ...times]), ...ends([...rows, ...own]));
  }

  /** Moves the selection along the events of its rank. */
  walk(by, grows = false) {
    const { timeline } = this, one = timeline.selected;
    if (!one) return this.changeRow(0);
    const { run } = one, rank = run.rank[one.event];
    // the program's own time is between two events
    const from = one.event < run.size ? one.event : run.before[one.event - run.size] + (by < 0);
    const event = Math.min(Math.max(run.first[rank], from + by), run.first[rank + 1] - 1);
    this.select({ run, event }, true);
    if (grows) this.extend(one, { run, event });
  }

  /** Selects the event that is current at the same time on the rank above or below. */
  changeRow(by, grows = false) {
    const { timeline } = this, one = timeline.selected;
    const row = one ? timeline.rowOf(one.run, one.run.rank[one.event]) + by : timeline.rowAt(RULER);
    const target = timeline.rows[row];
    if (!target || target.run.first[target.rank] === target.run.first[target.rank + 1]) return;
    const time = one ? one.run.post[one.event] : timeline.from, { run, rank } = target;
    const posts = run.post.subarray(run.first[rank], run.first[rank + 1]);
    const event = run.first[rank] + Math.max(0, firstAbove(posts, time + 1) - 1);
    this.select({ run, event }, true);
    if (grows && one) this.extend(one, { run, event });
  }

  goAcross() {
    const { run, event } = this.timeline.selected ?? {}, other = run ? run.partner(event) : -1;
    if (other >= 0) this.select({ run, event: other }, true);
  }

  // -- search

  search(text) {
    const { test, unknown } = parseSearch(text), isOn = text.trim() && !unknown;
    const marks = (run) => new Uint8Array(run.size).map((_, event) => test(run, event));
    const found = new Map(isOn ? this.runs.map((run) => [run, marks(run)]) : []);
    this.timeline.found = isOn ? found : null;
    let hits = 0;
    for (const own of found.values()) hits = own.reduce((sum, one) => sum + one, hits);
    const said = unknown ? `no field ${unknown}. Fields: ${FIELDS.join(", ")}`
      : `${hits.toLocaleString("en")} found`;
    this.part("hits").textContent = text.trim() ? said : "";
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
    const [sign, name] = this.playing ? ["❚❚", "pause"] : ["▶", "play"], button = this.part("play");
    [button.textContent, button.ariaLabel, button.title] = [sign, name, `${name} (space)`];
    cancelAnimationFrame(this.moving); // otherwise a pending frame would continue in parallel
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
      this.code.update();
      if (timeline.head >= Math.min(timeline.until, timeline.end)) return this.play();
      this.moving = requestAnimationFrame(tick);
    };
    this.moving = requestAnimationFrame(tick);
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
    const isIn = timeline.head >= timeline.from && timeline.head <= timeline.until;
    if (!isIn) timeline.centre(timeline.head);
    this.draw();
  }
}

/** Calls `move(event)` while an element is dragged. */
function whileDragged(element, move) {
  element.addEventListener("pointerdown", (event) => {
    element.setPointerCapture(event.pointerId);
    element.onpointermove = move;
    element.onpointerup = () => { element.onpointermove = null; };
    move(event);
  });
}

/** Returns whether two selections are the same event. */
function isSame(one, other) { return one?.run === other?.run && one?.event === other?.event; }
