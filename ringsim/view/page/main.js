// Handles the pointer, the wheel, keys, searching and playing. Subclasses keep the view's state.

const SPEEDS = [0.1, 0.2, 0.5, 1, 2, 5]; // windows per ten seconds
const CALM_MS = 700; // the pause between messages if the reader prefers reduced motion
const MOST_AT_ONCE = 20000; // of larger runs, the traffic is added up only once the view settles
const ZOOM = 0.65; // the visible time after zooming in, as a share of the time before
const STAGE = ["wheel", "pointerdown", "pointermove", "pointerup", "pointerleave"]; // events
const HINT = "ringsim-hint"; // the name under which a browser remembers that the hint was read
const SHORTCUTS = { bubble: " (B)", critical_path: " (C)" }; // in the legend

class View {
  constructor(root, runs) {
    const part = (name) => root.querySelector(`[data-part="${name}"]`);
    root.classList.add("ready");
    Object.assign(this, { root, runs, part });
    this.timeline = new Timeline(part("bars"), part("overlay"), part("overview"), runs);
    this.ring = new RingPicture(part("ring"), this.timeline, part("search"));
    const flags = runs.flatMap((run) => run.flags);
    // a run with a fault is first shown at its end
    if (flags.some(({ look }) => look === "problem")) this.timeline.head = this.timeline.end;
    this.which = 0; // the run that the panels show
    this.code = new CodePanel(this);
    this.tab = flags.length ? "findings" : "selection";
    this.describeRuns();
    this.showMatrix(this.ring.asMatrix);
    this.listen();
    new ResizeObserver(() => this.layOut()).observe(part("stage"));
  }

  open(dark, tab) {
    this.setTheme(dark);
    this.layOut();
    try {
      this.memory = localStorage;
    } catch {
      this.memory = {}; // a frame without storage
    }
    this.part("hint").hidden = HINT in this.memory;
    this.restore();
    this.drawLegend(); // some of it may be hidden now
    if (tab) this.showTab(tab);
    return this;
  }

  remember() {}
  restore() { this.draw(); }

  describeRuns() {
    const { root, runs, timeline, part } = this;
    const heads = runs.map(({ head }, number) => {
      const name = runs.length > 1 ? `${LETTERS[number]}: ` : "";
      const early = head.begin ? ` · started ${timeText(head.begin)} before the first event` : "";
      return name + head.title + early;
    });
    const sources = new Set(runs.map(({ head }) => head.source));
    part("source").textContent = [...heads, ...sources].join(" · ");
    const names = runs.map((_, number) => new Option(`run ${LETTERS[number]}`, number));
    part("which").replaceChildren(...names);
    const groupings = ["rank", ...timeline.groupings()];
    part("by").replaceChildren(...groupings.map((by) => new Option(`rows by ${by}`, by)));
    root.querySelector("#tab-code").hidden = !this.code.exists;
    this.tabs = [...root.querySelectorAll("[role=tab]:not([hidden])")];
  }

  /** Stops all timers, before a new view replaces this one. */
  close() {
    this.closed = true;
    this.playing = false;
    clearTimeout(this.later);
    for (const frame of [this.waiting, this.moving]) cancelAnimationFrame(frame);
    removeEventListener("keydown", this.heard, true);
    return this;
  }

  /** Returns the names of everything that is drawn in the runs, by their keys in LOOKS. */
  drawnNames() {
    const { timeline, runs } = this;
    const isDrawn = {
      bubble: runs.some((run) => run.head.steps.length),
      critical_path: runs.some((run) => run.size > run.marks.length),
      message: runs.some((run) => run.columns.partner.some(Boolean)),
      across: runs.some((run) => run.hosts),
      mark: runs.some((run) => run.marks.length),
      your_mark: true,
      recorded: timeline.ghost,
    };
    for (const { look, event } of runs.flatMap((run) => run.flags)) isDrawn[look] ||= event >= 0;
    const lags = timeline.lags.flatMap(([, late]) => [...late]);
    for (const lag of lags) isDrawn[lagKey(lag, runs[1])] = true;
    const all = Map.groupBy(runs.flatMap((run) => run.drawnNames()), ([state]) => state);
    const bars = STATE_KEYS.map((key, state) =>
      [key, new Set(all.get(state)?.map(([, name]) => name))]);
    const marks = Object.keys({ ...LOOKS.mark, ...LOOKS.comparison })
      .filter((key) => isDrawn[key]).map((key) => [key, new Set([MEANINGS[key].name])]);
    return new Map([...bars, ...marks].filter(([, names]) => names.size));
  }

