// The console: one page that uses the public routes. No framework; uPlot draws its curves.
"use strict";

const KEYS = {{keys}};
const REFRESH_MS = 2000;
const HEALTH_MS = 5000;
const byId = (id) => document.getElementById(id);
const TABS = [...document.querySelectorAll("[role=tab]")];

// Making elements: text is set as text, so no name can become markup.

function made(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

const cells = (...values) => values.map((value) => typeof value === "number" || value === null
  ? made("td", { class: "number" }, value === null ? "–" : measured(value)) : made("td", {}, value));
const shown = (number) => number.toLocaleString("en", { maximumFractionDigits: 20 });
// Measured and computed numbers have three digits, or all before the point, as in app/terminal.py.
const measured = (number) => number.toLocaleString("en",
  Math.abs(number) < 100 ? { maximumSignificantDigits: 3 } : { maximumFractionDigits: 0 });
const fill = (id, rows, nothing, columns) => byId(id).replaceChildren(
  ...(rows.length ? rows : [made("tr", {}, made("td", { colspan: columns, class: "hint" }, nothing))]));

// Requests to the service

class Refused extends Error {
  constructor(text, status = 0) {
    super(text);
    this.status = status;
  }
}

// Kept in this page only: storage is open to every page of this host, and one of them runs foreign scripts.
let key = "";
let isKeyRefused = false; // then a view does not refresh by itself

// The service's own place, which may be below a prefix; other applications of this host must not get the key.
const HOME = location.origin + location.pathname.replace(/[^/]*$/, "");

// A proxy decodes the path and resolves its dots before it chooses an application.
function staysBelow(home, address) {
  let path = address.split(/[?#]/)[0];
  for (let before = null; before !== path;) {
    before = path;
    path = path.replace(/%([0-9a-f]{2})/gi, (_, byte) => String.fromCharCode(parseInt(byte, 16)));
  }
  return address.startsWith(home) && !path.split(/[/\\]/).some((part) => /^\.{1,2}(;.*)?$/.test(part));
}

async function ask(path, { method = "GET", body, headers = {} } = {}) {
  const address = new URL(path, HOME).href;
  if (!staysBelow(HOME, address)) throw new Refused("This name leads to another place than Quotagate.");
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let answer;
  try {
    answer = await fetch(address, {
      method, headers, body: body === undefined ? undefined : JSON.stringify(body),
      redirect: "error", // a redirect would take the key along
    });
  } catch {
    throw new Refused("Quotagate does not answer.");
  }
  const text = await answer.text();
  if (!answer.ok && !path.startsWith("health/")) throw new Refused(explained(answer, text), answer.status);
  return answer.headers.get("Content-Type")?.includes("json") ? JSON.parse(text) : text;
}

function explained(answer, text) {
  if (answer.status === 401) {
    isKeyRefused = true;
    byId("key").focus();
  }
  try {
    const problem = JSON.parse(text);
    const faults = (problem.errors ?? []).map((fault) => `${fault.field || "body"}: ${fault.message}`);
    return [problem.detail ?? problem.title, ...faults].join("\n");
  } catch {
    return `${answer.status} ${answer.statusText}`;
  }
}

// Every action goes through here, so that errors always appear in the same place.
async function act(work) {
  try {
    const result = await work();
    say("");
    return result;
  } catch (error) {
    say(error.message);
    if (!(error instanceof Refused)) throw error;
    return undefined;
  }
}

function say(text) {
  byId("problem").textContent = text;
  byId("problem").hidden = !text;
}

// Views

let timer = 0;

function show(name, { focus = true } = {}) {
  for (const tab of TABS) {
    const mine = tab.getAttribute("aria-controls") === name;
    tab.setAttribute("aria-selected", mine);
    tab.tabIndex = mine ? 0 : -1;
    byId(tab.getAttribute("aria-controls")).hidden = !mine;
  }
  history.replaceState(null, "", `#${name}`);
  say("");
  clearInterval(timer);
  const first = { quotas: () => find(false), keys: lookAtKeys, reports: lookAtReports }[name];
  const refresh = {
    overview: lookAtOverview, quotas: lookAtShadows, buckets: lookAtBucket, health: lookAtHealth, volumes: lookAtVolumes,
  }[name];
  isKeyRefused = false;
  if (refresh) timer = setInterval(() => { if (!isKeyRefused) refresh(); }, REFRESH_MS);
  if (first) act(first);
  else refresh?.();
  if (focus) byId(name).querySelector("[data-first]")?.focus();
}

for (const tab of TABS) {
  tab.addEventListener("click", () => show(tab.getAttribute("aria-controls")));
  tab.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const next = TABS[(TABS.indexOf(tab) + step + TABS.length) % TABS.length];
    show(next.getAttribute("aria-controls"), { focus: false });
    next.focus();
  });
}

document.addEventListener("keydown", (event) => {
  if (document.querySelector("dialog[open]")) return;
  const typing = event.target.matches("input, select, textarea");
  if (event.key === "Escape") {
    if (typing) event.target.blur();
    else if (!byId("quota-page").hidden) closeEditor();
  } else if (!typing && !event.ctrlKey && !event.metaKey && !event.altKey) {
    const tab = TABS[Number(event.key) - 1];
    const first = document.querySelector("section:not([hidden]) [data-first]");
    if (tab) show(tab.getAttribute("aria-controls"));
    else if (event.key === "/" && first) first.focus();
    else return;
    event.preventDefault();
  }
});

byId("scheme").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.scheme
    ? root.dataset.scheme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.scheme = localStorage.quotagateScheme = dark ? "light" : "dark";
});
if (localStorage.quotagateScheme) document.documentElement.dataset.scheme = localStorage.quotagateScheme;

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = byId("key").value.trim();
  byId("key").value = "";
  byId("key").placeholder = "in use until this page is left or loaded again";
  show(location.hash.slice(1) || "overview");
});

