// Divides the run into one, two, four ... time bins, and finds the state that fills most of each
// bin, for each rank and band.

const MOST_CELLS = 1 << 22; // the most bins of all ranks together: 4 million, two bytes each
const FIRST_BINS = 2048; // bins per row until there is time for finer bins, about a screen's pixels
const MOST_IN_VIEW = 4096; // the most bins for a window
const INNER = 4; // how much more the bars of each further lane count, so that inner spans are shown

/** The bins that are drawn instead of events if there are more events than pixels. */
class Pyramid {
  constructor(run) {
    this.run = run;
    const most = Math.floor(Math.log2(MOST_CELLS / Math.max(1, 2 * run.ranks)));
    this.bins = 1 << Math.max(8, Math.min(14, most));
    this.binTime = run.end / this.bins;
    this.depth = Math.log2(this.bins) + 1;
    this.rows = []; // by rank and band, computed when first needed
    this.refined = 0; // the number of rows whose bins have all been computed
    this.filled = new Float32Array(Math.max(this.bins, MOST_IN_VIEW));
    this.covers = STATES.map(() => new Float32Array(this.filled.length));
  }

  /**
   * Returns bins of about one pixel for a rank's band, as {state, share, at, bins, begin, binTime};
   * `share` is how much of a bin is filled, up to 255.
   */
  level(rank, band, perPixel) {
    const place = rank * BANDS.length + band, coarse = this.depth - 1 - Math.log2(FIRST_BINS);
    const row = (this.rows[place] ??= this.build(rank, band, Math.max(0, coarse)));
    const wanted = Math.max(row.base, Math.floor(Math.log2(perPixel / this.binTime)));
    const level = Math.min(this.depth - 1, wanted), at = this.offset(row.base, level);
    return { ...row, at, bins: this.bins >> level, begin: 0, binTime: this.binTime * 2 ** level };
  }

  /** Returns bins computed from the events in a window too short for the bins of the run. */
  window(rank, band, from, until, pixels) {
    const bins = Math.min(MOST_IN_VIEW, pixels), binTime = (until - from) / bins;
    const row = { base: 0, state: new Uint8Array(bins), share: new Uint8Array(bins) };
    this.write(row, 0, bins, 1, this.cover(rank, band, from, bins, binTime));
    return { ...row, at: 0, bins, begin: from, binTime };
  }

  /** Prepares one more row for a closer look; returns false if there are no more rows. */
  refine() {
    if (this.refined >= this.run.ranks * BANDS.length) return false;
    const [rank, band] = [Math.floor(this.refined / BANDS.length), this.refined % BANDS.length];
    const isBinned = this.run.lanesIn(rank, BANDS[band]).length && BANDS[band] !== "program";
    if (isBinned) this.rows[this.refined] = this.build(rank, band, 0);
    this.refined++;
    return true;
  }

  /** Returns the start of a level in a row whose first level is `base`. */
  offset(base, level) { return 2 * ((this.bins >> base) - (this.bins >> level)); }

  build(rank, band, base) {
    const bins = this.bins >> base, binTime = this.binTime * 2 ** base;
    const used = this.cover(rank, band, 0, bins, binTime);
    const row = { base, state: new Uint8Array(2 * bins), share: new Uint8Array(2 * bins) };
    for (let level = base; level < this.depth; level++) {
      const some = this.bins >> level;
      this.write(row, this.offset(base, level), some, 1 << (level - base), used);
      for (const cover of [this.filled, ...used.map((one) => this.covers[one])]) {
        for (let bin = 0; bin < some >> 1; bin++) cover[bin] = cover[2 * bin] + cover[2 * bin + 1];
      }
    }
    return row;
  }

  /** Adds up how much of each bin is filled, in all and by state; returns the states that occur. */
  cover(rank, band, begin, bins, binTime) {
    const { run, filled, covers } = this, used = [], end = begin + bins * binTime;
    filled.fill(0, 0, bins);
    const isUsed = new Uint8Array(STATES.length), perBin = 1 / binTime;
    let weight = 1;
    const add = (from, until, state) => {
      const cover = covers[state];
      if (!isUsed[state]) {
        isUsed[state] = used.push(state);
        cover.fill(0, 0, bins);
      }
      const low = Math.min(bins, Math.max(0, (from - begin) * perBin));
      const high = Math.min(bins, Math.max((until - begin) * perBin, low + 1e-3));
      for (let bin = low | 0; bin < high; bin++) {
        const part = Math.min(high, bin + 1) - Math.max(low, bin); // of the bin
        cover[bin] += part * weight;
        filled[bin] += part;
      }
    };
    if (BANDS[band] === "span") findFree(run, rank, begin, end).visit(add, PROGRAM);
    for (const lane of run.lanesIn(rank, BANDS[band])) {
      run.between(lane, begin, end, (event) => run.parts(event, add));
      weight *= INNER;
    }
    return used;
  }

  /** Writes the state that fills most of each bin, and how much of the bin is filled. */
  write(row, at, bins, whole, used) {
    const { filled, covers } = this;
    for (let bin = 0; bin < bins; bin++) {
      if (!(filled[bin] > 0)) continue;
      let best = used[0];
      for (let k = 1; k < used.length; k++) {
        if (covers[used[k]][bin] > covers[best][bin]) best = used[k];
      }
      row.state[at + bin] = best;
      row.share[at + bin] = Math.max(24, Math.min(255, (255 * filled[bin]) / whole));
    }
  }
}
