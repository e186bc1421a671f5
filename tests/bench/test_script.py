"""The cost of the script per ask, compared with an empty script with TIME on the same server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import redis

from app.domain.entity import Entity
from app.domain.ladder import AppliedQuota
from app.domain.quota import KEYS, Quota
from app.store.compiled_quota import compiled
from app.store.encoding import encode_call, encode_plans
from app.store.keys import bucket_key
from app.store.library import Library
from app.store.port import Charge, Plan
from app.store.script import SCRIPT
from tests.proofs import print_table
from tests.prove.filters import strangers
from tests.stores import KINDS, running

pytestmark = pytest.mark.bench

EMPTY = "local function run() redis.call('TIME') return {} end"
ROUNDS, CALLS = 11, 40
CALL = encode_call(caller_clock=False, sequential=False, logged=False, max_ids=1_000_000)
IDS = strangers(100, seed=1).astype("<u4")
NEW = iter(strangers(400_000, seed=2).astype("<u4"))


def charge(key: str, user: int, limit: float, spreads: bytes = b"", ip: str | None = None) -> Charge:
    row = KEYS[key]
    quota = Quota(key, limit, row.algorithm, row.enforcement, burst=limit)
    entity = str(Entity.of(ip=ip) if ip else Entity.of(user=f"user-{user}"))
    applied = AppliedQuota(quota, entity, entity, entity)
    compiled_quota = compiled(quota, entity, 0)
    return Charge(compiled_quota, entity, entity, bucket_key(applied), 1, spreads)


def rates(user: int) -> tuple[Charge, Charge]:
    """The rate of a user and the rate of an address."""
    return charge("request_rate", user, 1e9), charge("request_rate", user, 1e9, ip=f"10.0.0.{user}")


def known(user: int) -> Charge:
    return charge("producer_ids_rate", user, 1, IDS[user].tobytes())


CASES: dict[str, Callable[[int], tuple[Charge, ...]]] = {
    "sampled rate": lambda user: (charge("request_rate", user, 1e9),),
    "sampled rate, throttled": lambda user: (charge("consumer_byte_rate", user, 0.15),),
    "token bucket": lambda user: (charge("controller_mutation_rate", user, 1e9),),
    "known id": lambda user: (known(user),),
    "two rates": rates,
    "two rates, known id": lambda user: (*rates(user), known(user)),
    "unknown id, throttled": lambda user: (charge("producer_ids_rate", user, 1, next(NEW).tobytes()),),
    "unknown id, remembered": lambda user: (charge("producer_ids_rate", user, 500_000, next(NEW).tobytes()),),
}


@pytest.mark.parametrize("kind", KINDS)
def test_script_compared_with_an_empty_one(kind: str):
    rows = []
    with running(kind) as url:
        client: Any = redis.Redis.from_url(url)
        libraries = {"script": Library.of(SCRIPT), "empty": Library.of(EMPTY)}
        for library in libraries.values():
            client.function_load(library.code)
        version = client.info("server").get("valkey_version") or client.info("server")["redis_version"]
        for user in range(100):
            _run(client, libraries["script"], [CASES["known id"](user)])
        for name, make in CASES.items():
            cells = []
            for asks in (1, 10, 100):
                best = dict.fromkeys(libraries, float("inf"))
                for _ in range(ROUNDS):
                    for which, library in libraries.items():
                        client.config_resetstat()
                        for _ in range(CALLS):
                            _run(client, library, [make(user) for user in range(asks)])
                        took = client.info("commandstats")["cmdstat_fcall"]["usec"] / CALLS / asks
                        best[which] = min(best[which], took)
                cells += [f"{best['script']:.2f}", f"{best['script'] / best['empty']:.1f}"]
            rows.append([name, *cells])
        client.close()
    columns = ["ask", *(f"{asks} a call: {what}" for asks in (1, 10, 100) for what in ("us", "x empty"))]
    print_table(f"{kind} {version}", "make bench T=tests/bench/test_script.py", columns, rows)


def _run(client: Any, library: Library, asks: list[tuple[Charge, ...]]) -> None:
    keys, arguments = encode_plans([Plan("admit", charges) for charges in asks])
    client.execute_command("FCALL", library.name, len(keys), *keys, CALL, *arguments)