  drawLegend() {
    const { hidden, ink, colourOf, notes } = this.timeline;
    this.names ??= this.drawnNames();
    const entry = ([key, names]) => {
      const { glyph, texture } = MEANINGS[key];
      const colour = key === "step" ? ink : colourOf[key];
      const swatch = make("span", { class: "swatch", "aria-hidden": "true" },
        glyph || texture || "\u00a0");
      if (!glyph) swatch.style.backgroundColor = colour;
      swatch.style.color = glyph ? colour : INKS[colour];
      const all = [...names].join(", "), few = [...names].slice(0, 2).join(", ");
      return press(swatch, {
        "data-key": key, "aria-pressed": `${!hidden.has(key)}`,
        title: `show or hide: ${all}${SHORTCUTS[key] ?? ""}`,
      }, ` ${names.size > 3 ? `${few}, …` : all}`);
    };
    const shown = [...this.names].filter(([key]) => key !== "your_mark" || notes.length);
    this.part("legend").replaceChildren(...shown.map(entry));
  }

  toggle(key) {
    const { hidden } = this.timeline;
    if (!hidden.delete(key)) hidden.add(key);
    for (const entry of this.part("legend").children) {
      entry.ariaPressed = `${!hidden.has(entry.dataset.key)}`;
    }
  }

  showMatrix(yes) {
    this.ring.asMatrix = yes;
    this.part("matrix").ariaPressed = `${yes}`;
    this.draw();
  }

  groupBy(by) {
    this.part("by").value = by;
    this.timeline.groupBy(by);
    this.timeline.scroll(0);
    this.draw();
  }

  setTheme(dark) {
    const around = [this.root, this.root.parentElement.closest(".explorer")].filter(Boolean);
    for (const element of around) element.dataset.theme = dark ? "dark" : "light";
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
    if (this.waiting || this.later) return;
    const { timeline } = this, stop = performance.now() + 8;
    while (timeline.pyramids.some((pyramid) => pyramid.refine())) {
      if (performance.now() > stop) return setTimeout(() => this.refine());
    }
    timeline.draw();
  }

  drawPanel() {
    const { tab } = this, panel = this.part("panel");
    for (const button of this.part("tabs").children) {
      const isChosen = button.textContent === tab;
      button.ariaSelected = `${isChosen}`;
      button.tabIndex = isChosen ? 0 : -1;
    }
    panel.setAttribute("aria-labelledby", `tab-${tab}`);
    const { timeline } = this, { from, until, end } = timeline, { clientWidth } = panel;
    const run = this.runs[this.which], traffic = this.ring.traffic(this.which);
    const show = {
      selection: () => this.cards(run),
      findings: () => this.findings(run),
      statistics: () => [
        statisticsTable(run, Math.max(0, from), Math.min(end, until)),
        edgesTable(traffic.edges(from, until)),
      ],
      bandwidth: () => bandwidthPanel(timeline, run, clientWidth),
      steps: () => stepsPanel(timeline, run, clientWidth),
      table: () => [visibleTable(timeline)],
    };
    if (tab === "code") this.code.show(panel);
    else panel.replaceChildren(...show[tab]());
  }

  showTab(tab) {
    this.tab = tab;
    this.draw();
    this.drawPanel();
  }

  findings(run) {
    const found = run.flags.map(({ kind, event, text }) => {
      const about = { title: "go to the event", onclick: () => this.select({ run, event }, true) };
      const show = event < 0 ? "" : press("show", about);
      const title = make("h2", {}, kind.replaceAll("_", " "), " ", show);
      return make("div", {}, title, make("p", {}, text));
    });
    const all = [...found, ...run.head.notes.map((note) => make("p", {}, note))];
    return all.length ? all : [make("p", {}, "Nothing wrong was found in this run.")];
  }

