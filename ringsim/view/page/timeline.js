// The timeline draws ranks as rows, pixel by pixel, with the ruler above, the whole run below, and the selection on top.

const GUTTER = 92, RULER = 34; // the space for names to the left of the rows, and for times above them, in pixels
const FOLDED_ROW = 14; // if whole ranks would be lower than 5 pixels, several share a row this high
const [MOST_ODD, STRIPS] = [12, 12]; // the most ranks with a row of their own; strips of the overview
const LEAST_ROW = 3; // the least row height in pixels
const SLOW_KINDS = new Set(["link", "slow_link", "late_sender", "late_receiver", "straggler"]); // kinds of findings in runs that finished
const MOST_ARROWS = 400, MOST_NAMES = 1000; // more would look like a grey area
const MOST_CROSSED = 24; // with more rows in view, only arrows near the pointer are drawn
const MOST_BUBBLES = 4000; // the most bubbles to hatch at the same time
const MOST_BARS = 10000; // with more events in view, bins are drawn instead of single bars
const MOST_PIXELS = 4e6; // the most pixels of the canvas; a larger screen gets larger pixels
const TEXTURES = { // whether a pixel belongs to a line of the texture
  "/": (x, y) => (x + y) % 6 === 0, "\\": (x, y) => (x - y) % 6 === 0,
  "|": (x) => x % 5 === 0, "-": (x, y) => y % 4 === 0,
  "+": (x, y) => x % 6 === 0 || y % 6 === 0, ".": (x, y) => x % 5 === 0 && y % 5 === 0,
  x: (x, y) => (x + y) % 8 === 0 || (x - y) % 8 === 0,
};

/** Returns the mixtures of a colour "#rrggbb" with the colour `ground`, as pixels of an ImageData. */
function shades(colour, ground) {
  const parse = (one) => [5, 3, 1].map((at) => parseInt(one.slice(at, at + 2), 16));
  const over = parse(colour), under = parse(ground);
  const mix = (share, k) => Math.round(under[k] + ((over[k] - under[k]) * share) / 255);
  return (share) =>
    ((255 << 24) | (mix(share, 0) << 16) | (mix(share, 1) << 8) | mix(share, 2)) >>> 0;
}

/** Returns one mixture of two colours; a `share` of 255 is the pure colour. */
function pixel(colour, ground, share = 255) { return shades(colour, ground)(share); }

/** Draws a line between two points. */
function strokeLine(context, from, to) {
  context.beginPath();
  context.moveTo(...from);
  context.lineTo(...to);
  context.stroke();
}

/** Writes a text from a point on, on a box of the ground's colour. */
function writeOn(context, text, [x, y], ground, ink) {
  context.fillStyle = ground;
  context.fillRect(x - 2, y - 7, context.measureText(text).width + 4, 14);
  context.fillStyle = ink;
  context.fillText(text, x, y);
}

/** Draws runs on one axis; `overlay` is a canvas for everything that changes with the pointer. */
class Timeline {
  constructor(canvas, overlay, overview, runs) {
    Object.assign(this, { canvas, overlay, overview, runs });
    this.pyramids = runs.map((run) => new Pyramid(run));
    this.end = Math.max(...runs.map((run) => run.end));
    this.begin = Math.min(0, ...runs.map((run) => run.begin)); // marks may precede the first event
    this.top = 0;
    this.unfolded = new Set(); // the keys of rows of several ranks that are shown rank by rank
    this.ghost = runs.length === 2 && runs[1].head.predicted ? runs[0] : null;
    this.fit();
    // for two runs, by rank, the ends of events in the second, and how much later they are
    this.lags = runs.length !== 2 ? []
      : Array.from({ length: runs[1].ranks }, (_, rank) => runs[1].rowsOf("lags", rank));
    this.hidden = new Set(["critical_path"]); // keys of LOOKS, or "mark"
    this.groupBy("rank");
    this.selected = this.hovered = null; // {run, event}
    this.pins = []; // the events of pinned cards
    this.head = 0; // the playhead's time
    this.tape = null; // the time range [from, until] of the selected area
    this.box = null; // the first and the last row of the selected area, or null for all rows
    this.notes = []; // the times of the user's marks
    this.found = null; // the hits of a search: for each run, an array with 1 for each hit
  }

  /** Returns the possible groupings of ranks: "stage" and "host", if any run has them. */
  groupings() {
    return ["stage", "host"].filter((by) => this.runs.some((run) => run[`${by}s`]));
  }

  /** Sorts the rows by "rank", "stage" or "host", so that the ranks of a stage or on a host are together. */
  groupBy(by) {
    this.grouping = by;
    this.all = [];
    for (const [number, run] of this.runs.entries()) {
      if (run === this.ghost) continue;
      for (let rank = 0; rank < run.ranks; rank++) this.all.push({ run, number, rank, group: by === "rank" ? 0 : run[`${by}s`]?.[rank] ?? -1 });
    }
    this.all.sort((a, b) => (a.group >>> 0) - (b.group >>> 0) || a.rank - b.rank || a.number - b.number);
    this.fold();
  }

