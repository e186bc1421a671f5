"""Decides asks: finds the buckets that they charge, calls the store once, and combines the verdicts."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import Any, Final

import structlog
from msgspec import structs

from app.admission.answers import ADMITTED, decided, suspend, without_call, without_store
from app.admission.atomic_asks import AtomicAsks, AtomicDecision, AtomicOutcome
from app.admission.cluster.gatherer import ClusterGatherer
from app.admission.compiled import Tables
from app.admission.factor import PRODUCE, UNTHROTTLED, FactorSource, is_suspended
from app.admission.gathering.circuit import Circuit
from app.admission.gathering.gatherer import QUEUE_S, Gatherer
from app.admission.gathering.queue import ACCOUNTING, Group
from app.admission.gathering.slices import Slices, Stride, Work
from app.admission.known_ids.local import LocalAnswers
from app.admission.known_ids.refresh import Refresher
from app.admission.leases.leases import Leases, count_lapses
from app.admission.metrics.metrics import Metrics
from app.admission.plan import (
    PlannedAsk,
    ids_charge,
    may_answer_alone,
    plan_of,
    restricted,
    scaled,
    with_spreads,
)
from app.admission.port import Then
from app.admission.recorder import UNRECORDED, Recorder
from app.admission.spans import Spans
from app.catalog.snapshot import Snapshot
from app.decision_log.batch import SEEN
from app.domain.ask import Ask
from app.domain.caller import ANYONE, Caller
from app.domain.decision import Decision, Verdict
from app.domain.ladder import MatchingRules
from app.domain.usage import ids_of
from app.store.cluster import ClusterStore
from app.store.port import Answer, Charge, Mark, Plan, Store, StoreError

log: Final = structlog.get_logger("quotagate.store")


class SingleAsk(Group, eq=False, kw_only=True):
    """A request of one ask, which is answered by a call of ``then``."""

    planned: PlannedAsk
    then: Then


DecidedBy = tuple[Answer | None, Sequence[Verdict], StoreError | None]
"""The grounds of a decision: the store's answer (None if missing or unreadable), the verdicts (empty if every
quota admits), and the error that kept the store from judging some or all quotas."""


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
        recorder: receives every decision.
        mark: reads the marks of the store; without it the node remembers no producer ids.
        spans: gives decisions their spans; None without traces.

    Attributes:
        circuit: knows whether the store is available.
        local: the producer ids that this node answers for without the store.
        leases: grants and settles leases.
    """

    def __init__(
        self,
        store: Store | ClusterStore,
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
        recorder: Recorder = UNRECORDED,
        mark: Callable[[], Awaitable[Mark]] | None = None,
        spans: Spans | None = None,
    ) -> None:
        self.circuit: Circuit | ClusterGatherer
        self._gatherer: Gatherer | ClusterGatherer
        gathering: Any = {"budget_s": budget_s, "queue_s": queue_s, "queued": metrics.observe_queue}
        if isinstance(store, ClusterStore):
            self.circuit = self._gatherer = ClusterGatherer(
                store, metrics, sequential=sequential, **gathering
            )
        else:
            self.circuit = Circuit(store, metrics)
            self._gatherer = Gatherer(self.circuit, **gathering)
        self._slices = Slices() if slices is None else slices
        self._refresher = Refresher(self._gatherer, recorder)
        self.local = LocalAnswers(
            self._gatherer,
            mark,
            quotas=lambda: snapshot().quotas,
            secret=secret,
            away=lambda: self.circuit.error is not None,
            metrics=metrics,
            recorder=recorder,
        )
        self.leases = Leases(
            self._gatherer,
            lambda: self.circuit.error,
            charges=self._charges,
            factor=factor,
            secret=secret,
            metrics=metrics,
            recorder=recorder,
        )
        self._unrecorded: list[tuple[PlannedAsk, DecidedBy, float, Caller]] = []
        """Decisions that are not counted and logged yet, each with the seconds that it took."""
        self._spans = spans
        self._snapshot = snapshot
        self._tables = Tables(Snapshot(), rules)
        self._factor = factor
        self._recorder = recorder
        self._rules = rules
        self._secret = secret
        self._sequential = sequential
        self._metrics = metrics

    def begin(self, ask: Ask, caller: Caller, then: Then, within_s: float | None = None) -> Group | None:
        """Decide one ask, and call ``then`` once, perhaps before this returns.

        Args:
            within_s: how long the ask may wait in this node, if less than ``queue_s``.

        Returns:
            the request that waits for the store; None if the ask was decided at once.

        Raises:
            OutOfBoundsError, OverloadedError: as for ``decide``, instead of the call.
        """
        planned = self._planned(ask, caller)
        plan, failure = planned.plan, self.circuit.error
        since = caller.came_at or monotonic()
        if plan is None or failure is not None:
            self._conclude(planned, None, failure, since, then, caller)
            return None
        group = SingleAsk(
            (plan,),
            self._finish_one,
            self._log_late_one,
            caller,
            _principal_of(ask),
            since,
            plan.ids if ask.producer_ids else 0,
            plan.mode in ACCOUNTING,
            planned=planned,
            then=then,
        )
        self._gatherer.submit(group, within_s)
        return group

    async def decide(
        self, asks: Sequence[Ask], caller: Caller = ANYONE, within_s: float | None = None
    ) -> list[PlannedAsk]:
        """Decide asks in order; if the store is silent for too long, by each quota's ``on_store_failure``.

        Args:
            within_s: as for ``begin``; only with a single ask.

        Raises:
            OutOfBoundsError: a bound caller would record in a bucket that others share,
                or refund to one; nothing was charged.
            OverloadedError: the node is overloaded; nothing was charged.
            CallerGoneError: the caller has left; nothing was charged.
        """
        if len(asks) == 1:
            return [await self._decide_one(asks[0], caller, within_s)]
        began = caller.came_at or monotonic()
        planned = await self._slices.run(caller.turn, self._planned_all(asks, caller))
        plans = [each.plan for each in planned if each.plan is not None]
        answers: list[Answer] = []
        failure = self.circuit.error
        if plans and failure is None:
            answers, failure = await self._gatherer.decide(
                plans,
                partial(self._log_late, [each for each in planned if each.plan is not None]),
                caller=caller,
                on_behalf_of=_principal_of(asks[0]),
            )
        await self._slices.run(caller.turn, self._decided_all(planned, answers, failure))
        seconds = monotonic() - began
        self._metrics.observe_decisions([seconds] * len(planned))
        if self._spans is not None:
            self._spans.add(planned, caller, seconds)
        return planned

    async def decide_atomically(
        self, asks: Sequence[Ask], caller: Caller = ANYONE, within_s: float | None = None
    ) -> AtomicDecision:
        """Admit all of these asks or none; ``app.admission.atomic_asks`` describes such asks.

        Args:
            within_s: as for ``begin``.

        Raises:
            OverloadedError, CallerGoneError: as for ``decide``.
        """
        began = caller.came_at or monotonic()
        atomic = self._atomic_asks(asks, caller)
        outcome = await self._decide_atomically(atomic, caller, within_s)
        seconds = monotonic() - began
        self._metrics.observe_decisions([seconds])
        if self._spans is not None:
            self._spans.add((outcome.whole,), caller, seconds)
        return atomic.answer(outcome)

    async def _decide_one(self, ask: Ask, caller: Caller, within_s: float | None) -> PlannedAsk:
        made: asyncio.Future[PlannedAsk | Exception] = asyncio.get_running_loop().create_future()
        group = self.begin(
            ask, caller, lambda result: None if made.done() else made.set_result(result), within_s
        )
        try:
            result = await made
        finally:
            if group is not None:
                group.is_done = True  # also after a cancellation
        if isinstance(result, Exception):
            raise result
        self._record_all()
        return result

    # Planning

    def _planned(self, ask: Ask, caller: Caller, place: int = 0) -> PlannedAsk:
        """Plan an ask.

        Args:
            place: its index in its batch.
        """
        charges, suspended = self._charged(ask, caller, place)
        if suspended:
            # A suspended ask only wants a kept answer: a retry gets its kept answer at any factor.
            return PlannedAsk(ask, charges, plan_of(ask, (), self._secret(), caller.key), True)
        if ask.producer_ids is not None:
            return self._planned_ids(ask, charges, caller)
        if ask.id is not None:
            return PlannedAsk(ask, charges, plan_of(ask, charges, self._secret(), caller.key))
        plan = Plan(ask.mode, tuple(charges), None, b"", ask.at_ms) if charges else None
        return PlannedAsk(ask, charges, plan)

    def _charged(self, ask: Ask, caller: Caller, place: int) -> tuple[Sequence[Charge], bool]:
        """Return an ask's charges, scaled by the throttle factor, and whether the factor suspends the ask."""
        charges: Sequence[Charge] = self._charges(ask)
        suspended = False
        if PRODUCE in ask.usage and (factor := self._factor.on(ask)) != 1:
            suspended = is_suspended(ask, factor)
            if factor and not suspended:
                charges = scaled(ask, charges, factor)
        if caller.bound_to:
            charges = restricted(ask, charges, caller.bound_to, place)
        return charges, suspended

    def _charges(self, ask: Ask) -> list[Charge]:
        """Return the charges of an ask by the quotas in force."""
        snapshot, tables = self._snapshot(), self._tables
        if snapshot.rungs is not tables.rungs:
            tables = self._tables = Tables(snapshot, self._rules)
        return tables.charges(ask)

    def _planned_ids(self, ask: Ask, charges: Sequence[Charge], caller: Caller) -> PlannedAsk:
        """Plan an ask with producer ids; the plan omits ids that this node knows."""
        secret, local, unknown = self._secret(), self.local, None
        charge = ids_charge(ask, charges) if local.remembers else None
        if charge is not None and may_answer_alone(ask):
            left = local.unknown(ask, charge)
            if not left:
                known = local.knowledge(ask, charge)
                return PlannedAsk(ask, charges, plan_of(ask, charges[1:], secret), False, known)
            if len(left) < charge.usage:
                unknown = replace(ask, producer_ids=tuple(left))
        sent = with_spreads(unknown or ask, charges, secret)
        plan = plan_of(ask, sent, secret, caller.key)
        return PlannedAsk(ask, charges, plan, False, None, unknown, local.generation)

    def _planned_all(self, asks: Sequence[Ask], caller: Caller) -> Work[list[PlannedAsk]]:
        planned: list[PlannedAsk] = []
        stride = Stride()
        for place, ask in enumerate(asks):
            planned.append(self._planned(ask, caller, place))
            if stride.is_full(len(ask.producer_ids or ())):
                yield
        return planned

    # Answers

    def _finish_one(self, group: SingleAsk, failure: Exception | None) -> None:
        if failure is not None and not isinstance(failure, StoreError):
            group.then(failure)
            return
        answer = group.answers[0] if group.answers else None
        self._conclude(group.planned, answer, failure, group.since, group.then, group.caller)

    def _conclude(
        self,
        planned: PlannedAsk,
        answer: Answer | None,
        failure: StoreError | None,
        since: float,
        then: Then,
        caller: Caller,
    ) -> None:
        """Decide one ask by its answer, if one came, and call back; counts and the log follow soon."""
        try:
            decided_by = self._decide(planned, answer, failure)
        except Exception as error:  # noqa: BLE001  the caller gets it: nobody else waits for this answer
            then(error)
            return
        try:
            then(planned)
        finally:
            if not self._unrecorded:  # behind the answers of this iteration of the loop
                asyncio.get_running_loop().call_soon(self._record_all)
            self._unrecorded.append((planned, decided_by, monotonic() - since, caller))

    def _record_all(self) -> None:
        """Count and log the decisions in ``_unrecorded``, and give them their spans."""
        decisions, self._unrecorded = self._unrecorded, []
        self._metrics.observe_decisions([seconds for _, _, seconds, _ in decisions])
        for planned, decided_by, _, _ in decisions:
            try:
                self._record(planned, *decided_by)
            except Exception:  # the decision was sent already, so the caller gets no error
                log.exception("a decision could not be counted or logged")
        if self._spans is not None:
            for planned, _, seconds, caller in decisions:
                self._spans.add((planned,), caller, seconds)

    def _decided_all(
        self, planned: Sequence[PlannedAsk], answers: Sequence[Answer], failure: StoreError | None
    ) -> Work[None]:
        """Decide and record each ask: by its answer, or without one if none came."""
        arrived = iter(answers)
        stride = Stride()
        for each in planned:
            answer = None if each.plan is None else next(arrived, None)
            self._record(each, *self._decide(each, answer, failure))
            if stride.is_full(len(each.ask.producer_ids or ())):  # ids are hashed for the log
                yield

    def _decide(self, planned: PlannedAsk, answer: Answer | None, failure: StoreError | None) -> DecidedBy:
        """Make a decision."""
        ask, charges, missed = planned.ask, planned.charges, failure
        if (
            answer is not None
            and answer.error is None
            and (answer.kept is not None or not planned.is_suspended)
        ):
            planned.answer = answer
            planned.decision, verdicts = decision_by(planned, answer, sequential=self._sequential)
            return answer, verdicts, answer.failure
        if answer is not None and answer.error is not None:
            missed = answer.error
            if missed.reason == "response":
                log.warning("the store could not decide an ask", why=str(missed))
            answer = None
        if planned.is_suspended:
            wait_ms = self._factor.suspension_ms(ask.at_ms)
            planned.decision, verdicts = suspend(ask, charges, wait_ms, away=failure is not None)
        elif missed is not None and charges and planned.plan is not None:
            known = planned.alone or int(self.local.passes(ask, charges))
            planned.decision, verdicts = without_store(ask, charges, known)
        else:
            planned.decision, verdicts = without_call(planned, sequential=self._sequential)
        return answer, verdicts, missed

    def _record(
        self,
        planned: PlannedAsk,
        answer: Answer | None,
        verdicts: Sequence[Verdict],
        missed: StoreError | None,
    ) -> None:
        """Count and log a decision, and learn from the store's answer."""
        assert planned.decision is not None
        suspended = planned.is_suspended and (answer is None or answer.kept is None)
        if (suspended and missed is None and planned.ask.mode == "admit") or (answer and answer.refreshes):
            self._refresher.add(planned.ask, planned.charges, self._secret())
        if answer and planned.ask.producer_ids and not (suspended or planned.known) and answer.kept is None:
            answer = self._learnt(planned, answer)
        why = None
        if planned.decision.source == "fallback":
            why = missed.reason if missed else "store_full"
            self._metrics.count_fallback(why)
        if self._metrics.count(planned, answer) and answer is not None and planned.plan is not None:
            count_lapses(self._metrics, self._recorder, planned.ask, planned.plan.charges, answer)
        self._recorder.decided(planned, answer, verdicts, why)

    def _learnt(self, planned: PlannedAsk, answer: Answer) -> Answer:
        """Learn ids from an answer; return the answer as if all ids of the ask had been sent."""
        self.local.learn(planned, answer)
        return answer if planned.unknown is None else _with_all_ids(answer, planned.ask, planned.unknown)

    def _log_late_one(self, group: SingleAsk, place: int, answer: Answer) -> None:
        self._log_late((group.planned,), place, answer)

    def _log_late(self, asked: Sequence[PlannedAsk], place: int, answer: Answer) -> None:
        """Log the charges of a late answer, whose ask was already answered without the store."""
        planned = asked[place]
        if answer.error is None and answer.kept is None and not planned.is_suspended:
            decision, verdicts = decision_by(planned, answer, sequential=self._sequential)
            charges = planned.charges[planned.alone :]
            count_lapses(self._metrics, self._recorder, planned.ask, charges, answer)
            if planned.known is None:
                answer = self._learnt(planned, answer)
            self._recorder.late(structs.replace(planned, decision=decision), answer, verdicts)

    # Asks that are decided as one

    def _atomic_asks(self, asks: Sequence[Ask], caller: Caller) -> AtomicAsks:
        """Return asks with their charges."""
        found = [self._charged(ask, caller, place) for place, ask in enumerate(asks)]
        return AtomicAsks(asks, [charges for charges, _ in found], [suspended for _, suspended in found])

    async def _decide_atomically(
        self, atomic: AtomicAsks, caller: Caller, within_s: float | None
    ) -> AtomicOutcome:
        """Decide asks as one; count and log the decision."""
        plan, failure, first = atomic.plan(), self.circuit.error, atomic.asks[0]
        answer: Answer | None = None
        if plan is not None and failure is None:
            answers, failure = await self._gatherer.decide(
                [plan],
                partial(self._log_late_atomic, atomic),
                caller=caller,
                on_behalf_of=_principal_of(first),
                within_s=within_s,
            )
            answer = answers[0] if answers else None
            if answer is not None and answer.error is not None:
                failure, answer = answer.error, None
                log.warning("the store could not decide a request", why=str(failure))
        if any(atomic.suspended):
            outcome = atomic.suspend(self._factor.suspension_ms(first.at_ms), away=failure is not None)
        elif plan is None:
            outcome = atomic.unlimited()
        elif answer is None:
            outcome = atomic.without_store()
        else:
            outcome = atomic.decided(answer)
        missed = failure if answer is None else answer.failure
        reason = missed.reason if missed is not None else "store_full"
        if outcome.whole.decision is not None and outcome.whole.decision.source == "fallback":
            self._metrics.count_fallback(reason)
        self._metrics.count(outcome.whole, answer)
        if answer is not None:
            count_lapses(self._metrics, self._recorder, first, atomic.charges, answer)
        for part, part_answer, verdicts in outcome.parts:
            assert part.decision is not None
            why = reason if part.decision.source == "fallback" else None
            self._recorder.decided(part, part_answer, verdicts, why)
        return outcome

    def _log_late_atomic(self, atomic: AtomicAsks, _place: int, answer: Answer) -> None:
        """Log the charges of a late answer, whose asks were already answered without the store."""
        if answer.error is None:
            count_lapses(self._metrics, self._recorder, atomic.asks[0], atomic.charges, answer)
            for part, part_answer, verdicts in atomic.decided(answer).parts:
                if part.charges and part_answer is not None:
                    self._recorder.late(part, part_answer, verdicts)

    @property
    def waiting(self) -> int:
        """How many asks are waiting for a store call."""
        return self._gatherer.waiting

    async def open(self) -> None:
        """Examine the store now, and regularly from then on."""
        await self.circuit.start()
        await self.local.open()

    async def close(self) -> None:
        """Wait for the current calls, and stop."""
        await self._refresher.close()
        await self.local.close()
        await self._gatherer.close()
        self._record_all()
        await self.circuit.stop()


def decision_by(
    planned: PlannedAsk, answer: Answer, *, sequential: bool
) -> tuple[Decision, Sequence[Verdict]]:
    """Return the decision by the store's answer, and the verdicts that made it; none if all quotas admit."""
    if answer.admits and planned.ask.mode == "admit" and not planned.ask.detail and answer.is_charged:
        return ADMITTED[len(planned.charges)], ()
    return decided(planned, answer, sequential=sequential)


def _with_all_ids(answer: Answer, ask: Ask, unknown: Ask) -> Answer:
    """Return an answer as if all ids had been sent: ids that the node knew count as seen."""
    outcomes = dict(zip(ids_of(unknown), answer.id_outcomes, strict=False))
    if not outcomes:
        return answer
    return structs.replace(answer, id_outcomes=bytes(outcomes.get(each, SEEN) for each in ids_of(ask)))


def _principal_of(ask: Ask) -> str:
    """Return the name by which a caller's asks take turns."""
    return ask.principal or ask.ip or ask.client_id or ""
