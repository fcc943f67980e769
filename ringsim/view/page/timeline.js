// Draws ranks as rows, with a ruler above, the whole run below, and the selection on top.

const [GUTTER, RULER] = [92, 34]; // the space for names left of the rows, and for times above them
const FOLDED_ROW = 14; // if ranks would be lower than 5 pixels, several share a row this high
const [MOST_ODD, STRIPS] = [12, 12]; // the most ranks with a row of their own; overview strips
// the least heights of rows: of all, of those with brackets of steps, and with two lines of names
const [LEAST_ROW, LEAST_STEPS, TWO_LINES] = [3, 16, 28];
// the kinds of findings in runs that finished
const SLOW_KINDS = new Set(["link", "slow_link", "late_sender", "late_receiver", "straggler"]);
const [MOST_ARROWS, MOST_NAMES] = [400, 1000]; // more would look like a grey area
const MOST_CROSSED = 24; // with more rows in view, only arrows of the rank under the pointer
const MOST_MARKS = 5000; // the most marks that are drawn at the same time
const MOST_BARS = 10000; // with more events in view, bins are drawn instead of single bars
const MOST_PIXELS = 4e6; // the most pixels of the canvas; a larger screen gets larger pixels
const MEANINGS = Object.assign({}, ...Object.values(LOOKS)); // the look of each meaning, by key
const TEXTURES = { // whether a pixel belongs to a line of the texture
  "/": (x, y) => (x + y) % 6 === 0, "\\": (x, y) => (x - y) % 6 === 0,
  "|": (x) => x % 5 === 0, "-": (x, y) => y % 4 === 0,
  "+": (x, y) => x % 6 === 0 || y % 6 === 0, ".": (x, y) => x % 5 === 0 && y % 5 === 0,
  x: (x, y) => (x + y) % 8 === 0 || (x - y) % 8 === 0,
};

/** Returns a mixture of two colours "#rrggbb" as a pixel; a `share` of 255 is the pure colour. */
function pixel(colour, ground, share = 255) {
  const over = parseInt(colour.slice(1), 16), under = parseInt(ground.slice(1), 16);
  const mix = (shift) => {
    const high = (over >> shift) & 255, low = (under >> shift) & 255;
    return Math.round(low + ((high - low) * share) / 255);
  };
  return ((255 << 24) | (mix(0) << 16) | (mix(8) << 8) | mix(16)) >>> 0;
}

function path(look, d) { return `<path class="${look}" d="${d}"/>`; }
function box(x0, x1, y0, y1) { return `M${x0},${y0}H${x1}V${y1}H${x0}Z`; }

/** Draws runs on one axis; `overlay` is an SVG group for what changes with the pointer. */
class Timeline {
  constructor(canvas, overlay, overview, runs) {
    Object.assign(this, { canvas, overlay, overview, runs });
    this.pyramids = runs.map((run) => new Pyramid(run));
    this.end = Math.max(...runs.map((run) => run.end));
    this.begin = Math.min(0, ...runs.map((run) => run.begin)); // marks may precede the first event
    this.top = 0;
    this.unfolded = new Set(); // the keys of rows of several ranks that are shown rank by rank
    const [, second] = runs.length === 2 ? runs : [];
    this.ghost = second?.head.predicted ? runs[0] : null;
    // for two runs, by rank, the ends of events in the second, and how much later they are
    this.lags = second?.head.counts.map((_, rank) => second.rowsOf("lags", rank)) ?? [];
    this.fit();
    this.hidden = new Set(["critical_path"]); // keys of MEANINGS
    this.groupBy("rank");
    this.selected = this.hovered = null; // {run, event}
    this.pins = []; // the events of pinned cards
    this.head = 0; // the playhead's time
    this.tape = null; // the time range [from, until] of the selected area
    this.box = null; // the first and the last row of the selected area, or null for all rows
    this.notes = []; // the times of the user's marks
    this.found = null; // the hits of a search: for each run, an array with 1 for each hit
  }

  groupings() { return ["stage", "host"].filter((by) => this.runs.some((run) => run[`${by}s`])); }

