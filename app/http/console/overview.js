// The overview: the whole deployment, from GET v1/overview.

const SPANS = {
  second: { step: 1, whole: 900, lately: 60, late: 4, name: "the last minute" },
  minute: { step: 60, whole: 86400, lately: 900, late: 70, name: "the last 15 minutes" },
}; // in seconds; `late`: how far behind the newest entry may be without a lost sample

const FULL = 7 / 8; // of its memory: then a store takes no new bucket
const BACK_MS = 60_000; // by how much the store's clock goes back when its state is lost: app/admission/overview
const MOST_DISKS = 20;
const MOST_LONG = 5; // buckets in one fault

// What to do about each fault of a store, by its name in docs/failures.md.
const REMEDIES = {
  authentication: "it refuses the password. Correct QUOTAGATE_REDIS_URL.",
  budget: "it answers slowly. Look for slow commands and a crowded host.",
  busy: "it runs somebody's endless script. End it with SCRIPT KILL.",
  cluster: "it is a cluster. Give its URL as redis+cluster://.",
  cluster_full_coverage: "it stops all slots when one primary is lost. Set cluster-require-full-coverage to no.",
  cluster_down: "a primary of the cluster is lost. Its replica takes over, or start it again.",
  connection: "it cannot be reached. Start it, or correct the network or QUOTAGATE_REDIS_URL.",
  disk_full: "its disk is full. Make room there.",
  full: "7/8 of its memory is used, so it takes no new bucket. Raise maxmemory, or add a primary.",
  loading: "it loads its file after a start. Wait.",
  master_down: "it is a replica without a primary. Start the primary, or promote this one.",
  maxmemory: "it has no maxmemory, so it may take all the memory of its host. Set one.",
  maxmemory_policy: "it evicts buckets. Set maxmemory-policy to noeviction.",
  misconfigured: "it cannot write its file. Its log says why.",
  missing_right: "its user lacks a right that a node needs. See the rule in docs/settings.md.",
  no_cluster: "it is not a cluster. Give its URL as redis://.",
  no_replicas: "it has too few replicas for writes. Start them, or lower min-replicas-to-write.",
  out_of_memory: "it is beyond its maxmemory. Raise it.",
  permission: "its user may not run scripts or write. See the rule in docs/settings.md.",
  primary_away: "a primary of the cluster is away. Its replica takes over, or start it again.",
  read_only: "it is a replica. Point QUOTAGATE_REDIS_URL to the primary.",
  response: "it gives an unexpected answer. The node's log has it.",
  scripting: "it does not run scripts. Allow EVAL and FCALL.",
  slot_moved: "a slot of the cluster has moved. The node follows; wait.",
  slot_moving: "a slot of the cluster is moving. Wait.",
  timeout: "it does not answer. Look whether it hangs, or its host is crowded.",
  unchecked: "it does not allow INFO, so its version and memory are not known. Allow it.",
  unexpected: "something unexpected happened. The node's log has it.",
  version: "it is too old. Update it to Valkey 7.2 or Redis 7.",
};

const perSecond = (entry, seconds, fields) => fields.map((field) => entry[field] / seconds);
const part = (count, all) => all ? (100 * count) / all : null;
const decided = ({ admit, delay, throttle, reject }) => admit + delay + throttle + reject;

const CHARTS = [
  {
    title: "Decisions a second", lines: ["admit", "delay", "throttle", "reject"], format: measured,
    values: (entry, seconds) => perSecond(entry, seconds, ["admit", "delay", "throttle", "reject"]),
  },
  {
    title: "Time to decide", lines: ["p50", "p99"],
    bounds: () => [latencyMs[0] / 2, 2 * latencyMs.at(-1)], splits: [1, 10, 100, 1000], // logarithmic
    format: (ms) => ms > latencyMs.at(-1) ? `> ${duration(latencyMs.at(-1) / 1000)}` : `≤ ${duration(ms / 1000)}`,
    values: (entry) => [0.5, 0.99].map((quantile) => percentile(entry.latency, quantile)),
  },
  {
    title: "Decided without the store", lines: ["by policy", "by nodes alone"], format: (percent) => `${measured(percent)} %`,
    values: (entry) => [part(entry.fallback, decided(entry)), part(entry.local, decided(entry))],
  },
  {
    title: "Asks that wait, and shed a second", lines: ["waiting", "shed"], format: measured,
    values: (entry, seconds) => [entry.queue_asks, entry.shed / seconds],
  },
];

let resolution = "second";
let entries = []; // oldest first
let latencyMs = [1];

