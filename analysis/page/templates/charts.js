// The three figures of a sweep: what is chosen becomes what Plotly draws, and a caption.
const CHARTS = (() => {
  const { MEAN, ALL, data, metrics, places, escaped, grouped, scale, titled, said, hover, caption } = POINTS;
  const DASHES = { solid: "solid", dashed: "7px,3px", dotted: "2px,3px", dashdot: "dashdot" };
  const MARKERS = { circle: "circle", square: "square", diamond: "diamond", triangle: "triangle-up", cross: "x" };
  const LINES = { gridcolor: "#E4E4E4", linecolor: "#777777", showline: true, zeroline: false, ticks: "outside", automargin: true };
  const FONT = { family: "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif", size: 12, color: "#222222" };
  const HOLDS = { "<": (a, b) => a < b, "<=": (a, b) => a <= b, ">": (a, b) => a > b, ">=": (a, b) => a >= b, "==": (a, b) => a === b };
  const NEAR = 2; // a limit that is farther than this from all values is told in words
  const DECADES = 100; // what spans more is drawn on a logarithmic axis
  const MOST_WHISKERS = 60; // places with their intervals
  const LETTER_PX = 8, CELL_PX = 38; // of a label, and of a cell with its number
  const MOST_ROWS = 40; // labels beside cells
  const NONE = "none";
  const BETTER = { 1: ", more is better", "-1": ", less is better", 0: "" };

  // -- parts of figures ------------------------------------------------------------------------------------------

  const frame = (height) => ({
    height, font: FONT, margin: { t: 24, b: 48, l: 60, r: 16 }, hovermode: "closest", showlegend: true,
    hoverlabel: { align: "left", namelength: -1, bgcolor: "#FFFFFF", font: { color: "#222222" } },
    legend: { orientation: "h", x: 0, xanchor: "left", y: 1.02, yanchor: "bottom" },
    plot_bgcolor: "#FFFFFF", paper_bgcolor: "#FFFFFF", shapes: [], annotations: [],
  });

  function placed(at, log, width) {
    const axis = data.axes[at], every = Math.ceil((axis.written.join("  ").length * LETTER_PX) / (width - 80));
    const written = (texts) => texts.filter((_, i) => i % every === 0);
    const named = { ...LINES, title: { text: escaped(axis.name), standoff: 8 } };
    if (axis.numbers) return { ...named, type: log ? "log" : "linear", tickvals: written(axis.ticks), ticktext: written(axis.written.map(escaped)) };
    return { ...named, type: "linear", tickvals: axis.written.map((_, code) => code), ticktext: axis.written.map(escaped), range: [-0.5, axis.labels.length - 0.5] };
  }

  const position = (at, code) => data.axes[at].numbers?.[code] ?? code;
  const far = (values) => Math.min(...values) > 0 && Math.max(...values) > DECADES * Math.min(...values);
  const errors = (of, size, colour) => ({
    type: "data", symmetric: false, color: colour, thickness: 1.2, width: 3,
    array: of.map(({ mean, high }) => (high - mean) / size), arrayminus: of.map(({ mean, low }) => (mean - low) / size),
  });

  function limits(layout, metric, size, values, log) {
    for (const { bound, text } of data.slo.filter((limit) => limit.metric === metric.name)) {
      const words = { xref: "paper", x: 0.01, xanchor: "left", showarrow: false, font: { size: 12 } };
      if (bound > NEAR * Math.max(...values)) {
        layout.annotations.push({ ...words, yref: "paper", y: 1, yanchor: "top", text: `SLO ${escaped(text)}: beyond the edge` });
        continue;
      }
      const y = bound / size.size;
      layout.shapes.push({ type: "line", xref: "paper", x0: 0, x1: 1, yref: "y", y0: y, y1: y, line: { color: "#222222", dash: DASHES.dashed, width: 1.3 } });
      layout.annotations.push({ ...words, yref: "y", y: log ? Math.log10(y) : y, yanchor: "bottom", text: `SLO ${escaped(text)}` });
      layout.yaxis.autorangeoptions = { include: [log ? y : 1.06 * y] };
    }
  }

  // -- the three figures -----------------------------------------------------------------------------------------

  // Each takes what is chosen, and gives what Plotly draws and the caption.
  function curves(chosen) {
    const { metric: name, x, series } = chosen;
    const metric = metrics.get(name), rest = others([x, ...series], chosen);
    const kept = [...series, x].filter((at) => at !== null);
    const all = places(kept, fixedOf(rest), [name]), found = all.filter((place) => place.of[0].n);
    const values = found.map((place) => place.of[0].mean), size = scale(metric, values);
    const traces = group(found, series.length).map((own, index) => {
      const [colour, dash, marker] = data.styles[index % data.styles.length], of = own.map((place) => place.of[0]);
      return {
        type: "scatter", mode: x === null || !data.axes[x].numbers ? "markers" : "lines+markers", name: escaped(series.map((at, i) => said(at, own[0].codes[i])).join(", ") || metric.label),
        x: own.map((place) => (x === null ? index : position(x, place.codes[series.length]))), y: of.map(({ mean }) => mean / size.size),
        error_y: errors(of, size.size, colour), line: { color: colour, dash: DASHES[dash], width: 1.7 },
        marker: { color: colour, symbol: MARKERS[marker], size: 8 },
        hovertext: own.map((place) => hover(place, kept, rest, [name])), hovertemplate: "%{hovertext}<extra></extra>",
      };
    });
    const log = chosen.logY ?? far(values), logX = x !== null && Boolean(data.axes[x].numbers) && (chosen.logX ?? data.axes[x].log);
    const yaxis = { ...LINES, title: { text: titled(metric, size), standoff: 8 }, type: log ? "log" : "linear", rangemode: log ? "normal" : "tozero", separatethousands: true };
    const layout = { ...frame(460), xaxis: x === null ? { ...LINES, showticklabels: false } : placed(x, logX, chosen.width), yaxis };
    limits(layout, metric, size, values, log);
    return { traces, layout, says: caption(found.length, all.length - found.length, rest), ticked: { logX, logY: log } };
  }

  // Places by their first codes.
  function group(found, count) {
    const made = new Map();
    for (const place of found) {
      const key = place.codes.slice(0, count).join();
      made.set(key, [...(made.get(key) ?? []), place]);
    }
    return [...made.values()];
  }

  function heatMap(chosen) {
    const { metric: name, x, y } = chosen, metric = metrics.get(name), rest = others([x, y], chosen);
    const all = places([y, x], fixedOf(rest), [name]), found = all.filter((place) => place.of[0].n);
    const values = found.map((place) => place.of[0].mean), size = scale(metric, values), log = far(values);
    const grid = (empty) => data.axes[y].labels.map(() => data.axes[x].labels.map(() => empty));
    const z = grid(null), texts = grid(""), labels = grid("");
    for (const place of found) {
      const [row, column] = place.codes, value = place.of[0].mean / size.size;
      z[row][column] = log ? Math.log10(value) : value;
      texts[row][column] = hover(place, [y, x], rest, [name]);
      labels[row][column] = grouped(value, 3);
    }
    const room = chosen.width - 160, few = room / data.axes[x].labels.length > CELL_PX;
    const bar = { title: { text: titled(metric, size), side: "right" }, thickness: 14, ...(log ? decades(values.map((value) => value / size.size)) : {}) };
    const traces = [{
      type: "heatmap", z, colorscale: "Cividis", colorbar: bar, hovertext: texts, hovertemplate: "%{hovertext}<extra></extra>",
      xgap: 1, ygap: 1, showlegend: false, hoverongaps: false, ...(few ? { text: labels, texttemplate: "%{text}" } : {}),
    }];
    const missed = found.filter((place) => data.slo.some((limit) => limit.metric === name && !HOLDS[limit.compare](place.of[0].mean, limit.bound)));
    if (missed.length) traces.push({
      type: "scatter", mode: "markers", name: "misses the SLO", marker: { symbol: "x", color: "#D55E00", size: 9, line: { color: "#FFFFFF", width: 1 } },
      x: missed.map((place) => place.codes[1] + 0.36), y: missed.map((place) => place.codes[0] + 0.3), hoverinfo: "skip",
    });
    const named = (at) => {
      const { name: title, labels, written, numbers } = data.axes[at], words = numbers ? labels : written, longest = Math.max(...words.map((word) => word.length));
      const every = Math.ceil(words.length / (at === x ? Math.max(room / LETTER_PX / (longest + 2), 1) : MOST_ROWS));
      const ticks = words.map((_, code) => code).filter((code) => code % every === 0);
      return { ...LINES, title: { text: escaped(title), standoff: 8 }, tickvals: ticks, ticktext: ticks.map((code) => escaped(words[code])), range: [-0.5, words.length - 0.5] };
    };
    const layout = { ...frame(Math.min(720, 200 + 44 * data.axes[y].labels.length)), xaxis: named(x), yaxis: named(y) };
    return { traces, layout, says: caption(found.length, all.length - found.length, rest) };
  }

  function decades(values) {
    const low = Math.floor(Math.log10(Math.min(...values))), high = Math.ceil(Math.log10(Math.max(...values)));
    const ticks = Array.from({ length: high - low + 1 }, (_, i) => low + i);
    return { tickvals: ticks, ticktext: ticks.map((tick) => grouped(10 ** tick, 3)) };
  }

  // Places that no other one dominates in the means are joined; those dominated for sure, whose intervals another
  // one's lie beyond in both, are pale. Without a direction that is better, there are neither.
  function pareto(chosen) {
    const pair = [chosen.across, chosen.up], both = pair.map((name) => metrics.get(name));
    const kept = data.axes.map((_, at) => at).filter((at) => !Number.isInteger(chosen[at]));
    const rest = data.axes.map((_, at) => [at, chosen[at]]).filter(([, choice]) => Number.isInteger(choice));
    const filters = data.slo.filter((_, i) => chosen[`slo${i}`]);
    if (chosen.filter !== NONE && chosen.bound !== "") filters.push({ metric: chosen.filter, compare: metrics.get(chosen.filter).sign > 0 ? ">=" : "<=", bound: Number(chosen.bound) });
    const all = places(kept, fixedOf(rest), [...pair, ...filters.map((limit) => limit.metric)]);
    const found = all.filter((place) => place.of[0].n && place.of[1].n);
    for (const place of found) {
      place.met = filters.every((limit, i) => HOLDS[limit.compare](place.of[2 + i].mean, limit.bound));
      const better = both.map(({ sign }, i) => (sign > 0 ? [place.of[i].mean, place.of[i].low, place.of[i].high] : [-place.of[i].mean, -place.of[i].high, -place.of[i].low]));
      [place.mean, place.worse, place.best] = [0, 1, 2].map((i) => better.map((ends) => ends[i]));
    }
    const directed = both.every(({ sign }) => sign), counted = found.filter((place) => place.met);
    const sure = directed ? frontier(counted, "worse") : [];
    for (const place of counted) place.dominated = sure.some((other) => other.worse[0] > place.best[0] && other.worse[1] > place.best[1]);
    const sizes = both.map((metric, i) => scale(metric, found.map((place) => place.of[i].mean)));
    const at = (own, i) => own.map((place) => place.of[i].mean / sizes[i].size);
    const front = (directed ? frontier(counted, "mean") : []).sort((a, b) => a.of[0].mean - b.of[0].mean);
    const marker = (own, style) => ({ type: "scatter", mode: "markers", x: at(own, 0), y: at(own, 1), hovertext: own.map((place) => hover(place, kept, rest, pair)), hovertemplate: "%{hovertext}<extra></extra>", ...style });
    const out = found.filter((place) => !place.met);
    const traces = [{ type: "scatter", mode: "lines", name: "not dominated", x: at(front, 0), y: at(front, 1), line: { color: "#777777", width: 1.7 }, hoverinfo: "skip" }];
    if (out.length) traces.push(marker(out, { name: "misses a limit", marker: { symbol: "x", color: "#BBBBBB", size: 7 } }));
    const few = counted.filter((place) => !place.dominated).length <= MOST_WHISKERS; // more would hide each other
    const coloured = kept.indexOf(chosen.colour);
    const groups = coloured < 0 ? [["places", counted]] : data.axes[chosen.colour].labels.map((_, code) => [said(chosen.colour, code), counted.filter((place) => place.codes[coloured] === code)]);
    groups.filter(([, own]) => own.length).forEach(([name, own], index) => {
      const [colour, , symbol] = data.styles[index % data.styles.length], looks = { color: colour, symbol: MARKERS[symbol], size: 9 };
      const pale = own.filter((place) => place.dominated), good = own.filter((place) => !place.dominated);
      if (pale.length) traces.push(marker(pale, { name: escaped(name), legendgroup: name, showlegend: !good.length, marker: { ...looks, opacity: 0.3 } }));
      const sureOf = good.map((place) => (few || front.includes(place) ? place : null));
      const bars = Object.fromEntries(["error_x", "error_y"].map((bar, i) => [bar, errors(sureOf.map((place) => place?.of[i] ?? {}), sizes[i].size, colour)]));
      if (good.length) traces.push(marker(good, { name: escaped(name), legendgroup: name, marker: looks, ...bars }));
    });
    const axis = (i) => ({ ...LINES, title: { text: titled(both[i], sizes[i]) + BETTER[both[i].sign], standoff: 8 }, separatethousands: true });
    const layout = { ...frame(540), xaxis: axis(0), yaxis: axis(1) };
    const met = filters.length ? ` ${grouped(counted.length, 9)} of ${grouped(found.length, 9)} meet the limits.` : "";
    const joined = directed ? " The line joins what no other place dominates; pale is dominated for sure." : " A metric of which neither more nor less is better has no best place.";
    return { traces, layout, says: caption(found.length, all.length - found.length, rest) + met + joined };
  }

  // Of places, those that no other one is as good as in both and better than in one.
  function frontier(found, by) {
    const ordered = [...found].sort((a, b) => b[by][0] - a[by][0] || b[by][1] - a[by][1]);
    let best = -Infinity;
    return ordered.filter((place) => place[by][1] > best && ((best = place[by][1]), true));
  }

  // [axis, its choice] of the axes that are not used.
  const others = (used, chosen) => data.axes.map((_, at) => [at, chosen[at]]).filter(([at]) => !used.includes(at));
  const fixedOf = (rest) => Object.fromEntries(rest.filter(([, choice]) => choice !== MEAN && choice !== ALL));

  return { curves, heatMap, pareto };
})();