  /** Puts neighbouring ranks into one row if there are too many, but not ranks unlike the others. */
  fold() {
    const room = (this.height ?? 600) - RULER, { all } = this, rows = new Map();
    const folds = all.length * 5 > room, size = 2 ** Math.ceil(Math.log2(all.length / Math.max(4, room / FOLDED_ROW - MOST_ODD)));
    for (const row of all) {
      const part = `${row.number} ${row.group} ${Math.floor(row.rank / size)}`;
      const alone = !folds || this.isOdd(row) || this.unfolded.has(part);
      const key = alone ? rows.size : part;
      if (rows.has(key)) rows.get(key).ranks.push(row.rank);
      else rows.set(key, { ...row, part, ranks: [row.rank] });
    }
    this.rows = [...rows.values()];
    this.places = this.runs.map((run) => new Int32Array(run.ranks));
    for (const [place, { number, ranks }] of this.rows.entries()) {
      for (const rank of ranks) this.places[number][rank] = place;
    }
    if (this.ghost) this.places[0].set(this.places[1].subarray(0, this.ghost.ranks));
  }

  /** Shows the ranks of a row one by one or, if they are shown so, in one row. */
  unfold(place) {
    const { part } = this.rows[place] ?? {};
    if (!this.unfolded.delete(part)) this.unfolded.add(part);
    this.resize(this.width, this.height);
  }

  /** Returns the row of the selection or, without one, the row in the middle. */
  selectedRow() {
    const one = this.selected;
    return one ? this.rowOf(one.run, one.run.rank[one.event]) : this.rowAt(this.height / 2);
  }

  /** Returns whether a rank is unlike most others, and one of the few that are most so. */
  isOdd({ run, rank }) {
    const { odd } = run.head;
    run.oddest ??= [...odd.keys()].sort((one, other) => odd[other] - odd[one]).slice(0, MOST_ODD);
    return odd[rank] > 1 && run.oddest.includes(rank);
  }

  setTheme(dark) {
    this.dark = dark;
    const theme = dark ? "dark" : "light", colours = {};
    for (const [key, look] of ["mark", "comparison", "paper", "rank"].flatMap((family) =>
      Object.entries(LOOKS[family]))) colours[key] = look[theme];
    this.marks = colours; // by meaning, such as "critical_path"
    const { ground, field, ink, muted, grid, running } = colours;
    Object.assign(this, { ground, stripe: field, ink, muted, grid, running, hatch: null });
    this.colours = STATES.map((state) => state[theme]);
    this.textures = this.colours.map((colour) => pixel(readableInk(colour), colour, 100));
    this.pixels = [this.ground, this.stripe].map((ground) =>
      this.colours.map((colour) => {
        const mixed = shades(colour, ground);
        return Uint32Array.from({ length: 256 }, (_, share) => mixed(share));
      }));
  }

  resize(width, height) {
    [this.width, this.height] = [width, height];
    this.ratio = Math.min(devicePixelRatio || 1, Math.sqrt(MOST_PIXELS / (width * height)));
    for (const canvas of [this.canvas, this.overlay]) {
      canvas.width = Math.round(width * this.ratio);
      canvas.height = Math.round(height * this.ratio);
    }
    [this.overview.width, this.overview.height] = [width, 48];
    this.fold();
    const fills = (height - RULER) / this.rows.length;
    if (!this.hasOwnHeight) this.rowHeight = Math.max(LEAST_ROW, fills);
    this.scroll(0);
  }

  // -- positions

  x(time) { return GUTTER + ((time - this.from) / (this.until - this.from)) * (this.width - GUTTER); }
  time(x) { return this.from + ((x - GUTTER) / (this.width - GUTTER)) * (this.until - this.from); }
  y(row) { return RULER + row * this.rowHeight - this.top; }
  rowAt(y) { return y < RULER ? -1 : Math.floor((y - RULER + this.top) / this.rowHeight); }
  rowOf(run, rank) { return this.places[this.runs.indexOf(run)][rank]; }
  rowsInView() { return this.rows.slice(this.rowAt(RULER), this.rowAt(this.height - 1) + 1); }

  /** Returns the top and the bottom of a lane's bars in a row, in pixels from the row's top. */
  laneSpan(row, band, lane) {
    const lanes = row.run.lanesOf(row.rank), height = this.rowHeight;
    if (band === "program") band = "span";
    const bracket = !lanes.step.length || height < 16 ? 0 : height < 64 ? 5 : 13; // of steps
    let pad = height >= 12 ? 2 : 0;
    if (band === "step") return [pad, pad + bracket];
    const inner = height - 2 * pad - bracket;
    pad += bracket;
    const both = lanes.span.length && lanes.operation.length;
    const [low, high] = !both ? [0, inner] : band === "span" ? [0, inner * 0.55] : [inner * 0.55, inner];
    const share = (high - low) / Math.max(1, lanes[band].length);
    return [pad + low + lane * share, pad + low + (lane + 1) * share];
  }

