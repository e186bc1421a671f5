"""Decides asks: finds their quotas in the snapshot, calls the store once, and combines the verdicts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from time import perf_counter
from typing import Final, NamedTuple, TypeVar

import structlog

from app.admission.circuit import Circuit
from app.admission.fallback import without_store
from app.admission.gather import QUEUE_S, Gatherer
from app.admission.hold import PRODUCE, UNTHROTTLED, FactorSource, hold_decision, is_held
from app.admission.logs import UNLOGGED, Logs
from app.admission.metrics import Fill, Metrics
from app.admission.plan import Match, Matches, decision_of, plan_of, restricted_matches, scaled_match
from app.admission.refresh import Refresher
from app.admission.slices import Slices, Work
from app.catalog.snapshot import Snapshot
from app.domain.ask import Ask
from app.domain.caller import ANYONE, Caller
from app.domain.decision import Decision, Verdict
from app.domain.ladder import MatchingRules, Quotas
from app.domain.quota import Quota
from app.store.port import Answer, Plan, Store, StoreError

log: Final = structlog.get_logger("quotagate.store")
T = TypeVar("T")


class PlannedAsk(NamedTuple):
    """An ask on its way to a decision.

    Attributes:
        matches: the quotas that apply, scaled by the throttle factor in force.
        is_held: whether a factor of 0 holds the ask.
        plan: what to ask the store; None if the store is not needed.
    """

    ask: Ask
    matches: tuple[Match, ...]
    is_held: bool
    plan: Plan | None


class Admission:
    """Decides asks.

    Args:
        snapshot: returns the quotas in force.
        secret: returns the deployment's hash secret, which is known once the catalog is open.
        sequential: add delays up as KIP-124 does.
        budget_s: how long the store may be silent on a quiet node.
        queue_s: how long an ask may wait in this node.
        slices: runs long work without blocking the event loop.
        factor: returns the throttle factor in force.
        logs: receives every decision.

    Attributes:
        circuit: knows whether the store is available.
    """

    def __init__(
        self,
        store: Store,
        snapshot: Callable[[], Snapshot],
        *,
        rules: MatchingRules,
        secret: Callable[[], bytes],
        sequential: bool,
        budget_s: float,
        metrics: Metrics,
        queue_s: float = QUEUE_S,
        slices: Slices | None = None,
        factor: FactorSource = UNTHROTTLED,
        logs: Logs = UNLOGGED,
    ) -> None:
        self.circuit = Circuit(store, metrics)
        self._gatherer = Gatherer(
            self.circuit, budget_s=budget_s, queue_s=queue_s, queued=metrics.observe_queue
        )
        self._slices = Slices() if slices is None else slices
        self._refresher = Refresher(self._gatherer, logs)
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
        """Decide asks in order; if the store is silent for too long, by each quota's ``on_store_failure``.

        Raises:
            OutOfBoundsError: a bound caller would record in a bucket that others share,
                or refund to one; nothing was charged.
            OverloadedError: the node is overloaded; nothing was charged.
            CallerGoneError: the caller has left; nothing was charged.
        """
        began = perf_counter()
        planned = await self._as_list(self._planned(asks, caller), len(asks), caller)
        return await self._decide(planned, caller, began)

    async def decide_in_full(
        self, ask: Ask, caller: Caller = ANYONE, within_s: float | None = None
    ) -> tuple[Decision, tuple[Quota, ...]]:
        """Decide an ask that wants detail and has no id; also return the quota of each verdict, in order.

        Args:
            within_s: how long the ask may wait in this node, if that is less than for all others.

        Raises:
            OverloadedError, CallerGoneError: as for ``decide``.
        """
        began = perf_counter()
        (planned,) = self._planned((ask,), caller)
        (decision,) = await self._decide((planned,), caller, began, within_s)
        return decision, tuple(match.applied.quota for match in planned.matches)

    async def _as_list(self, work: Iterator[T], length: int, caller: Caller) -> list[T]:
        """Return all items of an iterator as a list; more than one item is made in slices."""
        return list(work) if length == 1 else await self._slices.run(caller.turn, _in_steps(work))

    def _planned(self, asks: Sequence[Ask], caller: Caller) -> Iterator[PlannedAsk]:
        matches, secret = self._matches_in_force(), self._secret()
        for place, ask in enumerate(asks):
            its, is_held = self._match(ask, matches)
            if caller.bound_to:
                its = restricted_matches(ask, its, caller.bound_to, place)
            # A held ask only looks for a kept answer: its retry gets that whatever the factor is now.
            yield PlannedAsk(ask, its, is_held, plan_of(ask, () if is_held else its, secret, caller.key))

    def _match(self, ask: Ask, matches: Matches) -> tuple[tuple[Match, ...], bool]:
        """Return the quotas that apply to an ask, scaled by the factor, and whether the factor holds it."""
        its = matches.of(ask)
        if PRODUCE not in ask.usage or (factor := self._factor.on(ask)) == 1:
            return its, False
        if is_held(ask, factor):
            return its, True
        return tuple(scaled_match(match, factor) for match in its) if factor else its, False

    async def _decide(
        self, planned: Sequence[PlannedAsk], caller: Caller, began: float, within_s: float | None = None
    ) -> list[Decision]:
        wanted = [each for each in planned if each.plan is not None]
        answers: list[Answer] = []
        failure = self.circuit.error
        if wanted and failure is None:
            answers, failure = await self._gatherer.decide(
                [each.plan for each in wanted if each.plan is not None],
                partial(self._log_late, wanted),
                caller=caller,
                on_behalf_of=_principal_of(planned[0].ask),
                within_s=within_s,
            )
        decisions = await self._as_list(self._decisions(planned, answers, failure), len(planned), caller)
        self._metrics.observe_decision(perf_counter() - began, len(planned))
        return decisions

    def _decisions(
        self, planned: Sequence[PlannedAsk], answers: Sequence[Answer], failure: StoreError | None
    ) -> Iterator[Decision]:
        """Make the decisions from the answers, as far as they came."""
        arrived = iter(answers)
        for ask, its, holds, plan in planned:
            answer = None if plan is None else next(arrived, None)
            missed = failure if answer is None else answer.error
            if answer is not None and missed is not None:
                log.warning("the store could not decide an ask", why=str(missed))
                answer = None
            if holds and (answer is None or answer.kept is None):
                decision, verdicts = hold_decision(
                    ask, its, self._factor.hold_ms(ask.at_ms), away=failure is not None
                )
                if failure is None and ask.mode == "admit":
                    self._refresher.add(ask, its, self._secret())
            elif missed is not None and its:
                decision, verdicts = without_store(ask, [match.applied for match in its])
            else:
                decision, verdicts = decision_of(ask, plan, answer, sequential=self._sequential)
            why = (missed.reason if missed else "store_full") if decision.source == "fallback" else None
            if why is not None:
                self._metrics.count_fallback(why)
            self._count(ask, its, plan, answer, decision, verdicts)
            self._logs.decided(ask, its, answer, decision, verdicts, why)
            yield decision

    def _log_late(self, asked: Sequence[PlannedAsk], place: int, answer: Answer) -> None:
        """Log what the store charged late, for an ask that was answered without it."""
        ask, matches, holds, plan = asked[place]
        if answer.error is None and answer.kept is None and not holds:
            decision, verdicts = decision_of(ask, plan, answer, sequential=self._sequential)
            self._logs.late(ask, matches, answer, decision, verdicts)

    @property
    def waiting(self) -> int:
        """How many asks are waiting for a store call."""
        return self._gatherer.waiting

    async def open(self) -> None:
        """Examine the store now, and regularly from then on."""
        await self.circuit.start()

    async def close(self) -> None:
        """Wait for the current calls, and stop."""
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
            self._metrics.count_decision(ask, decision, verdicts)
            return
        fills: list[Fill] = []
        for charge, result in zip(plan.charges, answer.results, strict=True):
            if result.correction:
                self._metrics.count_correction()
            if charge.applied.quota.algorithm == "producer_ids":
                fills.append(Fill(charge.applied.bucket, result.remembered, result.fill))
            elif result.forgiven:
                self._metrics.count_forgiven(result.forgiven)
        self._metrics.count_decision(ask, decision, verdicts, fills, [match.applied for match in found])


def _principal_of(ask: Ask) -> str:
    """Return the name by which a caller's asks take turns."""
    return ask.principal or ask.ip or ask.client_id or ""


def _in_steps(work: Iterator[T]) -> Work[list[T]]:
    """Make a list of an iterator, one item per step."""
    made = []
    for each in work:
        made.append(each)
        yield
    return made
