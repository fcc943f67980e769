// Divides the run into one, two, four ... time bins, and finds the state that fills most of each bin, for each rank and band.

const BANDS = ["span", "operation", "step"];
const MOST_CELLS = 1 << 22; // the most bins of all ranks together: 4 million, two bytes each
const FIRST_BINS = 2048; // bins per row until there is time to compute finer bins; few screens have more pixels
const MOST_IN_VIEW = 4096; // the most bins for a window

/** The bins that are drawn instead of events if there are more events than pixels. */
class Pyramid {
  constructor(run) {
    this.run = run;
    this.bins = 1 << Math.max(8, Math.min(14, Math.floor(Math.log2(MOST_CELLS / Math.max(1, 2 * run.ranks)))));
    this.binTime = run.end / this.bins;
    this.depth = Math.log2(this.bins) + 1;
    this.rows = []; // by rank and band, computed when first needed
    this.refined = 0; // the number of rows whose bins have all been computed
    this.filled = new Float32Array(Math.max(this.bins, MOST_IN_VIEW));
    this.covers = STATES.map(() => new Float32Array(this.filled.length));
  }

  /** Returns bins of about one pixel for a rank's band, as {state, share, at, bins, begin, binTime}; `share` is how much of a bin is filled, up to 255. */
  level(rank, band, perPixel) {
    const row = (this.rows[rank * BANDS.length + band] ??= this.build(rank, band, Math.max(0, this.depth - 1 - Math.log2(FIRST_BINS))));
    const level = Math.min(this.depth - 1, Math.max(row.base, Math.floor(Math.log2(perPixel / this.binTime))));
    return { ...row, at: this.offset(row.base, level), bins: this.bins >> level, begin: 0, binTime: this.binTime * 2 ** level };
  }

  /** Returns bins computed from the events in a window that is too short for the bins of the run. */
  window(rank, band, from, until, pixels) {
    const bins = Math.min(MOST_IN_VIEW, pixels), binTime = (until - from) / bins;
    const row = { base: 0, state: new Uint8Array(bins), share: new Uint8Array(bins) };
    const used = this.cover(rank, band, from, bins, binTime, (lane, each) => this.run.between(lane, from, until, each));
    this.write(row, 0, bins, 1, used);
    return { ...row, at: 0, bins, begin: from, binTime };
  }

  /** Computes all bins of one more row; returns false if there are no more rows. */
  refine() {
    if (this.refined >= this.run.ranks * BANDS.length) return false;
    const [rank, band] = [Math.floor(this.refined / BANDS.length), this.refined % BANDS.length];
    if (this.run.lanesOf(rank)[BANDS[band]].length) this.rows[this.refined] = this.build(rank, band, 0);
    this.refined++;
    return true;
  }

  /** Returns the start of a level in a row whose first level is `base`. */
  offset(base, level) { return 2 * ((this.bins >> base) - (this.bins >> level)); }

  build(rank, band, base) {
    const bins = this.bins >> base, row = { base, state: new Uint8Array(2 * bins), share: new Uint8Array(2 * bins) };
    const used = this.cover(rank, band, 0, bins, this.binTime * 2 ** base, ({ events }, each) => events.forEach(each));
    for (let level = base; level < this.depth; level++) {
      this.write(row, this.offset(base, level), this.bins >> level, 1 << (level - base), used);
      for (const cover of [this.filled, ...used.map((one) => this.covers[one])]) {
        for (let bin = 0; 2 * bin + 1 < this.bins >> level; bin++) cover[bin] = cover[2 * bin] + cover[2 * bin + 1];
      }
    }
    return row;
  }

  /** Adds up how much of each bin is filled, in total and by state; returns the states that occur. `walk` visits the events of a lane. */
  cover(rank, band, begin, bins, binTime, walk) {
    const { run, filled, covers } = this, used = [];
    filled.fill(0, 0, bins);
    let weight = 1; // grows from lane to lane, so that the innermost of nested spans is shown
    const add = (from, until, state) => {
      const cover = covers[state];
      if (!used.includes(state)) {
        used.push(state);
        cover.fill(0, 0, bins);
      }
      const low = Math.max(0, (from - begin) / binTime), high = Math.max((until - begin) / binTime, low + 1e-3);
      const last = Math.min(bins - 1, Math.floor(high));
      for (let bin = Math.min(bins - 1, Math.floor(low)); bin <= last; bin++) {
        const part = Math.max(0, Math.min(high, bin + 1) - Math.max(low, bin)); // as a share of the bin
        cover[bin] += part * weight;
        filled[bin] += part;
      }
    };
    const each = (event) => run.parts(event, add);
    for (const lane of run.lanesOf(rank)[BANDS[band]]) {
      walk(lane, each);
      weight *= 4;
    }
    return used;
  }

  /** Writes the state that fills most of each bin, and how much of the bin is filled. */
  write(row, at, bins, whole, used) {
    const { filled, covers } = this;
    for (let bin = 0; bin < bins; bin++) {
      if (!(filled[bin] > 0)) continue;
      let best = used[0];
      for (let k = 1; k < used.length; k++) if (covers[used[k]][bin] > covers[best][bin]) best = used[k];
      row.state[at + bin] = best;
      row.share[at + bin] = Math.max(24, Math.min(255, (255 * filled[bin]) / whole));
    }
  }
}