  cards(run) {
    const { tape, selected, pins } = this.timeline;
    const zoom = press("zoom to it", { title: "zoom to the area (Z)", "data-act": "z" });
    const title = make("h2", {}, "Selected area ", zoom);
    const area = tape ? [title, ...areaTables(this.timeline, this.names)] : [];
    const how = make("p", {}, "Click a bar or press an arrow key to select an event.");
    const about = selected || tape ? [] : [how, make("pre", {}, run.head.summary)];
    const others = pins.filter((pin) => !isSame(pin, selected));
    const cards = (selected ? [selected, ...others] : others).flatMap((one) => {
      const name = pins.some((pin) => isSame(pin, one)) ? "unpin" : "pin";
      const pin = { title: "pin or unpin the card (P)", onclick: () => this.pin(one) };
      return card(one.run, one.event, (other) => this.select(other, true), press(name, pin));
    });
    return [...area, ...about, ...cards];
  }

  pin(one) {
    const { timeline } = this, rest = timeline.pins.filter((pin) => !isSame(pin, one));
    timeline.pins = rest.length < timeline.pins.length ? rest : [...rest, one];
    this.tab = "selection";
    this.draw();
  }

  /** Selects the area that contains some times and rows; without rows, on all rows. */
  selectArea(times, rows) {
    const { timeline } = this, ends = (list) => [Math.min(...list), Math.max(...list)];
    timeline.tape = ends(times);
    timeline.box = rows.length ? ends(rows) : null;
    this.tab = "selection";
    const [from, until] = timeline.tape;
    this.part("live").textContent = `selected area: ${timeText(until - from, 4)}`;
    this.draw();
  }

  /** Selects an event and announces it; if `reveals` is true, also scrolls it into view. */
  select(one, reveals = false) {
    const { timeline } = this;
    timeline.selected = one;
    if (one) {
      const { run, event } = one, facts = describe(run, event).slice(1, 4);
      this.which = this.runs.indexOf(run);
      this.part("which").value = this.which;
      if (reveals) timeline.reveal(one);
      if (reveals || timeline.head === 0) timeline.head = run.post[event];
      if (this.tab !== "code") this.tab = "selection";
      const said = [run.text(event), ...facts.map((fact) => fact.join(" "))].join(", ");
      this.part("live").textContent = `rank ${run.rank[event]}: ${said}`;
    }
    this.draw();
  }

  listen() {
    const { root, timeline, part } = this;
    const [search, tabs, stage] = ["search", "tabs", "stage"].map(part);
    this.pointers = new Map(); // those that are down, by number
    stage.onpointercancel = () => this.pointers.clear();
    this.actions = this.findActions();
    for (const type of STAGE) stage.addEventListener(type, (event) => this[type](event));
    this.heard = (event) => this.hears(event) && this.onKey(event);
    addEventListener("keydown", this.heard, true); // before the notebook, which has keys of its own
    root.onclick = (event) => this.onClick(event);
    search.oninput = () => this.search(search.value);
    search.onkeydown = (event) => {
      event.stopPropagation();
      if (event.key === "Enter") this.nextHit(event.shiftKey ? -1 : 1);
      if (event.key !== "Escape") return;
      this.search("");
      stage.focus();
    };
    tabs.onkeydown = ({ key, target }) => {
      const at = this.tabs.indexOf(target), by = { ArrowRight: 1, ArrowLeft: -1 }[key];
      const next = by && this.tabs.at((at + by) % this.tabs.length);
      next?.focus();
      next?.click();
    };
    part("by").onchange = ({ target }) => this.groupBy(target.value);
    part("which").onchange = ({ target }) => {
      this.which = Number(target.value);
      this.showTab(this.tab);
    };
    whileDragged(part("overview"), ({ offsetX }) => {
      timeline.centre(((offsetX - GUTTER) / (timeline.overview.width - GUTTER)) * timeline.end);
      this.draw();
    });
    this.listenToDivider();
  }

  onClick(event) {
    const button = event.target.closest("button"), { act, key } = button?.dataset ?? {};
    this.closeHint();
    if (act) this.actions[act](event.shiftKey);
    if (key) this.toggle(key);
    if (button?.role === "tab") this.showTab(button.textContent);
    if (act || key) this.draw();
    // After a click, the space bar plays the run, instead of pressing the button again.
    const isInDialog = button?.closest("dialog");
    if (event.detail && button && !isInDialog) this.part("stage").focus({ preventScroll: true });
  }

