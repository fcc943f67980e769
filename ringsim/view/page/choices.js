// What surrounds the view of an explorer, on a page and in a notebook: the choices, the words about
// a frame, and a picture of some frames.


/** An explorer's parts; `changed` gets the values, which may be `between` the options if true. */
class Explorer {
  constructor(outer, choices, values, between, changed) {
    Object.assign(this, { outer, values: [...values], between, changed });
    const section = (name) => outer.querySelector(`.${name}`)
      ?? outer.appendChild(make("section", { class: name, "aria-label": name }));
    const form = make("form", { onsubmit: (event) => event.preventDefault() });
    this.note = make("p", { role: "status" });
    form.append(...choices.flatMap((choice, place) => this.control(choice, place)), this.note);
    section("choices").append(form);
    [this.picture, this.words] = [section("picture"), section("words")];
    this.words.setAttribute("aria-live", "polite");
    new ResizeObserver(() => this.draw?.()).observe(this.picture);
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
      list.append(...options.map((option) => make("option", {}, option)));
      list.value = this.values[place];
      return [name, list];
    }
    const nearest = (number) => options.reduce((best, option) => (
      Math.abs(option - number) < Math.abs(best - number) ? option : best));
    const last = options.at(-1), say = (number) => `${number} ${unit}`.trim();
    const slider = make("input", { type: "range", id, max: `${options.length - 1}` });
    const field = make("input", {
      type: "number", step: whole ? "1" : "any", "aria-label": say(`${label} as a number`),
    });
    const show = (value) => {
      slider.value = options.indexOf(nearest(value));
      slider.setAttribute("aria-valuetext", say(value));
      field.value = value;
    };
    slider.addEventListener("input", () => {
      show(options[slider.value]);
      choose(options[slider.value]);
    });
    const take = () => {
      const typed = field.value === "" ? this.values[place] : Number(field.value);
      const inside = Math.min(last, Math.max(options[0], whole ? Math.round(typed) : typed));
      const value = this.between ? inside : nearest(typed);
      const why = this.between ? `is from ${options[0]} to ${say(last)}` + (whole ? ", whole" : "")
        : `is one of ${options.join(", ")} on this page: ${say(value)} is nearest to ${typed}`;
      show(value);
      choose(value, value === typed ? "" : `${label} ${why}.`);
    };
    field.addEventListener("change", take);
    field.addEventListener("keydown", (event) => { // JupyterLab suppresses the change
      if (event.key !== "Enter") return;
      event.preventDefault();
      take();
    });
    show(this.values[place]);
    return [name, slider, field, make("span", {}, unit)];
  }

  /** Shows a frame's words, and the picture of its runs. */
  show({ sentences, table: [names, ...rows], draws }, view) {
    const isNumber = (text) => /^[\d.]+( \S+)?$/.test(text);
    const cell = (text) => make("td", isNumber(text) ? { class: "number" } : {}, text);
    const row = ([first, ...more]) => (
      make("tr", {}, make("th", { scope: "row" }, first), ...more.map(cell)));
    this.words.replaceChildren(...sentences.map((text) => make("p", {}, text)));
    if (names) this.words.append(make("div", { tabindex: "0" }, make("table", {},
      make("thead", {}, make("tr", {}, ...names.map((text) => make("th", { scope: "col" }, text)))),
      make("tbody", {}, ...rows.map(row)))));
    const stuck = view.runs.find(({ head }) => head.findings[0]?.kind === "deadlock");
    const label = "bandwidth of A and B against the size of a message; the table lists the numbers";
    const chart = draws && make("canvas", { role: "img", "aria-label": label });
    this.picture.replaceChildren(...[stuck ? drawCircle(stuck) : chart].filter(Boolean));
    this.draw = () => {
      this.outer.parentNode.dataset.theme = view.root.dataset.theme;
      if (chart) drawBandwidth(chart, view.timeline, ...view.runs);
    };
    new MutationObserver(this.draw).observe(view.root, { attributeFilter: ["data-theme"] });
    this.draw();
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
  const picture = svg("svg", { viewBox: "0 0 300 220", role: "img",
    "aria-label": `Ranks ${ranks.join(", ")} wait for each other in a circle.` });
  for (const i of events.filter((one) => ranks.includes(run.columns.peer[one]))) {
    const [[x, y], [toX, toY]] = [place(run.rank[i]), place(run.columns.peer[i])];
    const long = Math.hypot(toX - x, toY - y), [dx, dy] = [(toX - x) / long, (toY - y) / long];
    const [middleX, middleY] = [(x + toX) / 2, (y + toY) / 2];
    const out = dy * (middleX - 150) - dx * (middleY - 110) < -1 ? -1 : 1; // away from the centre
    const [left, top] = [x + 20 * dx, y + 20 * dy], [right, end] = [toX - 22 * dx, toY - 22 * dy];
    const head = [[right, end], [right - 9 * dx - 5 * dy, end - 9 * dy + 5 * dx],
      [right - 9 * dx + 5 * dy, end - 9 * dy - 5 * dx]];
    picture.append(svg("line", { x1: left, y1: top, x2: right - 6 * dx, y2: end - 6 * dy }),
      svg("polygon", { points: head.join(" ") }),
      svg("text", { x: middleX + 16 * out * dy, y: middleY - 12 * out * dx + 4,
        "text-anchor": ["end", "middle", "start"][1 + Math.sign(Math.round(out * dy * 4))],
      }, run.op(i)));
  }
  for (const rank of ranks) {
    const [x, y] = place(rank);
    picture.append(svg("circle", { cx: x, cy: y, r: 16 }),
      svg("text", { x, y: y + 5, "text-anchor": "middle" }, `${rank}`));
  }
  return picture;
}