  zoom(factor, time = (this.from + this.until) / 2) {
    const span = Math.min(this.end * 1.2, Math.max(10, (this.until - this.from) * factor));
    const share = (time - this.from) / (this.until - this.from);
    this.show(time - share * span, time + (1 - share) * span);
  }

  /** Shows the whole run. */
  fit() { this.show(this.begin, this.end + 0.005 * (this.end - this.begin)); }

  /** Moves the window so that a time is in the middle. */
  centre(time, span = this.until - this.from) { this.show(time - span / 2, time + span / 2); }

  /** Shows a time range, moved if necessary so that it includes a part of the run. */
  show(from, until) {
    const span = until - from;
    from = Math.max(Math.min(from, this.end - 0.5 * span), this.begin - 0.1 * span);
    [this.from, this.until] = [from, from + span];
  }

  scroll(by) {
    this.top = Math.min(Math.max(0, this.top + by), Math.max(0, this.rows.length * this.rowHeight - (this.height - RULER)));
  }

  setRowHeight(height) {
    const row = (this.top + (this.height - RULER) / 2) / this.rowHeight;
    this.rowHeight = Math.min(this.height - RULER, Math.max(LEAST_ROW, height));
    this.hasOwnHeight = true; // otherwise the rows fill the window
    this.top = row * this.rowHeight - (this.height - RULER) / 2;
    this.scroll(0);
  }

  /** Makes rows fill the view. */
  showRows(first, last) {
    this.setRowHeight((this.height - RULER) / (last - first + 1));
    this.top = first * this.rowHeight;
    this.scroll(0);
  }

  /** Scrolls an event into view, and zooms only if the event is much too short or too long for the window. */
  reveal({ run, event }) {
    const begin = run.post[event], end = run.endOf(event);
    let span = this.until - this.from;
    if (end - begin > span || end - begin < span / 200) span = Math.max(20 * (end - begin), this.end / 1e6, 100);
    const isIn = begin >= this.from && end <= this.until && span === this.until - this.from;
    if (!isIn) this.centre((begin + end) / 2, span);
    const y = this.y(this.rowOf(run, run.rank[event]));
    if (y < RULER || y + this.rowHeight > this.height) this.scroll(y - this.height / 2);
  }

  /** Returns the event under a point (if events nest, the innermost), or null. */
  hit(x, y) {
    const row = this.rows[this.rowAt(y)];
    if (!row || x < GUTTER) return null;
    const slack = (3 * (this.until - this.from)) / (this.width - GUTTER), time = this.time(x);
    const inside = y - this.y(this.rowAt(y));
    const { run } = row, found = this.found?.get(run);
    const outside = (at, from, until) => Math.max(0, from - at, at - until);
    let best = null, distance = Infinity;
    run.visit(row.rank, BANDS, time - slack, time + slack, (event) => {
      const away = outside(inside, ...this.laneSpan(row, run.bandOf(event), run.lane[event]));
      if (away > (this.rowHeight < 12 ? this.rowHeight : 1) || this.hides(run, event)) return;
      const off = away * slack + outside(time, run.post[event], run.endOf(event));
      if (off <= distance && (!found || found[event])) [best, distance] = [{ run, event }, off];
    });
    return best;
  }

  /** Returns whether all of an event is hidden. */
  hides(run, event) {
    let shows = !this.hidden.size;
    if (!shows) run.parts(event, (_, __, state) => { shows ||= !this.hidden.has(STATE_KEYS[state]); });
    return !shows;
  }

  // -- bars

  draw() {
    const { width, height } = this.canvas, ratio = this.ratio;
    const context = this.canvas.getContext("2d");
    if (this.image?.width !== width || this.image.height !== height) {
      this.image = new ImageData(width, height);
      this.buffer = new Uint32Array(this.image.data.buffer);
    }
    this.buffer.fill(pixel(this.ground, this.ground));
    this.names = [];
    const left = Math.round(GUTTER * ratio);
    const perPixel = (this.until - this.from) / (width - left);
    const first = this.rowAt(RULER), last = first + this.rowsInView().length - 1;
    const many = this.countBars() > MOST_BARS;
    for (let index = first; index <= last; index++) {
      const row = this.rows[index], stripe = index % 2;
      const [top, bottom] = [this.y(index), this.y(index + 1)].map((y) => Math.round(y * ratio));
      if (stripe) this.fill(0, width, top, bottom, pixel(this.stripe, this.stripe));
      const pyramid = this.pyramids[row.number];
      for (const band of BANDS) {
        if (this.ghost && !many && !this.hidden.has("recorded")) {
          this.drawGhosts({ run: this.ghost, rank: row.rank }, index, band, left);
        }
        if (many) this.drawBins(row, index, band, pyramid, left, perPixel, stripe);
        else this.drawBars(row, index, band, left, stripe);
      }
    }
    this.fill(0, width, 0, Math.round(RULER * ratio), pixel(this.ground, this.ground));
    context.putImageData(this.image, 0, 0);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    if (!this.hidden.has("bubble")) this.drawBubbles(context, first, last);
    this.drawNames(context, first, last);
    this.drawRuler(context);
    this.drawOverlay();
    this.drawOverview();
  }

