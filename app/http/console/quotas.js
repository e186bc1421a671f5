// Quotas: search, edit, history with undo, shadow quotas, and the ladder of a caller.

// Search

let found = { quotas: [], query: null, cursor: null };

const TYPES = ["user", "client-id", "ip", "broker", "listener"];
const isMatch = (text) => TYPES.includes(text.split("=")[0]) && !text.endsWith("=");

async function find() {
  const text = byId("search-text").value.trim();
  const matches = text.split(",").map((part) => part.trim());
  const query = new URLSearchParams(text && matches.every(isMatch) ? matches.map((match) => ["match", match]) : []);
  query.set("limit", "200");
  await load(query);
}

// The first page of a query, or the one after those that are loaded.
async function load(query, earlier = { quotas: [] }) {
  const asked = new URLSearchParams(query);
  if (earlier.cursor) asked.set("cursor", earlier.cursor);
  const page = await latest("quotas", () => ask(`v1/quotas?${asked}`));
  if (!page) return;
  found = { quotas: [...earlier.quotas, ...page.quotas], query, cursor: page.next_cursor };
  showFound();
}

function showFound() {
  const text = byId("search-text").value.trim();
  const part = text && !text.split(",").every((each) => isMatch(each.trim())) ? text.toLowerCase() : "";
  const rows = found.quotas.filter(({ entity }) => decodeURIComponent(entity).toLowerCase().includes(part));
  fill("quota-rows", rows.map(rowOf), found.cursor ? "Nothing that is loaded matches. Load more, or name an entity, such as user=alice."
    : text ? "Nothing matches. Search for less, or set quotas with New…" : "No quotas yet: everything is admitted. Set some with New…", 3);
  byId("loaded").textContent = `${rows.length} of ${found.quotas.length} loaded${found.cursor ? ", there are more" : ""}`;
  byId("more").hidden = !found.cursor;
}

function rowOf(quotas) {
  const limits = Object.entries(quotas.quotas).map(([key, { limit, ...rest }]) =>
    made("div", {}, made("code", {}, key), ` ${shown(limit)}`,
      Object.keys(rest).length ? made("span", { class: "hint" }, ` ${JSON.stringify(rest)}`) : null));
  return openingRow({ "data-entity": quotas.entity }, quotas.entity, () => openQuotas(quotas), made("div", {}, ...limits), quotas.version);
}

byId("search").addEventListener("submit", (event) => { event.preventDefault(); act(find); });
byId("search-text").addEventListener("input", showFound);
byId("more").addEventListener("click", ({ target }) => act(() => load(found.query, found), target));
byId("new").addEventListener("click", () => openQuotas(without("")));

// Edit

let editing = null; // the entity's quotas as the service gave them; version null: it has none
let unchanged = ""; // the form as it was filled

// A reason alone changes nothing, so it may be discarded.
const formText = () => JSON.stringify([...byId("editor").elements].filter(({ id }) => id !== "edit-reason").map(({ value }) => value));
const mayDiscard = () => !editing || formText() === unchanged || confirm(`Discard the changes of ${editing.entity || "the new quotas"}?`);

const pathOf = (entity) => `v1/quotas/${entity.replace(/[?#/\\]/g, encodeURIComponent)}`;
const valueText = ({ limit, ...rest }) => `${shown(limit)}${Object.keys(rest).length ? ` ${JSON.stringify(rest)}` : ""}`;

function openQuotas(quotas) {
  if (mayDiscard()) edit(quotas);
}