// The bound that a part of all answers did not exceed; twice the largest bound for answers beyond it.
function percentile(counts, quantile) {
  const needed = quantile * counts.reduce((sum, count) => sum + count, 0);
  let reached = 0;
  const place = needed ? counts.findIndex((count) => (reached += count) >= needed) : -1;
  return place < 0 ? null : latencyMs[place] ?? 2 * latencyMs.at(-1);
}

const isLate = (nowMs) => entries.length > 0 && nowMs - entries.at(-1).at_ms > SPANS[resolution].late * 1000;

// Times (s) and values of a chart. An entry counts since the one before it; a lost sample is a gap, not a zero.
function rowsOf(chart, nowMs) {
  const { step } = SPANS[resolution];
  const gap = (atMs) => [atMs / 1000 + step, ...chart.lines.map(() => null)];
  const rows = [];
  for (let place = 1; place < entries.length; place += 1) {
    const [before, entry] = entries.slice(place - 1, place + 1);
    const seconds = (entry.at_ms - before.at_ms) / 1000;
    if (seconds > step) rows.push(gap(before.at_ms));
    rows.push([entry.at_ms / 1000, ...chart.values(entry, seconds)]);
  }
  if (isLate(nowMs)) rows.push(gap(entries.at(-1).at_ms));
  return rows;
}

// An answer has the latest entries again, because its throttled buckets are those of its entries.
async function lookAtOverview(isStill) {
  const { lately, whole } = SPANS[resolution];
  const of = (since) => ask(`v1/overview?${new URLSearchParams({ resolution, ...since })}`);
  const known = entries.length ? entries : (await of({})).series;
  const newest = known.at(-1)?.at_ms ?? 0;
  const since = Math.max(newest - lately * 1000, 0);
  const [now, volumes] = await Promise.all([of({ since_ms: since }), ask("v1/volumes")]);
  if (!isStill()) return;
  const isAnew = now.now_ms && now.now_ms < newest - BACK_MS;
  const all = isAnew ? [] : [...known, ...now.series.filter((entry) => entry.at_ms > newest)];
  // A clock that is a little behind, or not read yet, is not before the entries.
  now.now_ms = Math.max(now.now_ms, all.at(-1)?.at_ms ?? 0);
  // The newest entry stays: it tells how late the samples are.
  entries = all.filter((entry, place) => place === all.length - 1 || entry.at_ms > now.now_ms - whole * 1000);
  latencyMs = now.latency_ms;
  showOverview(now, volumes, since);
}

function showOverview(now, volumes, since) {
  const isDrawn = entries.length > 1;
  byId("curves").hidden = !isDrawn;
  byId("no-curves").hidden = isDrawn || isLate(now.now_ms);
  if (isDrawn) {
    for (const chart of CHARTS) {
      chart.parent = byId("curves");
      draw(chart, rowsOf(chart, now.now_ms), now.now_ms / 1000, SPANS[resolution].whole);
    }
  }
  showFaults(now, volumes);
  const { step, name } = SPANS[resolution];
  // An entry counts since the one before it.
  const seconds = entries.length ? (entries.at(-1).at_ms - Math.max(since, entries[0].at_ms - step * 1000)) / 1000 : null;
  byId("busiest-span").textContent = `In ${name}`;
  fill("busiest-rows", now.throttled.map((each) => made("tr", { "data-name": `${each.quota} ${each.bucket}` },
    ...cells(bucketLink(each), made("code", {}, each.quota), sinceOf(each, now.now_ms), seconds ? each.asks / seconds : null),
    made("td", { class: "number" }, each.throttle_ms ? duration(each.throttle_ms / each.asks / 1000) : "–"))),
    isLate(now.now_ms) ? "Not known: the newest samples are lost." : `Nobody was throttled in ${name}.`, 5);
  fill("store-rows", now.stores.map((store) => made("tr", {}, ...storeCells(store))),
    "Nothing is known of a store: this node has not read one yet. Look at Health.", 5);
  fill("node-rows", now.nodes.map(({ node, version, seen_ms: seen }) => made("tr", {}, ...cells(made("code", {}, node),
    version, `${duration(Math.max(now.now_ms - seen, 0) / 1000)} ago`))), "No node has counted yet.", 3);
  showDisks(volumes);
}

// The oldest entry bounds how far back it is known.
function sinceOf({ since_ms: since }, nowMs) {
  const length = duration(Math.floor(Math.max(nowMs - since, 0) / 1000));
  return since < entries[0]?.at_ms ? `for more than ${length}` : `${clock(since / 1000)} (${length})`;
}