  /** Returns whether each of STATES is hidden. */
  hiddenStates() { return STATE_KEYS.map((key) => this.hidden.has(key)); }

  /** Counts the visible bars. */
  countBars() {
    const lanes = this.rowsInView().flatMap(({ run, rank }) => Object.values(run.lanesOf(rank)).flat());
    return lanes.reduce((bars, { begins, ends }) =>
      bars + Math.max(0, firstAbove(begins, this.until) - firstAbove(ends, this.from)), 0);
  }

  /** Calls `each(start)` for the visible lines of pixels between two heights. */
  lines(y0, y1, each) {
    const { width, height } = this.canvas, top = Math.round(RULER * this.ratio);
    for (let y = Math.max(top, y0); y < Math.min(height, y1); y++) each(y * width, y);
  }

  fill(x0, x1, y0, y1, colour) {
    const left = Math.max(0, x0), right = Math.max(left, Math.min(this.canvas.width, x1));
    this.lines(y0, y1, (start) => this.buffer.fill(colour, start + left, start + right));
  }

  /** Draws a row's band from the pyramid, as one line of pixels that is repeated. */
  drawBins(row, index, band, pyramid, left, perPixel, stripe) {
    const lanes = row.run.lanesOf(row.rank)[band];
    if (!lanes?.length) return;
    const width = this.canvas.width, number = BANDS.indexOf(band);
    const { state, share, at, bins, begin, binTime } = perPixel >= pyramid.binTime ? pyramid.level(row.rank, number, perPixel)
      : pyramid.window(row.rank, number, this.from, this.until, width - left);
    const [low] = this.laneSpan(row, band, 0), [, high] = this.laneSpan(row, band, lanes.length - 1);
    if (low === high) return;
    const [y0] = this.pixelsOf(row, index, band, 0);
    const y1 = Math.max(y0 + 1, this.pixelsOf(row, index, band, lanes.length - 1)[1]);
    const line = new Uint32Array(width);
    const colours = this.pixels[stripe], pale = this.found ? 2 : 0, isOff = this.hiddenStates();
    for (let x = left; x < width; x++) {
      const bin = Math.floor((this.from - begin + (x - left) * perPixel) / binTime);
      if (bin >= 0 && bin < bins && share[at + bin] && !isOff[state[at + bin]]) line[x] = colours[state[at + bin]][share[at + bin] >> pale];
    }
    if (this.found) this.addFound(row, band, line, left, perPixel, colours, isOff);
    const empty = pixel(stripe ? this.stripe : this.ground, this.ground);
    for (let x = left; x < width; x++) line[x] ||= empty;
    const shown = line.subarray(left);
    this.lines(y0, y1, (start) => this.buffer.set(shown, start + left));
  }

  /** Draws the hits of a search into a line of pixels, even in bins that are mostly in a different state. */
  addFound({ run, rank }, band, line, left, perPixel, colours, isOff) {
    const found = this.found.get(run), x = (time) => Math.max(left, left + Math.floor((time - this.from) / perPixel));
    for (let event = run.first[rank]; event < run.first[rank + 1]; event++) {
      if (!found[event] || run.post[event] > this.until || run.endOf(event) < this.from || run.bandOf(event) !== band) continue;
      run.parts(event, (from, until, state) => isOff[state] || line.fill(colours[state][255], x(from), Math.max(x(from) + 1, x(until))));
    }
  }

  /** Returns the column of pixels of a time. */
  pixelAt(time) {
    const left = Math.round(GUTTER * this.ratio), scale = this.canvas.width - left;
    return Math.round(left + ((time - this.from) / (this.until - this.from)) * scale);
  }

  /** Returns the lines of pixels from the top to the bottom of a lane. */
  pixelsOf(row, index, band, lane) {
    const place = this.y(index);
    return this.laneSpan(row, band, lane).map((y) => Math.round((place + y) * this.ratio));
  }

  /** Draws a row's band bar by bar. */
  drawBars(row, index, band, left, stripe) {
    const { run, rank } = row, { ratio, canvas: { width } } = this;
    const found = this.found?.get(run), isOff = this.hiddenStates();
    for (const [number, lane] of run.lanesIn(rank, band).entries()) {
      const [low, high] = this.pixelsOf(row, index, band, number);
      const bottom = Math.max(low + 1, high - (high - low > 4 ? 1 : 0));
      let named = 0;
      run.between(lane, this.from, this.until, (event) => {
        const dim = found && !found[event];
        if (band === "step" && low === high) return;
        run.parts(event, (from, until, state) => {
          if (isOff[state]) return;
          const x0 = Math.max(left, this.pixelAt(from));
          const x1 = Math.max(x0 + 1, Math.min(width, this.pixelAt(until)));
          const colour = this.pixels[stripe][state][dim ? 50 : 255];
          if (band === "step") return this.drawFrame(x0, x1, low, bottom, this.textures[state], true);
          this.fill(x0, x1, low + (this.ghost ? (bottom - low) >> 2 : 0), bottom, colour);
          if (x1 - x0 > 5 && bottom - low > 5 && !dim) this.drawTexture(x0, x1, low, bottom, state);
        });
        const part = this.widestPart(run, event, named);
        if (part && bottom - low > 8 * ratio && this.names.length < MOST_NAMES && !dim) {
          const { state, begin, end } = part;
          if (state === PROGRAM || isOff[state]) return;
          const microbatch = run.columns.microbatch[event];
          const short = state >= SPANS ? STATES[state].short : "";
          const number = short && microbatch >= 0 ? microbatch : "";
          const ground = band === "step" ? this.ground : this.colours[state];
          const place = [begin, (low + bottom) / 2 / ratio, end - begin];
          named = Math.min(end, begin + 90); // bars that share a lane may overlap, but not their names
          this.names.push([run.text(event), ...place, ground, short + number]);
        }
      });
    }
  }

