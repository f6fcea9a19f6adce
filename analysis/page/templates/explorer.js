// What a reader chooses of a sweep, and the controls to choose it with.
(async () => {
  const { MEAN, ALL, data, metrics, unpack } = POINTS;
  const { curves, heatMap, pareto } = CHARTS;
  const CONFIG = { responsive: true, displayModeBar: false, doubleClick: "reset" };
  const PRINT_PX = 680;
  const MOST_SERIES = data.styles.length;
  const OTHERS = "others", NONE = "none";

  // -- what is chosen --------------------------------------------------------------------------------------------

  const every = data.axes.map((_, at) => at);
  const asOptions = (ats) => ats.map((at) => [at, data.axes[at].name]);
  const values = (at) => data.axes[at].labels.map((text, code) => [code, text]);
  const choice = (at, free) => [at, data.axes[at].name, [free, ...values(at)]];
  const together = (ats) => ats.reduce((product, at) => product * data.axes[at].labels.length, 1);
  const metricOptions = [
    ["Shown at first", data.main.map((name) => [name, metrics.get(name).label])],
    ["All metrics", data.metrics.map(({ name, label: word }) => [name, `${word} [${name}]`])],
  ];

  // Of each figure: what is chosen at first, and its controls: [key, label, options], or a key and a label of a tick.
  const FIGURES = {
    curves: {
      draw: (chosen) => curves({ ...chosen, series: chosen.series === OTHERS ? every.filter((at) => at !== chosen.x) : chosen.series === NONE ? [] : [chosen.series] }),
      first() {
        const { metric, x, series } = data.start, rest = every.filter((at) => at !== x);
        const whole = series.length === rest.length && series.length > 1;
        return { metric, x, series: whole ? OTHERS : series.at(-1) ?? NONE, logX: null, logY: null };
      },
      controls(chosen) {
        const rest = every.filter((at) => at !== chosen.x);
        if (chosen.series === chosen.x || (chosen.series === OTHERS && together(rest) > MOST_SERIES)) chosen.series = rest.at(-1) ?? NONE;
        const lines = [[NONE, "none"], ...asOptions(rest), ...(rest.length > 1 && together(rest) <= MOST_SERIES ? [[OTHERS, "all others together"]] : [])];
        const free = chosen.series === OTHERS ? [] : rest.filter((at) => at !== chosen.series);
        return [
          ["metric", "Metric", metricOptions], ...(data.axes.length ? [["x", "On x", asOptions(every)], ["series", "A line for each", lines]] : []),
          ...free.map((at) => choice(at, [MEAN, "mean of all"])), ["logX", "log x"], ["logY", "log y"],
        ];
      },
    },
    heat_map: {
      draw: heatMap,
      first: () => ({ metric: data.start.metric, x: data.start.cells[0], y: data.start.cells[1] }),
      controls(chosen) {
        if (chosen.y === chosen.x) chosen.y = every.find((at) => at !== chosen.x);
        const rest = every.filter((at) => at !== chosen.x && at !== chosen.y);
        return [["metric", "Metric", metricOptions], ["x", "On x", asOptions(every)], ["y", "On y", asOptions(every.filter((at) => at !== chosen.x))], ...rest.map((at) => choice(at, [MEAN, "mean of all"]))];
      },
    },
    pareto: {
      draw: pareto,
      first: () => ({
        across: data.start.pareto[0], up: data.start.pareto[1], colour: every.find((at) => !data.axes[at].numbers) ?? every[0] ?? NONE, filter: NONE, bound: "",
        ...Object.fromEntries(data.slo.map((_, i) => [`slo${i}`, true])), ...Object.fromEntries(every.map((at) => [at, ALL])),
      }),
      controls: (chosen) => [
        ["across", "On x", metricOptions], ["up", "On y", metricOptions], ["colour", "Coloured by", [[NONE, "none"], ...asOptions(every)]],
        ...every.map((at) => choice(at, [ALL, "all"])), ...data.slo.map(({ text }, i) => [`slo${i}`, `only ${text}`]),
        ["filter", "Only where", [[NONE, "no further limit"], ...metricOptions]],
        ...(chosen.filter === NONE ? [] : [["bound", metrics.get(chosen.filter).sign > 0 ? "is at least" : "is at most", "number"]]),
      ],
    },
  };

  // -- controls --------------------------------------------------------------------------------------------------

  function element(tag, properties, ...children) {
    const made = Object.assign(document.createElement(tag), properties);
    made.append(...children);
    return made;
  }

  const called = (key) => (Number.isInteger(key) ? `axis-${key}` : key); // a number would be a place in the form
  const parsed = (text) => (/^\d+$/.test(text) ? Number(text) : text);

  function control(chosen, [key, word, options], change) {
    if (options === undefined) {
      const tick = element("input", { type: "checkbox", name: key, checked: chosen[key] ?? false });
      tick.addEventListener("change", () => change(key, tick.checked));
      return element("label", { className: "tick" }, tick, ` ${word}`);
    }
    if (options === "number") {
      const unit = metrics.get(chosen.filter)?.unit === "s" ? " (s)" : "";
      const field = element("input", { type: "number", step: "any", name: key, value: chosen[key] });
      field.addEventListener("change", () => change(key, field.value));
      return element("label", {}, element("span", { textContent: word + unit }), field);
    }
    const option = ([value, text]) => Array.isArray(text)
      ? element("optgroup", { label: value || "-" }, ...text.map(option))
      : element("option", { value, textContent: text, selected: value === chosen[key] });
    const select = element("select", { name: called(key) }, ...options.map(option));
    select.value = String(chosen[key]);
    select.addEventListener("change", () => change(key, parsed(select.value)));
    return element("label", {}, element("span", { textContent: word }), select);
  }

  function explore(box) {
    const figure = FIGURES[box.dataset.explore], frame = box.closest("figure");
    const form = frame.querySelector("form"), says = frame.querySelector("figcaption");
    const chosen = { ...Object.fromEntries(every.map((at) => [at, data.axes[at].middle])), ...figure.first() };

    async function draw() {
      try {
        const { traces, layout, says: text, ticked = {} } = figure.draw({ ...chosen, width: box.clientWidth });
        await Plotly.react(box, traces, layout, CONFIG);
        for (const [key, on] of Object.entries(ticked)) form.elements[key].checked = on;
        says.textContent = text;
        box.dataset.state = "drawn";
        box.classList.add("drawn");
      } catch (error) {
        says.textContent = `This chart cannot be drawn: ${error.message}. What it shows at first is ${box.dataset.file}.`;
        box.dataset.state = "failed";
      }
    }

    async function change(key, value) {
      chosen[key] = value;
      if (key === "metric") chosen.logY = null;
      if (key === "x") chosen.logX = null;
      build();
      form.elements[called(key)]?.focus();
      await draw();
    }

    function build() {
      form.replaceChildren(...figure.controls(chosen).map((one) => control(chosen, one, change)));
    }

    form.addEventListener("submit", (event) => event.preventDefault());
    build();
    return draw();
  }

  // -- the page --------------------------------------------------------------------------------------------------

  const boxes = [...document.querySelectorAll("[data-explore]")];
  try {
    await Promise.all([window.drawingLibrary(), unpack()]);
  } catch (error) {
    for (const box of boxes) {
      box.replaceChildren(element("p", { className: "failed", textContent: `This chart cannot be drawn: ${error.message}. What it shows at first is ${box.dataset.file}.` }));
      box.dataset.state = "failed";
    }
    return;
  }
  for (const box of boxes) await explore(box);
  addEventListener("beforeprint", () => boxes.forEach((box) => Plotly.relayout(box, { width: PRINT_PX })));
  addEventListener("afterprint", () => boxes.forEach((box) => Plotly.relayout(box, { width: null, autosize: true })));
})();