// A name of more than 64 characters is a digest, which no bucket has.
const bucketLink = ({ bucket, quota }) => bucket.startsWith("#")
  ? made("span", {}, made("code", {}, bucket),
    made("span", { class: "hint" }, ` is the digest of a name of more than ${LONGEST_BUCKET} characters`))
  : made("a", { href: "#buckets", onclick: (event) => { event.preventDefault(); watch(bucket, quota); } },
    made("code", {}, bucket));

function storeCells({ primary, memory_bytes: used, max_bytes: most, faults }) {
  const share = most ? used / most : null;
  const label = `${primary} uses ${share === null ? "an unknown part" : `${shown(Math.floor(share * 100))} %`} of its memory`;
  const bar = share === null ? "–" : made("meter", {
    min: 0, max: 1, value: share, class: share > FULL ? "violating" : "ok", "aria-label": label }, label);
  return [...cells(made("code", {}, primary), bar, most ? `${size(used)} of ${size(most)}` : size(used),
    most ? size(Math.max(FULL * most - used, 0)) : "–"),
  made("td", faults.length ? { class: "bad" } : {}, faults.join(", ") || "none")];
}

function showDisks(now) {
  const { factor, reason, volumes } = now;
  byId("disk-factor").textContent = `Throttle factor ${measured(factor)}: ${reason}`;
  byId("disk-factor").className = factor < 1 ? "bad" : "hint";
  const used = ({ total_bytes: total, available_bytes: free }) => total ? 1 - free / total : 2; // unknown ones first
  const fullest = volumes.toSorted((a, b) => used(b) - used(a)).slice(0, MOST_DISKS);
  fill("disk-rows", fullest.map((volume) => {
    const [broker, dir, part, free, , state] = volumeCells(volume, now);
    return volumeRow(volume, [broker, dir, part, free, state]);
  }), noVolume(now), 5);
}

function showFaults(now, volumes) {
  const sum = (field) => now.series.reduce((total, entry) => total + entry[field], 0);
  const versions = [...new Set(now.nodes.map(({ version }) => version))];
  const { name } = SPANS[resolution];
  const found = now.stores.flatMap(({ primary, faults }) => faults.map((fault) =>
    [`Store ${primary}: ${fault}`, REMEDIES[fault] ?? "see docs/failures.md."]));
  if (sum("fallback")) {
    found.push([`Asks were decided by policy in ${name}`,
      "the store did not answer in time, or is full. Each quota's on_store_failure says how it decides then."]);
  }
  if (sum("shed")) {
    found.push([`Asks were shed in ${name}`,
      "nodes could not answer them within QUOTAGATE_QUEUE_MS. Add processes or nodes, or let callers use leases."]);
  }
  if (isLate(now.now_ms)) {
    found.push(["The newest samples are lost", "a process was killed, or cannot reach the store. Its log says more."]);
  }
  if (volumes.factor < 1) {
    found.push([volumes.factor ? `Produce limits are multiplied by ${measured(volumes.factor)}` : "Producers are stopped",
      volumes.drill ? "a drill is on. End it with: quotagate volumes drill --end"
        : "a disk is too full, or its state is not known. Make room on the disks marked below."]);
  }
  if (versions.length > 1) found.push([`Nodes run ${versions.join(" and ")}`, "complete the update."]);
  const long = now.throttled_long; // LONG_MS of app/admission/overview/series.py
  if (long.length) {
    found.push(["Throttled for half an hour or longer", `${long.length > MOST_LONG ? `and ${long.length - MOST_LONG} more. ` : ""}`
      + "The callers keep asking for more than their limits. Let them ask for less, or raise the limits.", long.slice(0, MOST_LONG)]);
  }
  // Screen readers hear it once, and not at each refresh.
  const text = JSON.stringify(found, (name, value) => name === "since_ms" ? undefined : value);
  if (byId("faults").dataset.text === text) return;
  byId("faults").dataset.text = text;
  update(byId("faults"), (found.length ? found : [["No fault is known.", ""]]).map(([fault, remedy, buckets = []]) =>
    made("li", remedy ? {} : { class: "hint" }, remedy ? made("strong", {}, `${fault}: `) : fault,
      ...buckets.flatMap((each) => [bucketLink(each), ` by ${each.quota} since ${shortly(each.since_ms)}; `]), remedy)));
}

byId("span").addEventListener("change", (event) => {
  resolution = event.target.value;
  entries = [];
  look();
});
