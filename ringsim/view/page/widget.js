// The entry file of a view in a notebook, whose kernel sends the traces and shares the window.

const WAITING = "The view is waiting for the kernel to send its trace. If the view does not "
  + "appear, run the cell again.";

class NotebookView extends View {
  constructor(root, runs, model) {
    super(root, runs);
    this.model = model;
  }

  remember() {
    const { timeline, model, runs } = this, { run, event } = timeline.selected ?? {};
    if (this.closed) return;
    model.set("window", [timeline.from, timeline.until].map((time) => time + runs[0].start));
    model.set("selected", event < run?.size ? [runs.indexOf(run), event] : []);
    model.save_changes();
  }

  /** In a notebook, keys are the view's only if it has the focus or the pointer. */
  hears(event) {
    const isHere = event.composedPath().includes(this.root) || this.root.matches(":hover");
    const { host } = this.root.getRootNode(), isOurs = !event.ctrlKey && !event.metaKey;
    host.toggleAttribute("data-lm-suppress-shortcuts", isOurs); // Ctrl + S saves the notebook
    return isHere && super.hears(event);
  }

  /** Returns the model's window on the axis; the model counts from the start of the run. */
  windowOf() { return this.model.get("window").map((time) => time - this.runs[0].start); }

  restore() {
    const [from, until] = this.windowOf(), [number, event] = this.model.get("selected");
    if (number !== undefined) this.select({ run: this.runs[number], event }, until === undefined);
    if (until > from) this.timeline.show(from, until);
    this.draw();
  }

  /** Shows the window that the kernel, or a different view of the same model, has set. */
  follow() {
    const { timeline } = this, [from, until] = this.windowOf();
    if (Math.abs(from - timeline.from) + Math.abs(until - timeline.until) < 1e-3) return;
    if (until > from) timeline.show(from, until); else timeline.fit();
    this.draw();
  }
}

function isDark(element) {
  const [red, green, blue] = getComputedStyle(element).color.match(/[\d.]+/g) ?? [0, 0, 0];
  return 0.3 * red + 0.59 * green + 0.11 * blue > 128;
}

/** Shows a model in an element. When that is removed, anywidget calls the returned function. */
function render({ model, el }) {
  // The attribute lets the view handle its own keys in Notebook 7; otherwise the notebook would,
  // and pressing D twice would delete a cell.
  const host = el.appendChild(make("div", { "data-lm-suppress-shortcuts": "true" }));
  const shadow = host.attachShadow({ mode: "open" }); // keeps the notebook's style out
  const said = make("p", {}, WAITING), choices = model.get("choices"); // of an explorer
  const outer = make("div", { class: "parts" });
  const choose = (chosen) => {
    model.set("chosen", chosen);
    model.save_changes();
  };
  const values = model.get("chosen"), isExplorer = choices.length > 0;
  const explorer = isExplorer && new Explorer(outer, choices, values, true, choose);
  outer.append(said);
  const look = isExplorer ? "ringsim ready explorer" : "";
  shadow.append(make("style", {}, STYLE), make("div", { class: look }, outer));
  const live = el.appendChild(make("style")); // hides an explorer's still picture, another output
  let view, tab, version = -1;
  const makeRoot = () => {
    (outer.querySelector(".ringsim") ?? said).outerHTML = PAGE;
    return outer.querySelector(".ringsim");
  };
  const showLive = async (buffer) => { // a part of a run that continues
    const run = readRun(await unpack(buffer));
    if (version > 0) return; // the whole run has come meanwhile
    if (view) view.renew?.(run); else view = new LiveView(makeRoot(), [run]).open(isDark(el));
  };
  const show = async (message, buffers) => {
    const [number, event] = message.select ?? [];
    if (view && message.select) view.select({ run: view.runs[number], event }, true);
    if (message.live) return showLive(buffers[0]);
    if (!(message.version > version)) return;
    if (version >= 0) { // the old values belong to the previous runs
      model.set("window", []);
      model.set("selected", []);
    }
    version = message.version;
    tab = view?.close().tab ?? tab;
    view = undefined;
    const runs = await Promise.all(buffers.map(async (one) => readRun(await unpack(one))));
    if (message.version < version) return;
    view = new NotebookView(makeRoot(), runs, model).open(isDark(el), tab);
    if (!isExplorer) return;
    explorer.show(message.frame, view);
    const { still } = message, hidden = `.${still}, .jp-OutputArea-child:has(.${still})`;
    live.textContent = `${hidden} { display: none }`;
  };
  const follow = () => view?.follow();
  const themes = new MutationObserver(() => view?.setTheme(isDark(el)));
  themes.observe(document.body, { attributes: true });
  model.on("msg:custom", show);
  model.on("change:window", follow);
  model.send({ ask: "runs" });
  return () => {
    view?.close();
    themes.disconnect();
    model.off("msg:custom", show);
    model.off("change:window", follow);
  };
}

export default { render };
