"""Refreshing the ids of asks that were refused without the store: the plans sent to the store."""

from __future__ import annotations

from collections.abc import Sequence

from app.admission.gathering.gatherer import Gatherer
from app.admission.known_ids.refresh import Refresher
from app.domain.ask import Ask
from app.store.port import Answer, Plan
from tests.unit.admission.fakes import IDS, RATE, PromptStore, charges_for


class Asked(PromptStore):
    """A fake store that remembers the plans it was asked to decide."""

    def __init__(self) -> None:
        self.plans: list[Plan] = []

    def answers(self, plans: Sequence[Plan]) -> list[Answer]:
        self.plans += plans
        return [Answer(()) for _ in plans]


async def test_refresh_concerns_ids_and_no_other_quota():
    store = Asked()
    refresher = Refresher(Gatherer(store, budget_s=30.0))
    ask = Ask({"requests": 1}, (7,), principal="alice")
    refresher.add(ask, charges_for(ask, IDS, RATE), b"s" * 32)
    await refresher.close()
    (plan,) = store.plans
    assert plan.mode == "refresh"
    assert [charge.quota.key for charge in plan.charges] == ["producer_ids_rate"]
