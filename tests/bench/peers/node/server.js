// A limiter as a Node team writes it: Node's own HTTP server, rate-limiter-flexible, and ioredis.
//
// Each ask takes one command for each limit; ioredis writes the commands of one turn of the loop together.

"use strict";

const http = require("node:http");
const Redis = require("ioredis");
const { RateLimiterRedis } = require("rate-limiter-flexible");

const redis = new Redis({ path: process.argv[2], enableAutoPipelining: true });
const FIELDS = ["requests", "produce_bytes", "fetch_bytes"];

// A limit that nobody reaches, and one a minute for `fetch_bytes`.
const limits = Object.fromEntries(
    FIELDS.map((field) => {
        const tight = field === "fetch_bytes";
        const [points, duration] = tight ? [1, 60] : [1e9, 1];
        return [field, new RateLimiterRedis({ storeClient: redis, keyPrefix: field, points, duration })];
    })
);

async function decide(ask) {
    const { principal, usage } = ask;
    if (typeof principal !== "string" || !principal) throw new SyntaxError("principal");
    const fields = Object.keys(usage);
    try {
        if (fields.length === 1) await limits[fields[0]].consume(principal, usage[fields[0]]);
        else await Promise.all(fields.map((field) => limits[field].consume(principal, usage[field])));
        return { decision: "admit", throttle_ms: 0 };
    } catch (refused) {
        if (refused instanceof Error) throw refused;
        return { decision: "throttle", throttle_ms: refused.msBeforeNext };
    }
}

function send(response, status, body) {
    const text = JSON.stringify(body);
    response.writeHead(status, { "Content-Type": "application/json", "Content-Length": Buffer.byteLength(text) });
    response.end(text);
}

const server = http.createServer((request, response) => {
    const parts = [];
    request.on("data", (part) => parts.push(part));
    request.on("end", async () => {
        try {
            const body = JSON.parse(parts.length === 1 ? parts[0] : Buffer.concat(parts));
            if (request.url === "/v1/decisions") send(response, 200, await decide(body));
            else if (request.url === "/v1/decisions:batch")
                send(response, 200, { decisions: await Promise.all(body.asks.map(decide)) });
            else send(response, 404, {});
        } catch (error) {
            send(response, error instanceof SyntaxError ? 400 : 500, { detail: String(error) });
        }
    });
});
server.keepAliveTimeout = 75000;
server.listen(0, "127.0.0.1", () => console.log(server.address().port));
process.on("SIGTERM", () => process.exit(0));
