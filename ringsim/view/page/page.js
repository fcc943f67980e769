// The entry file of a standalone page, whose address contains the state of the view.

class Page extends View {
  remember() {
    const { timeline, tab } = this, { hidden, grouping, selected, pins, notes, top } = timeline;
    const place = ({ run, event }) => [this.runs.indexOf(run), event];
    const rows = [top, timeline.rowHeight].map((one) => Number(one.toFixed(1)));
    const words = {
      t: [timeline.from, timeline.until].map(Math.round), h: Math.round(timeline.head),
      y: timeline.hasOwnHeight ? rows : [], e: selected ? place(selected) : [],
      p: pins.map(place), m: notes.map(Math.round), q: this.part("search").value,
      tab, hide: [...hidden], by: grouping === "rank" ? "" : grouping,
    };
    const said = Object.entries(words).filter(([name, value]) => name === "hide" || `${value}`);
    try {
      history.replaceState(null, "", `#${new URLSearchParams(said)}`.replaceAll("%2C", ","));
    } catch {} // the address of a frame without an origin of its own cannot be changed
  }

  /** Switches to the light theme until printing has ended; a still picture may be missing. */
  print() {
    if (!this.timeline.dark) return;
    this.setTheme(false);
    this.timeline.draw();
    addEventListener("afterprint", () => this.setTheme(true), { once: true });
  }

  restore() {
    const { timeline, runs } = this, words = new URLSearchParams(location.hash.slice(1));
    const list = (name) => (words.get(name) ?? "").split(",").filter(Boolean);
    const numbers = (name) => list(name).map(Number).filter(Number.isFinite);
    const [from, until] = numbers("t"), [head] = numbers("h"), [top, height] = numbers("y");
    if (until > from) timeline.show(from, until);
    if (head > 0) timeline.head = head;
    if (timeline.groupings().includes(words.get("by"))) this.groupBy(words.get("by"));
    if (words.has("hide")) timeline.hidden = new Set(list("hide"));
    if (height > 0) timeline.setRowHeight(height);
    if (top >= 0) timeline.scroll(top - timeline.top);
    timeline.notes = numbers("m");
    const events = (name) => numbers(name).flatMap((event, k, all) => {
      const run = k % 2 ? runs[all[k - 1]] : undefined;
      return Number.isInteger(event) && event < run?.size ? [{ run, event }] : [];
    });
    for (const one of events("p")) this.pin(one);
    for (const one of events("e")) this.select(one);
    this.part("search").value = words.get("q") ?? "";
    this.search(this.part("search").value);
    const isTab = this.tabs.some(({ textContent }) => textContent === words.get("tab"));
    if (isTab) this.tab = words.get("tab");
  }
}

const DARK = matchMedia("(prefers-color-scheme: dark)");

function openView(View, root, runs) {
  return (window.ringsim = new View(root, runs).open(DARK.matches));
}

/** Shows the parts of a run that the page's server sends while it continues, and the whole run. */
async function follow(root) {
  const next = root.cloneNode(true);
  for (let view;; await new Promise((go) => setTimeout(go, 250))) {
    const answer = await fetch("run").catch(() => undefined);
    if (!answer) return; // the server has ended
    if (!answer.ok) continue; // there is no part yet
    const run = readRun(await unpack(await answer.arrayBuffer()));
    if (view && run.head.progress) view.renew(run);
    else if (run.head.progress) view = openView(LiveView, root, [run]);
    else {
      view?.close();
      root.replaceWith(next);
      return openView(Page, next, [run]);
    }
  }
}

async function start() {
  const root = document.querySelector(".ringsim");
  try {
    const packed = [...document.querySelectorAll('script[type="application/x-ringsim"]')];
    const read = async (one) => readRun(await unpack(fromBase64(one.textContent.trim())));
    const runs = await Promise.all(packed.map(read));
    addEventListener("beforeprint", () => window.ringsim?.print?.());
    DARK.addEventListener("change", () => window.ringsim?.setTheme(DARK.matches));
    if (runs.length) openView(Page, root, runs); else await follow(root);
  } catch (error) {
    root.querySelector('[data-part="live"]').textContent = `cannot show the view: ${error.message}`;
    root.classList.add("failed");
    throw error;
  }
}

start();
