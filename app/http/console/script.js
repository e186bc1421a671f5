// The console: one page that uses the public routes. No framework; uPlot draws its curves.
"use strict";

const KEYS = {{keys}};
const REFRESH_MS = 2000;
const HEALTH_MS = 5000;
const READ_MS = 10_000; // how long an answer is waited for
const WRITE_MS = 60_000; // nobody knows whether a change that was given up is made
const byId = (id) => document.getElementById(id);
const TABS = [...document.querySelectorAll("[role=tab]")];

// Making elements: text is set as text, so no name can become markup.

function made(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element[name] = value;
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

// Filling places again and again: an element that is there already stays, with its focus, selection and begun click.

function update(place, children) {
  children.forEach((child, at) => {
    const old = place.childNodes[at];
    if (old) become(old, child);
    else place.append(child);
  });
  while (place.childNodes.length > children.length) place.lastChild.remove();
}

function become(old, wanted) {
  if (old.nodeName !== wanted.nodeName) return old.replaceWith(wanted);
  if (old.nodeType === Node.TEXT_NODE) return old.data === wanted.data || (old.data = wanted.data);
  for (const name of old.getAttributeNames()) if (!wanted.hasAttribute(name)) old.removeAttribute(name);
  for (const { name, value } of wanted.attributes) {
    if (name === "style") old.style.cssText = value; // the page's policy allows no such attribute
    else if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
  old.onclick = wanted.onclick;
  old.onkeydown = wanted.onkeydown;
  return update(old, [...wanted.childNodes]);
}

const list = (id, lines) => update(byId(id), Object.entries(lines).flatMap(([name, said]) =>
  [made("dt", {}, name), said instanceof Element ? said : made("dd", {}, said)]));

let isPressed = false; // then rows stay where they are: the click belongs to the row below the pointer
const held = new Map(); // by table: how to fill it afterwards
addEventListener("pointerdown", ({ target, button }) => { isPressed = button === 0 && target.matches("tbody :not(select)"); });
for (const name of ["pointerup", "pointercancel", "blur"]) {
  addEventListener(name, () => setTimeout(() => { // after the click
    isPressed = false;
    for (const [id, rest] of held) fill(id, ...rest);
    held.clear();
  }));
}

const nameOf = (row) => row.dataset.name ?? row.cells[0].textContent;

// Rows keep their elements by name; `nothing` is in place of no row.
function fill(id, rows, nothing, columns) {
  if (isPressed) return held.set(id, [rows, nothing, columns]);
  const body = byId(id);
  const focused = document.activeElement;
  const focusedAt = [...body.rows].findIndex((row) => row.contains(focused));
  const known = new Map([...body.rows].map((row) => [nameOf(row), row]));
  const wanted = rows.length ? rows : [made("tr", {}, made("td", { colspan: columns, class: "hint" }, nothing))];
  wanted.forEach((row, at) => {
    const old = known.get(nameOf(row));
    known.delete(nameOf(row));
    if (old) become(old, row);
    if (body.rows[at] !== (old ?? row)) body.insertBefore(old ?? row, body.rows[at] ?? null);
  });
  while (body.rows.length > wanted.length) body.lastChild.remove();
  if (focusedAt < 0 || focused === document.activeElement) return undefined;
  const near = body.rows[Math.min(focusedAt, body.rows.length - 1)].querySelector("button, a");
  return (body.contains(focused) ? focused : near)?.focus({ preventScroll: true });
}

// Rows of something else follow.
function empty(id) {
  held.delete(id);
  byId(id).replaceChildren();
}

// A row that opens something, by a click anywhere on it; the arrow keys move between the buttons of such rows.
function openingRow(attributes, name, open, ...values) {
  const move = (event) => {
    const step = { ArrowDown: "nextElementSibling", ArrowUp: "previousElementSibling" }[event.key];
    if (!step) return;
    event.target.closest("tr")[step]?.querySelector("button").focus();
    event.preventDefault();
  };
  const button = made("button", { type: "button", onkeydown: move }, made("code", {}, name));
  return made("tr", { ...attributes, class: "opens", onclick: open }, ...cells(button, ...values));
}

// Requests to the service

class Refused extends Error {
  constructor(text, status = 0) {
    super(text);
    this.status = status;
  }
}

// Kept in this page only: storage is open to every page of this host, and one of them runs foreign scripts.
let key = "";

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

async function ask(path, { method = "GET", body, headers = {}, waitMs = method === "GET" ? READ_MS : WRITE_MS } = {}) {
  const address = new URL(path, HOME).href;
  if (!staysBelow(HOME, address)) throw new Refused("This name leads to another place than Quotagate.");
  if (key && !path.startsWith("health/")) headers.Authorization = `Bearer ${key}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let answer;
  let found;
  try {
    answer = await fetch(address, {
      method, headers, body: body === undefined ? undefined : JSON.stringify(body),
      redirect: "error", // a redirect would take the key along
      signal: AbortSignal.timeout(waitMs),
    });
    const text = await answer.text();
    found = answer.headers.get("Content-Type")?.includes("json") ? JSON.parse(text) : text;
  } catch {
    throw new Refused(`Quotagate does not answer.${method === "GET" ? "" : " The change may or may not be done."}`);
  }
  // A node that is not ready says why.
  if (!answer.ok && !found?.store) throw new Refused(explained(answer, found), answer.status);
  return found;
}

function explained(answer, found) {
  if (answer.status === 401) byId("key").focus();
  const said = found?.detail ?? found?.title;
  if (!said) return `${answer.status} ${answer.statusText}`;
  return [said, ...(found.errors ?? []).map((fault) => `${fault.field || "body"}: ${fault.message}`)].join("\n");
}

// Every action goes through here, so that errors always appear in the same place. Its button waits for the answer.
async function act(work, button) {
  if (button?.ariaDisabled) return undefined;
  if (button) button.ariaDisabled = "true";
  say("");
  try {
    return await work();
  } catch (error) {
    say(error.message);
    if (!(error instanceof Refused)) throw error;
    return undefined;
  } finally {
    if (button) button.ariaDisabled = null;
  }
}

const problems = { action: "", refresh: "" };

function say(text, from = "action") {
  problems[from] = text;
  sayOnce("problem", [...new Set(Object.values(problems))].filter(Boolean).join("\n"));
  byId("problem").hidden = !byId("problem").textContent;
}

// Screen readers hear it once, and not at each refresh.
function sayOnce(id, text) {
  if (byId(id).textContent !== text) byId(id).textContent = text;
}

const requests = {}; // the newest one of each place

// The answer to the newest request for a place; undefined for one that was made before.
async function latest(place, work) {
  const mine = requests[place] = {};
  const answer = await work();
  return requests[place] === mine ? answer : undefined;
}

// Views

let timer = 0;
let look = null; // reads the view in front now, whatever was asked for before

// Reads what the view in front shows: `first` until it works, then `again` and again, one at a time.
function follow(first, again) {
  clearInterval(timer);
  let isBusy = false;
  const once = async () => {
    if (isBusy) return;
    isBusy = true;
    try {
      await first?.();
      first = null;
      await again?.(isStill);
      if (isStill()) say("", "refresh");
    } catch (error) {
      if (isStill()) say(error.message, "refresh");
      if (isStill() && [401, 403].includes(error.status)) clearInterval(timer); // until there is another key
      if (!(error instanceof Refused)) throw error;
    } finally {
      isBusy = false;
    }
  };
  const mine = timer = setInterval(once, REFRESH_MS);
  const isStill = () => timer === mine; // or the answer is late
  look = () => follow(first, again);
  once();
}

function show(name, { focus = true } = {}) {
  for (const tab of TABS) {
    const mine = tab.getAttribute("aria-controls") === name;
    tab.setAttribute("aria-selected", mine);
    tab.tabIndex = mine ? 0 : -1;
    byId(tab.getAttribute("aria-controls")).hidden = !mine;
  }
  history.replaceState(null, "", `#${name}`);
  say("");
  say("", "refresh");
  const first = { quotas: find, keys: lookAtKeys, reports: lookAtReports }[name];
  const again = {
    overview: lookAtOverview, quotas: lookAtShadows, buckets: lookAtBucket, health: lookAtHealth, volumes: lookAtVolumes,
  }[name];
  follow(first, again);
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
  const typing = event.target.matches("input:not([type=radio], [type=checkbox]), select, textarea");
  if (event.key === "Escape") {
    if (typing) event.target.blur();
    else if (editing && !byId("quotas").hidden) closeEditor();
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
  root.dataset.scheme = remembered(dark ? "light" : "dark");
});

// A browser may refuse its storage.
function remembered(scheme) {
  try {
    if (scheme) localStorage.quotagateScheme = scheme;
    return localStorage.quotagateScheme;
  } catch {
    return scheme;
  }
}
if (remembered()) document.documentElement.dataset.scheme = remembered();

const WITHOUT_KEY = byId("key").placeholder;
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const typed = byId("key").value.trim();
  if (/[^\x21-\x7e]/.test(typed)) return say("No key has such characters: copy it again, as it was shown.");
  key = typed;
  byId("key").value = "";
  byId("key").placeholder = key ? "in use until this page is left or loaded again" : WITHOUT_KEY;
  return show(location.hash.slice(1) || "overview");
});
// Back in the browser's history, a page may come back as it was left, with the key.
addEventListener("pageshow", (event) => { if (event.persisted) location.reload(); });

