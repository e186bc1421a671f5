"""An undo never leaves a token bucket with more than it would hold without the charge."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from app.domain.ask import Ask
from app.domain.entity import Entity
from app.domain.ladder import MatchingRules, applied_quotas
from app.domain.oracle import Oracle, TokensBucket, key_of
from app.domain.quota import Quota

USER = Entity.of(user="a")
RULES = MatchingRules()
BUCKET = Quota("request_rate", 10, "token_bucket", "delay", burst=40.0)
SPENDING = Ask({"requests": 1}, principal="a", mode="record", detail=True)
WITHOUT_END = 1e9

EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("record"), st.integers(0, 60)),
        st.tuples(st.just("refund"), st.integers(0, 60)),
        st.tuples(st.just("advance"), st.integers(0, 5_000)),
        st.tuples(st.just("slip"), st.integers(0, 5_000)),
        st.tuples(st.just("limit"), st.integers(1, 50)),
        st.tuples(st.just("burst"), st.integers(1, 80)),
    ),
    max_size=8,
)


class World:
    """A token bucket, and the events that change it."""

    def __init__(self, max_debt: float) -> None:
        self.oracle = Oracle(b"")
        self.quota = replace(BUCKET, max_debt=max_debt)
        self.now = 1_000_000

    def happens(self, event: str, amount: int) -> None:
        if event in {"record", "refund"}:
            self.spend(amount, refund=event == "refund")
        elif event in {"advance", "slip"}:
            self.now += amount if event == "advance" else -amount
        else:
            changed: dict[str, Any] = {event: amount}
            self.quota = replace(self.quota, **changed)

    def spend(self, amount: int, *, refund: bool = False) -> None:
        ask = replace(SPENDING, usage={"requests": amount}, mode="refund" if refund else "record")
        self.oracle.decide(ask, self._quotas, RULES, self.now)

    @property
    def applied(self):
        (found,) = applied_quotas(SPENDING, self._quotas, RULES)
        return found

    @property
    def tokens(self) -> float:
        """The tokens in the bucket now, by a peek."""
        (verdict,) = (
            self.oracle.decide(replace(SPENDING, mode="peek"), self._quotas, RULES, self.now).quotas or ()
        )
        assert verdict.remaining is not None
        return verdict.remaining

    @property
    def _quotas(self):
        return {"request_rate": {USER: self.quota}}


@settings(max_examples=300, deadline=None)
@example([("burst", 1), ("record", 34), ("advance", 1)], 32, [], [], WITHOUT_END)
@given(EVENTS, st.integers(1, 60), EVENTS, EVENTS, st.sampled_from((WITHOUT_END, 30.0)))
def test_bucket_holds_no_more_than_without_the_charge(before, amount, between, after, max_debt) -> None:
    undone, never = World(max_debt), World(max_debt)
    for world in (undone, never):
        world.spend(0)  # so that both have a state, and the same times
        for event in before:
            world.happens(*event)
    undone.spend(amount)
    stamp = undone.oracle.stamp(undone.applied, undone.now)
    never.spend(0)
    for event in between:
        undone.happens(*event)
        never.happens(*event)
    given_back = undone.oracle.undo(undone.applied, stamp, undone.now)
    assert 0 <= given_back <= stamp.taken <= amount + 1e-6  # tokens before less tokens after, rounded
    for event in [("advance", 0), *after]:
        undone.happens(*event)
        never.happens(*event)
        assert undone.tokens <= never.tokens + 1e-6


def test_undo_after_a_reset_gives_nothing_back() -> None:
    world = World(WITHOUT_END)
    world.spend(30)
    stamp = world.oracle.stamp(world.applied, world.now)
    world.oracle.reset(world.applied, 1)
    world.spend(20)
    assert world.oracle.undo(world.applied, stamp, world.now) == 0
    bucket = world.oracle.buckets[key_of(world.applied)]
    assert isinstance(bucket, TokensBucket)
    assert bucket.birth == 0
