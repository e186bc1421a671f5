"""The promises of the client's leases: bounds hold, available units get used, and few calls are made."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from app.domain.quota import Quota
from quotagate_client import AsyncClient, Client, Leased, Problem
from quotagate_client.leases import GRANTED, Holder
from tests.bounds.leases import most_in_a_window
from tests.clients.both import Time
from tests.clients.lessor import Lessor, lowered, working
from tests.clients.scripted import ADMITTED, REFUSED, Reply, Request, Script, answer
from tests.report import say
from tests.service import Service, eventually
from tests.waiting import until

QUOTAS = {
    "sampled rate": Quota("consumer_byte_rate", 1_000, "sampled_rate", "deny", samples=11, sample_ms=500),
    "token bucket": Quota("consumer_byte_rate", 1_000, "token_bucket", "deny", burst=5_500.0),
}
each = pytest.mark.parametrize("name", QUOTAS)
ALICE: Any = {"principal": "alice", "usage": {"fetch_bytes": 1}}


@pytest.mark.parametrize("holders", [1, 4])
@each
def test_holders_use_what_there_is_share_it_equally_and_keep_the_bound(name: str, holders: int):
    """With a demand of twice the limit, and leases of a tenth of the window."""
    quota = QUOTAS[name]
    bound, window_ms = quota.bound
    lessor, run_ms = Lessor(quota), 8 * window_ms
    workers = working(lessor, holders, window_ms // 10, 2.0 * quota.limit, run_ms)
    used = [len(worker.spent) for worker in workers]
    part = sum(used) / (quota.limit * run_ms / 1000)
    mean = sum(used) / holders
    spent = [one for worker in workers for one in worker.spent]
    ratio = most_in_a_window(spent, window_ms) / (quota.limit * window_ms / 1000)
    say(
        f"{holders} clients, {name}: {part:.1%} used, "
        f"shares {min(used) / mean:.3f} to {max(used) / mean:.3f}, "
        f"{ratio:.3f} of at most {bound}; {sum(worker.asked for worker in workers) / lessor.calls:.0f} "
        "decisions a call"
    )
    assert bound is not None
    assert part >= 0.95
    assert 0.9 * mean <= min(used) <= max(used) <= 1.1 * mean
    assert ratio <= bound


@pytest.mark.parametrize(("lease_ms", "most"), [(100, 161), (250, 73), (500, 40)])
def test_calls_fall_to_few_a_second(lease_ms: int, most: int):
    """600 decisions a second by ten holders, below the limit: all are admitted."""
    quota = Quota("consumer_byte_rate", 6_000, "sampled_rate", "deny", samples=11, sample_ms=1_000)
    lessor = Lessor(quota)
    workers = working(lessor, 10, lease_ms, 600, 20_000)
    a_second = lessor.calls / 20
    say(f"600 decisions a second make {a_second:.0f} calls with leases of {lease_ms} ms")
    assert sum(len(worker.spent) for worker in workers) == sum(worker.asked for worker in workers)
    assert a_second <= most


@each
def test_lowered_limit_binds_within_a_lease(name: str):
    quota = QUOTAS[name]
    lessor = Lessor(quota)
    window_ms = quota.bound[1]
    before = working(lessor, 2, 100, 2.0 * quota.limit, window_ms)
    lessor.quota, lessor.oracle = lowered(quota, 0.1), lessor.oracle
    start_ms = lessor.now_ms
    for worker in before:
        worker.spent.clear()
    while lessor.now_ms < start_ms + 4 * window_ms:
        lessor.now_ms += 5
        for worker in before:
            worker.tick()
    late = [one for worker in before for one in worker.spent if one[0] > start_ms + 2 * window_ms]
    assert len(late) <= 2 * window_ms / 1000 * quota.limit * 0.1 * 1.1


def test_nothing_is_spent_after_a_lease_is_over():
    lessor = Lessor(QUOTAS["token bucket"])
    holder = lessor.holder(1_000)
    assert lessor.carry_out(holder.decide(100)) is GRANTED
    lessor.now_ms = 979
    assert holder.take(0)
    lessor.now_ms = 981
    assert not holder.take(0)


def test_idle_holder_gives_back_and_asks_no_more():
    lessor = Lessor(QUOTAS["token bucket"])
    holder = lessor.holder(1_000)
    lessor.carry_out(holder.decide(100))
    lessor.carry_out(holder.renew())
    assert lessor.calls == 1, "it is not due yet"
    lessor.now_ms = 800
    holder.take(1)
    lessor.carry_out(holder.renew())
    assert lessor.calls == 2, "there is still demand"
    lessor.now_ms = 1_600
    lessor.carry_out(holder.renew())
    assert (lessor.calls, lessor.granted, holder.due_s()) == (3, {}, None)


@pytest.mark.parametrize("units", [-1, float("nan"), float("inf")])
def test_only_amounts_are_taken(units: float):
    lessor = Lessor(QUOTAS["token bucket"])
    holder = lessor.holder(1_000)
    holder.take(10)
    lessor.carry_out(holder.decide(10))
    assert not holder.take(units)
    with pytest.raises(ValueError, match="units"):
        lessor.carry_out(holder.decide(units))
    assert holder.take(1)


@pytest.mark.parametrize(
    ("usage", "lease_ms"),
    [
        ({}, 500),
        ({"requests": 0}, 500),
        ({"producer_ids": 1}, 500),
        ({"requests": 1}, 0),
        ({"requests": 1}, 10_001),
    ],
)
def test_wrong_leases_are_refused_at_once(usage: dict[str, float], lease_ms: int):
    with pytest.raises(ValueError, match="must"):
        Holder(Lessor(QUOTAS["token bucket"]).dialogues(), {}, usage, lease_ms)


def leased(granted: float, name: str = "a") -> Reply:
    """An answer that grants so much."""
    body = {**ADMITTED, "lease": name, "granted": {"fetch_bytes": granted}, "lease_ms": 500, "renew_ms": 400}
    return answer({**body, "settled": []})


def refused(throttle_ms: int, decision: str = "throttle", **more: object) -> Reply:
    """An answer that grants nothing."""
    body = {**REFUSED, "lease": None, "granted": {}, "lease_ms": 0, "renew_ms": 0, "settled": []}
    return answer({**body, "decision": decision, "throttle_ms": throttle_ms, **more})


class Work:
    """Leased work on a client of either kind, without its thread or task."""

    def __init__(self, kind: str, script: Script) -> None:
        self.time = Time()
        self.runner = asyncio.Runner() if kind == "async" else None
        options: Any = {"clock": self.time.clock, "jitter": 0}
        self.client: Any = (
            AsyncClient(script.url, **options) if self.runner else Client(script.url, **options)
        )
        self.leased: Any = self.client.leased(**ALICE)

    def decide(self, units: float = 1.0) -> Any:
        return self._done(self.leased.decide(units))

    def close(self) -> None:
        self._done(self.leased.aclose() if self.runner else self.leased.close())

    def end(self) -> None:
        self._done(self.client.aclose() if self.runner else self.client.close())
        if self.runner:
            self.runner.close()

    def _done(self, made: Any) -> Any:
        return self.runner.run(made) if self.runner else made


@pytest.fixture(params=["sync", "async"])
def work(request: pytest.FixtureRequest, script: Script) -> Any:
    made = Work(request.param, script)
    yield made
    made.end()


def bodies(script: Script) -> list[Any]:
    return [request.body for request in script.requests]


def test_lease_is_spent_without_calls_and_settled_on_the_way(work: Work, script: Script):
    script.plays(leased(100), leased(50, "b"), leased(0))
    assert [work.decide(10).decision for _ in range(10)] == ["admit"] * 10
    assert len(script.requests) == 1
    assert work.leased.calls == 1
    work.decide(10)
    work.time.now += 0.2
    work.close()
    first, second, last = bodies(script)
    assert first["settle"] == []
    assert second["settle"] == [{"lease": "a", "usage": {"fetch_bytes": 100}}]
    assert last["settle"] == [{"lease": "b", "usage": {"fetch_bytes": 10}}]
    assert last["ask"] == {"principal": "alice", "usage": {"fetch_bytes": 0}}


def test_refusal_is_repeated_until_its_time(work: Work, script: Script):
    script.plays(refused(300))
    assert [work.decide().throttle_ms for _ in range(5)] == [300] * 5
    work.time.now += 0.1
    assert work.decide().throttle_ms == 200
    assert len(script.requests) == 1
    script.plays(leased(100))
    work.time.now += 0.3
    assert work.decide() is GRANTED


def test_large_piece_of_work_is_asked_for_directly(work: Work, script: Script):
    script.plays(leased(10), answer(ADMITTED))
    assert work.decide(100).source == "store"
    assert script.requests[-1].path == "/v1/decisions"
    assert script.requests[-1].body["enforcement"] == "deny"
    assert script.requests[-1].body["usage"] == {"fetch_bytes": 100}
    assert work.decide(1) is GRANTED


@pytest.mark.parametrize("why", ["forbidden", "too large to lease", "lost"])
def test_without_leases_it_asks_directly(work: Work, script: Script, why: str):
    forbidden = answer({"title": "Forbidden", "status": 403, "detail": "needs account"}, 403)
    first = {
        "forbidden": forbidden,
        "too large to lease": refused(0, "reject"),
        "lost": answer("oops", 500),
    }[why]
    script.plays(first, answer(ADMITTED))
    assert [work.decide().source for _ in range(3)] == ["store"] * 3
    assert [request.path for request in script.requests] == ["/v1/leases"] + ["/v1/decisions"] * 3
    work.time.now += 11
    script.plays(leased(100))
    assert work.decide() is GRANTED


def test_policy_of_a_service_without_its_store_is_followed(work: Work, script: Script):
    script.plays(refused(0, "admit", source="fallback"))
    assert [work.decide().source for _ in range(10)] == ["fallback"] * 10
    assert len(script.requests) == 1


def test_errors_of_a_direct_ask_are_the_callers(work: Work, script: Script):
    script.plays(answer({"title": "Unprocessable", "status": 422, "detail": "wrong"}, 422))
    with pytest.raises(Problem):
        work.decide()


def plays_leases(script: Script) -> None:
    """Grant every wish."""
    number = iter(range(1_000_000))

    def grant(request: Request) -> Reply:
        return leased(request.body["ask"]["usage"]["fetch_bytes"], str(next(number)))

    script.plays(grant)


def test_thread_renews_when_most_is_spent(script: Script):
    script.plays(leased(100), leased(100, "b"))
    time = Time()
    with Client(script.url, clock=time.clock) as client, client.leased(**ALICE) as work:
        for _ in range(79):
            assert work.decide().source == "local"
        assert len(script.requests) == 1
        assert work.take()
        eventually(lambda: len(script.requests) == 2)
        assert all(work.take() for _ in range(20)), "what is left of the first one is spent"
        eventually(work.take)


def test_task_renews_when_most_is_spent(script: Script):
    script.plays(leased(100), leased(100, "b"))

    async def run() -> None:
        async with AsyncClient(script.url, clock=Time().clock) as client, client.leased(**ALICE) as work:
            for _ in range(80):
                assert (await work.decide()).source == "local"
            await until(lambda: len(script.requests) == 2)
            assert all(work.take() for _ in range(20))
            await until(work.take)

    asyncio.run(run())


def test_threads_spend_no_more_than_was_granted(script: Script):
    script.plays(leased(1_000), refused(60_000))
    with Client(script.url) as client, client.leased(**ALICE) as work:
        spent: list[int] = []

        def spend(work: Leased = work) -> None:
            spent.append(sum(work.decide().may_go_ahead for _ in range(1_000)))

        threads = [threading.Thread(target=spend) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sum(spent) <= 1_000


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_leases_of_a_real_node_keep_the_burst(node: Service, kind: str):
    """A burst of 1,000 is spent once, by either kind of client; then it is refused."""
    name = f"leased-{kind}"
    node.put(f"user={name}", consumer_byte_rate={"limit": 1, "algorithm": "token_bucket", "burst": 1_000})
    names: Any = {"principal": name, "usage": {"fetch_bytes": 1}, "lease_ms": 10_000}
    key = node.admin_key

    def sync() -> int:
        with Client(node.url, key=key) as client, client.leased(**names) as work:
            return _until_refused(lambda units: work.decide(units).may_go_ahead)

    async def awaited() -> int:
        async with AsyncClient(node.url, key=key) as client, client.leased(**names) as work:
            admitted = 0
            for _ in range(3_000):
                admitted += (await work.decide()).may_go_ahead
            return admitted

    admitted = sync() if kind == "sync" else asyncio.run(awaited())
    left = node.ask(principal=name, usage={"fetch_bytes": 0}, mode="peek", detail=True)["quotas"][0]
    assert 500 <= admitted <= 1_000 + 60
    assert left["remaining"] >= 1_000 - admitted - 1, "what was not spent was given back"


def _until_refused(decide: Callable[[float], bool]) -> int:
    return sum(decide(1) for _ in range(3_000))


def test_a_request_is_what_the_document_says(script: Script):
    plays_leases(script)
    with Client(script.url, key="k") as client:
        work = client.leased(principal="alice", client_id="etl", usage={"requests": 2, "fetch_bytes": 0.5})
        script.plays(
            answer(
                {
                    **ADMITTED,
                    "lease": "a",
                    "granted": {"requests": 20, "fetch_bytes": 5.0},
                    "lease_ms": 500,
                    "renew_ms": 400,
                }
            )
        )
        assert work.decide(3).source == "local"
        work.close()
    first, last = (json.loads(request.content) for request in script.requests)
    assert first["ask"]["principal"], first["ask"]["client_id"] == ("alice", "etl")
    assert isinstance(first["ask"]["usage"]["requests"], int)
    assert last["settle"][0]["usage"] == {"requests": 6, "fetch_bytes": 1.5}
    assert httpx.Headers(script.requests[0].headers)["Authorization"] == "Bearer k"
