// Reports of audits, what-ifs and recommendations, drawn from JSON: texts in them are never markup.

const MAX_TABLES_SHOWN = 40;
const MAX_ROWS_SHOWN = 200;
const MAX_LINES = 4;
const MAX_WHATIFS = 5;
const DAY_S = 86400;
const LATEST_MS = 8.64e15; // that a date can be
const JOBS = { audit: "audit", whatif: "what-if", recommend: "recommendation", backfill: "backfill" };
let reading = null; // the name of the report that is shown
let reportCurves = [];

async function lookAtReports() {
  let found;
  try {
    found = await ask("v1/reports");
  } catch (error) {
    if (error.status !== 404) throw error;
    showNoReports("This node shows no reports. Set ", made("code", {}, "QUOTAGATE_REPORTS"),
      " to a folder on it, start it again, and let jobs write below that folder, such as ",
      made("code", {}, "quotagate audit --out FOLDER/audit-1"), ".");
    return;
  }
  if (!found.reports.length) {
    showNoReports("No report yet. Let a job write below the folder of ", made("code", {}, "QUOTAGATE_REPORTS"), ", such as ",
      made("code", {}, "quotagate audit --out FOLDER/audit-1"), " or ",
      made("code", {}, "quotagate whatif --quotas quotas.yaml --out FOLDER/tighter"), ".");
  } else {
    byId("no-reports").hidden = true;
  }
  byId("report-list").hidden = !found.reports.length;
  fill("report-rows", found.reports.map(reportRow), "", 5);
  byId("report-notes").textContent = [
    found.more ? "Older reports are not listed." : "",
    found.unreadable ? `${shown(found.unreadable)} folders cannot be shown: they have no summary.json, or it is a link, damaged, `
      + "or larger than 16 MiB." : "",
  ].join(" ");
}

function showNoReports(...said) {
  byId("no-reports").replaceChildren(...said);
  byId("no-reports").hidden = false;
  byId("report-list").hidden = true;
  byId("report").hidden = true;
}

function reportRow(report) {
  const { text, isBad } = resultOf(report);
  return openingRow({ "data-report": report.name, "aria-current": report.name === reading ? "true" : null },
    report.name, () => act(() => openReport(report.name)),
    made("span", isBad ? { class: "bad" } : {}, text), JOBS[report.kind] ?? "?",
    report.from_ms === null ? "–" : `${shortly(report.from_ms)} – ${shortly(report.to_ms)}`, shortly(report.modified_ms));
}

const count = (value) => typeof value === "number" ? shown(value) : "–";

// The result in words; a summary may hold anything.
function resultOf({ kind, summary }) {
  if (!summary) return { text: "open it: its summary is large", isBad: kind === "audit" };
  if (kind === "audit") {
    const findings = Array.isArray(summary.findings) ? summary.findings.length : null;
    const text = findings === 0 ? `all bounds held, ${count(summary.decisions)} decisions`
      : `bounds did not hold: ${count(findings)} findings, ${count(summary.decisions)} decisions`;
    return { text, isBad: findings !== 0 };
  }
  if (kind === "whatif") {
    if (summary.newly_refused === null) return { text: `the log does not reproduce itself: ${count(summary.other)} differ`, isBad: true };
    const text = `${count(summary.newly_refused)} asks newly refused, ${count(summary.newly_admitted)} newly admitted`;
    return { text, isBad: summary.newly_refused > 0 };
  }
  if (kind === "recommend") {
    const text = `limits for ${count(summary.entities)} entities, ${count(summary.outliers)} outliers, `
      + `${count(summary.refused_asks)} asks would be refused`;
    return { text, isBad: false };
  }
  return { text: kind === "backfill" ? `${count(summary.ids)} ids in ${count(summary.buckets)} buckets` : "–", isBad: false };
}

// Links from an entity to the newest what-ifs; a report says what it would have refused of that entity.
async function showWhatifs({ entity }) {
  byId("whatifs").replaceChildren();
  let found;
  try { // not by act: without reports, the page of a quota is whole
    found = (await ask("v1/reports")).reports;
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    return;
  }
  if (editing?.entity !== entity) return; // another one is shown by now
  const whatifs = found.filter(({ kind }) => kind === "whatif").slice(0, MAX_WHATIFS);
  byId("whatifs").replaceChildren(...whatifs.map((report) => made("li", {}, made("a", { href: "#reports", onclick: (event) => {
    event.preventDefault();
    show("reports");
    act(() => openReport(report.name, entity));
  } }, made("code", {}, report.name)), `: ${resultOf(report).text} (${shortly(report.modified_ms)})`)));
}