  listenToDivider() {
    const divider = this.part("divider"), side = this.part("side");
    const widen = (width) => {
      this.root.style.setProperty("--side", `${Math.max(0, width)}px`); // the style has limits
      divider.ariaValueNow = side.offsetWidth;
      divider.ariaValueMax = this.root.clientWidth;
    };
    whileDragged(divider, ({ clientX }) => widen(side.getBoundingClientRect().right - clientX));
    divider.onkeydown = ({ key }) => {
      const by = { ArrowLeft: 24, ArrowRight: -24, Home: 9999, End: -9999 }[key];
      if (by) widen(side.offsetWidth + by);
    };
  }

  closeHint() {
    const hint = this.part("hint");
    if (hint.hidden) return;
    hint.hidden = true;
    this.memory[HINT] = "read";
  }

  wheel(event) {
    event.preventDefault();
    this.closeHint();
    const { timeline } = this, { deltaX, deltaY, ctrlKey, metaKey, shiftKey } = event;
    const by = deltaY || deltaX, isSideways = shiftKey || Math.abs(deltaX) > Math.abs(deltaY);
    const scrolls = timeline.rows.length * timeline.rowHeight > timeline.height - RULER;
    if (ctrlKey || metaKey || !(isSideways || scrolls)) {
      timeline.zoom(Math.exp(by * 0.002), timeline.time(Math.max(GUTTER, event.offsetX)));
    } else if (isSideways) timeline.pan(timeline.span * (by / timeline.width) * 0.7);
    else timeline.scroll(deltaY);
    this.draw();
  }

  pointerdown(event) {
    const { offsetX: x, offsetY: y, pointerId, shiftKey, currentTarget } = event;
    const mode = y < RULER ? "measure" : shiftKey ? "box" : "move";
    this.drag = { x, y, mode, time: this.timeline.time(x), moved: false };
    this.pointers.set(pointerId, event);
    currentTarget.setPointerCapture(pointerId);
  }

  pointermove(event) {
    const { timeline, drag, pointers } = this, { pointerId, offsetX, offsetY } = event;
    const before = [...pointers.values()];
    if (!pointers.has(pointerId)) return this.hover(event);
    drag.moved ||= pointers.size > 1 || Math.hypot(offsetX - drag.x, offsetY - drag.y) > 4;
    if (!drag.moved) return;
    pointers.set(pointerId, event);
    this.pointerleave();
    if (drag.mode === "move" || pointers.size > 1) this.move(before, [...pointers.values()]);
    else {
      const last = timeline.rows.length - 1, end = Math.max(GUTTER, offsetX);
      const rowAt = (y) => Math.min(timeline.rowAt(Math.max(RULER, y)), last);
      const rows = drag.mode === "box" ? [rowAt(drag.y), rowAt(offsetY)] : [];
      this.selectArea([drag.time, timeline.time(end)], rows);
    }
    this.draw();
  }

  /** Moves the window as far as one or two pointers have moved, and zooms as they part or meet. */
  move(before, after) {
    const { timeline } = this, middle = (all, side) => sumOf(all, (one) => one[side]) / all.length;
    const [last, now] = [before, after].map((all) => timeline.time(middle(all, "offsetX")));
    const width = ([one, other]) => Math.max(20, Math.abs(one.offsetX - other.offsetX));
    timeline.pan(last - now);
    if (after.length > 1) timeline.zoom(width(before) / width(after), last);
    timeline.scroll(middle(before, "offsetY") - middle(after, "offsetY"));
  }

  pointerup({ pointerId, offsetX, offsetY }) {
    const { timeline, pointers } = this;
    if (!pointers.delete(pointerId) || pointers.size || this.drag.moved) return;
    const flags = offsetY < RULER ? timeline.flags() : [];
    const flag = flags.find(({ x }) => Math.abs(x - offsetX) < 7);
    if (offsetX < GUTTER && offsetY > RULER) timeline.unfold(timeline.rowAt(offsetY));
    else {
      timeline.tape = timeline.box = null;
      this.part("tip").hidden = true;
      if (!flag) timeline.head = Math.max(0, timeline.time(offsetX));
      this.select(flag ?? timeline.hit(offsetX, offsetY), Boolean(flag));
    }
    this.draw();
  }

  pointerleave() {
    this.timeline.hovered = null;
    this.part("tip").hidden = true;
  }