// Health, from the metrics of the node that answers: name and value of each sample

function samples(text) {
  return text.split("\n").filter((line) => line && !line.startsWith("#")).map((line) => {
    const [, name, value] = /^(\w+)(?:\{.*\})? (\S+)/s.exec(line); // a label may hold U+2028
    return { name, value: Number(value) };
  });
}

async function lookAtHealth() {
  const state = await readiness();
  const all = samples(await ask("metrics"));
  const sum = (name) => all.filter((sample) => sample.name === `quotagate_${name}`).reduce((total, { value }) => total + value, 0);
  list("health-list", {
    Status: state.status, Store: state.store, Catalog: state.catalog, "Throttle factor": measured(state.throttle_factor),
    Decisions: shown(sum("decisions_total")), "Without the store": shown(sum("fallback_total")),
    "Store failures": shown(sum("store_failures_total")), "Clock corrections": shown(sum("clock_corrections_total")),
    "Processes without their store": shown(sum("store_circuit_open")),
  });
}

async function readiness() {
  const state = await ask("health/ready");
  if (!state.store) throw new Refused("Something else than Quotagate answers.");
  return state;
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
  const now = await ask("v1/volumes");
  const { drill } = now;
  const factor = made("dd", now.factor < 1 ? { class: "bad" } : {}, measured(now.factor));
  if (drill) factor.append(` for ${left(drill.until_ms)} by a drill`);
  list("factor-list", {
    "Throttle factor": factor, Why: now.reason, Since: when(now.since_ms), Valid: within(now.valid_until_ms),
    "Next check": when(now.next_check_ms), Source: now.source ?? "none", Limit: limitText(now),
  });
  sayOnce("drill", drill ? `Drill by ${drill.who}: factor ${shown(drill.factor)}, whatever the volumes say` : "");
  fill("volume-rows", now.volumes.map((volume) => volumeRow(volume, volumeCells(volume, now))), noVolume(now), 7);
}

