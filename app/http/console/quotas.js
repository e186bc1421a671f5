// Quotas: search, edit, history with undo, shadow quotas, and the ladder of a caller.

// Search

let found = [];
let cursor = null;

const TYPES = ["user", "client-id", "ip", "broker", "listener"];
const isMatch = (text) => TYPES.includes(text.split("=")[0]) && !text.endsWith("=");

async function find(more) {
  const text = byId("search-text").value.trim();
  const matches = text.split(",").map((part) => part.trim());
  const query = new URLSearchParams(text && matches.every(isMatch) ? matches.map((match) => ["match", match]) : []);
  query.set("limit", "200");
  if (more && cursor) query.set("cursor", cursor);
  const page = await ask(`v1/quotas?${query}`);
  found = more ? [...found, ...page.quotas] : page.quotas;
  cursor = page.next_cursor;
  showFound();
}

function showFound() {
  const text = byId("search-text").value.trim();
  const part = text && !text.split(",").every((each) => isMatch(each.trim())) ? text.toLowerCase() : "";
  const rows = found.filter(({ entity }) => decodeURIComponent(entity).toLowerCase().includes(part));
  const focused = document.activeElement?.dataset.entity;
  fill("quota-rows", rows.map(rowOf), "No quotas here.", 3);
  if (focused) [...byId("quota-rows").rows].find((row) => row.dataset.entity === focused)?.focus();
  byId("loaded").textContent = `${rows.length} of ${found.length} loaded${cursor ? ", there are more" : ""}`;
  byId("more").hidden = !cursor;
}

function rowOf(quotas) {
  const open = () => edit(quotas);
  const limits = Object.entries(quotas.quotas).map(([key, { limit, ...rest }]) =>
    made("div", {}, made("code", {}, key), ` ${shown(limit)}`,
      Object.keys(rest).length ? made("span", { class: "hint" }, ` ${JSON.stringify(rest)}`) : null));
  return made("tr", {
    tabindex: 0, "data-entity": quotas.entity, onclick: open, onkeydown: (event) => {
      const step = { ArrowDown: "nextElementSibling", ArrowUp: "previousElementSibling" }[event.key];
      if (event.key === "Enter") open();
      else if (step) event.currentTarget[step]?.focus();
      else return;
      event.preventDefault();
    },
  }, ...cells(made("code", {}, quotas.entity), made("div", {}, ...limits), quotas.version));
}

byId("search").addEventListener("submit", (event) => { event.preventDefault(); act(() => find(false)); });
byId("search-text").addEventListener("input", showFound);
byId("more").addEventListener("click", () => act(() => find(true)));
byId("new").addEventListener("click", () => edit(without("")));

// Edit

let editing = null; // the entity's quotas as the service gave them; version null: it has none

const pathOf = (entity) => `v1/quotas/${entity.replace(/[?#/\\]/g, encodeURIComponent)}`;
const valueText = ({ limit, ...rest }) => `${shown(limit)}${Object.keys(rest).length ? ` ${JSON.stringify(rest)}` : ""}`;

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
    made("td", {}, made("button", { type: "button", title: "Delete", onclick: () => row.remove() }, "×")));
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
async function written(method, entity, version, { body, reason }) {
  const headers = version === null ? { "If-None-Match": "*" } : { "If-Match": `"${version}"` };
  // A header holds bytes: one character for each byte of the UTF-8 text.
  if (reason) headers["X-Reason"] = String.fromCharCode(...new TextEncoder().encode(reason));
  const answer = await ask(pathOf(entity), { method, body, headers });
  await find(false);
  return answer;
}

const saidReason = () => byId("edit-reason").value.trim();
const without = (entity) => ({ entity, quotas: {}, version: null, bounds: {} });
const isInPage = () => byId("quota-page").contains(document.activeElement);

function closeEditor() {
  byId("quota-page").hidden = true;
  editing = null;
  byId("search-text").focus();
}

