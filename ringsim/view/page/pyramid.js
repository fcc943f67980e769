// What fills most of each bin of time, for each rank and band, at bins of one, two, four ... parts of the run.

const BANDS = ["span", "operation"];
const MOST_CELLS = 1 << 22; // bins of all ranks together: 4 million, two bytes each

/** Where a screen shows more events than it has pixels, it shows these bins. */
class Pyramid {
  constructor(run) {
    this.run = run;
    const most = run.size > MOST_BARS ? 14 : 11; // a run whose bars are drawn one by one needs bins for the overview alone
    this.bins = 1 << Math.max(8, Math.min(most, Math.floor(Math.log2(MOST_CELLS / Math.max(1, 2 * run.ranks)))));
    this.binTime = run.end / this.bins;
    this.depth = Math.log2(this.bins) + 1;
    this.state = [];
    this.share = []; // of a bin's time that is filled at all, from 0 to 255
    for (let level = 0; level < this.depth; level++) {
      const cells = run.ranks * BANDS.length * (this.bins >> level);
      this.state.push(new Uint8Array(cells));
      this.share.push(new Uint8Array(cells));
    }
    const filled = new Float32Array(this.bins);
    const states = STATES.map(() => new Float32Array(this.bins));
    for (let rank = 0; rank < run.ranks; rank++) for (let band = 0; band < BANDS.length; band++) this.build(rank, band, filled, states);
  }

  /** Returns where a row's bins begin at a level. */
  offset(rank, band, level) { return (rank * BANDS.length + band) * (this.bins >> level); }

  build(rank, band, filled, states) {
    const used = new Set();
    filled.fill(0);
    let weight = 1; // of nested spans the innermost is shown
    const add = (from, until, state) => {
      if (!used.has(state)) states[state].fill(0);
      used.add(state);
      this.add(from, until, weight, states[state], filled);
    };
    for (const lane of this.run.lanes[rank][BANDS[band]]) {
      for (const i of lane.events) this.run.parts(i, add);
      weight *= 4;
    }
    for (let level = 0; level < this.depth; level++) this.reduce(level, this.offset(rank, band, level), [...used], states, filled);
  }

  /** Adds what a bar fills of each bin. */
  add(from, until, weight, cover, filled) {
    const low = from / this.binTime, high = Math.max(until / this.binTime, low + 1e-3);
    const last = Math.min(this.bins - 1, Math.floor(high));
    for (let bin = Math.min(this.bins - 1, Math.floor(low)); bin <= last; bin++) {
      const part = Math.max(0, Math.min(high, bin + 1) - Math.max(low, bin));
      cover[bin] += part * weight;
      filled[bin] += part;
    }
  }

  /** Writes one level, and joins every two bins for the next. */
  reduce(level, at, used, states, filled) {
    const bins = this.bins >> level;
    const state = this.state[level], share = this.share[level];
    for (let bin = 0; bin < bins; bin++) {
      if (filled[bin] > 0) {
        let best = used[0];
        for (const one of used) if (states[one][bin] > states[best][bin]) best = one;
        state[at + bin] = best;
        share[at + bin] = Math.max(24, Math.min(255, (255 * filled[bin]) / (1 << level)));
      }
    }
    for (const cover of [filled, ...used.map((one) => states[one])]) {
      for (let bin = 0; 2 * bin + 1 < bins; bin++) cover[bin] = cover[2 * bin] + cover[2 * bin + 1];
    }
  }
}
