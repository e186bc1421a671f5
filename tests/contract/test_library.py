"""The function library in real stores: loaded where missing, and removed when unused."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest
import redis

from app.domain.ask import Ask
from app.domain.ladder import AppliedQuota
from app.domain.quota import KEYS, Quota
from app.store import library
from app.store.client import client_of
from app.store.library import Library, call_function
from app.store.port import Plan, StoreError
from app.store.redis import RedisStore, run
from app.store.script import SCRIPT
from tests.charging import single_charge
from tests.stores import KINDS, running

OTHER = SCRIPT + "\n-- the next version\n"


@pytest.fixture(params=KINDS)
def url(request: pytest.FixtureRequest):
    with running(request.param) as url:
        yield url


def libraries(client: Any) -> set[str]:
    return {entry[1].decode() for entry in client.function_list()}


def plan(user: str, limit: float = 2) -> Plan:
    row = KEYS["controller_mutation_rate"]
    quota = Quota("controller_mutation_rate", limit, row.algorithm, row.enforcement, burst=limit)
    found = AppliedQuota(quota, f"user={user}", f"user={user}", f"user={user}")
    return Plan("admit", (single_charge(found, Ask({"mutations": 1})),))


async def outcomes(store: RedisStore, plans: list[Plan]) -> list[str]:
    await store.connect()
    return [answer.results[0].outcome for answer in await store.decide(plans)]


async def test_lost_library_is_loaded_again_and_nothing_is_charged_twice(url: str):
    store = RedisStore(url)
    with redis.Redis.from_url(url) as client:
        assert await outcomes(store, [plan("a")]) == ["admit"]
        client.function_flush()
        assert await outcomes(store, [plan("a")]) == ["admit"]
        client.function_flush()
        assert await outcomes(store, [plan("a")]) == ["throttle"]
    await store.close()


async def test_state_of_one_call_does_not_reach_the_next(url: str):
    """Calls of stores with other options, and a call with a failed ask, leave no state behind."""
    store, by_caller = RedisStore(url, logged=True), RedisStore(url, caller_clock=True, max_ids=40)
    await store.connect()
    await by_caller.connect()
    with redis.Redis.from_url(url) as client:
        (early,) = await by_caller.decide([Plan("admit", plan("b").charges, at_ms=1_000)])
        assert early.at_ms == 0
        (late,) = await store.decide([plan("a")])
        assert late.at_ms > 1_000_000
        assert late.order is not None
        client.lpush(plan("c").charges[0].key, "of another type")
        first, broken, last = await store.decide([plan("a"), plan("c"), plan("d")])
        assert first.results[0].outcome == "admit"
        assert broken.error is not None
        assert broken.error.reason == "response"
        assert last.results[0].outcome == "admit"
        assert await outcomes(store, [plan("a")]) == ["throttle"]
    await store.close()
    await by_caller.close()


async def test_script_error_affects_only_its_own_ask(url: str):
    right = "check.tokens, check.at = forgive(check, before - check.usage), check.t"
    wrong = f"if check.limit == 3 then check.nothing.there = 1 end {right}"
    assert SCRIPT.count(right) == 1
    store = RedisStore(url, script=SCRIPT.replace(right, wrong))
    await store.connect()
    failing = Plan("admit", plan("b", limit=3).charges, retry=("b", b"ask"))
    first, broken, last = await store.decide([plan("a"), failing, plan("c")])
    assert broken.error is not None
    assert [first.results[0].outcome, last.results[0].outcome] == ["admit", "admit"]
    await store.close()


async def test_two_versions_run_together_and_the_unused_one_is_removed(
    url: str, monkeypatch: pytest.MonkeyPatch
):
    old, new = RedisStore(url, script=OTHER), RedisStore(url)
    names = {Library.of(SCRIPT).name, Library.of(OTHER).name}
    with redis.Redis.from_url(url) as client:
        client.function_load(
            "#!lua name=somebody_elses\nredis.register_function('f', function() return 1 end)"
        )
        for _ in range(2):
            await old.examine()
            await new.examine()
        assert libraries(client) == names | {"somebody_elses"}
        await old.examine()
        with monkeypatch.context() as patched:
            patched.setattr(library, "KEPT_S", 1)
            async with asyncio.timeout(60):
                while len(libraries(client)) > 2:
                    await new.examine()
        assert libraries(client) == {Library.of(SCRIPT).name, "somebody_elses"}
        assert await outcomes(old, [plan("a")]) == ["admit"]
    await old.close()
    await new.close()


async def test_node_without_permission_to_list_libraries_decides_normally(url: str):
    with redis.Redis.from_url(url) as client:
        client.execute_command(
            "ACL", "SETUSER", "node", "on", ">secret", "~*", "+@all", "-function|list", "-function|delete"
        )
        store = RedisStore(url.replace("unix://", "unix://node:secret@"))
        assert [fault.name for fault in await store.examine()] in ([], ["maxmemory"])
        assert await outcomes(store, [plan("a")]) == ["admit"]
        await store.close()


async def test_node_without_permission_to_load_reports_why(url: str):
    with redis.Redis.from_url(url) as client:
        client.execute_command("ACL", "SETUSER", "node", "on", ">secret", "~*", "+@all", "-function|load")
    client = client_of(url.replace("unix://", "unix://node:secret@"), 5)
    with pytest.raises(StoreError) as refused:
        await call_function(partial(run, client), Library.of(SCRIPT), [], [])
    assert refused.value.reason == "permission"
    await client.aclose()
