// What surrounds the view of an explorer, on a page and in a notebook: the choices, the words about
// a frame, and a picture of some frames.

/** An explorer's parts; `changed` gets the values, which may be `between` the options if true. */
class Explorer {
  constructor(outer, choices, values, between, changed) {
    Object.assign(this, { outer, values: [...values], between, changed });
    const section = (name) => outer.querySelector(`.${name}`)
      ?? outer.appendChild(make("div", { class: name, role: "group", "aria-label": name }));
    const form = make("form", { onsubmit: (event) => event.preventDefault() });
    this.note = make("p", { role: "status" });
    form.append(...choices.flatMap((choice, place) => this.control(choice, place)), this.note);
    section("choices").append(form);
    [this.picture, this.words] = [section("picture"), section("words")];
    this.words.ariaLive = "polite";
  }

  /** Creates the label and the controls of a choice: a list, or a slider and a field. */
  control({ label, unit, options, whole }, place) {
    const id = `choice-${place}`, name = make("label", { for: id }, label);
    const choose = (value, note = "") => {
      this.note.textContent = note;
      this.values[place] = value;
      this.changed([...this.values]);
    };
    if (typeof options[0] === "string") {
      const list = make("select", { id, onchange: () => choose(list.value) });
      list.append(...options.map((option) => new Option(option)));
      list.value = this.values[place];
      return [name, list];
    }
    const nearest = (number) => options.reduce((best, option) => (
      Math.abs(option - number) < Math.abs(best - number) ? option : best));
    const last = options.at(-1), say = (number) => `${number} ${unit}`.trim();
    const show = (value) => {
      slider.value = options.indexOf(nearest(value));
      slider.ariaValueText = say(value);
      field.value = value;
    };
    const take = () => {
      const typed = field.value === "" ? this.values[place] : Number(field.value);
      const inside = Math.min(last, Math.max(options[0], whole ? Math.round(typed) : typed));
      const value = this.between ? inside : nearest(typed);
      const why = this.between ? `is from ${options[0]} to ${say(last)}` + (whole ? ", whole" : "")
        : `is one of ${options.join(", ")} on this page: ${say(value)} is nearest to ${typed}`;
      show(value);
      choose(value, value === typed ? "" : `${label} ${why}.`);
    };
    const slider = make("input", { type: "range", id, max: `${options.length - 1}`, oninput: () => {
      show(options[slider.value]);
      choose(options[slider.value]);
    } });
    const field = make("input", {
      type: "number", step: whole ? "1" : "any", "aria-label": say(`${label} as a number`),
      onchange: take,
      onkeydown: (event) => { // JupyterLab suppresses the change
        if (event.key !== "Enter") return;
        event.preventDefault();
        take();
      },
    });
    show(this.values[place]);
    return [name, slider, field, make("span", {}, unit)];
  }

  /** Shows a frame's words, and the picture of its runs. */
  show({ sentences, table: [names, ...rows], draws }, view) {
    this.words.replaceChildren(...sentences.map((text) => make("p", {}, text)));
    if (names) this.words.append(make("div", { tabindex: "0" }, table("", names, rows)));
    const stuck = view.runs.find(({ head }) => head.findings[0]?.kind === "deadlock");
    const label = "bandwidth of A and B against the size of a message; the table lists the numbers";
    const chart = draws && bandwidthChart(view.timeline, view.runs, label, 420, 240);
    this.picture.replaceChildren(stuck ? drawCircle(stuck) : chart || "");
    const follow = () => { this.outer.parentNode.dataset.theme = view.root.dataset.theme; };
    new MutationObserver(follow).observe(view.root, { attributeFilter: ["data-theme"] });
    follow();
  }
}

/** Draws the ranks that wait for each other, each with an arrow to the rank that it waits for. */
function drawCircle(run) {
  const { events } = run.head.findings[0];
  const ranks = [...new Set(events.map((i) => run.rank[i]))].sort((a, b) => a - b);
  const place = (rank) => {
    const angle = (2 * Math.PI * ranks.indexOf(rank)) / ranks.length - Math.PI / 2;
    return [150 + 84 * Math.cos(angle), 110 + 84 * Math.sin(angle)];
  };
  const arrows = events.filter((i) => ranks.includes(run.columns.peer[i])).flatMap((i) => {
    const [from, to] = [run.rank[i], run.columns.peer[i]].map(place);
    const [x, y] = bendOf(from, to, 0.2);
    return [svg("path", { d: `M${from}L${to}`, "marker-end": "url(#circle-tip)" }),
      svg("text", { x, y: y + 4 }, run.op(i))];
  });
  const nodes = ranks.flatMap((rank) => {
    const [x, y] = place(rank);
    return [svg("circle", { cx: x, cy: y, r: 16 }), svg("text", { x, y: y + 5 }, `${rank}`)];
  });
  const label = `Ranks ${ranks.join(", ")} wait for each other in a circle.`;
  return svg("svg", { class: "circle", viewBox: "0 0 300 220", role: "img", "aria-label": label },
    makeTip("circle-tip", 18), ...arrows, ...nodes);
}