  /** Sorts the rows by "rank", "stage" or "host", so that a group's ranks are together. */
  groupBy(by) {
    this.grouping = by;
    const groupOf = (run, rank) => (by === "rank" ? 0 : run[`${by}s`]?.[rank] ?? -1);
    this.all = this.runs.flatMap((run, number) => (run === this.ghost ? []
      : run.head.counts.map((_, rank) => ({ run, number, rank, group: groupOf(run, rank) }))));
    // as an unsigned number, -1 comes last
    this.all.sort((one, other) => (one.group >>> 0) - (other.group >>> 0)
      || one.rank - other.rank || one.number - other.number);
    this.fold();
  }

  /** Puts neighbouring ranks into one row if there are too many, except ranks unlike the others. */
  fold() {
    const room = (this.height ?? 600) - RULER, { all } = this;
    const most = Math.max(4, room / FOLDED_ROW - MOST_ODD);
    const size = 2 ** Math.ceil(Math.log2(all.length / most));
    for (const row of all) row.part = `${row.number} ${row.group} ${Math.floor(row.rank / size)}`;
    const isAlone = (row) =>
      all.length * 5 <= room || this.isOdd(row) || this.unfolded.has(row.part);
    const rows = Map.groupBy(all, (row) => (isAlone(row) ? row : row.part));
    this.rows = [...rows.values()].map((own, place) =>
      ({ ...own[0], place, ranks: own.map(({ rank }) => rank) }));
    this.places = this.runs.map((run) => new Int32Array(run.ranks));
    for (const { place, number, ranks } of this.rows) {
      for (const rank of ranks) this.places[number][rank] = place;
    }
    if (this.ghost) this.places[0] = this.places[1];
  }

  /** Shows the ranks of a row one by one or, if they are shown so, in one row. */
  unfold(place) {
    const { part } = this.rows[place] ?? {};
    if (!this.unfolded.delete(part)) this.unfolded.add(part);
    this.resize();
  }

  /** Returns the row of the selection or, without one, the row at a height. */
  selectedRow(y) {
    const { run, event } = this.selected ?? {};
    return run ? this.rowOf(run, run.rank[event]) : this.rowAt(y);
  }

  /** Returns whether a rank is unlike most others, and one of the few that are most so. */
  isOdd({ run, rank }) {
    const { odd } = run.head;
    run.oddest ??= [...odd.keys()].sort((one, other) => odd[other] - odd[one]).slice(0, MOST_ODD);
    return odd[rank] > 1 && run.oddest.includes(rank);
  }

  setTheme(dark) {
    const looks = Object.entries(MEANINGS), theme = dark ? "dark" : "light";
    const colourOf = Object.fromEntries(looks.map(([key, look]) => [key, look[theme]]));
    const { ground, field: stripe, ink, muted, running } = colourOf;
    Object.assign(this, { dark, colourOf, ground, stripe, ink, muted, running });
    this.colours = STATE_KEYS.map((key) => colourOf[key]);
    this.textures = this.colours.map((colour) => pixel(INKS[colour], colour, 100));
    this.pixels = [ground, stripe].map((under) => this.colours.map((colour) =>
      Uint32Array.from({ length: 256 }, (_, share) => pixel(colour, under, share))));
    this.empty = [ground, stripe].map((colour) => pixel(colour, colour));
  }

  resize(width = this.width, height = this.height) {
    [this.width, this.height] = [width, height];
    this.ratio = Math.min(devicePixelRatio || 1, Math.sqrt(MOST_PIXELS / (width * height)));
    this.canvas.width = Math.round(width * this.ratio);
    this.canvas.height = Math.round(height * this.ratio);
    [this.overview.width, this.overview.height] = [width, 48];
    this.image = new ImageData(this.canvas.width, this.canvas.height);
    this.buffer = new Uint32Array(this.image.data.buffer);
    this.left = Math.round(GUTTER * this.ratio); // in pixels of the canvas
    this.fold();
    const fills = (height - RULER) / this.rows.length;
    if (!this.hasOwnHeight) this.rowHeight = Math.max(LEAST_ROW, fills);
    this.scroll(0);
  }

