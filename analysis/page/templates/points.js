// The points of a sweep as columns, grouped into places as a reader chooses, and what is said of them.
const POINTS = (() => {
  const data = JSON.parse(document.getElementById("settings").textContent);
  const TIMES = [[0.001, "µs", 1e-6], [1, "ms", 1e-3], [600, "s", 1], [10800, "min", 60], [Infinity, "h", 3600]];
  const MEAN = "mean", ALL = "all"; // what an axis that is not used may be instead of fixed
  const metrics = new Map(data.metrics.map((metric, at) => [metric.name, { ...metric, at }]));
  let columns;

  // -- columns ---------------------------------------------------------------------------------------------------

  async function unpack() {
    const packed = Uint8Array.from(atob(document.getElementById("columns").textContent), (c) => c.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    const all = new Float32Array(await new Response(stream).arrayBuffer());
    const column = (at) => all.subarray(at * data.rows, (at + 1) * data.rows);
    const count = data.axes.length;
    columns = {
      axes: data.axes.map((_, at) => column(at)),
      seed: column(count),
      status: column(count + 1),
      metric: (name) => column(count + 2 + metrics.get(name).at),
    };
  }

  // Places of the axes kept, of points that are fixed as said ({axis: code}); all other axes are averaged: of each
  // replicate first, so that an interval says how much replicates vary and not how much settings do.
  function places(kept, fixed, names) {
    const made = new Map();
    const conditions = Object.entries(fixed).map(([at, code]) => [columns.axes[at], code]);
    const values = names.map((name) => columns.metric(name));
    for (let row = 0; row < data.rows; row++) {
      if (conditions.some(([column, code]) => column[row] !== code)) continue;
      const codes = kept.map((at) => columns.axes[at][row]);
      const key = codes.join();
      let place = made.get(key);
      if (!place) made.set(key, (place = { codes, points: 0, done: 0, sums: names.map(() => new Map()) }));
      place.points++;
      place.done += columns.status[row] === data.done;
      values.forEach((column, at) => {
        if (!Number.isFinite(column[row])) return;
        const [sum, count] = place.sums[at].get(columns.seed[row]) ?? [0, 0];
        place.sums[at].set(columns.seed[row], [sum + column[row], count + 1]);
      });
    }
    const found = [...made.values()].sort((a, b) => compared(a.codes, b.codes));
    for (const place of found) place.of = place.sums.map(mean);
    return found;
  }

  const compared = (a, b) => {
    const at = a.findIndex((code, i) => code !== b[i]);
    return at < 0 ? 0 : a[at] - b[at];
  };

  // The mean of replicates, and the half width of its interval (Student's t).
  function mean(sums) {
    const values = [...sums.values()].map(([sum, count]) => sum / count);
    const n = values.length;
    const middle = values.reduce((a, b) => a + b, 0) / n;
    const variance = values.reduce((a, b) => a + (b - middle) ** 2, 0) / (n - 1);
    const half = n > 1 ? student(n - 1) * Math.sqrt(variance / n) : NaN;
    const low = Math.max(middle - (half || 0), Math.min(middle, 0));
    return { mean: middle, half, n, low, high: middle + (half || 0) };
  }

  function student(degrees) {
    const last = data.student.length;
    if (degrees <= last) return data.student[degrees - 1];
    return data.normal + ((data.student[last - 1] - data.normal) * last) / degrees;
  }

  // -- texts -----------------------------------------------------------------------------------------------------

  const escaped = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;").replace(/%\{/g, "&#37;{");
  const grouped = (value, digits) => value.toLocaleString("en", { maximumSignificantDigits: digits });

  function shown(value, unit) {
    if (!Number.isFinite(value)) return "-";
    if (unit.endsWith("share")) return `${(value * 100).toFixed(unit === "share" ? 1 : 2)} %`;
    if (unit !== "s") return grouped(value, Math.abs(value) < 1000 ? 4 : Math.max(6, Math.ceil(Math.log10(Math.abs(value)))));
    if (value === 0 || Math.abs(value) >= 1) return `${grouped(value, 4)} s`;
    return Math.abs(value) >= 1e-3 ? `${grouped(value * 1e3, 4)} ms` : `${grouped(value * 1e6, 4)} µs`;
  }

  // {name, size}: values are drawn divided by the size.
  function scale(metric, values) {
    const most = Math.max(0, ...values.filter(Number.isFinite));
    if (metric.unit.endsWith("share")) return { name: "%", size: 0.01 };
    if (metric.unit !== "s") return { name: "", size: 1 };
    const [, name, size] = TIMES.find(([below]) => most < below);
    return { name, size };
  }

  const titled = (metric, size) => escaped(metric.label) + (size.name ? ` (${size.name})` : "");
  const label = (at, code) => data.axes[at].labels[code];
  const said = (at, code) => data.axes[at].values[code];

  // What a place is, its values with their intervals: the text of a hover.
  function hover(place, kept, rest, names) {
    const lines = kept.map((at, i) => `${data.axes[at].name} = ${label(at, place.codes[i])}`);
    lines.push(...rest.map(([at, choice]) => `${data.axes[at].name}: ${choice === MEAN ? "mean of all" : label(at, choice)}`));
    names.forEach((name, i) => {
      const { unit, label: word } = metrics.get(name), of = place.of[i];
      lines.push(`<b>${escaped(word)}: ${shown(of.mean, unit)}</b>`);
      if (of.half >= 0) lines[lines.length - 1] += ` (95 % interval ${shown(of.low, unit)} to ${shown(of.high, unit)})`;
    });
    lines.push(`n = ${Math.max(...place.of.map((of) => of.n))} replicates` + (place.done < place.points ? `; ${place.done} of ${place.points} points are done` : ""));
    return lines.map((line) => (line.startsWith("<b>") ? line : escaped(line))).join("<br>");
  }

  function caption(drawn, missed, rest) {
    const fixed = rest.filter(([, choice]) => choice !== MEAN && choice !== ALL).map(([at, choice]) => said(at, choice));
    const averaged = rest.filter(([, choice]) => choice === MEAN).map(([at]) => data.axes[at].name);
    return [
      `${grouped(drawn, 9)} places, means of replicates, with 95 % intervals where there are two or more.`,
      fixed.length ? ` Fixed: ${fixed.join(", ")}.` : "",
      averaged.length ? ` Averaged over: ${averaged.join(", ")}.` : "",
      missed ? ` ${grouped(missed, 9)} places have no point that is done.` : "",
      data.constants.length ? ` The same at all: ${data.constants.join(", ")}.` : "",
    ].join("");
  }

  return { MEAN, ALL, data, metrics, unpack, places, escaped, grouped, scale, titled, label, said, hover, caption };
})();
