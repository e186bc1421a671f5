// Buckets: the state of one, and its curve while it is watched.

const WATCHED_S = 900; // how far back the curves go
const PARAMETERS = { user: "principal", "client-id": "client_id", ip: "ip", broker: "broker", listener: "listener" };
const LATEST = 2 ** 53 - 1;
const LAYERS = 4; // so many live at once, so a layer has a place of its own by its number
const LONGEST_BUCKET = 64; // whose name the overview has: app/store/samples.py

let watched = null;
let levels = new Map(); // the curve of each quota of the watched bucket
let waitsSince = LATEST; // the time (ms) until which the waits are known

byId("which").quota.append(made("option", { value: "" }, "all"), ...KEYS.map((key) => made("option", {}, key)));
byId("which").addEventListener("submit", (event) => {
  event.preventDefault();
  begin(Object.fromEntries([...new FormData(event.target)].filter(([, value]) => value)));
  look();
});
byId("reset").addEventListener("click", ({ target }) => {
  const { bucket, quota } = watched;
  if (confirm(`Reset the bucket ${bucket}${quota ? ` of ${quota}` : ""}?`)) {
    act(async () => { await ask("v1/buckets:reset", { method: "POST", body: watched }); look(); }, target);
  }
});

function watch(bucket, quota) {
  byId("which").bucket.value = bucket;
  byId("which").quota.value = quota;
  begin({ bucket, quota });
  show("buckets");
}

function begin(chosen) {
  watched = chosen;
  for (const chart of levels.values()) removeCurve(chart);
  levels = new Map();
  waitsSince = LATEST;
  empty("bucket-rows");
  byId("reset").disabled = true;
  byId("watched").textContent = "";
}

async function lookAtBucket(isStill) {
  if (!watched) return;
  const [{ buckets }, limits, overview] = await Promise.all([
    ask(`v1/buckets?${new URLSearchParams(watched)}`), limitsOf(watched.bucket),
    ask(`v1/overview?${new URLSearchParams({ since_ms: waitsSince })}`),
  ]);
  if (!isStill()) return;
  fill("bucket-rows", buckets.map((b) => {
    const limit = limitOf(b, limits);
    return made("tr", {}, ...cells(made("code", {}, b.quota), limit?.limit_now ?? null, limit ? quotaLink(limit.entity) : "–",
      b.observed, b.remaining, b.tokens, b.layers, b.fill, b.remembered_ids, b.charged_ids));
  }), "No quota charges this bucket. The view Effective names the buckets of a caller.", 10);
  byId("reset").disabled = !buckets.length;
  byId("watched").textContent = `${watched.bucket}, as of ${new Date().toLocaleTimeString()}`
    + (watched.bucket.length > LONGEST_BUCKET ? `. Waits have no marks: names of more than ${LONGEST_BUCKET} characters are not counted by name.` : "");
  for (const bucket of buckets) drawLevel(bucket, limits, overview);
  waitsSince = overview.series.at(-1)?.at_ms ?? Math.min(waitsSince, overview.now_ms);
}

// The limits in force for a bucket, which is named by those who share it.
async function limitsOf(bucket) {
  try {
    const parts = bucket.split(/[,;]/).map((part) => part.split("="));
    const caller = parts.filter(([type, name]) => type in PARAMETERS && name)
      .map(([type, name]) => [PARAMETERS[type], decodeURIComponent(name)]);
    return (await ask(`v1/quotas:effective?${new URLSearchParams(caller)}`)).quotas;
  } catch (error) {
    if (error instanceof Refused || error instanceof URIError) return []; // a network of addresses is no caller
    throw error;
  }
}

const limitOf = ({ quota, bucket }, limits) => limits.find((each) => each.quota === quota && each.bucket === bucket);

// The page of the quotas that set a limit.
const quotaLink = (entity) => made("a", { href: "#quotas", onclick: (event) => {
  event.preventDefault();
  act(async () => {
    const quotas = await ask(pathOf(entity));
    show("quotas", { focus: false });
    openQuotas(quotas);
  });
} }, made("code", {}, entity));

// What is used against the limit: a rate, or ids in the window. A token bucket has a level, and is full at its burst.
function drawLevel(bucket, limits, overview) {
  const limit = limitOf(bucket, limits)?.limit_now ?? null;
  const wait = overview.throttled.find((each) => each.quota === bucket.quota && each.bucket === bucket.bucket);
  const meanMs = wait ? wait.throttle_ms / wait.asks : null;
  const isTokens = bucket.tokens !== null;
  const isIds = bucket.charged_ids !== null;
  const level = isTokens ? bucket.tokens : isIds ? bucket.charged_ids : bucket.observed;
  const most = isTokens ? bucket.observed + bucket.tokens : limit;
  const lines = [isTokens ? "tokens" : isIds ? "charged ids" : "rate", isTokens ? "burst" : "limit", "mean wait",
    ...(isIds ? ["remembered ids", ...Array.from({ length: LAYERS }, (_, place) => `layer ${place + 1}`)] : [])];
  const known = levels.get(bucket.quota);
  if (known?.lines[0] !== lines[0]) { // the first one, or the quota has another algorithm now
    if (known) removeCurve(known);
    levels.set(bucket.quota, {
      title: `${bucket.quota} of ${bucket.bucket}`, parent: byId("levels"), rows: [], marks: "mean wait", lines,
      bands: isIds ? 4 : undefined,
      format: (value, line, row) => line === 2 ? duration(row.meanMs / 1000) : line < 4 ? measured(value)
        : row.layers[line - 4] === null ? "–" : measured(row.layers[line - 4]),
    });
  }
  const chart = levels.get(bucket.quota);
  const now = Date.now() / 1000;
  // A wait is a mark at the level that it was met with.
  const layers = Array(LAYERS).fill(null);
  for (const { number, ids } of bucket.live_layers ?? []) layers[(number - 1) % LAYERS] = ids;
  let top = 0; // layers are stacked
  const row = [now, level, most, meanMs === null ? null : level,
    ...(isIds ? [bucket.remembered_ids, ...layers.map((ids) => top += ids)] : [])];
  const last = chart.rows.at(-1)?.[0] ?? now;
  if (now - last > 3 * REFRESH_MS / 1000) chart.rows.push([last + 1, ...chart.lines.map(() => null)]); // not seen meanwhile
  const rows = [...chart.rows, Object.assign(row, { meanMs, layers })].filter(([at]) => at > now - WATCHED_S);
  draw(chart, rows, now, WATCHED_S);
}