  get span() { return this.until - this.from; }
  get perPixel() { return this.span / (this.canvas.width - this.left); }
  x(time) { return GUTTER + ((time - this.from) / this.span) * (this.width - GUTTER); }
  time(x) { return this.from + ((x - GUTTER) / (this.width - GUTTER)) * this.span; }
  y(row) { return RULER + row * this.rowHeight - this.top; }
  rowAt(y) { return y < RULER ? -1 : Math.floor((y - RULER + this.top) / this.rowHeight); }
  rowOf(run, rank) { return this.places[this.runs.indexOf(run)][rank]; }
  rowsInView() { return this.rows.slice(this.rowAt(RULER), this.rowAt(this.height - 1) + 1); }

  /** Returns the top and the bottom of a lane's bars. */
  laneSpan({ run, rank, place }, band, lane) {
    const { step, span, operation } = run.lanesOf(rank), height = this.rowHeight;
    const bracket = !step.length || height < LEAST_STEPS ? 0 : height < 64 ? 5 : 13;
    const pad = height >= 12 ? 2 : 0, y = this.y(place) + pad;
    if (band === "step") return [y, y + bracket];
    const [top, bottom] = [y + bracket, y + height - 2 * pad], isOperation = band === "operation";
    const share = span.length && operation.length ? 0.55 : isOperation ? 0 : 1;
    const middle = top + share * (bottom - top);
    const [first, last] = isOperation ? [middle, bottom] : [top, middle];
    const each = (last - first) / Math.max(1, (isOperation ? operation : span).length);
    return [first + lane * each, first + (lane + 1) * each];
  }

  /** Zooms at a time or, without one, at the pointer if it was last in the rows. */
  zoom(factor, time = this.mouse > GUTTER ? this.time(this.mouse) : this.from + this.span / 2) {
    const most = 1.2 * (this.end - this.begin);
    const span = Math.min(most, Math.max(10, this.span * factor));
    const share = (time - this.from) / this.span;
    this.show(time - share * span, time + (1 - share) * span);
  }

  pan(by) { this.show(this.from + by, this.until + by); }
  fit() { this.show(this.begin, this.end + 0.005 * (this.end - this.begin)); }
  centre(time, span = this.span) { this.show(time - span / 2, time + span / 2); }

  /** Shows a time range, moved if necessary so that it includes a part of the run. */
  show(from, until) {
    const span = until - from;
    this.from = Math.max(Math.min(from, this.end - 0.5 * span), this.begin - 0.1 * span);
    this.until = this.from + span;
  }

  scroll(by) {
    const most = Math.max(0, this.rows.length * this.rowHeight - (this.height - RULER));
    this.top = Math.min(Math.max(0, this.top + by), most);
  }

  setRowHeight(height) {
    const half = (this.height - RULER) / 2, row = (this.top + half) / this.rowHeight;
    this.rowHeight = Math.min(2 * half, Math.max(LEAST_ROW, height));
    this.hasOwnHeight = true; // otherwise the rows fill the window
    this.top = row * this.rowHeight - half;
    this.scroll(0);
  }

  fitAll() {
    this.hasOwnHeight = false;
    this.fit();
    this.resize();
  }

  zoomToArea() {
    const { tape, box: rows } = this;
    if (!tape) return;
    this.show(...tape);
    if (rows) this.setRowHeight((this.height - RULER) / (rows[1] - rows[0] + 1));
    if (rows) this.scroll(rows[0] * this.rowHeight - this.top);
    this.tape = this.box = null;
  }

  /** Scrolls an event into view, and zooms only if the event is much too short or too long. */
  reveal({ run, event }) {
    const begin = run.post[event], end = run.endOf(event), long = end - begin;
    const { span } = this, fits = long <= span && long >= span / 200;
    const isIn = begin >= this.from && end <= this.until;
    const least = Math.max(20 * long, this.end / 1e6, 100);
    if (!fits || !isIn) this.centre((begin + end) / 2, fits ? span : least);
    const y = this.y(this.rowOf(run, run.rank[event]));
    if (y < RULER || y + this.rowHeight > this.height) this.scroll(y - this.height / 2);
  }

