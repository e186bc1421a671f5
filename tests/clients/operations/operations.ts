// Calls every operation with the generated TypeScript client, and prints each answer as it would send it.

import * as api from "../../../clients/generated/typescript/src/index";

const who = "operations-typescript";
const entity = `user=${who}`;

const said: [string, unknown][] = [];

// Note an answer as the client would send it.
function say<T>(operation: string, answer: T, sent: (answer: T) => unknown): T {
    said.push([operation, sent(answer)]);
    return answer;
}

const nothing = (): null => null;

// Send back the quotas that were read, patch, and read the history and the shadow quotas.
async function ofQuotas(quotas: api.QuotasApi): Promise<void> {
    const quotaSet: api.QuotaSet = {
        requestRate: { limit: 16_777_217.5, burst: 3e9, algorithm: "token_bucket", enforcement: "deny" },
        producerByteRate: { limit: Number.MAX_SAFE_INTEGER },
        producerIdsRate: { limit: 5, layers: { interval_ms: 3_600_000, ttl_ms: 7_200_000 } },
        consumerByteRate: { limit: 2_147_483_649, shadow: true },
    };
    say("put_quotas", await quotas.putQuotas({ entity, quotaSet, xReason: "the first" }), api.EntityQuotasToJSON);
    const read = say("get_quotas", await quotas.getQuotas({ entity }), api.EntityQuotasToJSON);
    say("put_quotas", await quotas.putQuotas({ entity, quotaSet: read.quotas }), api.EntityQuotasToJSON);
    say("shadow_quotas", await quotas.shadowQuotas({ entity }), api.ShadowQuotasToJSON);
    const quotaPatch: api.QuotaPatch = {
        requestRate: { limit: 10, burst: null },
        producerIdsRate: null,
        consumerByteRate: { limit: 8 },
    };
    say("patch_quotas", await quotas.patchQuotas({ entity, quotaPatch }), (answer) =>
        api.EntityQuotasToJSON(answer as api.EntityQuotas),
    );
    const page = say(
        "list_quotas",
        await quotas.listQuotas({ match: [entity], strict: true, limit: 10 }),
        api.QuotaPageToJSON,
    );
    const history = say("quotas_history", await quotas.quotasHistory({ entity }), api.QuotaHistoryToJSON);
    const before = history.changes[0]?.before;
    if (!before) throw new Error("the last change had something before it");
    say("put_quotas", await quotas.putQuotas({ entity, quotaSet: before }), api.EntityQuotasToJSON);
    const altered = { entity, quotas: { request_rate: 7, producer_byte_rate: null } };
    say(
        "alter_quotas",
        await quotas.alterQuotas({ quotaAlterations: { alterations: [altered] } }),
        api.QuotaResultsToJSON,
    );
    const found = page.quotas[0];
    if (!found) throw new Error("the page has the entity");
    const setting = { entity: found.entity, quotas: { ...found.quotas, consumerByteRate: null } };
    say(
        "apply_quotas",
        await quotas.applyQuotas({ quotaApplication: { alterations: [setting], validateOnly: true } }),
        api.QuotaPlanToJSON,
    );
    say("effective_quotas", await quotas.effectiveQuotas({ principal: who }), api.EffectiveQuotasToJSON);
}

// Decide, take a lease, and look at the buckets.
async function ofDecisions(decisions: api.DecisionsApi, leases: api.LeasesApi, buckets: api.BucketsApi): Promise<void> {
    const usage = { requests: 1, producerIds: ["123", "9223372036854775807"] };
    const ask = { principal: who, usage, detail: true };
    say("decide_one_ask", await decisions.decideOneAsk({ ask }), api.DecisionToJSON);
    const batch = { asks: [ask, { usage: { requests: 1 } }] };
    say("decide_a_batch_of_asks", await decisions.decideABatchOfAsks({ batch }), api.DecisionsToJSON);
    say(
        "check_by_get",
        await decisions.checkByGet({ xQuotagatePrincipal: who, requests: 1 }),
        api.DecisionToJSON,
    );
    const wish = { principal: who, usage: { requests: 1 } };
    const lease = say(
        "take_lease",
        await leases.takeLease({ leaseRequest: { ask: wish, leaseMs: 10_000 } }),
        api.LeaseToJSON,
    );
    const spent = { usage: { requests: 0 } };
    say("end_lease", await leases.endLease({ lease: lease.lease ?? "", spent }), api.SettledToJSON);
    const found = say("get_buckets", await buckets.getBuckets({ bucket: entity }), api.BucketsToJSON);
    const bucket = found.buckets[0];
    if (!bucket) throw new Error("the ask made a bucket");
    const bucketReset = { bucket: bucket.bucket, quota: bucket.quota };
    say("reset_bucket", await buckets.resetBucket({ bucketReset }), nothing);
}

