"""Refreshing the ids of asks that were refused without the store: what the store is asked."""

from __future__ import annotations

from collections.abc import Sequence

from app.admission.gather import Gatherer
from app.admission.plan import matches_of
from app.admission.refresh import Refresher
from app.domain.ask import Ask
from app.domain.entity import ANY, Entity
from app.domain.ladder import MatchingRules
from app.domain.quota import Quota
from app.store.port import Answer, Plan, StoreCalls, StoreError

EVERYONE = Entity.of(user=ANY)
QUOTAS = {
    quota.key: {EVERYONE: quota}
    for quota in (
        Quota("producer_ids_rate", 5, "producer_ids", "deny"),
        Quota("request_rate", 5, "sampled_rate", "deny"),
    )
}


class Asked(StoreCalls):
    """A fake store that remembers the plans it was asked to decide."""

    def __init__(self) -> None:
        self.plans: list[Plan] = []

    def silent_since(self) -> float | None:
        return None

    def give_up(self, error: StoreError) -> None:
        raise AssertionError(error)

    async def decide(self, plans: Sequence[Plan]) -> list[Answer]:
        self.plans += plans
        return [Answer(()) for _ in plans]

    async def forget(self, keys: Sequence[bytes]) -> int | None:
        raise AssertionError(keys)


async def test_refresh_concerns_ids_and_no_other_quota():
    store = Asked()
    refresher = Refresher(Gatherer(store, budget_s=30.0))
    ask = Ask({"requests": 1}, (7,), principal="alice")
    refresher.add(ask, matches_of(ask, QUOTAS, MatchingRules()), b"s" * 32)
    await refresher.close()
    (plan,) = store.plans
    assert plan.mode == "refresh"
    assert [charge.applied.quota.key for charge in plan.charges] == ["producer_ids_rate"]
