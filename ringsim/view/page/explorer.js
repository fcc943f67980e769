// The entry file of an explorer's page, with choices, and a frame that Python computed for each combination of choices.

/** A view of a frame. Its state is not kept, because the next choice shows a different frame. */
class FrameView extends View {
  constructor(root, runs, outer) {
    super(root, runs);
    this.outer = outer;
  }

  setTheme(dark) {
    super.setTheme(dark);
    this.outer.dataset.theme = this.root.dataset.theme;
  }

  remember() {}

  restore() { this.draw(); }
}

/** Creates the control for a choice: a slider for numbers, or a list for names. */
function control({ label, options, at, numbers }, changed) {
  const said = make("output", {}, options[at]);
  const input = numbers ? make("input", { type: "range", min: "0", max: `${options.length - 1}`, value: `${at}`, "aria-valuetext": options[at] })
    : make("select", {}, ...options.map((option, number) => make("option", { value: `${number}`, selected: number === at }, option)));
  input.addEventListener("input", () => {
    const option = options[Number(input.value)];
    if (numbers) {
      input.setAttribute("aria-valuetext", option);
      said.textContent = option;
    }
    changed();
  });
  return [make("label", {}, `${label} `, input, ...(numbers ? [" ", said] : [])), () => Number(input.value)];
}

async function start() {
  const outer = document.querySelector(".explorer"), empty = outer.querySelector(".ringsim").cloneNode(true);
  const buffer = await unpack(fromBase64(document.querySelector('script[type="application/x-ringsim"]').textContent.trim()));
  const [head, end] = readHead(buffer), ends = [end];
  for (const size of head.sizes) ends.push(ends.at(-1) + size);
  const prefers = matchMedia("(prefers-color-scheme: dark)");
  let view;
  const show = () => {
    const frame = head.frames[controls.reduce((place, [, chosen], number) => place * head.choices[number].options.length + chosen(), 0)];
    const root = empty.cloneNode(true), runs = frame.runs.map((run) => readRun(buffer.slice(ends[run], ends[run + 1])));
    root.classList.add("ready");
    outer.querySelector(".ringsim").replaceWith(root);
    outer.querySelector("pre").textContent = frame.text;
    const tab = view?.close().tab ?? head.tab, dark = view?.timeline.dark ?? prefers.matches;
    window.ringsim = view = new FrameView(root, runs, outer).open(dark);
    if (tab) view.showTab(tab);
  };
  const controls = head.choices.map((choice) => control(choice, show));
  outer.querySelector("form").append(...controls.map(([label]) => label));
  prefers.addEventListener("change", (event) => view.setTheme(event.matches));
  show();
}

start();