  /** Shows the short card of the bar under the pointer; the panel has that of a selected bar. */
  hover({ offsetX, offsetY }) {
    const { timeline } = this, one = timeline.hit(offsetX, offsetY), tip = this.part("tip");
    const isOld = isSame(one, timeline.hovered);
    timeline.mouse = offsetX;
    tip.hidden = !one || isSame(one, timeline.selected);
    if (!tip.hidden) {
      tip.textContent = shortCard(one.run, one.event).join("\n");
      const [top, bottom] = timeline.placeOf(one.run, one.event), tall = tip.offsetHeight + 6;
      const y = bottom + tall < timeline.height ? bottom + 6 : top - tall; // not on the bar
      const x = Math.min(offsetX + 14, timeline.width - tip.offsetWidth - 4);
      Object.assign(tip.style, { left: `${x}px`, top: `${Math.max(4, y)}px` });
    }
    timeline.hovered = one;
    if (!isOld) timeline.drawOverlay();
  }

  /** Returns whether a key is meant for the view, and not for a field, a control or the dialog. */
  hears(event) {
    const [at] = event.composedPath(), field = "select, textarea, input:not([type=range])";
    if (this.part("help").open || at.matches?.(field) || at.isContentEditable) return false;
    const control = at.closest?.("button, a, input, summary, [tabindex]");
    const isLetter = event.key.length === 1 && event.key !== " ";
    return isLetter || event.key === "Escape" || !control || control === this.part("stage");
  }

  /** Returns what keys and buttons do, by key or name; they get whether Shift is pressed. */
  findActions() {
    const { timeline, part } = this, fold = part("fold");
    const grow = (by) => timeline.setRowHeight(timeline.rowHeight * by);
    const goAcross = () => {
      const { run, event } = timeline.selected ?? {}, other = run?.partner(event) ?? -1;
      if (other >= 0) this.select({ run, event: other }, true);
    };
    return {
      w: () => timeline.zoom(ZOOM), s: () => timeline.zoom(1 / ZOOM),
      a: () => timeline.pan(-0.15 * timeline.span), d: () => timeline.pan(0.15 * timeline.span),
      f: () => timeline.fitAll(), z: () => timeline.zoomToArea(),
      "+": () => grow(1.25), "-": () => grow(1 / 1.25),
      c: () => this.toggle("critical_path"), b: () => this.toggle("bubble"),
      p: () => timeline.selected && this.pin(timeline.selected),
      m: () => timeline.notes.push(timeline.head) && this.drawLegend(),
      u: () => timeline.unfold(timeline.selectedRow(timeline.height / 2)),
      " ": () => this.play(), ",": () => this.step(false), ".": () => this.step(true),
      "/": () => part("search").focus(),
      "?": () => part("help").showModal(), close: () => part("help").close(),
      q: () => { fold.ariaExpanded = `${fold.ariaExpanded !== "true"}`; },
      escape: () => this.clear(), enter: goAcross,
      arrowright: (grows) => this.walk(1, grows), arrowleft: (grows) => this.walk(-1, grows),
      arrowdown: (grows) => this.changeRow(1, grows), arrowup: (grows) => this.changeRow(-1, grows),
      end: (grows) => this.walk(Infinity, grows), home: (grows) => this.walk(-Infinity, grows),
      pagedown: () => timeline.scroll(timeline.height - RULER),
      pageup: () => timeline.scroll(RULER - timeline.height),
      back: () => this.nextHit(-1), on: () => this.nextHit(1),
      matrix: () => this.showMatrix(!this.ring.asMatrix),
      theme: () => this.setTheme(!timeline.dark),
    };
  }

  onKey(event) {
    const act = this.actions[event.key.toLowerCase()];
    if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    event.stopImmediatePropagation();
    this.closeHint();
    act(event.shiftKey);
    this.draw();
  }

  clear() {
    Object.assign(this.timeline, { selected: null, tape: null, box: null, notes: [] });
    this.search("");
    this.drawLegend();
  }

  /** Selects an event and, if `grows` is true, extends the selected area to it. */
  goTo(one, grows) {
    const { timeline } = this, { selected, tape, box } = timeline;
    this.select(one, true);
    if (!grows || !selected) return;
    const both = [selected, one];
    const times = both.flatMap(({ run, event }) => [run.post[event], run.endOf(event)]);
    const rows = both.map(({ run, event }) => timeline.rowOf(run, run.rank[event]));
    this.selectArea([...(tape ?? []), ...times], [...(box ?? []), ...rows]);
  }