  /** Returns the event under a point (if events nest, the innermost), or null. */
  hit(x, y) {
    const row = this.rows[this.rowAt(y)];
    if (!row || x < GUTTER) return null;
    const { run, rank } = row, found = this.found?.get(run), time = this.time(x);
    const slack = 3 * this.perPixel * this.ratio, near = this.rowHeight < 12 ? this.rowHeight : 1;
    const outside = (at, from, until) => Math.max(0, from - at, at - until);
    let best = null, distance = Infinity;
    run.visit(rank, BANDS, time - slack, time + slack, (event) => {
      const away = outside(y, ...this.placeOf(run, event));
      if (away > near || (found && !found[event])) return;
      let isShown = false;
      run.parts(event, (_, __, state) => { isShown ||= !this.hidden.has(STATE_KEYS[state]); });
      const off = away * slack + outside(time, run.post[event], run.endOf(event));
      if (isShown && off <= distance) [best, distance] = [{ run, event }, off];
    });
    return best;
  }

  draw() {
    const { canvas: { width }, ratio, hidden } = this, rows = this.rowsInView();
    const context = this.canvas.getContext("2d");
    this.buffer.fill(this.empty[0]);
    this.names = [];
    this.isOff = STATE_KEYS.map((key) => hidden.has(key));
    const many = this.countBars() > MOST_BARS;
    const bands = BANDS.filter((band) => band !== "step" || this.rowHeight >= LEAST_STEPS);
    for (const row of rows) {
      const [top, bottom] = [0, 1].map((k) => Math.round(this.y(row.place + k) * ratio));
      if (row.place % 2) this.fill(0, width, top, bottom, this.empty[1]);
      if (!many && !hidden.has("bubble")) this.drawBubbles(row);
      for (const band of bands) {
        if (this.ghost && !many && !hidden.has("recorded")) this.drawGhosts(row, band);
        if (many) this.drawBins(row, band);
        if (!many || this.found) this.drawBars(row, band, many);
      }
    }
    this.buffer.fill(this.empty[0], 0, Math.round(RULER * ratio) * width);
    context.putImageData(this.image, 0, 0);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    Object.assign(context, { textBaseline: "middle", font: FONT });
    this.drawNames(context);
    this.drawRows(context, rows);
    this.drawRuler(context);
    this.drawOverlay();
    this.drawOverview();
  }

  countBars() {
    const lanes = this.rowsInView().flatMap(({ run, rank }) =>
      Object.values(run.lanesOf(rank)).flat());
    return sumOf(lanes, (lane) => this.barsIn(lane));
  }

  barsIn({ begins, ends }) {
    return Math.max(0, firstAbove(begins, this.until) - firstAbove(ends, this.from));
  }

  /** Calls `each(start)` for the visible lines of pixels between two heights. */
  lines(y0, y1, each) {
    const { width, height } = this.canvas, top = Math.round(RULER * this.ratio);
    for (let y = Math.max(top, y0); y < Math.min(height, y1); y++) each(y * width, y);
  }

  fill(x0, x1, y0, y1, colour, texture = "", ink = 0) {
    const left = Math.max(0, x0), right = Math.max(left, Math.min(this.canvas.width, x1));
    const isInk = TEXTURES[texture];
    this.lines(y0, y1, (start, y) => {
      this.buffer.fill(colour, start + left, start + right);
      if (!isInk) return;
      for (let x = left; x < right; x++) if (isInk(x, y)) this.buffer[start + x] = ink;
    });
  }

  /** Draws a row's band from the pyramid, as one line of pixels that is repeated. */
  drawBins(row, band) {
    const lanes = row.run.lanesOf(row.rank)[band], { left, perPixel, canvas: { width } } = this;
    if (!lanes?.length) return; // the program's are those of the spans
    const [[y0], [, y1]] = [0, lanes.length - 1].map((lane) => this.pixelsOf(row, band, lane));
    const range = [this.from, perPixel, width - left];
    const bins = this.pyramids[row.number].bins(row.rank, BANDS.indexOf(band), ...range);
    const line = this.lineOf(bins, ...range, row.place % 2, this.found ? 2 : 0);
    this.lines(y0, Math.max(y0 + 1, y1), (start) => this.buffer.set(line, start + left));
  }

  /** Returns pixels from a time on with the colours of bins, which are paler by some bits. */
  lineOf({ state, share, begin, binTime }, from, perPixel, size, stripe, pale) {
    const colours = this.pixels[stripe], { isOff } = this;
    const line = new Uint32Array(size).fill(this.empty[stripe]), { length } = share;
    for (let x = 0; x < size; x++) {
      const at = Math.floor((from - begin + x * perPixel) / binTime), isIn = at >= 0 && at < length;
      if (isIn && share[at] && !isOff[state[at]]) line[x] = colours[state[at]][share[at] >> pale];
    }
    return line;
  }