const noVolume = ({ source }) => source === null
  ? "No disk is observed. Set QUOTAGATE_VOLUME_SOURCE to throttle producers before disks are full."
  : source === "push" ? "No disk is known yet. Let an agent on each broker push its disks, as in examples/volumes."
    : "No disk is known yet. The reason above says what the last check found.";
const volumeRow = ({ broker, dir }, shownCells) => made("tr", { "data-name": JSON.stringify([broker, dir]) }, ...shownCells);

const limitText = ({ min_available_bytes: bytes, min_available_ratio: ratio }) =>
  bytes !== null ? `${size(bytes)} must be free` : ratio !== null ? `${measured(100 * ratio)} % must be free` : "none";

// The share of a volume from which it is too full; null without a limit.
function fullFrom(total, { min_available_bytes: bytes, min_available_ratio: ratio }) {
  const free = bytes !== null ? bytes / total : ratio;
  return free === null ? null : Math.max(1 - free, 0);
}

function volumeCells({ broker, dir, total_bytes: total, available_bytes: free, state, observed_ms: observed }, limits) {
  const known = total !== null && free !== null;
  const used = !known ? null : total ? Math.max(1 - free / total, 0) : 1;
  const part = known ? `${shown(Math.floor(used * 1000) / 10)} %` : "–";
  const limit = known && total ? fullFrom(total, limits) : null;
  const label = `${dir} of broker ${broker} is used to ${part}${limit === null ? "" : `; ${limitText(limits)}`}`;
  const bar = known ? made("span", { class: "gauge" },
    made("meter", { min: 0, max: 1, value: used, class: state, "aria-label": label }, part)) : null;
  if (limit !== null) {
    const mark = made("span", { class: "limit", title: limitText(limits) });
    mark.style.setProperty("--at", limit);
    bar.append(mark);
  }
  const number = (text) => made("td", { class: "number" }, text);
  return [made("td", {}, made("code", {}, broker)), made("td", {}, made("code", {}, dir)),
    made("td", { class: "used" }, bar, ` ${part}`), number(size(free)), number(size(total)),
    made("td", {}, made("span", state === "ok" ? {} : { class: "bad" }, state)), made("td", {}, when(observed))];
}

async function lookAtState() {
  let text;
  let isWell = false;
  try {
    const { status, store, catalog } = await readiness();
    isWell = status === "ready" && store === "ok" && catalog === "ok";
    text = isWell ? "ready" : `${status} · store ${store} · catalog ${catalog}`;
  } catch (error) {
    text = error.message;
  }
  sayOnce("state", `this node: ${text}`);
  byId("state").className = `pill ${isWell ? "ok" : "bad"}`;
}
