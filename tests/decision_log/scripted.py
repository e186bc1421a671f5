"""A store that answers as a test says, in the bytes of the script."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Final, NamedTuple

from app.domain.decision import Outcome, Reason
from app.store.port import Answer, AnswersCallback, ChargeResult, IdsResult, Plan, StoreError, UnitsResult
from tests.packed import packed
from tests.unit.admission.fakes import PromptStore

BEGAN_MS: Final = 1_763_719_300_000
"""The store's time."""


class ScriptedResult(NamedTuple):
    """The store's result for one charge."""

    outcome: Outcome = "admit"
    throttle_ms: int = 0
    observed: float = 1.0
    remaining: float = 2.0
    reason: Reason | None = None
    correction: int = 0
    layers: int = 0
    given: float = 0.0


class ScriptedAnswer(NamedTuple):
    """The store's answer to an ask.

    Attributes:
        results: the results of its charges, repeated as needed.
        outcomes: the outcomes of its ids, repeated as needed.
        is_brief: whether the answer is brief where that is possible.
        is_unreadable: whether a bucket cannot be read.
    """

    results: tuple[ScriptedResult, ...] = (ScriptedResult(),)
    outcomes: tuple[int, ...] = (0,)
    is_brief: bool = False
    is_unreadable: bool = False


class ScriptedStore(PromptStore):
    """Answers each ask with ``says``; keeps answers as the script does."""

    def __init__(self) -> None:
        self.says = ScriptedAnswer()
        self.lost = lambda _error: None
        self._kept: dict[tuple[str | None, bytes], tuple[bytes, tuple[ChargeResult, ...]]] = {}
        self._order = 0

    def ask(self, plans: Sequence[Plan], done: AnswersCallback) -> None:
        self._order = (self._order // 128 + 1) * 128
        came = [self._answer(plan, self._order + place) for place, plan in enumerate(plans)]
        asyncio.get_running_loop().call_soon(done, came)

    def _answer(self, plan: Plan, order: int) -> Answer:
        says, at_ms = self.says, BEGAN_MS + order
        if says.is_unreadable:
            return packed(Answer((), error=StoreError("response", "no bucket")))
        if plan.retry is not None and plan.retry in self._kept:
            context, results = self._kept[plan.retry]
            return packed(Answer(results, context, None, at_ms, order))
        results = tuple(
            _result(says.results[place % len(says.results)], is_of_ids=bool(charge.spreads))
            for place, charge in enumerate(plan.charges)
        )
        outcomes = bytes(says.outcomes[place % len(says.outcomes)] for place in range(plan.ids))
        refused = any(result.outcome in ("throttle", "reject") for result in results)
        if plan.retry is not None and plan.mode != "peek" and results and not refused:
            self._kept[plan.retry] = plan.context, results
        answer = Answer(results, None, None, at_ms, order, outcomes)
        return packed(answer, brief=says.is_brief and plan.retry is None and _is_brief(results))


def _result(says: ScriptedResult, *, is_of_ids: bool) -> ChargeResult:
    largest = says.given if says.reason == "too_large" else 0.0
    head = (
        says.outcome,
        says.reason,
        says.correction,
        says.throttle_ms,
        says.observed,
        says.remaining,
        largest,
    )
    if not is_of_ids:
        return UnitsResult(*head)
    open_ms, unseen = (0, 0) if largest else (int(max(says.given, 0)), int(max(-says.given, 0)))
    return IdsResult(*head, remembered=2.0, layers=says.layers, open_ms=open_ms, unseen=unseen)


def _is_brief(results: Sequence[ChargeResult]) -> bool:
    """Whether two numbers of each result say all of it."""
    return all(
        UnitsResult("admit", None, 0, 0, result.observed, result.remaining) == result
        and not math.isnan(result.observed)
        for result in results
    )