// Health, from the metrics of the node that answers: name and value of each sample

function samples(text) {
  return text.split("\n").filter((line) => line && !line.startsWith("#")).map((line) => {
    const [, name, value] = /^(\w+)(?:\{.*\})? (\S+)/s.exec(line); // a label may hold U+2028
    return { name, value: Number(value) };
  });
}

async function lookAtHealth() {
  await act(async () => {
    const state = await ask("health/ready");
    const all = samples(await ask("metrics"));
    const sum = (name) => all.filter((sample) => sample.name === `quotagate_${name}`).reduce((total, { value }) => total + value, 0);
    const lines = {
      Status: state.status, Store: state.store, Catalog: state.catalog, "Throttle factor": measured(state.throttle_factor),
      Decisions: shown(sum("decisions_total")), "Without the store": shown(sum("fallback_total")),
      "Store failures": shown(sum("store_failures_total")), "Clock corrections": shown(sum("clock_corrections_total")),
      "Processes without their store": shown(sum("store_circuit_open")),
    };
    byId("health-list").replaceChildren(...Object.entries(lines).flatMap(([name, said]) =>
      [made("dt", {}, name), made("dd", {}, said)]));
  });
}

// Volumes, and the throttle factor computed from them

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];

function size(bytes) {
  if (bytes === null) return "–";
  const unit = bytes < 1 ? 0 : Math.min(Math.floor(Math.log2(bytes) / 10), UNITS.length - 1);
  return `${(Math.floor((bytes / 1024 ** unit) * 10) / 10).toLocaleString("en")} ${UNITS[unit]}`;
}

const LENGTHS = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];

// Rounded up, in at most two units, as in app/terminal.py.
function duration(seconds) {
  if (Math.ceil(seconds * 1000) < 1000) return `${Math.ceil(seconds * 1000)} ms`;
  if (seconds < 10) return `${Math.ceil(seconds * 10) / 10} s`;
  for (let place = 0; place < LENGTHS.length - 1; place += 1) {
    const [[name, long], [shortName, short]] = LENGTHS.slice(place);
    const whole = Math.ceil(seconds / short) * short;
    const rest = whole % long;
    if (whole >= long) return `${Math.floor(whole / long)} ${name}${rest ? ` ${rest / short} ${shortName}` : ""}`;
  }
  return `${Math.ceil(seconds)} s`;
}

const left = (untilMs) => untilMs <= Date.now() ? "over" : duration((untilMs - Date.now()) / 1000);
const shortly = (atMs) => atMs ? new Date(atMs).toLocaleString([], { dateStyle: "short", timeStyle: "short" }) : "–";
const when = (atMs) => atMs ? new Date(atMs).toLocaleString() : "–";
const within = (untilMs) => untilMs === null ? "does not end" : `${left(untilMs)} (until ${when(untilMs)})`;

async function lookAtVolumes() {
  await act(async () => {
    const now = await ask("v1/volumes");
    const factor = made("dd", now.factor < 1 ? { class: "bad" } : {}, measured(now.factor));
    const lines = {
      Why: now.reason, Since: when(now.since_ms), Valid: within(now.valid_until_ms),
      "Next check": when(now.next_check_ms), Source: now.source ?? "none",
    };
    byId("factor-list").replaceChildren(made("dt", {}, "Throttle factor"), factor,
      ...Object.entries(lines).flatMap(([name, said]) => [made("dt", {}, name), made("dd", {}, said)]));
    const { drill } = now;
    const notice = drill ? `Drill by ${drill.who}: factor ${shown(drill.factor)}, whatever the volumes say` : "";
    // Screen readers hear it once, and not at each refresh.
    if (byId("drill").dataset.notice !== notice) byId("drill").textContent = byId("drill").dataset.notice = notice;
    if (drill) factor.append(` for ${left(drill.until_ms)} by a drill`);
    fill("volume-rows", now.volumes.map((volume) => made("tr", {}, ...volumeCells(volume))),
      "No volume is known.", 7);
  });
}

function volumeCells({ broker, dir, total_bytes: total, available_bytes: free, state, observed_ms: observed }) {
  const known = total !== null && free !== null;
  const used = !known ? null : total ? Math.max(1 - free / total, 0) : 1;
  const part = known ? `${shown(Math.floor(used * 1000) / 10)} %` : "–";
  const label = `${dir} of broker ${broker} is used to ${part}`;
  const bar = known ? made("meter", { min: 0, max: 1, value: used, class: state, "aria-label": label }, part) : null;
  const number = (text) => made("td", { class: "number" }, text);
  return [made("td", {}, made("code", {}, broker)), made("td", {}, made("code", {}, dir)),
    made("td", { class: "used" }, bar, ` ${part}`), number(size(free)), number(size(total)),
    made("td", {}, made("span", state === "ok" ? {} : { class: "bad" }, state)), made("td", {}, when(observed))];
}

async function lookAtState() {
  const pill = byId("state");
  try {
    const { status, store, catalog } = await ask("health/ready");
    const well = status === "ready" && store === "ok" && catalog === "ok";
    pill.textContent = well ? "ready" : `${status} · store ${store} · catalog ${catalog}`;
    pill.className = `pill ${well ? "ok" : "bad"}`;
  } catch (error) {
    pill.textContent = error.message;
    pill.className = "pill bad";
  }
}