// List reports, and read the newest.
async function ofReports(reports: api.ReportsApi): Promise<void> {
    const listed = say("get_reports", await reports.getReports(), api.ReportListToJSON);
    const newest = listed.reports[0];
    if (!newest) throw new Error("the list has a report");
    say("get_report", await reports.getReport({ name: newest.name }), api.ReportToJSON);
}

// Make, rotate and revoke a key.
async function ofKeys(keys: api.KeysApi): Promise<void> {
    const keyWanted: api.KeyWanted = {
        name: who,
        scopes: ["decide"],
        boundTo: [entity],
        expiresMs: 4_102_444_800_000,
    };
    say("create_key", await keys.createKey({ keyWanted }), api.KeyOnceToJSON);
    say("get_keys", await keys.getKeys(), api.KeyListToJSON);
    say("rotate_key", await keys.rotateKey({ name: who, rotation: { graceMs: 1_000 } }), api.KeyOnceToJSON);
    say("revoke_key", await keys.revokeKey({ name: who }), nothing);
}

// Push volumes, read them, push them again, and read a drill in the history. A number has 53 bits here.
async function ofVolumes(volumes: api.VolumesApi, quotas: api.QuotasApi): Promise<void> {
    const pushed = [
        { broker: "1", dir: "/a", totalBytes: Number.MAX_SAFE_INTEGER, availableBytes: 2 ** 52 + 1 },
        { broker: "1", dir: "/b", totalBytes: null, availableBytes: null },
    ];
    const push = (each: typeof pushed): Promise<api.Volumes> =>
        volumes.pushVolumes({ pushedVolumes: { volumes: each, complete: true } });
    say("push_volumes", await push(pushed), api.VolumesToJSON);
    const read = say("get_volumes", await volumes.getVolumes(), api.VolumesToJSON);
    const again = read.volumes.map(({ broker, dir, totalBytes, availableBytes }) => ({
        broker,
        dir,
        totalBytes,
        availableBytes,
    }));
    say("push_volumes", await push(again as typeof pushed), api.VolumesToJSON);
    say("forget_volumes", await volumes.forgetVolumes({ broker: "1" }), nothing);
    say("begin_drill", await volumes.beginDrill({ drillWanted: { factor: 0.5, forMs: 600_000 } }), api.VolumesToJSON);
    say("end_drill", await volumes.endDrill({ xReason: "over" }), nothing);
    const history = await quotas.quotasHistory({ entity: "throttle_factor", limit: 2 });
    say("quotas_history", history, api.QuotaHistoryToJSON);
}

async function main(): Promise<void> {
    const configuration = new api.Configuration({
        basePath: process.env.QUOTAGATE_URL ?? "",
        accessToken: process.env.QUOTAGATE_KEY ?? "",
    });
    const quotas = new api.QuotasApi(configuration);
    const health = new api.HealthApi(configuration);
    await ofQuotas(quotas);
    await ofDecisions(
        new api.DecisionsApi(configuration),
        new api.LeasesApi(configuration),
        new api.BucketsApi(configuration),
    );
    const overview = new api.OverviewApi(configuration);
    say("get_overview", await overview.getOverview({ resolution: "second", sinceMs: 1 }), api.OverviewToJSON);
    await ofReports(new api.ReportsApi(configuration));
    await ofKeys(new api.KeysApi(configuration));
    await ofVolumes(new api.VolumesApi(configuration), quotas);
    say("live", await health.live(), api.HealthToJSON);
    say("is_ready", await health.isReady(), api.HealthToJSON);
    say("scrape", await health.scrape(), (text) => text);
    say("delete_quotas", await quotas.deleteQuotas({ entity }), nothing);
    console.log(JSON.stringify(said));
}

main().catch(async (error: unknown) => {
    console.error(error, error instanceof api.ResponseError ? await error.response.text() : "");
    process.exitCode = 1;
});
