"""Admission: asks in, decisions out, by the snapshot in force and one round trip to the store."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from time import perf_counter
from typing import Final, NamedTuple, Protocol, TypeVar

import structlog

from app.admission.bounds import bounded
from app.admission.circuit import Circuit
from app.admission.fallback import without_store
from app.admission.gather import QUEUE_S, Gatherer
from app.admission.hold import PRODUCE, UNTHROTTLED, held, is_held
from app.admission.logs import UNLOGGED, Logs
from app.admission.metrics import Fill, Metrics
from app.admission.plan import Match, Matches, decided, plan_of, scaled_match
from app.admission.refresh import Refresher
from app.admission.slices import Slices, Work
from app.domain.ask import Ask
from app.domain.caller import ANYONE, Caller
from app.domain.decision import Decision, Verdict
from app.domain.ladder import Quotas, Rules
from app.domain.quota import Quota
from app.store.port import Answer, Plan, Store, StoreError

log: Final = structlog.get_logger("quotagate.store")
T = TypeVar("T")


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


class Planned(NamedTuple):
    """An ask, the quotas that apply to it under the factor in force, and what to ask the store."""

    ask: Ask
    matches: tuple[Match, ...]
    is_held: bool
    plan: Plan | None


class Admission:
    """Decides asks.

    Args:
        snapshot: gives the quotas in force.
        secret: gives the deployment's hash secret, which the catalog knows once it is open.
        sequential: sum delays as KIP-124 does.
        budget_s: how long the store may be silent on a quiet node.
        queue_s: how long an ask may wait in this node.
        slices: does what would hold the event loop for long.
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
        queue_s: float = QUEUE_S,
        slices: Slices | None = None,
        factor: Factor = UNTHROTTLED,
        logs: Logs = UNLOGGED,
    ) -> None:
        self.circuit = Circuit(store, metrics)
        self._gatherer = Gatherer(self.circuit, budget_s=budget_s, queue_s=queue_s, queued=metrics.queued)
        self._slices = slices or Slices()
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
        """Decide asks in order; for a store that is silent for too long, each quota's policy does.

        Raises:
            OutOfBounds: the caller is bound, and an ask of it would record in a bucket that others share, or
                give back to one; nothing was charged.
            OverloadedError: the node has too much to do; nothing was charged.
            CallerGoneError: the caller has left; nothing was charged.
        """
        began = perf_counter()
        planned = await self._all(self._planned(asks, caller), len(asks), caller)
        return await self._decide(planned, caller, began)

    async def decide_in_full(
        self, ask: Ask, caller: Caller = ANYONE, within_s: float | None = None
    ) -> tuple[Decision, tuple[Quota, ...]]:
        """Decide an ask that wants detail and has no id; and the quotas, each in its verdict's place.

        Args:
            within_s: how long it may wait in this node, if that is less than what holds for all.

        Raises:
            OverloadedError, CallerGoneError: as decide does.
        """
        began = perf_counter()
        (planned,) = self._planned((ask,), caller)
        (decision,) = await self._decide((planned,), caller, began, within_s)
        return decision, tuple(match.applied.quota for match in planned.matches)

    async def _all(self, work: Iterator[T], length: int, caller: Caller) -> list[T]:
        """All of a sequence; a long one is made in slices."""
        return list(work) if length == 1 else await self._slices.run(caller.turn, _listed(work))

    def _planned(self, asks: Sequence[Ask], caller: Caller) -> Iterator[Planned]:
        matches, secret = self._matches_in_force(), self._secret()
        for place, ask in enumerate(asks):
            its, is_held = self._found(ask, matches)
            if caller.bound_to:
                its = bounded(ask, its, caller.bound_to, place)
            # Of what is held only a kept answer is looked for, which a retry is given whatever holds now.
            yield Planned(ask, its, is_held, plan_of(ask, () if is_held else its, secret, caller.key))

    def _found(self, ask: Ask, matches: Matches) -> tuple[tuple[Match, ...], bool]:
        """The quotas that apply to an ask under the factor in force, and whether that holds it."""
        its = matches.of(ask)
        if PRODUCE not in ask.usage or (factor := self._factor.on(ask)) == 1:
            return its, False
        if is_held(ask, factor):
            return its, True
        return tuple(scaled_match(match, factor) for match in its) if factor else its, False

    async def _decide(
        self, planned: Sequence[Planned], caller: Caller, began: float, within_s: float | None = None
    ) -> list[Decision]:
        wanted = [each for each in planned if each.plan is not None]
        answers: list[Answer] = []
        failure = self.circuit.error
        if wanted and failure is None:
            answers, failure = await self._gatherer.decide(
                [each.plan for each in wanted if each.plan is not None],
                partial(self._came_late, wanted),
                caller=caller,
                on_behalf_of=_whom(planned[0].ask),
                within_s=within_s,
            )
        decisions = await self._all(self._decided(planned, answers, failure), len(planned), caller)
        self._metrics.took(perf_counter() - began, len(planned))
        return decisions

    def _decided(
        self, planned: Sequence[Planned], answers: Sequence[Answer], failure: StoreError | None
    ) -> Iterator[Decision]:
        """The decisions, from the answers as far as they came."""
        arrived = iter(answers)
        for ask, its, holds, plan in planned:
            answer = None if plan is None else next(arrived, None)
            missed = failure if answer is None else answer.error
            if answer is not None and missed is not None:
                log.warning("an ask was not decided by the store", why=str(missed))
                answer = None
            if holds and (answer is None or answer.kept is None):
                decision, verdicts = held(ask, its, self._factor.hold_ms(ask.at_ms), away=failure is not None)
                if failure is None and ask.mode == "admit":
                    self._refresher.add(ask, its, self._secret())
            elif missed is not None and its:
                decision, verdicts = without_store(ask, its)
            else:
                decision, verdicts = decided(ask, plan, answer, sequential=self._sequential)
            why = (missed.reason if missed else "store_full") if decision.source == "fallback" else None
            if why is not None:
                self._metrics.fell_back(why)
            self._count(ask, its, plan, answer, decision, verdicts)
            self._logs.decided(ask, its, answer, decision, verdicts, why)
            yield decision

    def _came_late(self, asked: Sequence[Planned], place: int, answer: Answer) -> None:
        """Have it taken down what was charged after all for an ask that was answered without the store."""
        ask, matches, holds, plan = asked[place]
        if answer.error is None and answer.kept is None and not holds:
            decision, verdicts = decided(ask, plan, answer, sequential=self._sequential)
            self._logs.late(ask, matches, answer, decision, verdicts)

    @property
    def waiting(self) -> int:
        """How many asks wait for a call to the store."""
        return self._gatherer.waiting

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
            elif said.forgiven:
                self._metrics.forgave(said.forgiven)
        self._metrics.decided(ask, decision, verdicts, fills, [match.applied for match in found])


def _whom(ask: Ask) -> str:
    """Whom an ask is for, as far as its caller's asks take turns by it."""
    return ask.principal or ask.ip or ask.client_id or ""


def _listed(work: Iterator[T]) -> Work[list[T]]:
    """A sequence that is made step by step, as a list in the end."""
    made = []
    for each in work:
        made.append(each)
        yield
    return made
