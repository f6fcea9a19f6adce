"use strict";
(() => {
  const NARROW = matchMedia("(max-width: 640px)");
  const TOUCH = matchMedia("(pointer: coarse)").matches; // a finger that drags wants to scroll
  const PRINT_PX = 680;
  const CONFIG = { responsive: true, displayModeBar: false, doubleClick: "reset" };
  const STEPS = { "+": [0.5, 0], "=": [0.5, 0], "-": [2, 0], "_": [2, 0], ArrowLeft: [1, -0.2], ArrowRight: [1, 0.2] };
  const boxes = [...document.querySelectorAll(".plot[data-figure]")];
  const figures = new Map(); // box -> its figure, once drawn
  let library;

  // The drawing library, unpacked and run once.
  async function unpack() {
    if (!window.DecompressionStream) throw new Error("this browser cannot unpack the drawing library (DecompressionStream)");
    const packed = Uint8Array.from(atob(document.getElementById("library").textContent), (c) => c.charCodeAt(0));
    const script = document.createElement("script");
    script.textContent = await new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
    document.head.append(script);
    if (!window.Plotly) throw new Error("the drawing library did not start");
  }

  window.drawingLibrary = () => (library ??= unpack());

  function layout(figure) {
    const chosen = structuredClone(NARROW.matches ? figure.narrow : figure.layout);
    return TOUCH ? { ...chosen, dragmode: false } : chosen;
  }

  async function draw(box) {
    if (box.dataset.state) return;
    box.dataset.state = "drawing";
    try {
      await window.drawingLibrary();
      const figure = JSON.parse(document.getElementById(box.dataset.figure).textContent);
      figures.set(box, figure);
      box.classList.add("drawn");
      await Plotly.newPlot(box, figure.data, layout(figure), CONFIG);
      figure.home = ranges(box, /^[xy]axis/);
      box.dataset.state = "drawn";
    } catch (error) {
      const reason = document.createElement("p");
      reason.className = "failed";
      reason.textContent = `This chart cannot be drawn: ${error.message}. The same figure is ${box.dataset.file}.`;
      box.replaceChildren(reason);
      box.classList.remove("drawn");
      box.dataset.state = "failed";
      figures.delete(box);
    }
  }

  // What the axes show that a reader can move: {"xaxis": [low, high], ...}
  function ranges(box, pattern) {
    const free = Object.entries(box.layout).filter(([name, axis]) => pattern.test(name) && axis.range && !axis.fixedrange);
    return Object.fromEntries(free.map(([name, axis]) => [name, [...axis.range]]));
  }

  // Zoom round the middle, and move by a share of what is shown.
  function move(box, [factor, shift]) {
    const change = {};
    for (const [name, [low, high]] of Object.entries(ranges(box, /^xaxis/))) {
      const middle = (low + high) / 2 + shift * (high - low);
      const half = (factor * (high - low)) / 2;
      change[`${name}.range`] = [middle - half, middle + half];
    }
    return Plotly.relayout(box, change);
  }

  function reset(box) {
    const home = Object.entries(figures.get(box).home).map(([name, range]) => [`${name}.range`, [...range]]);
    return Plotly.relayout(box, Object.fromEntries(home));
  }

  function act(box, key) {
    if (!figures.get(box)?.home) return false;
    if (key === "0") reset(box);
    else if (STEPS[key]) move(box, STEPS[key]);
    else return false;
    return true;
  }

  for (const box of boxes) {
    box.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      if (act(box, event.key)) event.preventDefault();
    });
    for (const button of box.closest("figure").querySelectorAll("button[data-key]")) {
      button.addEventListener("click", () => act(box, button.dataset.key));
    }
  }

  // One chart after the other, in order of reading; between them the page answers.
  (async () => {
    for (const box of boxes) {
      await draw(box);
      await new Promise((done) => setTimeout(done));
    }
  })();

  NARROW.addEventListener("change", async () => {
    for (const [box, figure] of figures) {
      await Plotly.react(box, figure.data, layout(figure), CONFIG);
      figure.home = ranges(box, /^[xy]axis/);
    }
  });

  addEventListener("beforeprint", () => {
    boxes.forEach(draw); // those not drawn yet
    for (const box of figures.keys()) Plotly.relayout(box, { width: PRINT_PX });
  });
  addEventListener("afterprint", () => {
    for (const box of figures.keys()) Plotly.relayout(box, { width: null, autosize: true });
  });

  // Copying: the clipboard where it may be used, else the old command, else the text is left selected.
  async function copy(button) {
    const text = document.getElementById(button.dataset.copy);
    let done = true;
    try {
      await navigator.clipboard.writeText(text.textContent);
    } catch {
      getSelection().selectAllChildren(text);
      done = document.execCommand("copy");
    }
    button.textContent = done ? "Copied" : "Selected";
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  }
  for (const button of document.querySelectorAll("button[data-copy]")) button.addEventListener("click", () => copy(button));
})();
