// Shows a run that continues. Its newest part is renewed again and again, and the window and the
// playhead follow its end.

const NOT_YET = { stuck: "waiting for more than 1 s", unwaited: "not waited for yet" };

class LiveView extends View {
  drawnNames() {
    const names = super.drawnNames();
    for (const key in NOT_YET) if (names.has(key)) names.set(key, new Set([NOT_YET[key]]));
    return names;
  }

  remember() { }

  restore() { this.renew(this.runs[0]); }

  /** Shows a newer part of the run, unless the reader looks at an event or an area, or drags. */
  renew(run) {
    const { timeline, ring, pointers } = this, { canvas, overlay, overview } = timeline;
    const { begin, end, from, until, top, unfolded, hidden, notes, grouping } = timeline;
    const isHeld = timeline.selected || timeline.tape || pointers.size;
    const { progress, title } = run.head, held = isHeld ? " · held until you press Esc" : "";
    this.part("source").textContent = `${progress} · ${title}${held}`;
    if (isHeld) return;
    this.runs = [run];
    const fresh = new Timeline(canvas, overlay, overview, this.runs);
    const own = { begin: run.size ? run.begin : 0, head: fresh.end };
    Object.assign(timeline, fresh, { top, unfolded, hidden, notes, ...own });
    timeline.groupBy(grouping);
    const by = until >= end ? fresh.end - end : 0; // unless the reader looks at an earlier time
    if (by && from <= begin) timeline.fit(); else timeline.show(from + by, until + by);
    ring.found.clear();
    ring.key = "";
    const names = this.drawnNames(), keysOf = (all) => `${[...all?.keys() ?? []]}`;
    const isSame = keysOf(names) === keysOf(this.names);
    this.names = names;
    if (!isSame) this.drawLegend(); // otherwise, a click on it could be lost
    this.draw();
  }
}
