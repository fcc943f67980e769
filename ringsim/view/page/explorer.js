// The entry file of an explorer's page, with a frame for each combination of choices.

async function start() {
  const outer = document.querySelector(".parts");
  const empty = outer.querySelector(".ringsim").cloneNode(true);
  const data = document.querySelector('script[type="application/x-ringsim"]').textContent.trim();
  const buffer = await unpack(fromBase64(data));
  const [head, end] = readHead(buffer), ends = [end];
  for (const size of head.sizes) ends.push(ends.at(-1) + size);
  const prefers = matchMedia("(prefers-color-scheme: dark)");
  let view;
  const show = (values) => {
    const place = head.choices.reduce((number, { options }, at) => (
      number * options.length + options.indexOf(values[at])), 0);
    const frame = head.frames[place], root = empty.cloneNode(true);
    const runs = frame.runs.map((run) => readRun(buffer.slice(ends[run], ends[run + 1])));
    outer.querySelector(".ringsim").replaceWith(root);
    const tab = view?.close().tab, dark = view?.timeline.dark ?? prefers.matches;
    window.ringsim = view = new View(root, runs).open(dark, tab);
    explorer.show(frame, view);
  };
  const first = head.choices.map(({ value }) => value);
  const explorer = new Explorer(outer, head.choices, first, false, show);
  prefers.onchange = () => view.setTheme(prefers.matches);
  show(first);
}

start();