// `entity`: its quotas' rows are marked, and the first one is in view.
async function openReport(name, entity) {
  reading = name;
  const report = await ask(`v1/reports/${encodeURIComponent(name)}`, { waitMs: WRITE_MS }); // up to 16 MiB
  if (reading !== name) return; // another one was opened meanwhile
  for (const row of byId("report-rows").rows) row.toggleAttribute("aria-current", false);
  const row = [...byId("report-rows").rows].find((each) => each.dataset.report === name);
  row?.setAttribute("aria-current", "true");
  const { text, isBad } = resultOf(report);
  const place = byId("report");
  place.replaceChildren(
    made("h2", { tabindex: -1 }, `${JOBS[report.kind] ?? "Report"} `, made("code", {}, name)),
    made("p", {}, made("strong", isBad ? { class: "bad" } : {}, text)),
    made("p", { class: "hint" }, report.log === null ? "An older version made this report, so it has no tables here."
      : `The log ${report.log}, ${when(report.from_ms)} to ${when(report.to_ms)}. `
        + "report.html next to it says more; its Parquet files have all rows."),
    ...findingsOf(report.summary));
  place.hidden = false;
  reportCurves.forEach(removeCurve);
  reportCurves = [];
  let figures = null; // curves that follow each other share a line
  for (const table of report.tables.slice(0, MAX_TABLES_SHOWN)) {
    const isCurve = table.columns[0] === "at_ms";
    if (isCurve && !figures) place.append(figures = made("div", { class: "curves" }));
    if (isCurve) drawTable(figures, table);
    else place.append(reportTable(table, table.name === "quotas" ? entity : undefined));
    if (!isCurve) figures = null;
  }
  if (!report.tables.length) place.append(made("pre", {}, made("code", {}, JSON.stringify(report.summary, null, 1).slice(0, 20_000))));
  place.querySelector("h2").focus();
  place.querySelector("[aria-current]")?.scrollIntoView({ block: "center" });
}

// The findings of an audit: over all, and by principal.
function findingsOf({ findings }) {
  if (!Array.isArray(findings) || !findings.length) return [];
  const items = findings.slice(0, MAX_ROWS_SHOWN).map((finding) => {
    const said = Array.isArray(finding?.findings) ? finding.findings.join("; ") : JSON.stringify(finding);
    const isNamed = finding !== null && typeof finding === "object" && "principal" in finding;
    return made("li", {}, ...(isNamed ? [made("code", {}, String(finding.principal ?? "(no principal)")), ": "] : []), said);
  });
  const rest = findings.length - items.length;
  return [made("h3", {}, "Findings"), made("ul", {}, ...items, ...(rest ? [made("li", {}, `and ${shown(rest)} more`)] : []))];
}

const headOf = (column) => column.replace(/(^at)?_ms$/, (_, at) => at ? "when" : "").replaceAll("_", " ");

function reportCell(column, value) {
  if (value === null || value === undefined) return "–";
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (typeof value !== "number") return String(value);
  if (column === "at_ms") return when(value);
  return column.endsWith("_ms") ? duration(value / 1000) : Number.isInteger(value) ? shown(value) : measured(value);
}

// The rows whose first value is `marked`, if given, are the current ones.
function reportTable({ title, columns, rows, count: all }, marked) {
  if (!rows.length) return made("div", {}, made("h3", {}, title), made("p", { class: "hint" }, "None."));
  const isNumber = columns.map((column, place) => column !== "at_ms" && rows.some((row) => typeof row[place] === "number"));
  const cell = (tag, place, text) => made(tag, { class: isNumber[place] ? "number" : null }, text);
  const kept = rows.slice(0, MAX_ROWS_SHOWN);
  return made("div", {}, made("h3", {}, title),
    made("div", { class: "wide long", tabindex: 0, role: "region", "aria-label": title }, made("table", {},
      made("thead", {}, made("tr", {}, ...columns.map((column, place) => cell("th", place, headOf(column))))),
      made("tbody", {}, ...kept.map((row) => made("tr", { "aria-current": row[0] === marked ? "true" : null },
        ...columns.map((column, place) => cell("td", place, reportCell(column, row[place])))))))),
    all > kept.length ? made("p", { class: "hint" }, `${shown(kept.length)} of ${shown(all)} rows`) : null);
}

// A table over time: curves, in which rows without a time are left out.
function drawTable(place, { title, columns, rows }) {
  const lines = columns.slice(1, 1 + MAX_LINES);
  const points = rows.filter(([at]) => typeof at === "number" && Math.abs(at) <= LATEST_MS).map(([at, ...values]) =>
    [at / 1000, ...lines.map((_, line) => typeof values[line] === "number" ? values[line] : null)]);
  points.sort(([one], [other]) => one - other);
  if (!points.length) {
    place.append(made("div", {}, made("h3", {}, title), made("p", { class: "hint" }, "None.")));
    return;
  }
  const [first, last] = [points[0][0], points.at(-1)[0]];
  const isOneDay = last - first < DAY_S && new Date(first * 1000).getDate() === new Date(last * 1000).getDate();
  const chart = { title, parent: place, lines: lines.map(headOf), format: (value) => measured(value), hasDates: !isOneDay };
  reportCurves.push(chart);
  draw(chart, points, last, last - first || 60);
}