function edit(quotas, { focus = true } = {}) {
  const isOther = editing?.entity !== quotas.entity;
  editing = quotas;
  byId("quota-page").hidden = false;
  byId("edit-title").textContent = quotas.entity || "New quotas";
  byId("edit-entity").value = quotas.entity;
  byId("edit-entity").readOnly = quotas.entity !== "";
  byId("edit-delete").disabled = quotas.version === null;
  byId("edit-reason").value = "";
  byId("bounds").replaceChildren(...Object.entries(quotas.bounds).map(([key, bound]) => made("li", {}, `${key}: ${bound.text}`)));
  const rows = Object.entries(quotas.quotas).map(([key, value]) =>
    editRow(key, Object.keys(value).length === 1 ? String(value.limit) : JSON.stringify(value)));
  byId("edit-rows").replaceChildren(...(rows.length ? rows : [editRow("request_rate", "")]));
  unchanged = formText();
  if (focus) (quotas.entity ? byId("edit-rows").querySelector("input") : byId("edit-entity")).focus();
  showChanges(quotas);
  beginShadows(quotas);
  if (isOther) {
    beginLadder(quotas);
    showWhatifs(quotas);
  } else if (byId("ladder").childElementCount) act(showLadder);
}

function editRow(key, text) {
  const options = KEYS.map((name) => made("option", name === key ? { selected: "" } : {}, name));
  const row = made("tr", {},
    made("td", {}, made("select", { "aria-label": "Quota" }, ...options)),
    made("td", {}, made("input", { "aria-label": "Value", value: text, spellcheck: "false" })),
    made("td", {}, made("button", { type: "button", "aria-label": "Delete this quota", title: "Delete", onclick: () => {
      (row.nextElementSibling ?? row.previousElementSibling)?.querySelector("input").focus();
      row.remove();
      if (!byId("edit-rows").rows.length) byId("edit-add").focus();
    } }, "×")));
  return row;
}

function edited() {
  const quotas = {};
  for (const row of byId("edit-rows").rows) {
    const key = row.querySelector("select").value;
    const text = row.querySelector("input").value.trim();
    if (key in quotas) throw new Refused(`${key} is duplicated.`);
    try {
      quotas[key] = JSON.parse(text);
    } catch {
      throw new Refused(`${key}: give a number, or a JSON object such as {"limit": 100, "enforcement": "deny"}.`);
    }
  }
  return quotas;
}

// Changes the entity, unless somebody else has changed it; `version` null: it must not be there.
async function write(method, entity, version, { body, reason }) {
  const was = editing;
  const headers = version === null ? { "If-None-Match": "*" } : { "If-Match": `"${version}"` };
  // A header holds bytes: one character for each byte of the UTF-8 text.
  if (reason) headers["X-Reason"] = String.fromCharCode(...new TextEncoder().encode(reason));
  const answer = await ask(pathOf(entity), { method, body, headers });
  // The user may have moved on meanwhile.
  if (editing === was) edit(method === "DELETE" ? without(entity) : answer, { focus: isInPage() });
  act(find); // if it fails, the change is made all the same
}

const saidReason = () => byId("edit-reason").value.trim();
const without = (entity) => ({ entity, quotas: {}, version: null, bounds: {} });
const isInPage = () => byId("quota-page").contains(document.activeElement);

function closeEditor() {
  if (!mayDiscard()) return;
  byId("quota-page").hidden = true;
  editing = null;
  byId("search-text").focus();
}

byId("editor").addEventListener("submit", (event) => {
  event.preventDefault();
  const entity = byId("edit-entity").value.trim();
  act(() => write("PUT", entity, editing.version, { body: edited(), reason: saidReason() }), event.submitter);
});
byId("edit-add").addEventListener("click", () => {
  const row = editRow(KEYS.find((key) => ![...byId("edit-rows").querySelectorAll("select")].some((s) => s.value === key)), "");
  byId("edit-rows").append(row);
  row.querySelector("select").focus();
});
byId("edit-delete").addEventListener("click", ({ target }) => {
  const { entity, version } = editing;
  if (!confirm(`Delete all quotas of ${entity}? The history keeps them, and can bring them back.`)) return;
  act(() => write("DELETE", entity, version, { reason: saidReason() }), target);
});
byId("edit-close").addEventListener("click", closeEditor);

// History, newest first

let changesCursor = null;