  /** Returns the first column of pixels of a time range, and the one after its last. */
  columnsOf(from, until) {
    const [x0, x1] = [from, until].map((time) => Math.round(this.x(time) * this.ratio));
    const first = Math.max(this.left, x0);
    return [first, Math.max(first + 1, Math.min(this.canvas.width, x1))];
  }

  pixelsOf(row, band, lane) {
    return this.laneSpan(row, band, lane).map((y) => Math.round(y * this.ratio));
  }

  /** Draws a row's band bar by bar; above bins, only the hits of a search. */
  drawBars(row, band, many) {
    const { run, rank, place } = row, { ratio, isOff } = this, found = this.found?.get(run);
    for (const [number, lane] of run.lanesIn(rank, band).entries()) {
      const [low, high] = this.pixelsOf(row, band, number);
      const bottom = Math.max(low + 1, high - (high - low > 4 ? 1 : 0)), tall = bottom - low;
      const top = low + (this.ghost ? tall >> 2 : 0); // leaves the recorded bars visible
      let named = 0; // bars that share a lane may overlap, but not their names
      run.between(lane, this.from, this.until, (event) => {
        const dim = found && !found[event];
        if (dim && many) return;
        let widest = { size: tall > 8 * ratio && !dim ? 12 * ratio : Infinity };
        run.parts(event, (from, until, state) => {
          if (isOff[state]) return;
          const [x0, x1] = this.columnsOf(from, until), ink = this.textures[state];
          const begin = Math.max(x0, named), size = x1 - begin;
          if (size > widest.size) widest = { state, begin, size, y: (low + bottom) / 2 };
          if (band === "step") return this.drawFrame(x0, x1, low, bottom, ink, true);
          const { texture } = x1 - x0 > 5 && tall > 5 && !dim ? STATES[state] : {};
          const colour = this.pixels[place % 2][state][dim ? 50 : 255];
          this.fill(x0, x1, top, bottom, colour, texture, ink);
        });
        if (widest.y) named = this.addName(run, event, band, widest);
      });
    }
  }

  /** Notes the name of a bar, to write it into a part of the bar; returns the name's end. */
  addName(run, event, band, { state, begin, size, y }) {
    const { ratio } = this, end = Math.min(begin + size, begin + 90 * ratio);
    if (state === PROGRAM || this.names.length >= MOST_NAMES) return end;
    const microbatch = run.columns.microbatch[event];
    const short = state >= SPANS ? STATES[state].short : "";
    const number = short && microbatch >= 0 ? microbatch : "";
    const ground = band === "step" ? this.ground : this.colours[state];
    const place = [begin, y, size].map((one) => one / ratio);
    this.names.push([run.text(event), ...place, ground, short + number]);
    return end;
  }

  drawGhosts(row, band) {
    const { ghost: run } = this, colour = pixel(this.colourOf.recorded, this.ground, 150);
    run.visit(row.rank, [band], this.from, this.until, (event) => {
      const [low, high] = this.pixelsOf({ ...row, run }, band, run.lane[event]);
      run.parts(event, (from, until) =>
        this.drawFrame(...this.columnsOf(from, until), low, high, colour, false));
    });
  }

  drawFrame(x0, x1, y0, y1, colour, isOpen) {
    this.fill(x0, x1, y0, y0 + 1, colour);
    this.fill(x0, x0 + 1, y0, y1, colour);
    this.fill(x1 - 1, x1, y0, y1, colour);
    if (!isOpen) this.fill(x0, x1, y1 - 1, y1, colour);
  }

  /** Draws the times within steps in which a rank did not compute, where its computations are. */
  drawBubbles(row) {
    const { run, rank } = row, { bubble } = this.colourOf, ink = pixel(this.muted, bubble, 90);
    const { texture } = MEANINGS.bubble;
    const [, high] = this.pixelsOf(row, "span", run.lanesOf(rank).span.length - 1);
    const [ends, begins, events] = run.rowsOf("bubbles", rank);
    for (let k = firstAbove(ends, this.from); k < ends.length; k++) {
      if (begins[k] >= this.until) continue; // those of two steps may overlap
      const [low] = this.pixelsOf(row, "span", run.lane[events[k]]);
      const [x0, x1] = this.columnsOf(begins[k], ends[k]);
      this.fill(x0, x1, low, high, pixel(bubble, bubble), this.found ? "" : texture, ink);
    }
  }

