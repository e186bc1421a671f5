"""Decides asks: finds their quotas in the snapshot, calls the store once, and combines the verdicts."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from time import monotonic
from typing import Any, Final, TypeVar

import structlog
from msgspec import structs

from app.admission.circuit import Circuit
from app.admission.fallback import without_store
from app.admission.gather import QUEUE_S, Gatherer
from app.admission.hold import PRODUCE, UNTHROTTLED, FactorSource, hold_decision, is_held
from app.admission.leases import Leases, count_lapses
from app.admission.local import LocalAnswers
from app.admission.logs import UNLOGGED, Logs
from app.admission.metrics import Fill, Metrics
from app.admission.plain import PlainAsk, PlainAsks, PlannedAsk, admission_of, remaining_of
from app.admission.plan import (
    LocalVerdict,
    Match,
    Matches,
    decision_of,
    plan_of,
    restricted_matches,
    scaled_match,
)
from app.admission.port import InFull, Joint, Remaining
from app.admission.queue import ACCOUNTING, WEIGHT, Group
from app.admission.refresh import Refresher
from app.admission.slices import ASK_WEIGHT, STRIDE, Slices, Work, weight_of
from app.admission.spreading import ClusterGatherer
from app.admission.together import JointAsks, Together
from app.catalog.snapshot import Snapshot
from app.decision_log.batch import SEEN
from app.domain.ask import Ask
from app.domain.caller import ANYONE, Caller
from app.domain.decision import Decision, Verdict
from app.domain.ladder import MatchingRules, Quotas
from app.domain.usage import ids_of
from app.store.cluster import ClusterStore, plan_slots
from app.store.encoding import OPEN_MS, Values, admitted_values, decode_answer
from app.store.port import (
    Answer,
    Charge,
    ChargeResult,
    Mark,
    PackedAnswer,
    PackedPlan,
    Plan,
    Store,
    StoreError,
)

log: Final = structlog.get_logger("quotagate.store")

NOT_WRITTEN: Final = b"\0"
"""The outcome of an id that was neither charged nor refreshed."""


T = TypeVar("T")


class SingleAsk(Group, eq=False, kw_only=True):
    """A request of one ask, which is answered by a call of ``then``, or of ``admitted`` if that is given."""

    planned: PlannedAsk
    then: Callable[[Any], None]
    admitted: Callable[[Remaining], object] | None


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
        logs: Logs = UNLOGGED,
        mark: Callable[[], Awaitable[Mark]] | None = None,
    ) -> None:
        self.circuit: Circuit | ClusterGatherer
        self._gatherer: Gatherer | ClusterGatherer
        gathering: Any = {"budget_s": budget_s, "queue_s": queue_s, "queued": metrics.observe_queue}
        self._is_clustered = isinstance(store, ClusterStore)
        if isinstance(store, ClusterStore):
            self.circuit = self._gatherer = ClusterGatherer(
                store, metrics, sequential=sequential, **gathering
            )
        else:
            self.circuit = Circuit(store, metrics)
            self._gatherer = Gatherer(self.circuit, **gathering)
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
            lambda: self.circuit.error,
            matches=self._matches_in_force,
            factor=factor,
            secret=secret,
            metrics=metrics,
            logs=logs,
        )
        self._snapshot = snapshot
        self._factor = factor
        self._logs = logs
        self._takes_admissions = logs.takes_admissions
        self._rules = rules
        self._secret = secret
        self._sequential = sequential
        self._metrics = metrics
        self._observe = metrics.observe_decision
        self._quotas: Quotas = {}
        self._matches = Matches(self._quotas, rules)
        self._plain = PlainAsks(self._matches, b"")

    def plain(self, ask: Ask) -> PlainAsk | None:
        """Return an ask made ready, which serves equal ones while it is valid; None if it is not plain."""
        self._matches_in_force()
        plain = self._plain.of(ask)
        if self._is_clustered and plain is not None and (plan := plain.planned.plan) is not None:
            return None if self._spans_slots(plan) else plain  # results of several slots are put together
        return plain

    @property
    def edition(self) -> object:
        """That of the quotas in force: a plain ask is valid while it has the same one."""
        return self._matches_in_force().edition

    async def decide(self, asks: Sequence[Ask | PlainAsk], caller: Caller = ANYONE) -> list[Decision]:
        """Decide asks in order; if the store is silent for too long, by each quota's ``on_store_failure``.

        Raises:
            OutOfBoundsError: a bound caller would record in a bucket that others share,
                or refund to one; nothing was charged.
            OverloadedError: the node is overloaded; nothing was charged.
            CallerGoneError: the caller has left; nothing was charged.
        """
        if len(asks) == 1:
            return [await self._decide_one(self._planned_one(asks[0], caller), caller)]
        began = caller.came_at or monotonic()
        planned = await self._slices.run(caller.turn, self._planned(asks, caller))
        return await self._decide_all(planned, caller, began)

    async def decide_in_full(
        self, ask: Ask, caller: Caller = ANYONE, within_s: float | None = None
    ) -> InFull:
        """Decide an ask that wants detail and has no id.

        Args:
            within_s: how long the ask may wait in this node, if that is less than for all others.

        Raises:
            OverloadedError, CallerGoneError: as for ``decide``.
        """
        planned = self._planned_one(self.plain(ask) or ask, caller)
        decision = await self._decide_one(planned, caller, within_s)
        return in_full(planned, decision)

    async def decide_together(
        self, asks: Sequence[Ask], caller: Caller = ANYONE, within_s: float | None = None
    ) -> Joint:
        """Decide asks of which all are admitted or none; see ``app.admission.together`` for what they are.

        Args:
            within_s: as for ``decide_in_full``.

        Raises:
            OverloadedError, CallerGoneError: as for ``decide``.
        """
        began = caller.came_at or monotonic()
        joint = self._joint(asks, caller)
        together = await self._decide_together(joint, caller, within_s)
        self._metrics.observe_decision(monotonic() - began, 1)
        return joint.answer(together)

    def begin(
        self, ask: Ask | PlainAsk, caller: Caller, then: Callable[[Decision | Exception], None]
    ) -> object:
        """Decide one ask, and call ``then`` once with the decision, an ``AdmissionError`` or another error.

        It may be called before this returns.

        Returns:
            the ``edition`` that decides.

        Raises:
            OutOfBoundsError, OverloadedError: as for ``decide``.
        """
        matches = self._matches_in_force()
        self._begin(self._planned_one(ask, caller, matches), caller, then)
        return matches.edition

    def begin_in_full(
        self,
        ask: Ask | PlainAsk,
        caller: Caller,
        admitted: Callable[[Remaining], T],
        then: Callable[[T | InFull | Exception], None],
        within_s: float | None = None,
    ) -> object:
        """Decide one ask that wants detail and has no id, and call ``then`` once, as ``begin`` does.

        Args:
            admitted: makes what ``then`` gets if the ask is plain, every quota admits, and there is no more
                to say. Otherwise it gets the whole decision, or an error.
            within_s: as for ``decide_in_full``.

        Returns:
            as ``begin``.

        Raises:
            OutOfBoundsError, OverloadedError: as for ``decide``.
        """
        matches = self._matches_in_force()
        planned = self._planned_one(ask, caller, matches)
        self._begin(planned, caller, then, within_s, admitted)
        return matches.edition

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
        then: Callable[[Any], None],
        within_s: float | None = None,
        admitted: Callable[[Remaining], object] | None = None,
    ) -> SingleAsk | None:
        """Decide a planned ask; return the request that waits for the store, if one does.

        Args:
            then: called with the ``Decision``, or with an error.
            admitted: for who wants an ``InFull`` in place of the decision. If the ask goes the short way, and
                all of its quotas admit, ``then`` gets what this returns.
        """
        plan, failure = planned.plan, self.circuit.error
        since = caller.came_at or monotonic()
        if plan is None or failure is not None:
            self._conclude(planned, (), failure, since, then, admitted)
            return None
        group = SingleAsk(
            (plan,),
            self._finish_one,
            self._log_late_one,
            caller,
            _principal_of(planned.ask),
            since,
            plan.ids,
            plan.mode in ACCOUNTING,
            WEIGHT if planned.plain is None else 1,
            planned=planned,
            then=then,
            admitted=admitted,
        )
        self._gatherer.submit(group, within_s)
        return group

    def _finish_one(self, group: Group, failure: Exception | None) -> None:
        assert isinstance(group, SingleAsk)
        if failure is None or isinstance(failure, StoreError):
            self._conclude(group.planned, group.answers, failure, group.since, group.then, group.admitted)
        else:
            group.then(failure)

    def _conclude(
        self,
        planned: PlannedAsk,
        answers: Sequence[PackedAnswer],
        failure: StoreError | None,
        since: float,
        then: Callable[[Any], None],
        admitted: Callable[[Remaining], object] | None,
    ) -> None:
        """Decide one ask by its answer, if one came, and call back as ``_begin`` says."""
        try:
            packed, plain = answers[0] if answers else None, planned.plain
            if plain is None or plain.places or self._takes_admissions:
                values = self._admitted(planned, packed)
            else:  # nothing limits it, or its ids are known: what ``_admitted`` would do, without a call
                values = ()
                self._metrics.count_admission((), values, plain.alone)
            if values is None:
                decision = self._decision(planned, packed, failure)
            elif admitted is None:
                assert plain is not None
                decision = admission_of(planned, values) if planned.ask.detail else plain.decision
            self._observe(monotonic() - since, 1)
        except Exception as error:  # noqa: BLE001  the caller gets it: nobody else waits for this answer
            then(error)
            return
        if admitted is None:
            then(decision)
        elif values is None:
            then(in_full(planned, decision))
        else:
            then(admitted(remaining_of(values, len(planned.matches))))

    def _planned(self, asks: Sequence[Ask | PlainAsk], caller: Caller) -> Work[list[PlannedAsk]]:
        matches, weight = self._matches_in_force(), 0
        planned: list[PlannedAsk] = []
        for place, ask in enumerate(asks):
            if (
                isinstance(ask, PlainAsk)
                and ask.is_simple
                and ask.quotas.edition is matches.edition
                and not caller.bound_to
            ):
                planned.append(ask.planned)
                weight += 1
            else:
                each = self._planned_one(ask, caller, matches, place)
                planned.append(each)
                weight += weight_of(len(each.ask.producer_ids or ()))
            if weight >= STRIDE:
                weight = 0
                yield
        return planned

    def _planned_one(
        self, ask: Ask | PlainAsk, caller: Caller, matches: Matches | None = None, place: int = 0
    ) -> PlannedAsk:
        if matches is None:
            matches = self._matches_in_force()
        if isinstance(ask, PlainAsk):
            plain, planned = ask, ask.planned
            ask = planned.ask
            if plain.quotas.edition is matches.edition and not caller.bound_to:
                if plain.is_simple:
                    return planned
                if PRODUCE not in ask.usage or self._factor.on(ask) == 1:
                    learns = plain.quotas.learns is not None and self.local.remembers
                    return self._planned_with_ids(plain) if learns else planned
        its, is_held = self._match(ask, matches)
        if caller.bound_to:
            its = restricted_matches(ask, its, caller.bound_to, place)
        if is_held:
            # A held ask only looks for a kept answer: its retry gets that whatever the factor is now.
            return PlannedAsk(ask, its, is_held, plan_of(ask, (), self._secret(), caller.key))
        alone = self.local.verdict(ask, its)
        travels = self.local.unknown(ask, its) if alone is None else None
        return self._planned_with(ask, its, alone, travels, caller.key)

    def _planned_with(
        self,
        ask: Ask,
        its: tuple[Match, ...],
        alone: LocalVerdict | None,
        travels: Ask | None,
        key: str | None = None,
    ) -> PlannedAsk:
        """Plan an ask the readable way, by what this node knows of its ids."""
        plan = plan_of(travels or ask, its if alone is None else its[1:], self._secret(), key)
        return PlannedAsk(ask, its, False, plan, None, alone, travels, self.local.edition)

    def _planned_with_ids(self, plain: PlainAsk) -> PlannedAsk:
        """Plan a plain ask with ids; one that needs more than kept bytes goes the readable way from here."""
        planned = plain.planned
        ask, its, answered = planned.ask, planned.matches, plain.answered
        if answered is not None:
            known_ms = self.local.known_at(answered.match, ask.producer_ids or ())
            if known_ms is not None:
                others = answered.others()
                if others.answered is not None and not self._takes_admissions:
                    return others.answered
                alone = LocalVerdict(others.verdict, known_ms)
                return PlannedAsk(ask, its, False, others.plan, others.quotas, alone)
            refusal = self.local.refusal(ask, its)
            travels = self.local.unknown(ask, its) if refusal is None else None
            if refusal is not None or travels is not None:
                return self._planned_with(ask, its, refusal, travels)
        return PlannedAsk(ask, its, False, planned.plan, plain.quotas, edition=self.local.edition)

    def _spans_slots(self, plan: Plan | PackedPlan) -> bool:
        """Whether a plan needs several slots of a cluster."""
        return self._is_clustered and len(set(plan_slots(plan))) > 1

    def _match(self, ask: Ask, matches: Matches) -> tuple[tuple[Match, ...], bool]:
        """Return the quotas that apply to an ask, scaled by the factor, and whether the factor holds it."""
        its = matches.of(ask)
        if PRODUCE not in ask.usage or (factor := self._factor.on(ask)) == 1:
            return its, False
        if is_held(ask, factor):
            return its, True
        return tuple(scaled_match(match, factor) for match in its) if factor else its, False

    def _joint(self, asks: Sequence[Ask], caller: Caller) -> JointAsks:
        """Return asks with the quotas that apply to them."""
        in_force = self._matches_in_force()
        matches, held = [], []
        for place, ask in enumerate(asks):
            its, is_held = self._match(ask, in_force)
            if caller.bound_to:
                its = restricted_matches(ask, its, caller.bound_to, place)
            matches.append(its)
            held.append(is_held)
        return JointAsks(asks, matches, held)

    async def _decide_together(self, joint: JointAsks, caller: Caller, within_s: float | None) -> Together:
        """Decide asks as one, count and log that."""
        plan, failure, first = joint.plan(), self.circuit.error, joint.asks[0]
        answer: Answer | None = None
        if plan is not None and failure is None:
            answers, failure = await self._gatherer.decide(
                [plan],
                partial(self._log_late_together, joint, plan),
                caller=caller,
                on_behalf_of=_principal_of(first),
                within_s=within_s,
            )
            answer = decode_answer(answers[0]) if answers else None
            if answer is not None and answer.error is not None:
                failure, answer = answer.error, None
                log.warning("the store could not decide a request", why=str(failure))
        if any(joint.held):
            together = joint.on_hold(self._factor.hold_ms(first.at_ms), away=failure is not None)
        elif plan is None:
            together = joint.unlimited()
        elif answer is None:
            together = joint.without_store()
        else:
            together = joint.decided(plan, answer)
        decision = together.decision
        missed = failure if answer is None else answer.failure
        reason = missed.reason if missed is not None else "store_full"
        if decision.source == "fallback":
            self._metrics.count_fallback(reason)
        count_answer(self._metrics, first, together.matches, plan, answer, decision, together.verdicts)
        if plan is not None and answer is not None:
            count_lapses(self._metrics, self._logs, first, plan, answer)
        for part in together.parts:
            why = reason if part.decision.source == "fallback" else None
            self._logs.decided(part.ask, part.matches, part.answer, part.decision, part.verdicts, why)
        return together

    def _log_late_together(self, joint: JointAsks, plan: Plan, _place: int, packed: PackedAnswer) -> None:
        """Log what the store charged late, for asks that were answered without it."""
        answer = decode_answer(packed)
        if answer.error is None:
            count_lapses(self._metrics, self._logs, joint.asks[0], plan, answer)
            for part in joint.decided(plan, answer).parts:
                if part.matches:
                    assert part.answer is not None
                    self._logs.late(part.ask, part.matches, part.answer, part.decision, part.verdicts)

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
        decisions = await self._slices.run(caller.turn, self._decisions(planned, answers, failure))
        self._metrics.observe_decision(monotonic() - began, len(planned))
        return decisions

    def _decisions(
        self, planned: Sequence[PlannedAsk], answers: Sequence[PackedAnswer], failure: StoreError | None
    ) -> Work[list[Decision]]:
        """Make the decisions from the answers, as far as they came."""
        arrived = iter(answers)
        decisions: list[Decision] = []
        weight = 0
        for each in planned:
            packed = None if each.plan is None else next(arrived, None)
            values = self._admitted(each, packed)
            if values is None:
                decisions.append(self._decision(each, packed, failure))
                weight += ASK_WEIGHT
            else:
                decisions.append(admission_of(each, values))
                weight += 1
            if weight >= STRIDE:
                weight = 0
                yield
        return decisions

    def _decision(
        self, each: PlannedAsk, packed: PackedAnswer | None, failure: StoreError | None
    ) -> Decision:
        """Make a decision the readable way, count and log it."""
        ask, its, alone, travels = each.ask, each.matches, each.alone, each.travels
        plan = self._readable(each)
        answer = None if packed is None else decode_answer(packed)
        missed = failure if answer is None else answer.error
        if answer is not None and missed is not None:
            if missed.reason == "response":
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
                self.local.learn(travels or ask, its, plan, answer, each.edition)
                answer = answer if travels is None else _with_all_ids(answer, ask, travels)
        if answer is not None:
            missed = answer.failure
            if answer.refreshes:
                self._refresher.add(ask, its, self._secret())
        why = (missed.reason if missed else "store_full") if decision.source == "fallback" else None
        if why is not None:
            self._metrics.count_fallback(why)
        count_answer(self._metrics, ask, its, plan, answer, decision, verdicts)
        if plan is not None and answer is not None:
            count_lapses(self._metrics, self._logs, ask, plan, answer)
        if alone is not None and plan is None:
            self._metrics.count_shadows(verdicts)
        logged = answer if answer is not None or alone is None else Answer((), at_ms=alone.at_ms)
        self._logs.decided(ask, its, logged, decision, verdicts, why)
        return decision

    def _admitted(self, planned: PlannedAsk, packed: PackedAnswer | None) -> Values | None:
        """Count and log an ask of the short way and return its answer's numbers if every quota admits.

        Otherwise do nothing, and return None.
        """
        plain = planned.plain
        if plain is None or (self._takes_admissions and plain.alone is not None):
            return None
        if packed is None:
            values: Values | None = None if plain.places else ()
        elif not self._takes_admissions and packed.id_outcomes.strip(NOT_WRITTEN):
            return None  # the ids alone are logged
        else:
            values = admitted_values(packed.packed, plain.of_units)
            if values is not None and plain.learns is not None:
                open_ms = int(values[OPEN_MS])
                self.local.learn_admission(planned.ask, plain.learns, open_ms, packed.at_ms, planned.edition)
        if values is not None:
            self._metrics.count_admission(plain.places, values, plain.alone)
            if self._takes_admissions:
                self._logs.admitted(planned, plain, packed)
        return values

    def _readable(self, planned: PlannedAsk) -> Plan | None:
        """Return the plan of an ask, made now if the ask went the short way."""
        if isinstance(planned.plan, PackedPlan):
            its = planned.matches if planned.alone is None else planned.matches[1:]
            return plan_of(planned.ask, its, self._secret())
        return planned.plan

    def _log_late_one(self, group: Group, place: int, packed: PackedAnswer) -> None:
        assert isinstance(group, SingleAsk)
        self._log_late((group.planned,), place, packed)

    def _log_late(self, asked: Sequence[PlannedAsk], place: int, packed: PackedAnswer) -> None:
        """Log what the store charged late, for an ask that was answered without it."""
        each, answer = asked[place], decode_answer(packed)
        if answer.error is None and answer.kept is None and not each.is_held:
            ask, alone, travels, plan = each.ask, each.alone, each.travels, self._readable(each)
            known = None if alone is None else alone.verdict
            decision, verdicts = decision_of(ask, plan, answer, sequential=self._sequential, alone=known)
            if plan is not None:
                count_lapses(self._metrics, self._logs, ask, plan, answer)
            if plan is not None and alone is None:
                self.local.learn(travels or ask, each.matches, plan, answer, each.edition)
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
    for charge, result, *before in zip(plan.charges, *(each.results for each in answer.tries), strict=True):
        if result.correction or any(each.correction for each in before):
            metrics.count_correction()
        if charge.applied.quota.algorithm == "producer_ids":
            left = result.remaining - _refused_ids(ask, charge, result)
            fills.append(Fill(charge.applied.bucket, result.remembered, result.fill, left))
        elif forgiven := result.forgiven + sum(each.forgiven for each in before):
            metrics.count_forgiven(forgiven)
    metrics.count_decision(ask, decision, verdicts, fills, [match.applied for match in found])


def _refused_ids(ask: Ask, charge: Charge, result: ChargeResult) -> int:
    """How many new ids a quota refused; of an ask with more than the quota can ever hold, all ids count.

    A shadow quota charges the ids that it would refuse, so they are in what remains.
    """
    if ask.mode == "peek" or charge.applied.quota.shadow:
        return 0
    return int(charge.usage) if result.outcome == "reject" else result.unseen


def _with_all_ids(answer: Answer, ask: Ask, travels: Ask) -> Answer:
    """Return an answer as if all ids had been sent: those that the node knew were seen."""
    outcomes = dict(zip(ids_of(travels), answer.id_outcomes, strict=False))
    if not outcomes:
        return answer
    return structs.replace(answer, id_outcomes=bytes(outcomes.get(each, SEEN) for each in ids_of(ask)))


def in_full(planned: PlannedAsk, decision: Decision) -> InFull:
    """Return a decision with all verdicts, with the quotas that made it."""
    return InFull(decision, tuple([match.applied.quota for match in planned.matches]))


def _principal_of(ask: Ask) -> str:
    """Return the name by which a caller's asks take turns."""
    return ask.principal or ask.ip or ask.client_id or ""