  /** Returns the widest visible part of a bar right of a position, as {state, begin, end}. */
  widestPart(run, event, least) {
    let widest = null;
    run.parts(event, (from, until, state) => {
      const begin = Math.max(least, this.x(Math.max(from, this.from)));
      const end = this.x(Math.min(until, this.until));
      const most = widest ? widest.end - widest.begin : 12;
      if (end - begin > most) widest = { state, begin, end };
    });
    return widest;
  }

  /** Draws the outlines of the recorded bars, behind the predicted ones. */
  drawGhosts(row, index, band, left) {
    const colour = pixel(this.marks.recorded, this.ground, 150), { run, rank } = row;
    run.visit(rank, [band], this.from, this.until, (event) => {
      const [low, high] = this.pixelsOf(row, index, band, run.lane[event]);
      run.parts(event, (from, until) => {
        const [x0, x1] = [this.pixelAt(from), this.pixelAt(until)];
        if (x1 > left) this.drawFrame(Math.max(left, x0), x1, low, high, colour, false);
      });
    });
  }

  /** Draws the outline of a box or, if it is open, a bracket. */
  drawFrame(x0, x1, y0, y1, colour, isOpen) {
    this.fill(x0, x1, y0, y0 + 1, colour);
    this.fill(x0, x0 + 1, y0, y1, colour);
    this.fill(x1 - 1, x1, y0, y1, colour);
    if (!isOpen) this.fill(x0, x1, y1 - 1, y1, colour);
  }

  /** Draws a texture of fine lines, in a darker or lighter colour, into a bar. */
  drawTexture(x0, x1, y0, y1, state) {
    const { texture } = STATES[state];
    if (!texture) return;
    const ink = this.textures[state], isInk = TEXTURES[texture];
    this.lines(y0, y1, (start, y) => {
      for (let x = x0; x < x1; x++) if (isInk(x, y)) this.buffer[start + x] = ink;
    });
  }

  /** Hatches the times within steps in which a rank did not compute, on the lane of its computations. */
  drawBubbles(context, first, last) {
    const places = [];
    for (let index = first; index <= last; index++) {
      const row = this.rows[index], [, high] = this.laneSpan(row, "span", row.run.lanesOf(row.rank).span.length - 1);
      const [ends, begins, events] = row.run.rowsOf("bubbles", row.rank);
      for (let k = firstAbove(ends, this.from); k < ends.length; k++) {
        if (begins[k] >= this.until) continue; // those of two steps may overlap
        const [low] = this.laneSpan(row, "span", row.run.lane[events[k]]);
        const x0 = this.x(Math.max(begins[k], this.from)), x1 = this.x(Math.min(ends[k], this.until));
        if (x1 - x0 > 1) places.push([x0, this.y(index) + low, x1 - x0, high - low]);
      }
      if (places.length > MOST_BUBBLES) return;
    }
    if (!places.length) return;
    context.fillStyle = this.hatch ??= makeHatch(this.muted);
    context.globalAlpha = this.found ? 0.25 : 1;
    for (const place of places) context.fillRect(...place);
    context.globalAlpha = 1;
  }

  /** Writes the names of ranks, and of bars that are wide enough. */
  drawNames(context, first, last) {
    context.textBaseline = "middle";
    context.font = FONT;
    for (const [name, x, y, width, ground, short] of this.names) {
      context.fillStyle = readableInk(ground);
      const fits = Math.floor((width - 6) / 6.5);
      if (name.length <= fits) context.fillText(name, x + 3, y);
      else if (short) { // in narrow bars "B3" instead of "backward 3", as in drawings of schedules
        const free = width - context.measureText(short).width;
        if (free >= 1) context.fillText(short, x + free / 2, y);
      } else if (fits >= 3) context.fillText(`${name.slice(0, fits - 1)}…`, x + 3, y);
    }
    context.fillStyle = this.ground;
    context.fillRect(0, RULER, GUTTER - 2, this.height);
    context.fillStyle = this.ink;
    let free = -Infinity; // the next name may be written from this position on
    for (let index = first; index <= last; index++) {
      const { rank, ranks, number, group } = this.rows[index], y = Math.max(RULER + 7, this.y(index) + this.rowHeight / 2);
      const begins = this.grouping !== "rank" && group !== this.rows[index - 1]?.group;
      if (begins) context.fillRect(0, this.y(index), this.width, 1);
      if (y < free) continue;
      const which = this.runs.length > 1 && !this.ghost && this.rowHeight >= 13 ? ` ${LETTERS[number]}` : "";
      const two = begins && this.rowHeight >= 28;
      const last = ranks.at(-1), span = last === rank ? "" : `–${last}`;
      const kind = begins && !two ? `${this.grouping} ${group} ·` : span ? "ranks" : "rank";
      const name = `${kind} ${rank}${span}${which}`;
      context.fillText(name, 8, two ? y + 7 : y);
      if (two) context.fillText(group < 0 ? `no ${this.grouping}` : `${this.grouping} ${group}`, 8, y - 7);
      const late = this.runs.length === 2 && number === 1 ? this.lags[rank]?.[1].at(-1) : undefined;
      if (late !== undefined && !two && this.rowHeight >= 28) context.fillText(lagText(late), 8, y + 13);
      free = y + 13;
    }
  }