async function showChanges({ entity }) {
  delete requests.history;
  byId("history").replaceChildren();
  byId("older").hidden = true;
  if (!entity) return;
  const page = await act(() => latest("history", () => ask(`v1/quotas:history?${new URLSearchParams({ entity })}`)));
  if (!page) return;
  byId("history").replaceChildren(...page.changes.map(changeItem));
  if (!page.changes.length) {
    byId("history").append(made("li", { class: "hint" }, "No change is kept. QUOTAGATE_HISTORY_RETENTION says for how long changes are."));
  }
  showOlder(page.next_cursor);
}

function showOlder(cursor) {
  changesCursor = cursor;
  byId("older").hidden = !cursor;
}

byId("older").addEventListener("click", ({ target }) => act(async () => {
  const query = new URLSearchParams({ entity: editing.entity, cursor: changesCursor });
  const page = await latest("history", () => ask(`v1/quotas:history?${query}`));
  if (!page) return;
  byId("history").append(...page.changes.map((change) => changeItem(change, -1)));
  showOlder(page.next_cursor);
}, target));

// A change with both values of each quota that it touched. The newest one can be undone.
function changeItem(change, place) {
  const { at_ms: atMs, who, before, after, reason } = change;
  const keys = KEYS.filter((key) => !isSame(before?.[key], after?.[key]));
  const value = (quotas, key) => quotas?.[key] ? made("code", {}, valueText(quotas[key])) : "none";
  const title = !before ? "Created" : !after ? "Deleted" : keys.length ? "Changed" : "Left as it was";
  const undoing = place === 0 && keys.length
    ? made("button", { type: "button", class: "undo", onclick: ({ target }) => act(() => undo(change), target) }, "Undo") : null;
  const rows = keys.map((key) => made("tr", {}, made("th", { scope: "row" }, made("code", {}, key)),
    ...cells(value(before, key), value(after, key))));
  return made("li", {},
    made("p", {}, made("strong", {}, title), " by ", made("strong", {}, who), ", ",
      made("time", { datetime: new Date(atMs).toISOString() }, when(atMs)), undoing ? " " : null, undoing),
    made("p", reason ? {} : { class: "hint" }, reason || "no reason was given"),
    rows.length ? made("table", {}, made("thead", {}, made("tr", {}, ...["Quota", "Before", "After"].map((head) =>
      made("th", { scope: "col" }, head)))), made("tbody", {}, ...rows)) : null);
}

const isSame = (one, other) => one === other || (!!one && !!other && typeof one === "object" && typeof other === "object"
  && Object.keys({ ...one, ...other }).every((name) => isSame(one[name], other[name])));

// It is a change like others, so another undo takes it back.
async function undo({ at_ms: atMs, who, before, after }) {
  const { entity, version, quotas } = editing;
  if (!isSame(after, version === null ? null : quotas)) {
    throw new Refused(`${entity} has changed meanwhile. Open it again.`);
  }
  const reason = saidReason() || `undo of the change of ${new Date(atMs).toISOString()} by ${who}`;
  await write(before ? "PUT" : "DELETE", entity, version, { body: before ?? undefined, reason });
}

// Shadow quotas: what they would have done, all over the deployment, while the page is open

const SHADOW_S = 600; // how far back the curves go
const VERDICTS = ["admit", "delay", "throttle", "reject"];
let shadowReads = []; // the answers while this page is open
let shadowCurves = new Map(); // by quota key

const asksOf = (shadow) => VERDICTS.reduce((sum, verdict) => sum + shadow[verdict], 0);
const refusedOf = ({ throttle, reject }) => throttle + reject;
const inShadowMs = (nowMs, { since_ms: sinceMs }) => sinceMs === null ? null : Math.max(nowMs - sinceMs, 0);
const periodOf = (nowMs, shadow) => {
  const ms = inShadowMs(nowMs, shadow);
  return ms === null ? "an unknown time" : duration(ms / 1000);
};
const shareOf = (count, all) => count ? `${shown(count)} (${measured((100 * count) / all)}\u00a0%)` : "0";