  walk(by, grows) {
    const { run, event } = this.timeline.selected ?? {};
    if (!run) return this.changeRow(0);
    const { rank: { [event]: rank }, first, size } = run;
    // the program's own time is between two events
    const from = event < size ? event : run.before[event - size] + (by < 0);
    const to = Math.min(Math.max(first[rank], from + by), first[rank + 1] - 1);
    this.goTo({ run, event: to }, grows);
  }

  /** Selects the event that is current at the same time on the rank above or below. */
  changeRow(by, grows) {
    const { timeline } = this, one = timeline.selected;
    const { run, rank } = timeline.rows[timeline.selectedRow(RULER) + (one ? by : 0)] ?? {};
    if (!run || run.first[rank] === run.first[rank + 1]) return;
    const time = one ? one.run.post[one.event] : timeline.from;
    const posts = run.post.subarray(run.first[rank], run.first[rank + 1]);
    const before = Math.max(0, firstAbove(posts, time + 1) - 1);
    this.goTo({ run, event: run.first[rank] + before }, grows);
  }

  search(text) {
    const { test, unknown } = parseSearch(text), isOn = text.trim() && !unknown;
    const marks = (run) => new Uint8Array(run.size).map((_, event) => test(run, event));
    const found = new Map(isOn ? this.runs.map((run) => [run, marks(run)]) : []);
    const hits = sumOf([...found.values()], (own) => sumOf(own));
    const said = unknown ? `no field ${unknown}. Fields: ${[...FIELDS.keys()].join(", ")}`
      : `${hits.toLocaleString("en")} found`;
    this.part("search").value = text;
    this.part("hits").textContent = text.trim() ? said : "";
    this.timeline.found = isOn ? found : null;
    this.draw();
  }

  /** Selects the next or previous hit in time order; the first hit follows the last. */
  nextHit(by) {
    const { runs, timeline: { found, selected } } = this, place = ({ run }) => runs.indexOf(run);
    const order = (one, other) => by * (one.run.post[one.event] - other.run.post[other.event]
      || place(one) - place(other) || one.event - other.event);
    const isPast = (one) => Boolean(selected) && order(one, selected) <= 0;
    const isNearer = (one, other) => (isPast(one) - isPast(other) || order(one, other)) < 0;
    let next = null;
    for (const [run, marks] of found ?? []) {
      for (let event = marks.indexOf(1); event >= 0; event = marks.indexOf(1, event + 1)) {
        if (!next || isNearer({ run, event }, next)) next = { run, event };
      }
    }
    if (next) this.select(next, true);
  }

  play() {
    const { timeline } = this, { from, until, head } = timeline;
    this.playing = !this.playing;
    const [textContent, ariaLabel] = this.playing ? ["❚❚", "pause"] : ["▶", "play"];
    const title = `${ariaLabel} (space)`;
    Object.assign(this.part("play"), { textContent, ariaLabel, title });
    cancelAnimationFrame(this.moving); // otherwise a pending frame would continue in parallel
    if (!this.playing) return;
    if (head < from || head >= Math.min(until, timeline.end)) timeline.head = Math.max(0, from);
    this.playOn(performance.now());
  }

  /** Moves the playhead at each frame or, for readers who want no motion, to the next message. */
  playOn(last) {
    this.moving = requestAnimationFrame((now) => {
      const { timeline } = this, { head, span } = timeline;
      const speed = SPEEDS[this.part("speed").value];
      const isCalm = matchMedia("(prefers-reduced-motion: reduce)").matches;
      if (isCalm && now < this.pause) return this.playOn(now);
      this.pause = now + CALM_MS / speed;
      if (isCalm) this.step(true);
      else timeline.head += ((now - last) / 10000) * speed * span;
      timeline.drawOverlay();
      this.ring.draw(this.which);
      this.code.update();
      const isOver = isCalm ? timeline.head === head
        : timeline.head >= Math.min(timeline.until, timeline.end);
      if (isOver) this.play(); else this.playOn(now);
    });
  }

  step(forward) {
    const { timeline } = this;
    timeline.head = this.ring.traffic(this.which).step(timeline.head, forward);
    const { head, from, until } = timeline;
    if (head < from || head > until) timeline.centre(head);
    this.draw();
  }
}

function whileDragged(element, move) {
  element.onpointermove = (event) => element.hasPointerCapture(event.pointerId) && move(event);
  element.onpointerdown = (event) => {
    element.setPointerCapture(event.pointerId);
    move(event);
  };
}

function isSame(one, other) { return one?.run === other?.run && one?.event === other?.event; }
