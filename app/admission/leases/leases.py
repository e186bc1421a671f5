"""Leases: takes a part of a caller's wish from the store, and settles earlier leases."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import structlog
from msgspec import structs

from app.admission.answers import decided, suspend, why_by_policy, without_store
from app.admission.factor import PRODUCE, FactorSource, is_suspended
from app.admission.gathering.gatherer import Gathering
from app.admission.leases.names import LeaseName, seal, unseal
from app.admission.metrics.metrics import Metrics
from app.admission.plan import PlannedAsk, granted_by, hold_plan, restricted, scaled, settle_plan
from app.admission.recorder import Recorder
from app.domain.ask import Ask
from app.domain.caller import Caller
from app.domain.decision import Decision
from app.store.port import Answer, Charge, Plan, StoreError, UnitsResult

LEASE_BYTES: Final = 16
LONGEST_PRODUCE_MS: Final = 1_000
"""A lease of produce bytes is short, so that the throttle factor is followed within a second."""
ADMITTED: Final = Decision("admit", 0, False, 0, "local", None)

log: Final = structlog.get_logger("quotagate.store")


class Settlement(NamedTuple):
    """The usage spent of one lease.

    Attributes:
        lease: None if it is not a lease of this caller.
        spent: by usage field, at most the grant.
    """

    lease: LeaseName | None
    spent: dict[str, float]


class LeaseAnswer(NamedTuple):
    """The answer to an ask for a lease.

    Attributes:
        name: the name of the lease; None if nothing was granted.
        granted: by usage field; empty if nothing was granted.
        settled: for each settlement, whether the store still held the lease.
    """

    decision: Decision
    name: str | None
    granted: dict[str, float]
    lease_ms: int
    settled: list[bool]


class SentPlan(NamedTuple):
    """A plan, and the ask that it was made from."""

    plan: Plan
    planned: PlannedAsk

    @property
    def ask(self) -> Ask:
        """The ask."""
        return self.planned.ask


class Leases:
    """Grants and settles leases.

    Args:
        away: returns why the store is away; None if it is not.
        charges: returns the charges of an ask.
        secret: returns the deployment's hash secret, which also seals the names.
    """

    def __init__(
        self,
        gatherer: Gathering,
        away: Callable[[], StoreError | None],
        *,
        charges: Callable[[Ask], Sequence[Charge]],
        factor: FactorSource,
        secret: Callable[[], bytes],
        metrics: Metrics,
        recorder: Recorder,
    ) -> None:
        self._gatherer = gatherer
        self._away = away
        self._charges = charges
        self._factor = factor
        self._secret = secret
        self._metrics = metrics
        self._recorder = recorder

    def named(self, text: str, key: str | None, created_ms: int | None = None) -> LeaseName | None:
        """Return the content of a lease's name; None for a lease of another key, or of an earlier one."""
        name = unseal(text, self._secret())
        return name if name is not None and name.is_of(key, created_ms) else None

    async def take(
        self, wish: Ask, lease_ms: int, settlements: Sequence[Settlement], caller: Caller
    ) -> LeaseAnswer:
        """Settle leases, then hold a part of a wish in all its buckets, or in none.

        Without the store nothing is granted, and each quota's ``on_store_failure`` decides.

        Args:
            wish: under deny, in mode admit; if all its usage is 0, leases are only settled.

        Raises:
            OutOfBoundsError: a bound caller would hold in a bucket that others share; nothing was changed.
            OverloadedError, CallerGoneError: nothing was changed.
        """
        holding, decision, charges = self._plan(wish, lease_ms, caller)
        settling = [self._settling(each, wish.at_ms) for each in settlements]
        sent = [each for each in (*settling, holding) if each is not None]
        answers, failure = await self._ask(sent, caller, wish)
        came = iter(answers)
        settled = [
            self._settled(settlement, each, None if each is None else next(came, None))
            for settlement, each in zip(settlements, settling, strict=True)
        ]
        answer = None if holding is None else next(came, None)
        if holding is None:
            return self._without_hold(wish, lease_ms, settled, decision, charges, caller)
        if answer is None:
            missed = failure.reason if failure is not None else "response"
            decision, _ = without_store(wish, charges)
            self._metrics.count_fallback(missed)
            self._metrics.count_lease("refused")
            return LeaseAnswer(decision, None, {}, 0, settled)
        return self._answered(holding, answer, lease_ms, settled, caller)

    def _plan(
        self, wish: Ask, lease_ms: int, caller: Caller
    ) -> tuple[SentPlan | None, Decision | None, Sequence[Charge]]:
        """Return the plan of a wish, or the decision if the store is not asked; and the charges."""
        if not any(wish.usage.values()):
            return None, ADMITTED, ()
        charges = self._charges(wish)
        restricted(replace(wish, mode="record"), charges, caller.bound_to)
        factor = self._factor.on(wish) if PRODUCE in wish.usage else 1.0
        if is_suspended(wish, factor):
            away = self._away() is not None
            decision, _ = suspend(wish, charges, self._factor.suspension_ms(wish.at_ms), away=away)
            return None, decision, charges
        if not charges:
            return None, None, ()
        if factor not in (0, 1):
            charges = scaled(wish, charges, factor)
        plan = hold_plan(wish, charges, secrets.token_bytes(LEASE_BYTES), lease_ms)
        return SentPlan(plan, PlannedAsk(wish, charges, plan)), None, charges

    def _settling(self, settlement: Settlement, at_ms: int | None) -> SentPlan | None:
        """Return the plan that settles a lease; None if no bucket holds it."""
        if settlement.lease is None or not settlement.lease.holds:
            return None
        ask = settlement.lease.ask(settlement.spent, at_ms)
        charges = self._charges(ask)
        if not charges:
            return None
        plan = settle_plan(ask, charges, settlement.lease.lease)
        return SentPlan(plan, PlannedAsk(ask, charges, plan))

    async def _ask(
        self, sent: Sequence[SentPlan], caller: Caller, wish: Ask
    ) -> tuple[list[Answer | None], StoreError | None]:
        """Return the store's answers in order up to a failure (None if unreadable), and the failure."""
        if not sent:
            return [], None
        if (error := self._away()) is not None:
            return [], error

        def late(place: int, answer: Answer) -> None:
            if answer.error is None:
                self._record(sent[place], answer)

        came, failure = await self._gatherer.decide(
            [each.plan for each in sent], late, caller=caller, on_behalf_of=wish.principal or ""
        )
        answers: list[Answer | None] = []
        for each, answer in zip(sent, came, strict=False):
            if answer.error is not None:
                log.warning("the store could not decide a lease", why=str(answer.error))
                answers.append(None)
                continue
            self._record(each, answer)
            answers.append(answer)
        return answers, failure

    def _record(self, sent: SentPlan, answer: Answer) -> None:
        """Count the bucket states in an answer, and log the answer."""
        plan, granted = sent.plan, sent.ask.usage
        decision, verdicts = decided(sent.planned, answer, sequential=False)
        self._metrics.count_leased(plan.charges, answer)
        count_lapses(self._metrics, self._recorder, sent.ask, plan.charges, answer)
        if plan.mode == "hold" and grants(decision):
            granted = granted_by(sent.ask, plan, answer)
        assert plan.lease is not None
        self._recorder.leased(
            "lease" if plan.mode == "hold" else "settlement",
            structs.replace(
                sent.planned,
                ask=replace(sent.ask, usage=granted),
                decision=replace(decision, charged=grants(decision)),
            ),
            answer,
            verdicts,
            plan.lease,
        )

    def _settled(self, settlement: Settlement, sent: SentPlan | None, answer: Answer | None) -> bool:
        if sent is None:
            found = settlement.lease is not None and not settlement.lease.holds
        else:
            found = answer is not None and any(result.outcome == "admit" for result in answer.results)
        self._metrics.count_lease("settled" if found else "unknown")
        return found

    def _without_hold(
        self,
        wish: Ask,
        lease_ms: int,
        settled: list[bool],
        decision: Decision | None,
        charges: Sequence[Charge],
        caller: Caller,
    ) -> LeaseAnswer:
        """Return the answer to a wish for which the store was not asked."""
        if decision is not None:
            if charges or wish.usage.get(PRODUCE):
                self._metrics.count_lease("refused")
            return LeaseAnswer(decision, None, {}, 0, settled)
        self._metrics.count_lease("granted")
        granted = dict(wish.usage)
        name = self._name(secrets.token_bytes(LEASE_BYTES), wish, granted, caller, holds=False)
        return LeaseAnswer(ADMITTED, name, granted, lease_ms, settled)

    def _answered(
        self, sent: SentPlan, answer: Answer, lease_ms: int, settled: list[bool], caller: Caller
    ) -> LeaseAnswer:
        decision, _ = decided(sent.planned, answer, sequential=False)
        assert sent.plan.lease is not None
        if not grants(decision):
            if decision.source == "fallback":
                self._metrics.count_fallback(why_by_policy(answer))
            self._metrics.count_lease("refused")
            return LeaseAnswer(replace(decision, charged=False), None, {}, 0, settled)
        self._metrics.count_lease("granted")
        granted = granted_by(sent.ask, sent.plan, answer)
        name = self._name(sent.plan.lease[0], sent.ask, granted, caller, holds=True)
        return LeaseAnswer(decision, name, granted, lease_ms, settled)

    def _name(self, lease: bytes, ask: Ask, granted: dict[str, float], caller: Caller, *, holds: bool) -> str:
        names = (ask.principal, ask.client_id, ask.ip, ask.broker, ask.listener)
        made = LeaseName(lease, caller.key, names, granted, holds, caller.key_created_ms)
        return seal(made, self._secret())


def count_lapses(
    metrics: Metrics, recorder: Recorder, ask: Ask, charges: Sequence[Charge], answer: Answer
) -> None:
    """Count and log lapses: units of unsettled leases that the tries of an ask found ended."""
    if ask.mode == "peek":
        return  # a peek does not write the lapse, so another ask finds it again
    for each in answer.tries:
        if each.kept is not None:
            continue  # its results belong to an earlier ask
        for place, (charge, result) in enumerate(zip(charges, each.results, strict=True)):
            if isinstance(result, UnitsResult) and result.lapsed:
                metrics.count_lapsed(result.lapsed)
                own = structs.replace(each, order=each.orders[place]) if each.orders else each
                recorder.lapsed(ask, charge, result.lapsed, own)


def lasting_ms(wish: Ask, lease_ms: int) -> int:
    """Return how long a lease for this wish lasts: at most ``lease_ms``."""
    return min(lease_ms, LONGEST_PRODUCE_MS) if PRODUCE in wish.usage else lease_ms


def grants(decision: Decision) -> bool:
    """Return whether a decision on a wish means that it is held."""
    return decision.decision == "admit" and decision.source == "store"