  drawRuler(context) {
    const step = niceStep((this.until - this.from) / Math.max(2, (this.width - GUTTER) / 110));
    context.fillStyle = context.strokeStyle = this.muted;
    context.lineWidth = 1;
    const digits = Math.max(3, Math.ceil(Math.log10(Math.max(1, Math.abs(this.until) / step))) + 1);
    for (let tick = Math.ceil(Math.max(this.begin, this.from) / step) * step; tick <= this.until; tick += step) {
      const x = Math.round(this.x(tick)) + 0.5;
      strokeLine(context, [x, RULER - 6], [x, RULER]);
      const text = timeText(tick, digits);
      if (x + 3 + context.measureText(text).width < this.width) context.fillText(text, x + 3, 9);
    }
    if (this.runs.length === 2) this.drawDifferences(context);
  }

  /** Draws on the ruler how much later or earlier the ranks of the second run are, at the worst. */
  drawDifferences(context) {
    const { lags, runs: [, second] } = this;
    const one = 0.01 * (second.end - second.begin), cell = 60;
    context.font = "10px system-ui, sans-serif";
    for (let x = GUTTER, said = 0; x < this.width; x += cell) {
      const from = this.time(x), until = this.time(x + cell);
      if (until < second.begin || from > second.end) continue;
      const worst = lags.reduce((most, [times, late]) => {
        const lag = late[firstAbove(times, until) - 1] ?? 0;
        return Math.abs(lag) > Math.abs(most) ? lag : most;
      }, 0);
      const key = lagKey(worst, second);
      if (this.hidden.has(key)) continue;
      context.fillStyle = this.marks[key];
      context.fillRect(x, 16, cell, 4);
      context.fillStyle = this.ink;
      if (Math.abs(worst - said) >= one) context.fillText(lagText(said = worst), x + 2, 27);
    }
  }

  /** Draws the overview of the whole run, with the visible part marked. */
  drawOverview() {
    const { width, height } = this.overview, context = this.overview.getContext("2d");
    const image = new ImageData(width, height), buffer = new Uint32Array(image.data.buffer);
    buffer.fill(pixel(this.stripe, this.stripe));
    const strips = this.all.length > 2 * STRIPS ? STRIPS : this.all.length, lines = strips * 2;
    const oddness = ({ run, rank }) => run.head.odd[rank];
    const worst = (one, row) => (oddness(row) > oddness(one) ? row : one);
    const chosen = Array.from({ length: strips }, (_, strip) => { // of many ranks, the most unlike
      const [from, until] = [strip, strip + 1].map((at) => Math.floor((at * this.all.length) / strips));
      return until - from > 1 ? this.all.slice(from, until).reduce(worst) : this.all[from];
    });
    const isOff = this.hiddenStates();
    for (let line = 0; line < lines; line++) {
      const row = chosen[line >> 1];
      const perPixel = this.end / (width - GUTTER);
      const { state, share, at, bins, binTime } = this.pyramids[row.number].level(row.rank, line % 2, perPixel);
      for (let x = GUTTER; x < width; x++) {
        const bin = Math.floor(((x - GUTTER) * perPixel) / binTime);
        if (bin >= bins || !share[at + bin] || isOff[state[at + bin]]) continue;
        const colour = this.pixels[1][state[at + bin]][share[at + bin]];
        for (let y = Math.floor((line * height) / lines); y < Math.floor(((line + 1) * height) / lines); y++) buffer[y * width + x] = colour;
      }
    }
    context.putImageData(image, 0, 0);
    const [x0, x1] = [this.from, this.until].map((time) => GUTTER + (Math.min(Math.max(0, time), this.end) / this.end) * (width - GUTTER));
    context.fillStyle = this.ground;
    context.globalAlpha = 0.6;
    context.fillRect(GUTTER, 0, x0 - GUTTER, height);
    context.fillRect(x1, 0, width - x1, height);
    context.globalAlpha = 1;
    context.strokeStyle = this.ink;
    context.strokeRect(x0 + 0.5, 0.5, Math.max(2, x1 - x0 - 1), height - 1);
    context.fillStyle = this.muted;
    context.font = FONT;
    const odd = strips < this.all.length ? chosen.reduce(worst) : null;
    const named = odd && this.isOdd(odd);
    context.fillText("whole run", 8, height / 2 - (named ? 7 : 0));
    if (!named) return;
    context.fillText(`rank ${odd.rank}`, 8, height / 2 + 8);
    context.fillStyle = this.marks.slow; // where the rank's strip is
    context.fillRect(GUTTER - 8, (chosen.indexOf(odd) * height) / strips, 6, height / strips);
  }