function beginShadows({ quotas }) {
  shadowReads = [];
  for (const chart of shadowCurves.values()) if (chart.plot) removeCurve(chart);
  shadowCurves = new Map();
  empty("shadow-rows");
  const isThere = Object.values(quotas).some(({ shadow }) => shadow);
  byId("shadow-table").hidden = !isThere;
  byId("no-shadows").hidden = isThere;
  if (isThere) look();
}

async function lookAtShadows() {
  const was = editing;
  if (!was?.entity || byId("shadow-table").hidden) return;
  const found = await ask(`v1/quotas:shadow?${new URLSearchParams({ entity: was.entity })}`);
  if (editing !== was) return;
  const isAnew = found.version !== shadowReads.at(-1)?.version;
  shadowReads = [...(isAnew ? [] : shadowReads), found].filter((read) => read.now_ms > found.now_ms - SHADOW_S * 1000);
  fill("shadow-rows", found.shadows.map((shadow) => shadowRow(found, shadow)), "Nothing is in shadow any more. Open it again.", 7);
  for (const { quota } of found.shadows) {
    if (!shadowCurves.has(quota)) {
      shadowCurves.set(quota, { title: `${quota}: a second, while you watch`, parent: byId("shadow-curves"),
        lines: ["asks", "would delay", "would refuse"], format: measured });
    }
    const rates = shadowRates(quota);
    if (rates.length) draw(shadowCurves.get(quota), rates, found.now_ms / 1000, SHADOW_S);
  }
}

// Rows of what was added a second between two reads; nothing where the quota changed in between.
function shadowRates(quota) {
  const rows = [];
  for (let place = 1; place < shadowReads.length; place += 1) {
    const [before, after] = shadowReads.slice(place - 1, place + 1);
    const [old, now] = [before, after].map(({ shadows }) => shadows.find((each) => each.quota === quota));
    const seconds = (after.now_ms - before.now_ms) / 1000;
    if (!old || !now || old.since_ms !== now.since_ms || seconds <= 0) continue;
    rows.push([after.now_ms / 1000, ...[asksOf, (each) => each.delay, refusedOf].map((count) =>
      Math.max(count(now) - count(old), 0) / seconds)]);
  }
  return rows;
}

function shadowRow(found, shadow) {
  const all = asksOf(shadow);
  const row = made("tr", {}, ...cells(made("code", {}, shadow.quota), shown(shadow.limit), periodOf(found.now_ms, shadow),
    shown(all), shareOf(shadow.delay, all), shareOf(refusedOf(shadow), all)));
  row.append(made("td", {}, made("button", { type: "button", onclick: () => offerPromotion(found, shadow) }, "Make it live…")));
  return row;
}

function shadowWarning(nowMs, shadow) {
  const { quota, window_ms: windowMs } = shadow;
  const ms = inShadowMs(nowMs, shadow);
  const window = duration(windowMs / 1000);
  if (ms === null) return `It is unknown since when ${quota} has been in shadow; its window is ${window}.`;
  return ms >= windowMs ? "" : `${quota} has been in shadow for ${duration(ms / 1000)}, which is shorter than its window of `
    + `${window}: more asks may be refused than these counts say.`;
}

let promoted = null;

function offerPromotion(found, shadow) {
  promoted = { found, shadow };
  const all = asksOf(shadow);
  const { quota, limit, enforcement } = shadow;
  byId("promote-title").textContent = `Make ${quota} of ${found.entity} live`;
  byId("promote-effect").textContent = `In ${periodOf(found.now_ms, shadow)}, of ${shown(all)} asks, a limit of ${shown(limit)} `
    + `(${enforcement}) would have refused ${shareOf(refusedOf(shadow), all)} and delayed ${shareOf(shadow.delay, all)}.`;
  byId("promote-warning").textContent = shadowWarning(found.now_ms, shadow);
  byId("promote-reason").value = `promoted from shadow: ${quota} would have refused ${refusedOf(shadow)} and delayed `
    + `${shadow.delay} of ${all} asks in ${periodOf(found.now_ms, shadow)}`;
  byId("promote").showModal();
  byId("promote-no").focus(); // a key that is held down must not confirm it
}

