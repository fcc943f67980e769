// Divides a run into one, two, four ... bins of time, and finds the state that fills most of each.

const MOST_CELLS = 1 << 22; // the most bins of all ranks together: 4 million, two bytes each
const FIRST_BINS = 2048; // bins per row until there is time for finer bins, about a screen's pixels
const MOST_IN_VIEW = 4096; // the most bins for a window
const INNER = 4; // how much more the bars of each further lane count, so that inner spans are shown

/** The bins that are drawn instead of events if there are more events than pixels. */
class Pyramid {
  constructor(run) {
    this.run = run;
    const most = Math.floor(Math.log2(MOST_CELLS / Math.max(1, 2 * run.ranks)));
    this.most = 1 << Math.max(8, Math.min(run.size > MOST_BARS ? 14 : 11, most));
    this.rows = []; // levels by rank and band, from fine to coarse, computed when first needed
    this.filled = new Float32Array(Math.max(this.most, MOST_IN_VIEW));
    this.covers = STATES.map(() => new Float32Array(this.filled.length));
  }

  // Returns bins of about one pixel for a rank's band; `share` is how full a bin is, up to 255. If
  // the bins of the run are wider than a pixel, the bins come from the visible events.
  bins(rank, band, from, perPixel, pixels) {
    if (perPixel < this.run.end / this.most) {
      const bins = Math.min(MOST_IN_VIEW, pixels), binTime = (pixels * perPixel) / bins;
      return this.choose(from, bins, binTime, 1, this.cover(rank, band, from, bins, binTime));
    }
    const place = rank * BANDS.length + band;
    const levels = (this.rows[place] ??= this.build(rank, band, Math.min(this.most, FIRST_BINS)));
    const wanted = Math.max(0, Math.floor(Math.log2(perPixel / levels[0].binTime)));
    return levels[Math.min(levels.length - 1, wanted)];
  }

  /** Prepares one more row for a closer look; returns whether there was one. */
  refine() {
    const place = this.rows.findIndex((levels) => levels?.[0].state.length < this.most);
    if (place < 0) return false;
    const [rank, band] = [Math.floor(place / BANDS.length), place % BANDS.length];
    this.rows[place] = this.build(rank, band, this.most);
    return true;
  }

  /** Returns the levels of a row, whose first has a number of bins. */
  build(rank, band, most) {
    const binTime = this.run.end / most, levels = [];
    const used = this.cover(rank, band, 0, most, binTime);
    for (let bins = most, whole = 1; bins; bins >>= 1, whole *= 2) {
      levels.push(this.choose(0, bins, binTime * whole, whole, used));
      for (const cover of [this.filled, ...used.map((one) => this.covers[one])]) {
        for (let bin = 0; bin < bins >> 1; bin++) cover[bin] = cover[2 * bin] + cover[2 * bin + 1];
      }
    }
    return levels;
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
    const addFree = (from, until) => add(from, until, PROGRAM);
    if (BANDS[band] === "span") findFree(run, rank, begin, end, addFree);
    for (const lane of run.lanesIn(rank, BANDS[band])) {
      run.between(lane, begin, end, (event) => run.parts(event, add));
      weight *= INNER;
    }
    return used;
  }

  /** Returns bins with the state that fills most of each, and how much of the bin is filled. */
  choose(begin, bins, binTime, whole, used) {
    const { filled, covers } = this, state = new Uint8Array(bins), share = new Uint8Array(bins);
    for (let bin = 0; bin < bins; bin++) {
      if (!(filled[bin] > 0)) continue;
      let best = used[0];
      for (let k = 1; k < used.length; k++) {
        if (covers[used[k]][bin] > covers[best][bin]) best = used[k];
      }
      state[bin] = best;
      share[bin] = Math.max(24, Math.min(255, (255 * filled[bin]) / whole));
    }
    return { state, share, begin, binTime };
  }
}
