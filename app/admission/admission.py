"""Admission: asks in, decisions out, by the snapshot in force and one round trip to the store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Final, Protocol

import structlog

from app.admission.circuit import Circuit
from app.admission.fallback import without_store
from app.admission.gather import Gatherer
from app.admission.metrics import Fill, Metrics
from app.admission.plan import Match, Matches, decided, plan_of
from app.domain.ask import Ask
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


class Admission:
    """Decides asks.

    Args:
        snapshot: gives the quotas in force.
        secret: gives the deployment's hash secret, which the catalog knows once it is open.
        sequential: sum delays as KIP-124 does.
        budget_s: the longest a decision waits for the store.

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
    ) -> None:
        self.circuit = Circuit(store, metrics)
        self._gatherer = Gatherer(self.circuit, budget_s=budget_s)
        self._snapshot = snapshot
        self._rules = rules
        self._secret = secret
        self._sequential = sequential
        self._metrics = metrics
        self._quotas: Quotas = {}
        self._matches = Matches(self._quotas, rules)

    async def decide(self, asks: Sequence[Ask]) -> list[Decision]:
        """Decide asks in order; for a store that does not answer in time, each quota's policy does."""
        matches = self._matches_in_force()
        return await self._decide(asks, [matches.of(ask) for ask in asks])

    async def decide_in_full(self, ask: Ask) -> tuple[Decision, tuple[Quota, ...]]:
        """Decide an ask that wants detail and has no id; and the quotas, each in its verdict's place."""
        found = self._matches_in_force().of(ask)
        (decision,) = await self._decide((ask,), (found,))
        return decision, tuple(match.applied.quota for match in found)

    async def _decide(self, asks: Sequence[Ask], found: Sequence[Sequence[Match]]) -> list[Decision]:
        began = perf_counter()
        secret = self._secret()
        plans = [plan_of(ask, its, secret) for ask, its in zip(asks, found, strict=True)]
        wanted = [plan for plan in plans if plan is not None]
        answers: list[Answer] = []
        failure = self.circuit.error
        if wanted and failure is None:
            answers, failure = await self._gatherer.decide(wanted)
        arrived = iter(answers)
        decisions = []
        for ask, its, plan in zip(asks, found, plans, strict=True):
            answer = None if plan is None else next(arrived, None)
            missed = failure if answer is None else answer.error
            if answer is not None and answer.error is not None:
                log.warning("an ask was not decided by the store", why=str(answer.error))
                answer = None
            if missed is not None and its:
                self._metrics.fell_back(missed.reason)
                decision, verdicts = without_store(ask, its)
            else:
                decision, verdicts = decided(ask, plan, answer, sequential=self._sequential)
            self._count(ask, its, plan, answer, decision, verdicts)
            decisions.append(decision)
        self._metrics.took(perf_counter() - began, len(asks))
        return decisions

    async def open(self) -> None:
        """Look at the store, and keep an eye on it."""
        await self.circuit.start()

    async def close(self) -> None:
        """Wait for the call under way."""
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