byId("promote-no").addEventListener("click", () => byId("promote").close());
byId("promote-form").addEventListener("submit", (event) => {
  event.preventDefault();
  byId("promote").close();
  const { found: { entity, version }, shadow: { quota } } = promoted;
  const reason = byId("promote-reason").value.trim();
  act(() => write("PATCH", entity, version, { body: { [quota]: { shadow: null } }, reason }), event.submitter);
});

// The ladder of a caller

// Each part of an entity, as type and name; null is the default.
const partsOf = (entity) => entity.split(",").map((part) => {
  const [type, name] = part.split("=");
  return [type, name === "*" ? null : decodeURIComponent(name ?? "")];
});

function beginLadder({ entity }) {
  const parts = entity ? partsOf(entity) : [];
  const isOfUsers = parts.some(([type]) => type === "user" || type === "client-id");
  const types = isOfUsers ? ["user", "client-id"] : parts.map(([type]) => type);
  byId("ladder-fields").replaceChildren(...types.map((type) => {
    const name = parts.find(([known]) => known === type)?.[1];
    return made("label", {}, { user: "Principal", "client-id": "Client-id" }[type] ?? type,
      made("input", { name: PARAMETERS[type], value: name ?? "", spellcheck: "false" }));
  }));
  delete requests.ladder;
  byId("ladder").replaceChildren();
  const isNamed = parts.length > 0 && parts.every(([, name]) => name !== null);
  byId("ladder-hint").hidden = isNamed;
  if (isNamed) act(showLadder);
}

async function showLadder() {
  byId("ladder-hint").hidden = true;
  await explain("ladder", byId("ladder-of"));
}

byId("ladder-of").addEventListener("submit", (event) => {
  event.preventDefault();
  act(showLadder);
});

// Effective limits

byId("who").addEventListener("submit", (event) => {
  event.preventDefault();
  act(() => explain("explained", event.target));
});

// Draws in a place the limits of the caller that a form names.
async function explain(place, form) {
  const said = [...new FormData(form)].filter(([, value]) => value);
  const answer = await latest(place, () => ask(`v1/quotas:effective?${new URLSearchParams(said)}`));
  if (!answer) return;
  byId(place).replaceChildren(...(answer.quotas.length ? answer.quotas.map(explanation)
    : [made("p", {}, "No quota applies: everything is admitted.")]));
}

// The ladder as steps, from the most to the least specific entity; the first that has a limit decides.
function explanation(quota) {
  const decides = quota.ladder.findIndex(({ entity }) => entity === quota.entity);
  const rungs = quota.ladder.map(({ entity, limit }, place) => {
    const isFound = place === decides;
    const note = isFound ? "decides" : limit === null ? "" : "not reached";
    const rung = made("li", isFound ? { class: "found", "aria-current": "true" } : {},
      made("code", {}, entity), ` ${limit === null ? "–" : shown(limit)}`, note ? made("em", {}, note) : null);
    rung.style.setProperty("--step", place);
    return rung;
  });
  const now = quota.limit_now === quota.limit ? "" : `, ${measured(quota.limit_now)} at the moment`;
  return made("article", {}, made("h3", {}, `${quota.quota}: ${shown(quota.limit)}${now}`),
    made("p", {}, "charged to ", made("a", { href: "#buckets", onclick: (event) => {
      event.preventDefault();
      watch(quota.bucket, quota.quota);
    } }, made("code", {}, quota.bucket))),
    made("ol", { class: "ladder" }, ...rungs));
}
