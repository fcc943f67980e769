// The entry file of a standalone page. The page contains the traces, and its address contains the state of the view.

class Page extends View {
  /** Writes the state of the view to the address, so that a copied link restores the state. */
  remember() {
    const { timeline } = this, number = (one) => this.runs.indexOf(one.run);
    const words = new URLSearchParams({ t: [timeline.from, timeline.until].map(Math.round) });
    words.set("h", Math.round(timeline.head));
    if (timeline.hasOwnHeight) words.set("y", this.rowsWord());
    if (timeline.selected) words.set("e", [number(timeline.selected), timeline.selected.event]);
    if (this.pins.length) words.set("p", this.pins.map((one) => [number(one), one.event]));
    if (timeline.notes.length) words.set("m", timeline.notes.map(Math.round));
    if (this.part("search").value) words.set("q", this.part("search").value);
    words.set("tab", this.tab);
    words.set("hide", [...timeline.hidden]);
    if (timeline.grouping !== "rank") words.set("by", timeline.grouping);
    try {
      history.replaceState(null, "", `#${words.toString().replaceAll("%2C", ",")}`);
    } catch {
      // the address of a frame without an origin of its own cannot be changed
    }
  }

  /** Switches to the light theme until printing has ended. Pages without a still picture print the timeline. */
  print() {
    if (!this.timeline.dark) return;
    this.setTheme(false);
    this.timeline.draw();
    addEventListener("afterprint", () => this.setTheme(true), { once: true });
  }

  rowsWord() { return [this.timeline.top, this.timeline.rowHeight].map((one) => Number(one.toFixed(1))); }

  restore() {
    const { timeline } = this, words = new URLSearchParams(location.hash.slice(1));
    const numbers = (name) => (words.has(name) ? words.get(name).split(",").map(Number) : []);
    const [from, until] = numbers("t"), [head] = numbers("h"), [top, height] = numbers("y");
    if (until > from) timeline.show(from, until);
    if (head > 0) timeline.head = head;
    if (timeline.groupings().includes(words.get("by"))) this.groupBy(words.get("by"));
    if (words.has("hide")) timeline.hidden = new Set(words.get("hide").split(",").filter(Boolean));
    if (height > 0) timeline.setRowHeight(height);
    if (top >= 0) timeline.scroll(top - timeline.top);
    timeline.notes = numbers("m").filter(Number.isFinite);
    const places = (list) => list.flatMap((run, k) => (k % 2 ? [] : [{ run: this.runs[run], event: list[k + 1] }]));
    const exists = ({ run, event }) => run && Number.isInteger(event) && event >= 0 && event < run.size;
    for (const one of places(numbers("p")).filter(exists)) this.pin(one);
    for (const one of places(numbers("e")).filter(exists)) this.select(one);
    this.part("search").value = words.get("q") ?? "";
    this.search(this.part("search").value);
    if (this.tabs.includes(words.get("tab"))) this.tab = words.get("tab");
  }
}

/** Opens a view of runs in the page's element. */
function show(root, runs, View) {
  root.classList.add("ready");
  return (window.ringsim = new View(root, runs).open(matchMedia("(prefers-color-scheme: dark)").matches));
}

/** Shows a run that continues, as long as the page's server sends its newest part, and then the whole run. */
async function follow(root) {
  const whole = root.cloneNode(true);
  let view;
  for (;; await new Promise((next) => setTimeout(next, 250))) {
    const answer = await fetch("run").catch(() => undefined);
    if (!answer) return; // the server has ended
    if (!answer.ok) continue; // there is no part yet
    const run = readRun(await unpack(await answer.arrayBuffer()));
    if (!run.head.progress) {
      view?.close();
      root.replaceWith(whole);
      show(whole, [run], Page);
      return;
    }
    if (view) view.renew(run); else view = show(root, [run], LiveView);
  }
}

/** Shows the runs in a page. */
async function start() {
  const root = document.querySelector(".ringsim");
  try {
    const packed = [...document.querySelectorAll('script[type="application/x-ringsim"]')];
    const runs = await Promise.all(packed.map(async (one) => readRun(await unpack(fromBase64(one.textContent.trim())))));
    if (runs.length) show(root, runs, Page); else await follow(root);
    addEventListener("beforeprint", () => window.ringsim.print());
    const prefers = matchMedia("(prefers-color-scheme: dark)");
    prefers.addEventListener("change", (event) => window.ringsim.setTheme(event.matches));
  } catch (error) {
    root.querySelector('[data-part="live"]').textContent = `cannot show the view: ${error.message}`;
    root.classList.add("failed");
    throw error;
  }
}

start();
