"""Decides asks: finds their quotas in the snapshot, calls the store once, and combines the verdicts."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from time import perf_counter
from typing import Final, TypeVar

import structlog
from msgspec import structs

from app.admission.circuit import Circuit
from app.admission.fallback import without_store
from app.admission.gather import QUEUE_S, Gatherer
from app.admission.hold import PRODUCE, UNTHROTTLED, FactorSource, hold_decision, is_held
from app.admission.leases import Leases
from app.admission.local import LocalAnswers
from app.admission.logs import UNLOGGED, Logs
from app.admission.metrics import Fill, Metrics
from app.admission.plain import PlainAsk, PlainAsks, PlainQuotas, PlannedAsk, admission_of
from app.admission.plan import Match, Matches, decision_of, plan_of, restricted_matches, scaled_match
from app.admission.queue import DoneCallback, Group, LateCallback
from app.admission.refresh import Refresher
from app.admission.slices import Slices, Work
from app.catalog.snapshot import Snapshot
from app.decision_log.batch import SEEN
from app.domain.ask import Ask
from app.domain.caller import ANYONE, Caller
from app.domain.decision import Decision, Verdict
from app.domain.ladder import MatchingRules, Quotas
from app.domain.quota import Quota
from app.domain.usage import ids_of
from app.store.encoding import admitted_values, decode_answer
from app.store.port import Answer, Mark, PackedAnswer, PackedPlan, Plan, Store, StoreError

log: Final = structlog.get_logger("quotagate.store")
T = TypeVar("T")

STRIDE: Final = 8
"""How many asks of a batch are planned or answered in one step."""

NOT_WRITTEN: Final = b"\0"
"""The outcome of an id that was neither charged nor refreshed."""


class SingleAsk(Group):
    """A request of one ask, which is answered by a call of ``then``."""

    __slots__ = ("began", "planned", "then")

    def __init__(
        self,
        planned: PlannedAsk,
        plan: Plan | PackedPlan,
        done: DoneCallback,
        late: LateCallback,
        caller: Caller,
        then: Callable[[Decision | Exception], None],
    ) -> None:
        since = caller.came_at or asyncio.get_running_loop().time()
        super().__init__((plan,), done, late, caller, _principal_of(planned.ask), since)
        self.planned = planned
        self.then = then
        self.began = perf_counter()
        if planned.plain is not None:
            self.weight = 1


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
        mark: reads the marks of the store; without it the node remembers no producer ids.

    Attributes:
        circuit: knows whether the store is available.
        local: what this node answers alone.
        leases: grants and settles leases.
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
        mark: Callable[[], Awaitable[Mark]] | None = None,
    ) -> None:
        self.circuit = Circuit(store, metrics)
        self._gatherer = Gatherer(
            self.circuit, budget_s=budget_s, queue_s=queue_s, queued=metrics.observe_queue
        )
        self._slices = Slices() if slices is None else slices
        self._refresher = Refresher(self._gatherer, logs)
        self.local = LocalAnswers(
            self._gatherer,
            mark,
            quotas=lambda: snapshot().quotas,
            secret=secret,
            away=lambda: self.circuit.error is not None,
            metrics=metrics,
            logs=logs,
        )
        self.leases = Leases(
            self._gatherer,
            self.circuit,
            matches=self._matches_in_force,
            factor=factor,
            secret=secret,
            metrics=metrics,
            logs=logs,
        )
        self._snapshot = snapshot
        self._factor = factor
        self._logs = logs
        self._rules = rules
        self._secret = secret
        self._sequential = sequential
        self._metrics = metrics
        self._quotas: Quotas = {}
        self._matches = Matches(self._quotas, rules)
        self._plain = PlainAsks(self._matches, b"")

    def plain(self, ask: Ask) -> PlainAsk | None:
        """Return an ask made ready, which serves equal ones while it is valid; None if it is not plain."""
        self._matches_in_force()
        return self._plain.of(ask)

    def is_valid(self, plain: PlainAsk) -> bool:
        """Return whether the quotas of a plain ask are still those that apply to it."""
        return plain.quotas.snapshot is self._matches_in_force()

    async def decide(self, asks: Sequence[Ask | PlainAsk], caller: Caller = ANYONE) -> list[Decision]:
        """Decide asks in order; if the store is silent for too long, by each quota's ``on_store_failure``.

        Raises:
            OutOfBoundsError: a bound caller would record in a bucket that others share,
                or refund to one; nothing was charged.
            OverloadedError: the node is overloaded; nothing was charged.
            CallerGoneError: the caller has left; nothing was charged.
        """
        if len(asks) == 1:
            (planned,) = self._planned(asks, caller)
            return [await self._decide_one(planned, caller)]
        began = perf_counter()
        planned_asks = await self._as_list(self._planned(asks, caller), caller)
        return await self._decide_all(planned_asks, caller, began)

    async def decide_in_full(
        self, ask: Ask, caller: Caller = ANYONE, within_s: float | None = None
    ) -> tuple[Decision, tuple[Quota, ...]]:
        """Decide an ask that wants detail and has no id; also return the quota of each verdict, in order.

        Args:
            within_s: how long the ask may wait in this node, if that is less than for all others.

        Raises:
            OverloadedError, CallerGoneError: as for ``decide``.
        """
        (planned,) = self._planned((self.plain(ask) or ask,), caller)
        decision = await self._decide_one(planned, caller, within_s)
        return decision, tuple(match.applied.quota for match in planned.matches)

    def begin(
        self, ask: Ask | PlainAsk, caller: Caller, then: Callable[[Decision | Exception], None]
    ) -> None:
        """Decide one ask, and call ``then`` once with the decision or the ``AdmissionError``.

        It may be called before this returns.

        Raises:
            OutOfBoundsError, OverloadedError: as for ``decide``.
        """
        (planned,) = self._planned((ask,), caller)
        self._begin(planned, caller, then)

    async def _decide_one(
        self, planned: PlannedAsk, caller: Caller, within_s: float | None = None
    ) -> Decision:
        made: asyncio.Future[Decision | Exception] = asyncio.get_running_loop().create_future()
        group = self._begin(
            planned, caller, lambda result: None if made.done() else made.set_result(result), within_s
        )
        try:
            result = await made
        finally:
            if group is not None:
                group.is_done = True  # also if nobody waits any more
        if isinstance(result, Exception):
            raise result
        return result

    def _begin(
        self,
        planned: PlannedAsk,
        caller: Caller,
        then: Callable[[Decision | Exception], None],
        within_s: float | None = None,
    ) -> SingleAsk | None:
        """Decide a planned ask; return the request that waits for the store, if one does."""
        failure = self.circuit.error
        if planned.plan is None or failure is not None:
            began = perf_counter()
            (decision,) = self._decisions((planned,), (), failure)
            self._metrics.observe_decision(perf_counter() - began)
            then(decision)
            return None
        late = partial(self._log_late, (planned,))
        group = SingleAsk(planned, planned.plan, self._finish_one, late, caller, then)
        self._gatherer.submit(group, within_s)
        return group

    def _finish_one(self, group: Group, failure: Exception | None) -> None:
        assert isinstance(group, SingleAsk)
        if failure is None or isinstance(failure, StoreError):
            (decision,) = self._decisions((group.planned,), group.answers, failure)
            self._metrics.observe_decision(perf_counter() - group.began)
            group.then(decision)
        else:
            group.then(failure)

    async def _as_list(self, work: Iterator[T], caller: Caller) -> list[T]:
        """Return all items of an iterator as a list, made in slices."""
        return await self._slices.run(caller.turn, _in_steps(work))

    def _planned(self, asks: Sequence[Ask | PlainAsk], caller: Caller) -> Iterator[PlannedAsk]:
        matches, secret = self._matches_in_force(), self._secret()
        for place, ask in enumerate(asks):
            if isinstance(ask, PlainAsk):
                if planned := self._planned_plain(ask, matches, caller):
                    yield planned
                    continue
                ask = ask.planned.ask  # noqa: PLW2901  it goes the readable way
            its, is_held = self._match(ask, matches)
            if caller.bound_to:
                its = restricted_matches(ask, its, caller.bound_to, place)
            if is_held:
                # A held ask only looks for a kept answer: its retry gets that whatever the factor is now.
                yield PlannedAsk(ask, its, is_held, plan_of(ask, (), secret, caller.key))
                continue
            alone = self.local.verdict(ask, its)
            travels = self.local.unknown(ask, its) if alone is None else None
            plan = plan_of(travels or ask, its if alone is None else its[1:], secret, caller.key)
            yield PlannedAsk(ask, its, is_held, plan, None, alone, travels, self.local.turn)

    def _planned_plain(self, plain: PlainAsk, matches: Matches, caller: Caller) -> PlannedAsk | None:
        """Return a plain ask for the short way; None if more has to be looked at."""
        ask = plain.planned.ask
        if plain.quotas.snapshot is not matches or caller.bound_to:
            return None
        if ask.producer_ids and self.local.remembers:
            return None  # what the store says of the ids is learned
        if PRODUCE in ask.usage and self._factor.on(ask) != 1:
            return None
        return plain.planned

    def _match(self, ask: Ask, matches: Matches) -> tuple[tuple[Match, ...], bool]:
        """Return the quotas that apply to an ask, scaled by the factor, and whether the factor holds it."""
        its = matches.of(ask)
        if PRODUCE not in ask.usage or (factor := self._factor.on(ask)) == 1:
            return its, False
        if is_held(ask, factor):
            return its, True
        return tuple(scaled_match(match, factor) for match in its) if factor else its, False

    async def _decide_all(
        self, planned: Sequence[PlannedAsk], caller: Caller, began: float
    ) -> list[Decision]:
        wanted = [each for each in planned if each.plan is not None]
        answers: list[PackedAnswer] = []
        failure = self.circuit.error
        if wanted and failure is None:
            answers, failure = await self._gatherer.decide(
                [each.plan for each in wanted if each.plan is not None],
                partial(self._log_late, wanted),
                caller=caller,
                on_behalf_of=_principal_of(planned[0].ask),
            )
        decisions = await self._as_list(self._decisions(planned, answers, failure), caller)
        self._metrics.observe_decision(perf_counter() - began, len(planned))
        return decisions

    def _decisions(
        self, planned: Sequence[PlannedAsk], answers: Sequence[PackedAnswer], failure: StoreError | None
    ) -> Iterator[Decision]:
        """Make the decisions from the answers, as far as they came."""
        arrived = iter(answers)
        for each in planned:
            packed = None if each.plan is None else next(arrived, None)
            if each.plain is not None and (values := self._admitted(each.plain, packed)) is not None:
                yield admission_of(each, values)
                continue
            ask, its, alone, travels = each.ask, each.matches, each.alone, each.travels
            plan = self._readable(each)
            answer = None if packed is None else decode_answer(packed)
            missed = failure if answer is None else answer.error
            if answer is not None and missed is not None:
                log.warning("the store could not decide an ask", why=str(missed))
                answer = None
            if each.is_held and (answer is None or answer.kept is None):
                decision, verdicts = hold_decision(
                    ask, its, self._factor.hold_ms(ask.at_ms), away=failure is not None
                )
                if failure is None and ask.mode == "admit":
                    self._refresher.add(ask, its, self._secret())
            elif missed is not None and its and plan is not None:
                known = self.local.passes(ask, its) if alone is None else alone.verdict
                decision, verdicts = without_store(ask, [match.applied for match in its], known)
            else:
                known = None if alone is None else alone.verdict
                decision, verdicts = decision_of(ask, plan, answer, sequential=self._sequential, alone=known)
                if plan is not None and answer is not None and alone is None and answer.kept is None:
                    self.local.learn(travels or ask, its, plan, answer, each.turn)
                    answer = answer if travels is None else _with_all_ids(answer, ask, travels)
            why = (missed.reason if missed else "store_full") if decision.source == "fallback" else None
            if why is not None:
                self._metrics.count_fallback(why)
            count_answer(self._metrics, ask, its, plan, answer, decision, verdicts)
            logged = answer if answer is not None or alone is None else Answer((), at_ms=alone.at_ms)
            self._logs.decided(ask, its, logged, decision, verdicts, why)
            yield decision

    def _admitted(self, plain: PlainQuotas, packed: PackedAnswer | None) -> Sequence[float] | None:
        """Count a plain ask and return the numbers of its answer, if it is a plain admission; else None."""
        if self._logs.takes_admissions:
            return None
        if packed is None:
            values: Sequence[float] | None = None if plain.places else ()
        elif packed.id_outcomes.strip(NOT_WRITTEN):  # which are logged
            return None
        else:
            values = admitted_values(packed.packed, plain.of_units)
        if values is not None:
            self._metrics.count_admission(plain.places, values)
        return values

    def _readable(self, planned: PlannedAsk) -> Plan | None:
        """Return the plan of an ask, made now if the ask went the short way."""
        if isinstance(planned.plan, PackedPlan):
            return plan_of(planned.ask, planned.matches, self._secret())
        return planned.plan

    def _log_late(self, asked: Sequence[PlannedAsk], place: int, packed: PackedAnswer) -> None:
        """Log what the store charged late, for an ask that was answered without it."""
        each, answer = asked[place], decode_answer(packed)
        if answer.error is None and answer.kept is None and not each.is_held:
            ask, alone, travels, plan = each.ask, each.alone, each.travels, self._readable(each)
            known = None if alone is None else alone.verdict
            decision, verdicts = decision_of(ask, plan, answer, sequential=self._sequential, alone=known)
            if plan is not None and alone is None:
                self.local.learn(travels or ask, each.matches, plan, answer, each.turn)
                answer = answer if travels is None else _with_all_ids(answer, ask, travels)
            self._logs.late(ask, each.matches, answer, decision, verdicts)

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
        await self.circuit.stop()

    def _matches_in_force(self) -> Matches:
        quotas = self._snapshot().quotas
        if quotas is not self._quotas:
            self._quotas, self._matches = quotas, Matches(quotas, self._rules)
            self._plain = PlainAsks(self._matches, self._secret())
        return self._matches


def count_answer(
    metrics: Metrics,
    ask: Ask,
    found: Sequence[Match],
    plan: Plan | None,
    answer: Answer | None,
    decision: Decision,
    verdicts: Sequence[Verdict],
) -> None:
    """Count the decision on an ask, and what else the store's answer says."""
    if plan is None or answer is None or answer.kept is not None:
        metrics.count_decision(ask, decision, verdicts)
        return
    fills: list[Fill] = []
    for charge, result in zip(plan.charges, answer.results, strict=True):
        if result.correction:
            metrics.count_correction()
        if charge.applied.quota.algorithm == "producer_ids":
            fills.append(Fill(charge.applied.bucket, result.remembered, result.fill))
        else:
            if result.forgiven:
                metrics.count_forgiven(result.forgiven)
            if result.lapsed and ask.mode != "peek":  # a peek does not write it, and another finds it again
                metrics.count_lapsed(result.lapsed)
    metrics.count_decision(ask, decision, verdicts, fills, [match.applied for match in found])


def _with_all_ids(answer: Answer, ask: Ask, travels: Ask) -> Answer:
    """Return an answer as if all ids had been sent: those that the node knew were seen."""
    outcomes = dict(zip(ids_of(travels), answer.id_outcomes, strict=False))
    if not outcomes:
        return answer
    return structs.replace(answer, id_outcomes=bytes(outcomes.get(each, SEEN) for each in ids_of(ask)))


def _principal_of(ask: Ask) -> str:
    """Return the name by which a caller's asks take turns."""
    return ask.principal or ask.ip or ask.client_id or ""


def _in_steps(work: Iterator[T]) -> Work[list[T]]:
    """Make a list of an iterator, some items per step."""
    made = []
    for each in work:
        made.append(each)
        if not len(made) % STRIDE:
            yield
    return made
