// Puts a quota, asks until throttled, reads what is wrong with a bad ask, and deletes the quota.

import { Configuration, DecisionsApi, QuotasApi, ResponseError } from "../../../clients/generated/typescript/src/index";
import type { Problem } from "../../../clients/generated/typescript/src/index";

const who = "example-typescript";
const entity = `user=${who},client-id=*`;

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
    let said = await decisions.decideOneAsk({ ask });
    while (said.decision === "admit" && admitted < 100) {
        admitted += 1;
        said = await decisions.decideOneAsk({ ask });
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
