"""Admission: asks in, decisions out, by the snapshot in force and one round trip to the store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Final, NamedTuple, Protocol

import structlog

from app.admission.circuit import Circuit
from app.admission.fallback import without_store
from app.admission.gather import Gatherer
from app.admission.hold import PRODUCE, UNTHROTTLED, held, is_held
from app.admission.logs import UNLOGGED, Logs
from app.admission.metrics import Fill, Metrics
from app.admission.plan import Match, Matches, decided, plan_of, scaled_match
from app.admission.refresh import Refresher
from app.domain.ask import Ask
from app.domain.caller import ANYONE, Caller
from app.domain.decision import Decision, Verdict
from app.domain.ladder import Quotas, Rules
from app.domain.quota import Quota
from app.store.port import Answer, Plan, Store

log: Final = structlog.get_logger("quotagate.store")


class Snapshot(Protocol):
    """The quotas in force, which a change replaces by new ones."""

    @property
    def quotas(self) -> Quotas:
        """Every quota, by quota key and entity."""


class Factor(Protocol):
    """The throttle factor in force; ``app.admission.throttling`` knows it."""

    def on(self, ask: Ask) -> float:
        """The factor for an ask: 1 where none touches it."""

    def hold_ms(self, at_ms: int | None) -> int:
        """How long an ask to produce waits while the factor is 0."""


class Found(NamedTuple):
    """An ask, the quotas that apply to it under the factor in force, and whether that holds it."""

    ask: Ask
    matches: tuple[Match, ...]
    is_held: bool


class Admission:
    """Decides asks.

    Args:
        snapshot: gives the quotas in force.
        secret: gives the deployment's hash secret, which the catalog knows once it is open.
        sequential: sum delays as KIP-124 does.
        budget_s: the longest a decision waits for the store.
        factor: gives the throttle factor in force.
        logs: takes every decision down.

    Attributes:
        circuit: says how the store is.
    """

    def __init__(
        self,
        store: Store,
        snapshot: Callable[[], Snapshot],
        *,
        rules: Rules,
        secret: Callable[[], bytes],
        sequential: bool,
        budget_s: float,
        metrics: Metrics,
        factor: Factor = UNTHROTTLED,
        logs: Logs = UNLOGGED,
    ) -> None:
        self.circuit = Circuit(store, metrics)
        self._gatherer = Gatherer(self.circuit, budget_s=budget_s)
        self._refresher = Refresher(self._gatherer.decide, logs)
        self._snapshot = snapshot
        self._factor = factor
        self._logs = logs
        self._rules = rules
        self._secret = secret
        self._sequential = sequential
        self._metrics = metrics
        self._quotas: Quotas = {}
        self._matches = Matches(self._quotas, rules)

    async def decide(self, asks: Sequence[Ask], caller: Caller = ANYONE) -> list[Decision]:
        """Decide asks in order; for a store that does not answer in time, each quota's policy does."""
        matches = self._matches_in_force()
        return await self._decide([self._found(ask, matches) for ask in asks], caller)

    async def decide_in_full(self, ask: Ask, caller: Caller = ANYONE) -> tuple[Decision, tuple[Quota, ...]]:
        """Decide an ask that wants detail and has no id; and the quotas, each in its verdict's place."""
        found = self._found(ask, self._matches_in_force())
        (decision,) = await self._decide((found,), caller)
        return decision, tuple(match.applied.quota for match in found.matches)

    def _found(self, ask: Ask, matches: Matches) -> Found:
        its = matches.of(ask)
        if PRODUCE not in ask.usage or (factor := self._factor.on(ask)) == 1:
            return Found(ask, its, is_held=False)
        if is_held(ask, factor):
            return Found(ask, its, is_held=True)
        return Found(ask, tuple(scaled_match(match, factor) for match in its) if factor else its, False)

    async def _decide(self, found: Sequence[Found], caller: Caller) -> list[Decision]:  # noqa: ARG002  fair turns next
        began = perf_counter()
        secret = self._secret()
        # Of what is held only a kept answer is looked for, which a retry is given whatever holds now.
        plans = [plan_of(each.ask, () if each.is_held else each.matches, secret) for each in found]
        wanted = [plan for plan in plans if plan is not None]
        answers: list[Answer] = []
        failure = self.circuit.error
        if wanted and failure is None:
            answers, failure = await self._gatherer.decide(wanted, partial(self._came_late, found, plans))
        arrived = iter(answers)
        decisions = []
        for (ask, its, holds), plan in zip(found, plans, strict=True):
            answer = None if plan is None else next(arrived, None)
            missed = failure if answer is None else answer.error
            if answer is not None and missed is not None:
                log.warning("an ask was not decided by the store", why=str(missed))
                answer = None
            if holds and (answer is None or answer.kept is None):
                decision, verdicts = held(ask, its, self._factor.hold_ms(ask.at_ms), away=failure is not None)
                if failure is None and ask.mode == "admit":
                    self._refresher.add(ask, its, secret)
            elif missed is not None and its:
                decision, verdicts = without_store(ask, its)
            else:
                decision, verdicts = decided(ask, plan, answer, sequential=self._sequential)
            why = missed.reason if missed is not None and decision.source == "fallback" else None
            if why is not None:
                self._metrics.fell_back(why)
            self._count(ask, its, plan, answer, decision, verdicts)
            self._logs.decided(ask, its, answer, decision, verdicts, why)
            decisions.append(decision)
        self._metrics.took(perf_counter() - began, len(found))
        return decisions

    def _came_late(
        self, found: Sequence[Found], plans: Sequence[Plan | None], place: int, answer: Answer
    ) -> None:
        """Have it taken down what was charged after all for an ask that was answered without the store."""
        asked = [(each, plan) for each, plan in zip(found, plans, strict=True) if plan is not None]
        each, plan = asked[place]
        if answer.error is None and answer.kept is None and not each.is_held:
            decision, verdicts = decided(each.ask, plan, answer, sequential=self._sequential)
            self._logs.late(each.ask, each.matches, answer, decision, verdicts)

    async def open(self) -> None:
        """Look at the store, and keep an eye on it."""
        await self.circuit.start()

    async def close(self) -> None:
        """Wait for the call under way."""
        await self._refresher.close()
        await self._gatherer.close()
        await self.circuit.stop()

    def _matches_in_force(self) -> Matches:
        quotas = self._snapshot().quotas
        if quotas is not self._quotas:
            self._quotas, self._matches = quotas, Matches(quotas, self._rules)
        return self._matches

    def _count(
        self,
        ask: Ask,
        found: Sequence[Match],
        plan: Plan | None,
        answer: Answer | None,
        decision: Decision,
        verdicts: Sequence[Verdict],
    ) -> None:
        if plan is None or answer is None or answer.kept is not None:
            self._metrics.decided(ask, decision, verdicts)
            return
        fills: list[Fill] = []
        for charge, said in zip(plan.charges, answer.said, strict=True):
            if said.correction:
                self._metrics.corrected()
            if charge.applied.quota.algorithm == "producer_ids":
                fills.append(Fill(charge.applied.bucket, said.remembered, said.fill))
        self._metrics.decided(ask, decision, verdicts, fills, [match.applied for match in found])
