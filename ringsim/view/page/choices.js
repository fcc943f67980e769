// What surrounds the view of an explorer: the choices, words about a frame, and a picture.

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

  control({ label, unit, options, whole }, place) {
    const id = `choice-${place}`, name = make("label", { for: id }, label);
    const choose = (value, note = "") => {
      this.note.textContent = note;
      this.values[place] = value;
      this.changed([...this.values]);
    };
    if (typeof options[0] === "string") {
      const offered = options.map((option) => new Option(option));
      const list = make("select", { id, onchange: () => choose(list.value) }, ...offered);
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
    const take = (typed) => {
      const inside = Math.min(last, Math.max(options[0], whole ? Math.round(typed) : typed));
      const value = this.between ? inside : nearest(typed);
      const why = this.between ? `is from ${options[0]} to ${say(last)}` + (whole ? ", whole" : "")
        : `is one of ${options.join(", ")} on this page: ${say(value)} is nearest to ${typed}`;
      show(value);
      choose(value, value === typed ? "" : `${label} ${why}.`);
    };
    const slide = () => take(options[slider.value]);
    const slider = make("input", { type: "range", id, max: options.length - 1, oninput: slide });
    const read = () => take(field.value === "" ? this.values[place] : Number(field.value));
    const field = make("input", {
      type: "number", step: whole ? "1" : "any", "aria-label": say(`${label} as a number`),
      onchange: read,
      onkeydown: (event) => { // JupyterLab suppresses the change
        if (event.key !== "Enter") return;
        event.preventDefault();
        read();
      },
    });
    show(this.values[place]);
    return [name, slider, field, make("span", {}, unit)];
  }

  show({ sentences, table: [names, ...rows], draws }, view) {
    this.words.replaceChildren(...sentences.map((text) => make("p", {}, text)));
    if (names) this.words.append(make("div", { tabindex: "0" }, table("", names, rows)));
    const stuck = view.runs.find(({ head }) => head.findings[0]?.kind === "deadlock");
    const label = "bandwidth of A and B against the size of a message; the table lists the numbers";
    const chart = draws && bandwidthChart(view.timeline, view.runs, label, 420, 240);
    this.picture.replaceChildren(stuck ? drawCircle(stuck) : chart || "");
  }
}

/** Draws the ranks that wait for each other, each with an arrow to the rank that it waits for. */
function drawCircle(run) {
  const { events, ranks } = run.head.findings[0];
  const places = new Map(ranks.map((rank, k) => [rank, placeOn([150, 110], 84, k / ranks.length)]));
  const ends = events.map((i) => [places.get(run.rank[i]), places.get(run.columns.peer[i]), i]);
  const arrows = ends.filter(([, to]) => to).flatMap(([from, to, i]) => {
    const [x, y] = onCurve(from, to, 0.5, 0.4), line = svg("path", { d: `M${from}L${to}` });
    return [line, svg("text", { x, y: y + 4 }, run.op(i))];
  });
  const nodes = [...places].flatMap(([rank, [x, y]]) =>
    [svg("circle", { cx: x, cy: y, r: 16 }), svg("text", { x, y: y + 5 }, `${rank}`)]);
  const label = `Ranks ${ranks.join(", ")} wait for each other in a circle.`;
  return svg("svg", { class: "circle", viewBox: "0 0 300 220", role: "img", "aria-label": label },
    ...arrows, ...nodes);
}
