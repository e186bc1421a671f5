"""Calls that write much leave some asks undecided; these are sent again, and decisions do not differ."""

from __future__ import annotations

from collections import Counter

import pytest

from app.domain.ask import Ask
from app.domain.ladder import AppliedQuota
from app.domain.quota import Quota
from app.store.port import Plan
from app.store.redis import RedisStore
from app.store.script import MOST_WRITTEN, SCRIPT
from tests.charging import single_charge
from tests.contract.machine import run
from tests.prove.filters import strangers
from tests.stores import KINDS, running

BOUND = f"local MOST_WRITTEN = {MOST_WRITTEN}"


def test_interrupted_calls_decide_like_complete_ones():
    """The state machine, with a script that stops after a few hundred bytes."""
    assert SCRIPT.count(BOUND) == 1
    met: Counter[str] = Counter()
    with running("valkey") as url:
        while met["in pieces"] < 100:
            met += run(url, examples=40, steps=50, script=SCRIPT.replace(BOUND, "local MOST_WRITTEN = 600"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("logged", [False, True])
async def test_call_stops_before_an_ask_once_it_wrote_256_kib(kind: str, logged: bool):
    """A new principal of 500 ids writes some 150 KiB, so two are decided and the third is not."""
    with running(kind) as url:
        store = RedisStore(url, logged=logged)
        await store.connect()
        plans = [new(f"p{n}") for n in range(5)]
        first = await store.decide(plans)
        second = await store.decide(plans[len(first) :])
        third = await store.decide(plans[len(first) + len(second) :])
        again = await store.decide(plans)
        await store.close()
    assert [len(answers) for answers in (first, second, third)] == [2, 2, 1]
    assert {answer.results[0].observed for answer in (*first, *second, *third)} == {500}
    assert [answer.results[0].observed for answer in again] == [500] * 5, "seen ids write little"
    places = [answer.order for answer in (*first, *second, *third)]
    if logged:
        found = [place for place in places if place]
        assert len(found) == 5
        assert found == sorted(found)
    else:
        assert places == [None] * 5


def new(principal: str) -> Plan:
    quota = Quota("producer_ids_rate", 500_000, "producer_ids", "deny")
    entity = f"user={principal}"
    found = AppliedQuota(quota, entity, entity, entity)
    spreads = strangers(500, seed=len(principal)).astype("<u4").tobytes()
    return Plan("admit", (single_charge(found, Ask({}, tuple(range(500))), spreads),))