  // -- above the bars

  drawOverlay() {
    const context = this.overlay.getContext("2d");
    context.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    context.clearRect(0, 0, this.width, this.height);
    context.font = FONT;
    context.textBaseline = "middle";
    this.drawTape(context);
    this.drawFlags(context);
    context.save();
    context.beginPath();
    context.rect(GUTTER, RULER, this.width, this.height);
    context.clip();
    this.drawMarks(context);
    for (const one of this.messagesInView()) {
      this.drawArrow(context, one, 1, this.isFaded(one) ? 0.1 : 0.55);
    }
    if (!this.hidden.has("critical_path")) for (const number of this.runs.keys()) this.drawPath(context, number);
    for (const one of [...this.pins, this.hovered, this.selected]) {
      if (!one) continue;
      this.outline(context, one, one === this.selected ? 2.5 : 1.5);
      if (one.run.partner(one.event) >= 0) {
        this.outline(context, { run: one.run, event: one.run.partner(one.event) }, 1.5);
        this.drawArrow(context, one, 2, 1);
      }
    }
    context.restore();
    this.drawLine(context, this.head, this.ink, "");
    for (const [index, time] of this.hidden.has("your_mark") ? [] : this.notes.entries()) {
      const since = index ? ` ${timeText(Math.abs(time - this.notes[index - 1]), 4)} from M${index}` : "";
      this.drawLine(context, time, this.marks.your_mark, `M${index + 1}${since}`);
    }
  }

  /** Draws a run's critical path as a thick line along ranks, and across to the ranks that they waited for. */
  drawPath(context, number) {
    const run = this.runs[number], [ranks, others, begins, ends] = run.tables.path;
    const y = (rank) => this.y(this.rowOf(run, rank)) + this.rowHeight * 0.55;
    context.beginPath();
    for (let k = firstAbove(ends, this.from); begins[k] <= this.until; k++) {
      context.moveTo(this.x(begins[k]), y(ranks[k]));
      context.lineTo(this.x(ends[k]), y(others[k] < 0 ? ranks[k] : others[k]));
    }
    for (const [colour, width] of [[this.ground, 5], [this.marks.critical_path, 2.5]]) {
      [context.strokeStyle, context.lineWidth] = [colour, width];
      context.stroke();
    }
  }

  drawLine(context, time, colour, name) {
    if (time < this.from || time > this.until) return;
    const x = Math.round(this.x(time)) + 0.5;
    context.strokeStyle = colour;
    context.lineWidth = 1;
    strokeLine(context, [x, 4], [x, this.height]);
    if (name) writeOn(context, name, [x + 3, 8], this.ground, colour); // hides the ruler's labels
  }

  /** Draws the selected area. */
  drawTape(context) {
    if (!this.tape) return;
    const [x0, x1] = this.tape.map((time) => this.x(time)).sort((a, b) => a - b);
    context.fillStyle = this.marks.focus;
    context.globalAlpha = 0.15;
    const [y0, y1] = this.box ? [this.y(this.box[0]), this.y(this.box[1] + 1)] : [0, this.height];
    context.fillRect(x0, y0, x1 - x0, y1 - y0);
    context.globalAlpha = 1;
    context.strokeStyle = this.marks.focus;
    context.strokeRect(x0, y0, x1 - x0, y1 - y0);
    const text = timeText(this.tape[1] - this.tape[0], 4);
    writeOn(context, text, [x0 + 4, Math.max(RULER, y0) + 10], this.ground, this.ink);
  }

  /** Draws a flag on the ruler for each finding. */
  drawFlags(context) {
    for (const { x, look } of this.flags()) {
      context.fillStyle = this.marks[look];
      context.beginPath();
      context.moveTo(x, RULER - 2);
      context.lineTo(x - 5, RULER - 13);
      context.lineTo(x + 5, RULER - 13);
      context.fill();
    }
  }

  /** Returns the findings whose events are visible, with the positions of their flags. */
  flags() {
    const flags = this.runs.flatMap((run) => run.flags.map((flag) =>
      ({ ...flag, run, x: this.x(run.post[flag.event]) })));
    return flags.filter(({ x, look }) => x >= GUTTER && x <= this.width && !this.hidden.has(look));
  }

