// Shows a run that continues; the window and the playhead follow its end.

class LiveView extends View {
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
    ring.found = [];
    ring.key = "";
    this.names = this.drawnNames();
    const isUsed = this.part("legend").matches(":hover, :focus-within"); // a click could be lost
    if (!isUsed) this.drawLegend();
    this.draw();
  }
}
