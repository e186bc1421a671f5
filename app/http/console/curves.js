// Curves over time, drawn by uPlot. Each has a label with its newest values, and a table.
//
// A chart has a title, lines (their names), the text of a value (`format`), and the element that it is in
// (`parent`). A row is a time (s) and a value for each line; null is a gap. `hasDates` writes times with their date.
// The lines from `bands` on are filled areas, each down to the line before it, the first down to 0.
// `at` is the time that the keyboard has chosen: the curve moves on below it, so the cursor follows its row.

const DASHES = [[], [6, 3], [2, 3], [8, 3, 2, 3]];
const BORDERS = ["solid", "dashed", "dotted", "double"]; // of the marks in the legend
const drawn = new Set(); // charts

const clock = (second) => new Date(second * 1000).toLocaleTimeString("en-GB");
const instant = (chart, second) => chart.hasDates
  ? `${new Date(second * 1000).toLocaleDateString("en-CA")} ${clock(second).slice(0, 5)}` : clock(second);
const textOf = (chart, row, line) => row?.[line + 1] == null ? "–" : chart.format(row[line + 1], line, row);

// The colour that a variable of the style has in the scheme in use.
function colour(name) {
  byId("probe").style.color = `var(--${name})`;
  return getComputedStyle(byId("probe")).color;
}

// Draws the last `span` seconds until `ends`.
function draw(chart, rows, ends, span) {
  Object.assign(chart, { rows, ends, span });
  chart.figure ??= figureOf(chart);
  const columns = [0, ...chart.lines.map((_, line) => line + 1)].map((column) => rows.map((row) => row[column]));
  if (!chart.plot) chart.plot = new uPlot(optionsOf(chart), columns, chart.figure.querySelector(".plot"));
  else chart.plot.setData(columns);
  if (chart.plot.cursor.idx == null) chart.plot.setLegend({ idx: rows.length - 1 });
  const values = chart.lines.map((name, line) => `${name} ${textOf(chart, rows.at(-1), line)}`);
  chart.figure.querySelector(".plot").setAttribute("aria-label", `${chart.title}, newest: ${values.join(", ")}`);
}

function figureOf(chart) {
  const plot = made("div", { class: "plot", role: "img", tabindex: 0 });
  const details = made("details", {}, made("summary", {}, "As a table"), made("table"));
  const figure = made("figure", {}, made("figcaption", {}, chart.title), plot, details);
  details.addEventListener("toggle", () => details.open && tabulate(chart));
  plot.addEventListener("keydown", (event) => moveCursor(chart, event));
  plot.addEventListener("mousemove", () => { chart.at = null; });
  new ResizeObserver(() => chart.plot?.setSize(sizeOf(plot))).observe(plot);
  chart.parent.append(figure);
  drawn.add(chart);
  return figure;
}

function removeCurve(chart) {
  chart.plot.destroy();
  chart.figure.remove();
  drawn.delete(chart);
}

const sizeOf = (plot) => ({ width: Math.max(plot.clientWidth, 200), height: 180 });

function optionsOf(chart) {
  const axis = { stroke: () => colour("quiet"), grid: { stroke: () => colour("line"), width: 1 }, ticks: { show: false } };
  const scale = chart.bounds
    ? { splits: () => chart.splits, values: (_, values) => values.map((value) => duration(value / 1000)) }
    : { values: (_, values) => values.map((value) => chart.format(value, 0)) };
  const start = () => chart.ends - Math.min(chart.span, Math.max(chart.ends - (chart.rows[0]?.[0] ?? 0), 60));
  return {
    ...sizeOf(chart.figure.querySelector(".plot")),
    padding: [null, chart.hasDates ? 60 : 30, null, null], // half of the last time
    cursor: { drag: { x: false, y: false }, y: false },
    hooks: { ready: [(plot) => plot.setLegend({ idx: chart.rows.length - 1 })], draw: [() => chart.at && pointAt(chart)] },
    legend: { markers: { dash: (_, place) => BORDERS[place - 1] ?? "solid" } },
    bands: chart.lines.flatMap((_, line) => line > chart.bands ? [{ series: [line + 1, line] }] : []),
    scales: {
      x: { range: () => [start(), chart.ends] },
      y: chart.bounds ? { distr: 3, range: () => chart.bounds() } : { range: (_, least, most) =>
        [Math.min(least ?? 0, 0), most > 0 ? most * 1.1 : 1] },
    },
    axes: [
      { ...axis, size: 30, space: chart.hasDates ? 130 : 70, values: (_, times) => times.map((time) => chart.hasDates
        ? instant(chart, time) : clock(time).replace(/:00$/, "")) },
      { ...axis, size: 62, space: 35, ...scale },
    ],
    series: [
      { label: "at", value: (_, time) => time == null ? "–" : instant(chart, time) },
      ...chart.lines.map((label, line) => ({
        label, stroke: () => colour(`line-${line}`), width: 1.5, dash: DASHES[line],
        ...(label === chart.marks ? { paths: () => null } : {}),
        points: { fill: () => colour(`line-${line}`), ...(label === chart.marks ? { show: true, size: 9 } : {}) },
        ...(line >= chart.bands ? bandOf(line - chart.bands) : {}),
        value: (_, _value, _line, place) => textOf(chart, chart.rows[place], line),
      })),
    ],
  };
}

function bandOf(place) {
  const paint = () => colour(`band-${place}`);
  return { stroke: paint, fill: paint, width: 0, points: { show: false } };
}

function moveCursor(chart, event) {
  const last = chart.rows.length - 1;
  const at = chart.plot.cursor.idx ?? last + 1;
  const next = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: last }[event.key];
  if (next === undefined || last < 0) return;
  [chart.at] = chart.rows[Math.min(Math.max(next, 0), last)];
  pointAt(chart);
  event.preventDefault();
}

// Moves the cursor to the chosen time, or to the oldest row after it.
function pointAt(chart) {
  chart.at = Math.max(chart.at, chart.rows[0][0]);
  chart.plot.setCursor({ left: chart.plot.valToPos(chart.at, "x"), top: 10 });
}

// The table is of the moment when it is opened: it does not change while somebody reads it.
function tabulate(chart) {
  const rows = chart.rows.toReversed().map((row) => made("tr", {}, made("th", { scope: "row" }, instant(chart, row[0])),
    ...cells(...chart.lines.map((_, line) => textOf(chart, row, line)))));
  const heads = ["At", ...chart.lines].map((name) => made("th", { scope: "col" }, name));
  chart.figure.querySelector("details table").replaceChildren(made("caption", {}, chart.title),
    made("thead", {}, made("tr", {}, ...heads)), made("tbody", {}, ...rows));
}

// uPlot keeps the colours that it began with.
function drawAgain() {
  for (const chart of drawn) {
    chart.plot.destroy();
    chart.plot = null;
    draw(chart, chart.rows, chart.ends, chart.span);
  }
}

byId("scheme").addEventListener("click", drawAgain);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAgain);
