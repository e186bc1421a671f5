"""Storms of real connections through two proxies: all rates hold, and an address slows only itself."""

from __future__ import annotations

import asyncio
import math
import statistics
from collections.abc import Sequence
from typing import Final

import pytest

from tests.connections.proxies import Attempt, attempt, proxying, storm, until
from tests.report import say
from tests.service import Service

LIMIT: Final = 40
SAMPLES, SAMPLE_MS = 5, 200
RATE: Final = {"limit": LIMIT, "samples": SAMPLES, "sample_ms": SAMPLE_MS}
WINDOW_S: Final = SAMPLES * SAMPLE_MS / 1000
CLIENTS: Final = 40
STORM_S: Final = 3.0
LONG_STORM_S: Final = 4.0
"""The length of the storm. A bystander is measured in it, from when hundreds of connections are held."""
HALF_THE_LIMIT: Final = 0.5
"""The least share of the limit that must pass: a storm that is mostly refused would keep to any bound."""


async def test_an_address_has_one_rate_over_both_proxies(node: Service, target: int) -> None:
    """The bound that the API states, in every window and over the whole storm."""
    node.put("ip=*", connection_creation_rate=RATE)
    try:
        bounds = node.http.get("/v1/quotas/ip=*").json()["bounds"]["connection_creation_rate"]
        assert bounds["window_ms"] == WINDOW_S * 1000
        async with (
            proxying(node.url, target, broker="1") as one,
            proxying(node.url, target, broker="2") as two,
        ):
            made = await storm([one.port, two.port], "127.0.3.1", clients=CLIENTS, seconds=STORM_S)
            found = one.counts() + two.counts()
    finally:
        node.http.delete("/v1/quotas/ip=*").raise_for_status()
    passed = [one for one in made if one.passed]
    tell(made, f"{found['rechecked']} asked again, {found['rejected']} closed")
    held_to(passed, bounds["ratio"] * LIMIT * WINDOW_S, attempts=len(made))
    assert len(made) == found["accepted"] == found["admitted"] + found["rejected"]
    assert len(passed) == found["admitted"]
    assert found["throttled"] == found["rechecked"] >= found["rejected"] > 0
    assert found["delayed"] == 0


PLACES: Final = {
    "a listener of each broker": (("1", "A"), ("2", "A"), "listener=A", {}, 1),
    "a listener of all brokers": (("1", "B"), ("2", "B"), "listener=B", {"scope": "cluster"}, 2),
    "a broker of two listeners": (("3", "C"), ("3", "D"), "broker=3", {}, 2),
}


@pytest.mark.parametrize(("one", "other", "entity", "scope", "acceptors"), PLACES.values(), ids=PLACES)
async def test_a_place_has_one_rate(node: Service, target: int, one, other, entity, scope, acceptors) -> None:
    """No connection is refused; one above the rate makes its acceptor wait."""
    node.put(entity, max_connection_creation_rate={**RATE, **scope})
    async with (
        proxying(node.url, target, broker=one[0], listener=one[1]) as near,
        proxying(node.url, target, broker=other[0], listener=other[1]) as far,
    ):
        storms = [
            storm([proxy.port], "127.0.3.2", clients=CLIENTS // 2, seconds=STORM_S) for proxy in (near, far)
        ]
        made = await asyncio.gather(*storms)
        found = [near.counts(), far.counts()]
    for attempts, counts in zip(made, found, strict=True):
        assert all(each.passed for each in attempts)
        assert len(attempts) == counts["accepted"] == counts["admitted"] + counts["delayed"]
        assert counts["delayed"] > 0
    together = [[*made[0], *made[1]]] if acceptors == 2 else made
    for attempts in together:
        tell(attempts, f"{acceptors} acceptors")
        held_to(attempts, with_delays(acceptors), attempts=len(attempts))


def with_delays(acceptors: int) -> float:
    """Return the most connections that obedient acceptors let in during any window of N samples.

    The sum at the last ask of a window has all its connections. A sum of up to M = limit x (N + 1) samples
    may be within the rate, because the measured window may be that long. Above M each ask is over the rate,
    and its acceptor waits. It waits for a whole sample, at most N times, or until the rate would be down if
    nothing were forgotten. Above M that moment comes after the oldest sample was forgotten: at most N + 1
    times. With the last ask, whose wait does not matter, an acceptor adds 2N + 2.
    """
    return LIMIT * (SAMPLES + 1) * SAMPLE_MS / 1000 + acceptors * (2 * SAMPLES + 2)


def held_to(passed: Sequence[Attempt], bound: float, *, attempts: int) -> None:
    """Check that no window had more than this many, and that the total is not much below the limit.

    On a crowded machine there may be fewer attempts than the limit allows. A connection was charged between
    its beginning and its end, by a clock of whole milliseconds.
    """
    assert most_within(passed, WINDOW_S - 0.001) <= bound
    span = max(one.ended for one in passed) - min(one.began for one in passed)
    assert len(passed) <= bound * math.ceil((span + 0.001) / WINDOW_S)
    assert len(passed) >= HALF_THE_LIMIT * min(LIMIT * span, attempts)


def most_within(passed: Sequence[Attempt], span_s: float) -> int:
    """The most connections that were certainly charged within one span: they began and ended in it."""
    return max(
        sum(one.began >= first.began and one.ended <= first.began + span_s for one in passed)
        for first in passed
    )


async def test_a_storm_of_one_address_does_not_slow_another(node: Service, target: int) -> None:
    """A connection of another address overtakes hundreds of held ones, in a fraction of their time."""
    node.put("ip=127.0.3.3", connection_creation_rate=RATE)
    node.put("ip=127.0.3.4", connection_creation_rate=RATE)
    async with proxying(node.url, target) as proxy:
        quiet = [await attempt(proxy.port, "127.0.3.4") for _ in range(10)]
        storming = asyncio.create_task(storm([proxy.port], "127.0.3.3", clients=300, seconds=LONG_STORM_S))
        await until(lambda: proxy.counts()["held"] >= 200)
        passing: list[Attempt] = []
        while not storming.done():
            passing.append(await attempt(proxy.port, "127.0.3.4"))
            await asyncio.sleep(0.1)  # ten a second, a quarter of its rate
        made = await storming
    overtaken = [sum(one.began < each.began and each.ended < one.ended for one in made) for each in passing]
    typical = {"quiet": took_ms(quiet), "in the storm": took_ms(passing), "the storm's own": took_ms(made)}
    tell(made, f"a bystander passes by {statistics.median(overtaken):.0f}; ms: {typical}")
    assert all(one.passed for one in [*quiet, *passing])
    assert statistics.median(overtaken) >= 100
    assert 4 * typical["in the storm"] <= typical["the storm's own"]


def took_ms(attempts: Sequence[Attempt]) -> float:
    """The median time from connecting to the answer or the end."""
    return round(1000 * statistics.median(one.ended - one.began for one in attempts), 1)


def tell(made: Sequence[Attempt], more: str) -> None:
    passed = [one for one in made if one.passed]
    span = max(one.ended for one in passed) - min(one.began for one in passed)
    most = most_within(passed, WINDOW_S)
    say(f"{len(passed)} of {len(made)} in {span:.1f} s, {most} in a window of {WINDOW_S} s, {more}")
