// What fills most of each bin of time, for each rank and band, at bins of one, two, four ... parts of the run.

const BANDS = ["span", "operation"];
const MOST_CELLS = 1 << 22; // bins of all ranks together: 4 million, two bytes each
const FIRST_BINS = 2048; // of a row, until there is time for finer ones: a screen has hardly more pixels

/** Where a screen shows more events than it has pixels, it shows these bins. */
class Pyramid {
  constructor(run) {
    this.run = run;
    this.bins = 1 << Math.max(8, Math.min(14, Math.floor(Math.log2(MOST_CELLS / Math.max(1, 2 * run.ranks)))));
    this.binTime = run.end / this.bins;
    this.depth = Math.log2(this.bins) + 1;
    this.rows = []; // by rank and band, made when they are first asked for
    this.refined = 0; // so many rows have all their bins
    this.filled = new Float32Array(this.bins);
    this.covers = STATES.map(() => new Float32Array(this.bins));
  }

  /** Returns the bins of a rank's band at about a level: {state, share, at, bins, binTime}. `share` is what is filled of a bin, up to 255. */
  level(rank, band, perPixel) {
    const row = (this.rows[rank * BANDS.length + band] ??= this.build(rank, band, Math.max(0, this.depth - 1 - Math.log2(FIRST_BINS))));
    const level = Math.min(this.depth - 1, Math.max(row.base, Math.floor(Math.log2(perPixel / this.binTime))));
    return { state: row.state, share: row.share, at: this.offset(row.base, level), bins: this.bins >> level, binTime: this.binTime * 2 ** level };
  }

  /** Gives one more row all its bins; tells whether there was one. */
  refine() {
    if (this.refined >= this.run.ranks * BANDS.length) return false;
    this.rows[this.refined] = this.build(Math.floor(this.refined / BANDS.length), this.refined % BANDS.length, 0);
    this.refined++;
    return true;
  }

  /** Returns where a level begins in a row that begins with another. */
  offset(base, level) { return 2 * ((this.bins >> base) - (this.bins >> level)); }

  build(rank, band, base) {
    const { run, filled, covers } = this, bins = this.bins >> base, binTime = this.binTime * 2 ** base;
    const row = { base, state: new Uint8Array(2 * bins), share: new Uint8Array(2 * bins) }, used = [];
    filled.fill(0, 0, bins);
    let weight = 1; // of nested spans the innermost is shown
    const add = (from, until, state) => {
      const cover = covers[state];
      if (!used.includes(state)) {
        used.push(state);
        cover.fill(0, 0, bins);
      }
      const low = from / binTime, high = Math.max(until / binTime, low + 1e-3);
      const last = Math.min(bins - 1, Math.floor(high));
      for (let bin = Math.min(bins - 1, Math.floor(low)); bin <= last; bin++) {
        const part = Math.max(0, Math.min(high, bin + 1) - Math.max(low, bin)); // of the bin
        cover[bin] += part * weight;
        filled[bin] += part;
      }
    };
    for (const { events } of run.lanesOf(rank)[BANDS[band]]) {
      for (let k = 0; k < events.length; k++) run.parts(events[k], add);
      weight *= 4;
    }
    for (let level = base; level < this.depth; level++) this.reduce(row, level, used);
    return row;
  }

  /** Writes one level, and joins every two bins for the next. */
  reduce(row, level, used) {
    const { filled, covers } = this, bins = this.bins >> level, at = this.offset(row.base, level), whole = 1 << (level - row.base);
    for (let bin = 0; bin < bins; bin++) {
      if (!(filled[bin] > 0)) continue;
      let best = used[0];
      for (let k = 1; k < used.length; k++) if (covers[used[k]][bin] > covers[best][bin]) best = used[k];
      row.state[at + bin] = best;
      row.share[at + bin] = Math.max(24, Math.min(255, (255 * filled[bin]) / whole));
    }
    for (const cover of [filled, ...used.map((one) => covers[one])]) {
      for (let bin = 0; 2 * bin + 1 < bins; bin++) cover[bin] = cover[2 * bin] + cover[2 * bin + 1];
    }
  }
}
