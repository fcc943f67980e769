// Shows a run that continues. Its newest part is renewed again and again, and the window and the playhead follow its end.

const NOT_YET = { stuck: "waiting for more than 1 s", unwaited: "not waited for yet" }; // in the legend

class LiveView extends View {
  drawnNames() {
    return super.drawnNames().map(([key, names]) => [key, key in NOT_YET ? new Set([NOT_YET[key]]) : names]);
  }

  remember() { }

  restore() { this.follow(true); }

  describeRuns() {
    super.describeRuns();
    this.say();
  }

  /** Reports the progress of the run. */
  say() {
    const [{ head }] = this.runs, isHeld = this.timeline.selected ? " · held until you press Esc" : "";
    this.part("source").textContent = `${head.progress} · ${head.title}${isHeld}`;
  }

  /** Shows a newer part of the run, unless the reader is looking at an event or is dragging. */
  renew(run) {
    const { timeline } = this, { top, unfolded, hidden, notes, grouping, from, until, begin, end } = timeline;
    if (timeline.selected || timeline.tape || this.pointers.size) return this.say();
    this.runs = [run];
    Object.assign(timeline, new Timeline(timeline.canvas, timeline.overlay, timeline.overview, this.runs), { top, unfolded, hidden, notes });
    timeline.groupBy(grouping);
    this.ring.found.clear();
    this.say();
    if (until >= end) this.follow(from <= begin, until - from);
    else [timeline.from, timeline.until, timeline.head] = [from, until, timeline.end];
    const names = new Map(this.drawnNames());
    if (names.size !== this.names.size) {
      this.names = names;
      this.drawLegend();
    }
    this.draw();
  }

  /** Moves the window and the playhead to the end of the run. */
  follow(isWhole, span) {
    const { timeline } = this;
    timeline.begin = this.runs[0].begin;
    timeline.head = timeline.end;
    if (isWhole) timeline.fit(); else timeline.show(timeline.end - span, timeline.end);
  }
}
