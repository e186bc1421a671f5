// Puts a quota, asks until throttled, reads the error of a bad ask, and deletes the quota.
// An overloaded node refuses an ask with 503, and charges nothing; `decide` asks again after its `Retry-After`.

import { Configuration, DecisionsApi, QuotasApi, ResponseError } from "../../../clients/generated/typescript/src/index";
import type { Ask, Decision, Problem } from "../../../clients/generated/typescript/src/index";

const who = "example-typescript";
const entity = `user=${who},client-id=*`;

const overloaded = "urn:quotagate:overloaded";

// A decision; an overloaded node is asked again up to `times` times, a little after its `Retry-After`.
async function decide(decisions: DecisionsApi, ask: Ask, times = 3): Promise<Decision> {
    for (;;) {
        try {
            return await decisions.decideOneAsk({ ask });
        } catch (refused) {
            if (times === 0 || !(refused instanceof ResponseError) || refused.response.status !== 503) throw refused;
            const problem = (await refused.response.clone().json()) as Problem;
            if (problem.type !== overloaded) throw refused;
            times -= 1;
            const seconds = Number(refused.response.headers.get("Retry-After") ?? "1");
            await new Promise((go) => setTimeout(go, seconds * 1000 * (1 + Math.random() / 10)));
        }
    }
}

async function main(): Promise<void> {
    const configuration = new Configuration({
        basePath: process.env.QUOTAGATE_URL ?? "http://127.0.0.1:8080",
        accessToken: process.env.QUOTAGATE_KEY ?? "",
    });
    const quotas = new QuotasApi(configuration);
    const decisions = new DecisionsApi(configuration);

    const three = { limit: 0.1, algorithm: "token_bucket", burst: 3, enforcement: "deny" } as const;
    const put = await quotas.putQuotas({ entity, quotaSet: { requestRate: three } });
    console.log(`put ${put.entity}`);

    const ask = { principal: who, clientId: "app", usage: { requests: 1 } };
    let admitted = 0;
    let said = await decide(decisions, ask);
    while (said.decision === "admit" && admitted < 100) {
        admitted += 1;
        said = await decide(decisions, ask);
    }
    console.log(`admitted ${admitted} times, then ${said.decision}`);

    try {
        await decisions.decideOneAsk({ ask: { principal: who, usage: { requests: -1 } } });
    } catch (refused) {
        if (!(refused instanceof ResponseError)) throw refused;
        const problem = (await refused.response.json()) as Problem;
        console.log(`a bad ask: ${problem.errors?.[0]?.field}`);
    }

    await quotas.deleteQuotas({ entity });
    console.log("deleted");
}

main().catch((error: unknown) => {
    console.error(error);
    process.exitCode = 1;
});