  drawNames(context) {
    for (const [name, x, y, width, ground, short] of this.names) {
      const fits = Math.floor((width - 6) / 6.5), isShort = name.length > fits && short;
      const free = isShort ? width - context.measureText(short).width : 6;
      // in narrow bars "B3" instead of "backward 3", as in drawings of schedules
      const text = isShort ? short : name.length > fits ? `${name.slice(0, fits - 1)}…` : name;
      context.fillStyle = INKS[ground];
      const hasRoom = isShort ? free >= 0 : fits >= Math.min(3, name.length);
      if (hasRoom) context.fillText(text, x + free / 2, y);
    }
  }

  drawRows(context, rows) {
    context.fillStyle = this.ground;
    context.fillRect(0, RULER, GUTTER - 2, this.height);
    context.fillStyle = this.ink;
    let free = -Infinity; // the next name may be written from this position on
    for (const row of rows) {
      const top = this.y(row.place), y = Math.max(RULER + 7, top + this.rowHeight / 2);
      const begins = this.grouping !== "rank" && row.group !== this.rows[row.place - 1]?.group;
      if (begins) context.fillRect(0, top, this.width, 1);
      if (y < free) continue;
      const lines = this.nameRow(row, begins);
      lines.forEach((line, k) => context.fillText(line, 8, y + 7 * (2 * k + 1 - lines.length)));
      free = y + 13;
    }
  }

  nameRow({ rank, ranks, number, group }, begins) {
    const { grouping, runs, rowHeight } = this, isHigh = rowHeight >= TWO_LINES;
    const last = ranks.at(-1), late = number === 1 ? this.lags[rank]?.[1].at(-1) : undefined;
    const which = runs.length > 1 && !this.ghost && rowHeight >= 13 ? ` ${LETTERS[number]}` : "";
    const name = `${rank}${last === rank ? "" : `–${last}`}${which}`;
    const both = `${last === rank ? "rank" : "ranks"} ${name}`;
    if (begins && !isHigh) return [`${grouping} ${group} · ${name}`];
    if (begins) return [group < 0 ? `no ${grouping}` : `${grouping} ${group}`, both];
    return late !== undefined && isHigh ? [both, lagText(late)] : [both];
  }