  drawMarks(context) {
    context.strokeStyle = this.ink;
    context.lineWidth = 1;
    for (const run of this.runs) {
      if (run.marks.length > 5000 || this.hidden.has("mark")) continue;
      for (const event of run.marks) {
        const x = this.x(run.post[event]), y = this.y(this.rowOf(run, run.rank[event]));
        if (x < GUTTER || x > this.width || y < 0 || y > this.height) continue;
        context.strokeRect(x - 2.5, y + this.rowHeight / 2 - 2.5, 5, 5);
      }
    }
  }

  /** Returns the sends of the visible messages, or an empty list if there are too many. */
  messagesInView() {
    const sends = [], rows = this.rowsInView();
    if (this.hidden.has("message")) return sends;
    if (rows.length > MOST_CROSSED) return this.messagesNear();
    for (const { run, rank } of rows) {
      for (const lane of run.lanesOf(rank).operation) {
        if (firstAbove(lane.begins, this.until) - firstAbove(lane.ends, this.from) > 2 * MOST_ARROWS) return [];
        run.between(lane, this.from, this.until, (event) => {
          if (run.kind(event) === "send" && run.partner(event) >= 0) sends.push({ run, event });
        });
        if (sends.length > MOST_ARROWS) return [];
      }
    }
    return sends;
  }

  /** Returns the sends of the messages of the rank under the pointer, near the pointer. */
  messagesNear() {
    const sends = [], { hovered } = this;
    if (!hovered) return sends;
    const { run, event } = hovered, reach = (40 * (this.until - this.from)) / (this.width - GUTTER);
    const [from, until] = [run.post[event] - reach, run.endOf(event) + reach];
    run.visit(run.rank[event], ["operation"], from, until, (near) => {
      if (run.partner(near) >= 0 && sends.length < 40) sends.push({ run, event: near });
    });
    return sends;
  }

  /** Returns the top and the bottom of an event's bar on the canvas. */
  placeOf(run, event) {
    const row = this.rowOf(run, run.rank[event]), y = this.y(row);
    if (run.kind(event) === "mark") return [y, y + this.rowHeight];
    return this.laneSpan(this.rows[row], run.bandOf(event), run.lane[event]).map((inside) => y + inside);
  }

  /** Returns whether a search has found neither side of a message. */
  isFaded({ run, event }) {
    const found = this.found?.get(run);
    return Boolean(found) && !found[event] && !found[run.partner(event)];
  }

  middleOf(run, event) {
    const [low, high] = this.placeOf(run, event);
    return (low + high) / 2;
  }

  /** Draws an arrow for a message, from its send to the end of its recv. */
  drawArrow(context, { run, event }, thick, alpha) {
    const other = run.partner(event);
    const [send, recv] = run.kind(event) === "send" ? [event, other] : [other, event];
    const crosses = run.crosses(run.rank[send], run.rank[recv]);
    if (this.hidden.has("message") || (crosses && this.hidden.has("across"))) return;
    const [x0, y0] = [this.x(run.post[send]), this.middleOf(run, send)];
    const [x1, y1] = [this.x(run.endOf(recv)), this.middleOf(run, recv)];
    const angle = Math.atan2(y1 - y0, x1 - x0);
    context.globalAlpha = alpha;
    context.strokeStyle = context.fillStyle = this.marks.message;
    context.lineWidth = thick;
    context.setLineDash(crosses ? [7, 4] : []);
    strokeLine(context, [x0, y0], [x1, y1]);
    context.setLineDash([]);
    context.beginPath();
    context.moveTo(x1, y1);
    for (const side of [2.7, -2.7]) context.lineTo(x1 + 8 * Math.cos(angle + side), y1 + 8 * Math.sin(angle + side));
    context.fill();
    context.globalAlpha = 1;
  }

  outline(context, { run, event }, thick) {
    const [low, high] = this.placeOf(run, event), x = this.x(run.post[event]);
    context.strokeStyle = this.ink;
    context.lineWidth = thick;
    context.strokeRect(x - 1, low - 1, Math.max(3, this.x(run.endOf(event)) - x + 2), high - low + 1);
  }
}

/** Returns the key of LOOKS for how much later or earlier something is, as a share of the run. */
function lagKey(lag, { begin, end }) {
  const percent = Math.abs(lag) / (0.01 * (end - begin));
  const [less, more] = lag < 0 ? ["earlier", "much_earlier"] : ["later", "much_later"];
  return percent < 1 ? "alike" : percent < 5 ? less : more;
}

/** Formats how much later or earlier something is. */
function lagText(lag) { return `${lag < 0 ? "−" : "+"}${timeText(Math.abs(lag), 2)}`; }

/** Returns a pattern of diagonal lines. */
function makeHatch(colour) {
  const tile = document.createElement("canvas"), context = tile.getContext("2d");
  tile.width = tile.height = 8;
  context.strokeStyle = colour;
  context.globalAlpha = 0.6;
  for (const x of [-8, 0, 8]) {
    context.moveTo(x, 8);
    context.lineTo(x + 8, 0);
  }
  context.stroke();
  return context.createPattern(tile, "repeat");
}

/** Returns the smallest of 1, 2, 5, 10, 20 ... that is at least the given number. */
function niceStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((one) => one * power).find((one) => one >= least);
}