byId("editor").addEventListener("submit", (event) => {
  event.preventDefault();
  act(async () => {
    const entity = byId("edit-entity").value.trim();
    const quotas = await written("PUT", entity, editing.version, { body: edited(), reason: saidReason() });
    edit(quotas, { focus: isInPage() });  // unless the user has moved on meanwhile
  });
});
byId("edit-add").addEventListener("click", () => {
  const row = editRow(KEYS.find((key) => ![...byId("edit-rows").querySelectorAll("select")].some((s) => s.value === key)), "");
  byId("edit-rows").append(row);
  row.querySelector("select").focus();
});
byId("edit-delete").addEventListener("click", () => {
  const { entity, version } = editing;
  if (!confirm(`Delete all quotas of ${entity}? The history keeps them, and can bring them back.`)) return;
  act(async () => {
    await written("DELETE", entity, version, { reason: saidReason() });
    edit(without(entity), { focus: isInPage() });
  });
});
byId("edit-close").addEventListener("click", closeEditor);

// History, newest first

let changesCursor = null;

async function showChanges({ entity }) {
  byId("history").replaceChildren();
  byId("older").hidden = true;
  if (!entity) return;
  const page = await act(() => ask(`v1/quotas:history?${new URLSearchParams({ entity })}`));
  if (!page || editing?.entity !== entity) return; // another one is shown by now
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

byId("older").addEventListener("click", () => act(async () => {
  const { entity } = editing;
  const page = await ask(`v1/quotas:history?${new URLSearchParams({ entity, cursor: changesCursor })}`);
  if (editing?.entity !== entity) return;
  byId("history").append(...page.changes.map((change) => changeItem(change, -1)));
  showOlder(page.next_cursor);
}));

// A change with both values of each quota that it touched. The newest one can be undone.
function changeItem(change, place) {
  const { at_ms: atMs, who, before, after, reason } = change;
  const keys = KEYS.filter((key) => !isSame(before?.[key], after?.[key]));
  const value = (quotas, key) => quotas?.[key] ? made("code", {}, valueText(quotas[key])) : "none";
  const title = !before ? "Created" : !after ? "Deleted" : keys.length ? "Changed" : "Left as it was";
  const undoing = place === 0 && keys.length
    ? made("button", { type: "button", class: "undo", onclick: () => act(() => undo(change)) }, "Undo") : null;
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
  const answer = await written(before ? "PUT" : "DELETE", entity, version, { body: before ?? undefined, reason });
  edit(before ? answer : without(entity), { focus: isInPage() });
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
  byId("shadow-fault").textContent = "";
  const isThere = Object.values(quotas).some(({ shadow }) => shadow);
  byId("shadow-table").hidden = !isThere;
  byId("no-shadows").hidden = isThere;
  if (isThere) lookAtShadows();
}

async function lookAtShadows() {
  if (!editing?.entity || byId("shadow-table").hidden) return;
  const { entity, version } = editing;
  let found;
  try { // not by act: a refresh leaves the problem of an action in place
    found = await ask(`v1/quotas:shadow?${new URLSearchParams({ entity })}`);
    byId("shadow-fault").textContent = "";
  } catch (error) {
    byId("shadow-fault").textContent = error.message;
    if (!(error instanceof Refused)) throw error;
    return;
  }
  if (editing?.entity !== entity || editing.version !== version) return;
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
  byId("promote-yes").focus();
}

byId("promote-no").addEventListener("click", () => byId("promote").close());
byId("promote-form").addEventListener("submit", (event) => {
  event.preventDefault();
  byId("promote").close();
  const { found: { entity, version }, shadow: { quota } } = promoted;
  act(async () => {
    const reason = byId("promote-reason").value.trim();
    edit(await written("PATCH", entity, version, { body: { [quota]: { shadow: null } }, reason }));
  });
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
  byId("ladder").replaceChildren();
  const isNamed = parts.length > 0 && parts.every(([, name]) => name !== null);
  byId("ladder-hint").hidden = isNamed;
  if (isNamed) act(showLadder);
}

async function showLadder() {
  const said = [...new FormData(byId("ladder-of"))].filter(([, value]) => value);
  byId("ladder-hint").hidden = true;
  byId("ladder").replaceChildren(...await explanations(said));
}

byId("ladder-of").addEventListener("submit", (event) => {
  event.preventDefault();
  act(showLadder);
});

// Effective limits

byId("who").addEventListener("submit", (event) => {
  event.preventDefault();
  const said = [...new FormData(event.target)].filter(([, value]) => value);
  act(async () => byId("explained").replaceChildren(...await explanations(said)));
});

async function explanations(said) {
  const { quotas } = await ask(`v1/quotas:effective?${new URLSearchParams(said)}`);
  return quotas.length ? quotas.map(explanation) : [made("p", {}, "No quota applies: everything is admitted.")];
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