  drawRuler(context) {
    const { from, until, width } = this;
    const least = (until - from) / Math.max(2, (width - GUTTER) / 110);
    const power = 10 ** Math.floor(Math.log10(least));
    const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= least);
    const digits = Math.max(3, Math.ceil(Math.log10(Math.max(1, Math.abs(until) / step))) + 1);
    context.fillStyle = this.muted;
    let tick = Math.ceil(Math.max(this.begin, from) / step) * step;
    for (; tick <= until; tick += step) {
      const x = Math.round(this.x(tick)), text = timeText(tick, digits);
      context.fillRect(x, RULER - 6, 1, 6);
      if (x + 3.5 + context.measureText(text).width < width) context.fillText(text, x + 3.5, 9);
    }
    if (this.lags.length) this.drawDifferences(context);
  }

  /** Draws on the ruler how much later or earlier the ranks of the second run are, at the worst. */
  drawDifferences(context) {
    const { lags, runs: [, second] } = this;
    const one = 0.01 * (second.end - second.begin), cell = 60;
    context.font = "10px system-ui, sans-serif";
    for (let x = GUTTER, said = 0; x < this.width; x += cell) {
      const from = this.time(x), until = this.time(x + cell);
      if (until < second.begin || from > second.end) continue;
      const all = lags.map(([times, late]) => late[firstAbove(times, until) - 1] ?? 0);
      const [worst] = all.sort((one, other) => Math.abs(other) - Math.abs(one));
      const key = lagKey(worst, second);
      if (this.hidden.has(key)) continue;
      context.fillStyle = this.colourOf[key];
      context.fillRect(x, 16, cell, 4);
      context.fillStyle = this.ink;
      if (Math.abs(worst - said) >= one) context.fillText(lagText(said = worst), x + 2, 27);
    }
  }

  drawOverview() {
    const { overview: { width, height }, all, end } = this;
    const image = new ImageData(width, height), buffer = new Uint32Array(image.data.buffer);
    buffer.fill(this.empty[1]);
    const count = all.length > 2 * STRIPS ? STRIPS : all.length;
    const oddness = ({ run, rank }) => run.head.odd[rank];
    const oddest = (rows) => rows.reduce((one, row) => (oddness(row) > oddness(one) ? row : one));
    const strips = Map.groupBy(all, (_, k) => Math.ceil(((k + 1) * count) / all.length));
    const chosen = [...strips.values()].map(oddest); // of many ranks, the most unlike
    const size = width - GUTTER, perPixel = end / size, range = [0, perPixel, size];
    for (let k = 0; k < 2 * count; k++) {
      const { number, rank } = chosen[k >> 1];
      const line = this.lineOf(this.pyramids[number].bins(rank, k % 2, ...range), ...range, 1, 0);
      const [top, bottom] = [k, k + 1].map((at) => Math.floor((at * height) / (2 * count)));
      for (let y = top; y < bottom; y++) buffer.set(line, y * width + GUTTER);
    }
    this.overview.getContext("2d").putImageData(image, 0, 0);
    const [x0, x1] = [this.from, this.until].map((time) =>
      GUTTER + Math.min(Math.max(0, time), end) / perPixel);
    const [visible, name, mark] = this.overview.parentNode.querySelectorAll("span");
    Object.assign(visible.style, { left: `${x0}px`, width: `${Math.max(2, x1 - x0)}px` });
    const odd = oddest(chosen), isNamed = count < all.length && this.isOdd(odd);
    name.textContent = isNamed ? `whole run\nrank ${odd.rank}` : "whole run";
    mark.hidden = !isNamed;
    const top = (chosen.indexOf(odd) * height) / count;
    Object.assign(mark.style, { top: `${top}px`, height: `${height / count}px` });
  }

  drawOverlay() {
    const { hidden, notes } = this;
    const shown = (key, list, draw) => (hidden.has(key) ? [] : list.map(draw));
    const since = (time, k) => ` ${timeText(Math.abs(time - notes[k - 1]), 4)} from M${k}`;
    this.overlay.innerHTML = [
      this.drawTape(),
      ...this.flags().map(({ x, look }) => path(look, `M${x},${RULER - 2}l-5,-11h10Z`)),
      `<svg x="${GUTTER}" y="${RULER}"><g transform="translate(${-GUTTER} ${-RULER})">`, // clips
      ...shown("mark", this.runs, (run) => this.drawMarks(run)),
      ...this.messagesInView().map((one) => this.drawArrow(one)),
      ...shown("critical_path", this.runs, (run) => this.drawPath(run)),
      ...[...this.pins, this.hovered].filter(Boolean).map((one) => this.drawChosen(one)),
      this.selected ? this.drawChosen(this.selected, "selected") : "",
      "</g></svg>",
      this.drawLine(this.head),
      ...shown("your_mark", notes, (time, k) =>
        this.drawLine(time, `M${k + 1}${k ? since(time, k) : ""}`)),
    ].join("");
  }

  drawPath(run) {
    const point = (time, rank) =>
      [this.x(time), this.y(this.rowOf(run, rank)) + this.rowHeight * 0.55];
    const [ranks, others, begins, ends] = run.tables.path;
    let line = "";
    for (let k = firstAbove(ends, this.from); begins[k] <= this.until; k++) {
      const to = others[k] < 0 ? ranks[k] : others[k];
      line += `M${point(begins[k], ranks[k])}L${point(ends[k], to)}`;
    }
    return path("ground", line) + path("critical_path", line);
  }

  /** Draws the playhead or, if it has a name, a mark. */
  drawLine(time, name = "") {
    if (time < this.from || time > this.until) return "";
    const x = Math.round(this.x(time)) + 0.5, look = name ? "your_mark" : "head";
    return path(look, `M${x},4V${this.height}`)
      + `<text class="${look}" x="${x + 3}" y="8">${name}</text>`;
  }

  drawTape() {
    if (!this.tape) return "";
    const [x0, x1] = this.tape.map((time) => this.x(time)), rows = this.box;
    const [y0, y1] = rows ? [this.y(rows[0]), this.y(rows[1] + 1)] : [0, this.height];
    const text = timeText(this.tape[1] - this.tape[0], 4), y = Math.max(RULER, y0) + 10;
    return path("tape", box(x0, x1, y0, y1)) + `<text x="${x0 + 4}" y="${y}">${text}</text>`;
  }

  /** Returns the findings whose events are visible, with the positions of their flags. */
  flags() {
    const flags = this.runs.flatMap((run) => run.flags.map((flag) =>
      ({ ...flag, run, x: this.x(run.post[flag.event]) })));
    return flags.filter(({ x, look }) => x >= GUTTER && x <= this.width && !this.hidden.has(look));
  }

  drawMarks(run) {
    if (run.marks.length > MOST_MARKS) return "";
    const place = (i) => `M${this.x(run.post[i]) - 2.5},${this.middleOf(run, i) - 2.5}`;
    return path("mark", run.marks.map((i) => `${place(i)}h5v5h-5Z`).join(""));
  }

  /** Returns events of the messages to draw; of many rows, those of the rank under the pointer. */
  messagesInView() {
    const found = [], all = this.rowsInView(), isMany = all.length > MOST_CROSSED;
    const { run: own, event: here } = this.hovered ?? {};
    const near = own ? [{ run: own, rank: own.rank[here] }] : [];
    for (const { run, rank } of isMany ? near : all) {
      const lanes = run.lanesOf(rank).operation;
      if (lanes.some((lane) => this.barsIn(lane) > 2 * MOST_ARROWS)) return [];
      run.visit(rank, ["operation"], this.from, this.until, (event) => {
        const isShown = isMany || run.kind(event) === "send"; // otherwise each would be shown twice
        if (isShown && run.partner(event) >= 0) found.push({ run, event });
      });
    }
    return found.length > MOST_ARROWS ? [] : found;
  }

  placeOf(run, event) {
    const row = this.rows[this.rowOf(run, run.rank[event])], y = this.y(row.place);
    if (run.kind(event) === "mark") return [y, y + this.rowHeight];
    return this.laneSpan(row, run.bandOf(event), run.lane[event]);
  }

  middleOf(run, event) {
    const [low, high] = this.placeOf(run, event);
    return (low + high) / 2;
  }

  /** Draws an arrow for a message, from its send to the end of its recv; a search may fade it. */
  drawArrow({ run, event }, look = "") {
    const other = run.partner(event), found = this.found?.get(run);
    const [send, recv] = run.kind(event) === "send" ? [event, other] : [other, event];
    const crosses = run.crosses(run.rank[send], run.rank[recv]);
    if (this.hidden.has("message") || (crosses && this.hidden.has("across"))) return "";
    const isFaded = found && !found[send] && !found[recv];
    const from = [this.x(run.post[send]), this.middleOf(run, send)];
    const to = [this.x(run.endOf(recv)), this.middleOf(run, recv)];
    const looks = `message ${look} ${crosses ? "across" : ""} ${isFaded ? "faded" : ""}`;
    return path(looks, `M${from}L${to}`);
  }

  drawChosen(one, look) {
    const { run, event } = one, other = run.partner(event), own = this.outline(run, event, look);
    return other < 0 ? own : own + this.outline(run, other) + this.drawArrow(one, "chosen");
  }

  outline(run, event, look = "") {
    const [low, high] = this.placeOf(run, event);
    const [x0, x1] = [run.post[event], run.endOf(event)].map((time) => this.x(time));
    return path(`outline ${look}`, box(x0 - 1, Math.max(x0 + 2, x1 + 1), low - 1, high));
  }
}

/** Returns the key of LOOKS for how much later or earlier something is, as a share of the run. */
function lagKey(lag, { begin, end }) {
  const percent = Math.abs(lag) / (0.01 * (end - begin));
  const [less, more] = lag < 0 ? ["earlier", "much_earlier"] : ["later", "much_later"];
  return percent < 1 ? "alike" : percent < 5 ? less : more;
}
function lagText(lag) { return `${lag < 0 ? "−" : "+"}${timeText(Math.abs(lag), 2)}`; }
