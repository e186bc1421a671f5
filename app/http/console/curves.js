// Curves over time in a place of a page, drawn by uPlot; each is also a table.

const CURVE_HEIGHT = 180;
const scheme = matchMedia("(prefers-color-scheme: dark)");
let curves = []; // those in the page

// Returns a curve without values: a figure in `place`. `lines` are the names of its lines.
function curveIn(place, { title, lines, format = measured }) {
  const plot = made("div", { class: "plot", role: "img", tabindex: 0 });
  const table = made("table");
  const details = made("details", {}, made("summary", {}, "As a table"), table);
  const curve = { title, lines, format, plot: null, rows: [], at: { plot, table } };
  details.addEventListener("toggle", () => details.open && tabulateCurve(curve));
  plot.addEventListener("keydown", (event) => moveCursor(curve, event));
  new ResizeObserver(() => curve.plot?.setSize(curveSize(plot))).observe(plot);
  place.append(made("figure", {}, made("figcaption", {}, title), plot, details));
  curves = [...curves.filter((each) => each.at.plot.isConnected), curve];
  return curve;
}

const curveSize = (plot) => ({ width: Math.max(plot.clientWidth, 200), height: CURVE_HEIGHT });

// Rows are [time in s, a value or null for each line], in the order of their times.
function drawCurve(curve, rows) {
  curve.rows = rows;
  const columns = [0, ...curve.lines.map((_, line) => line + 1)].map((column) => rows.map((row) => row[column]));
  if (curve.plot) curve.plot.setData(columns);
  else curve.plot = new uPlot(curveOptions(curve), columns, curve.at.plot);
  if (curve.plot.cursor.idx == null && rows.length) curve.plot.setLegend({ idx: rows.length - 1 });
  const newest = rows.at(-1)?.slice(1) ?? [];
  const values = curve.lines.map((line, place) => `${line} ${textOf(curve, newest[place])}`);
  curve.at.plot.setAttribute("aria-label", `${curve.title}, newest: ${values.join(", ")}`);
}

// Times of one day are without their date.
function instant(curve, second) {
  const [first, last] = [curve.rows[0]?.[0] ?? second, curve.rows.at(-1)?.[0] ?? second];
  const at = new Date(second * 1000);
  if (last - first < 86400 && new Date(first * 1000).getDate() === new Date(last * 1000).getDate()) return clock(second);
  return `${at.toLocaleDateString("en-CA")} ${clock(second).slice(0, 5)}`;
}

function curveOptions(curve) {
  const axis = { stroke: () => colour("quiet"), grid: { stroke: () => colour("line"), width: 1 }, ticks: { show: false } };
  return {
    ...curveSize(curve.at.plot),
    cursor: { drag: { x: false, y: false }, y: false },
    scales: {
      x: { range: () => [curve.rows[0]?.[0] ?? 0, Math.max(curve.rows.at(-1)?.[0] ?? 0, (curve.rows[0]?.[0] ?? 0) + 1)] },
      y: { range: (_, _min, most) => [0, most > 0 ? most * 1.1 : 1] },
    },
    axes: [
      { ...axis, space: 130, values: (_, times) => times.map((time) => instant(curve, time).replace(/:00$/, "")) },
      { ...axis, size: 62, space: 35, values: (_, values) => values.map((value) => value === null ? "" : curve.format(value)) },
    ],
    series: [
      { label: "at", value: (_, time) => time == null ? "–" : instant(curve, time) },
      ...curve.lines.map((label, place) => ({
        label, stroke: () => colour(`line-${place % 4}`), width: 1.5, dash: DASHES[place % DASHES.length],
        value: (_, value) => textOf(curve, value), points: { show: curve.rows.length === 1 },
      })),
    ],
  };
}

// The table is of the moment when it is opened: it does not change while somebody reads it.
function tabulateCurve(curve) {
  const rows = curve.rows.toReversed().map(([at, ...values]) => made("tr", {}, made("th", { scope: "row" }, instant(curve, at)),
    ...cells(...curve.lines.map((_, place) => textOf(curve, values[place])))));
  const heads = ["At", ...curve.lines].map((name) => made("th", { scope: "col" }, name));
  curve.at.table.replaceChildren(made("caption", {}, curve.title), made("thead", {}, made("tr", {}, ...heads)),
    made("tbody", {}, ...rows));
}

// uPlot keeps the colours that it began with.
function drawCurvesAgain() {
  curves = curves.filter((each) => each.at.plot.isConnected);
  for (const curve of curves) {
    curve.plot?.destroy();
    curve.plot = null;
    drawCurve(curve, curve.rows);
  }
}

byId("scheme").addEventListener("click", drawCurvesAgain);
scheme.addEventListener("change", drawCurvesAgain);
