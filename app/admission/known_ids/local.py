"""The producer ids that this node knows: it answers for them without the store, and writes uses back.

``app.admission.known_ids.memory`` has the rules. The marks of the store are read four times a second, so a
loss of its state and resets by other nodes are noticed.
"""

from __future__ import annotations

import asyncio
import time
from asyncio import sleep
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Final

import structlog
from msgspec import structs

from app.admission.compiled import charge_of
from app.admission.errors import CallerGoneError, OverloadedError
from app.admission.gathering.gatherer import CLOSE_WITHIN_S, Gathering
from app.admission.known_ids.memory import Id, KnownIds, Renewal, StoreTime
from app.admission.metrics.metrics import Fill, Metrics
from app.admission.plan import Knowledge, PlannedAsk, ids_charge, with_spreads
from app.admission.recorder import UNRECORDED, Recorder
from app.domain.ask import Ask
from app.domain.entity import Entity
from app.domain.ladder import AppliedQuota, Quotas
from app.domain.quota import PRODUCER_IDS_RATE
from app.domain.usage import ids_of
from app.node.tasks import end, finish
from app.store.port import Answer, Charge, IdsResult, Mark, Plan, StoreError

POLL_EVERY_S: Final = 0.25
"""How often the marks of the store are read."""

GATHER_S: Final = 0.01
"""How long renewals are gathered, so that renewals of one bucket share an ask; not after a full call."""

IDS_IN_CALL: Final = 50
"""The most ids that are renewed at a time: a quarter of a call, so that asks need not wait for another."""

PAUSE_S: Final = 0.25
"""The pause after a renewal that could not be sent."""

log: Final = structlog.get_logger("quotagate.store")


class LocalAnswers:
    """The node's memory for producer ids.

    Args:
        mark: reads the marks of the store; None for a node that remembers nothing.
        quotas: returns the quotas in force.
        secret: returns the deployment's hash secret.
        away: whether the store is known to be away; then nothing is sent.
        known: the ids that the node knows.
        now_s: the monotonic clock.

    Attributes:
        remembers: whether this node remembers anything.
    """

    def __init__(
        self,
        gatherer: Gathering,
        mark: Callable[[], Awaitable[Mark]] | None,
        *,
        quotas: Callable[[], Quotas],
        secret: Callable[[], bytes],
        away: Callable[[], bool],
        metrics: Metrics,
        recorder: Recorder = UNRECORDED,
        known: KnownIds | None = None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._gatherer = gatherer
        self._mark = mark
        self.remembers: Final = mark is not None
        self._quotas = quotas
        self._secret = secret
        self._away = away
        self._metrics = metrics
        self._recorder = recorder
        self._known = KnownIds() if known is None else known
        self._now_s = now_s
        self._time = StoreTime()
        self._polling: asyncio.Task[None] | None = None
        self._renewing: asyncio.Task[None] | None = None

    @property
    def generation(self) -> int:
        """Changes whenever the node forgets something; see ``learn``."""
        return self._known.generation

    @property
    def waits(self) -> bool:
        """Whether something has to be renewed."""
        return self._renewing is not None or bool(self._known.due)

    @property
    def now_ms(self) -> int | None:
        """The store's time; None while it is not known."""
        return self._time.at_ms(self._now_s() * 1000)

    def unknown(self, ask: Ask, charge: Charge) -> Sequence[Id]:
        """Return the ids of an ask that the store must be asked about; the node knows the others.

        The use of known ids is counted, and noted to be written back. So call it once for an ask, and only if
        the node may answer for its ids (``ids_charge``, ``may_answer_alone``).
        """
        known, now_ms, ids = self._known, self.now_ms, ids_of(ask)
        if now_ms is None:
            return ids
        left = known.unknown(charge.key, charge.applied, ids, now_ms)
        if len(left) < len(ids):
            self._metrics.count_local(PRODUCER_IDS_RATE, charge.bucket, len(ids) - len(left))
        if self._renewing is None and known.due:
            self._renew_soon()
        return left

    def knowledge(self, ask: Ask, charge: Charge) -> Knowledge:
        """Return the grounds on which this node answers for an ask's ids; it must know all of them."""
        return self._known.knowledge(charge.key, ids_of(ask), self.now_ms or 0)

    def passes(self, ask: Ask, charges: Sequence[Charge]) -> bool:
        """Return whether this node knows all ids of an ask, while the store is away."""
        charge, now_ms = ids_charge(ask, charges), self.now_ms
        if charge is None or now_ms is None or ask.mode == "refund":
            return False
        return self._known.knows(charge.key, charge.applied, ids_of(ask), now_ms)

    def learn(self, planned: PlannedAsk, answer: Answer) -> None:
        """Learn ids from the store's answer, unless the node forgot something since the ask was planned."""
        ask, known = planned.unknown or planned.ask, self._known
        charge = ids_charge(ask, planned.charges)
        if charge is None or not self.remembers:
            return
        result = answer.results[0]
        is_current = planned.generation == known.generation
        if isinstance(result, IdsResult) and result.open_ms and is_current:
            closes_ms = answer.at_ms + result.open_ms
            known.learn(charge.key, charge.applied, ask.principal or "", ids_of(ask), closes_ms, answer.at_ms)

    def reset(self, keys: Sequence[bytes]) -> None:
        """Forget buckets that this node reset, or tried to."""
        self._known.reset(keys)

    async def open(self) -> None:
        """Read the marks now, and regularly from then on."""
        if self._mark is not None:
            await self._poll()
            self._polling = asyncio.create_task(self._poll_forever(), name="poll the marks of the store")

    async def close(self) -> None:
        """Send the waiting renewals, for at most ``CLOSE_WITHIN_S``, and stop."""
        await end(self._polling)
        await finish(self._renewing, 0 if self._away() else CLOSE_WITHIN_S)

    async def _poll_forever(self) -> None:
        while True:
            await sleep(POLL_EVERY_S)
            try:
                if not self._away():
                    await self._poll()
            except Exception:
                log.exception("cannot read the marks of the store")

    async def _poll(self) -> None:
        assert self._mark is not None
        sent_ms = self._now_s() * 1000
        try:
            mark = await self._mark()
        except StoreError as error:
            log.debug("cannot read the marks of the store", why=str(error))
            return
        if self._time.read(mark.now_ms, sent_ms, self._now_s() * 1000):
            self._known.forget_all()
        self._known.compare(mark.birth, mark.resets)
        self._metrics.set_known_ids(self._known.ids)
        if self._known.due and self._renewing is None:
            self._renew_soon()

    def _renew_soon(self) -> None:
        self._renewing = asyncio.create_task(self._renew(), name="renew ids")

    async def _renew(self) -> None:
        pause_s = GATHER_S
        try:
            while self._known.due:
                await sleep(PAUSE_S if self._away() else pause_s)
                if self._away():
                    continue
                renewals = self._renewals()
                is_full = sum(len(each.ids) for each in renewals) >= IDS_IN_CALL
                is_done = not renewals or await self._sent(renewals)
                pause_s = PAUSE_S if not is_done else 0 if is_full else GATHER_S
        finally:
            self._renewing = None

    def _renewals(self) -> list[Renewal]:
        """Return the renewals of the next call."""
        now_ms = self.now_ms
        return [] if now_ms is None else self._known.renewals(IDS_IN_CALL, now_ms, self._in_force)

    async def _sent(self, renewals: Sequence[Renewal]) -> bool:
        """Send renewals; return whether all were done. Renewals that were not done stay due."""
        answers: list[Answer] = []
        secret, birth = self._secret(), self._known.birth
        plans = [renewal_plan(each, birth, secret) for each in renewals]

        def received_late(place: int, answer: Answer) -> None:
            self._renewed(renewals[place], answer)

        with suppress(OverloadedError, CallerGoneError):
            answers, _ = await self._gatherer.decide(plans, received_late)
        done = [self._renewed(each, answer) for each, answer in zip(renewals, answers, strict=False)]
        return len(done) == len(renewals) and all(done)

    def _renewed(self, renewal: Renewal, answer: Answer) -> bool:
        """Note the answer to a renewal; return false if the store's state is not known."""
        result = answer.results[0] if answer.results else None
        if not isinstance(result, IdsResult):
            self._known.renewed(renewal, None, 0, answer.at_ms)
            return True
        if result.outcome == "throttle":
            return False
        self._known.renewed(renewal, result.outcome, result.open_ms, answer.at_ms)
        if result.outcome == "admit":
            self._metrics.count_renewal(
                Fill(renewal.applied.bucket, result.remembered, result.fill, result.remaining)
            )
            ask = _ask_of(renewal)
            known = Knowledge(answer.at_ms, renewal.until_ms, renewal.resets)
            planned = PlannedAsk(ask, (charge_of(renewal.applied, ask),), None, known=known)
            self._recorder.renewed(planned, answer)
        return True

    def _in_force(self, applied: AppliedQuota) -> AppliedQuota | None:
        """Return the present form of a quota; None if it is gone or has another bucket."""
        quota = self._quotas().get(PRODUCER_IDS_RATE, {}).get(Entity.parse(applied.entity))
        before = applied.quota
        if quota is None or (quota.identity, quota.epoch) != (before.identity, before.epoch):
            return None
        return AppliedQuota(quota, applied.entity, applied.bucket, applied.owner)


def renewal_plan(renewal: Renewal, birth: bytes, secret: bytes) -> Plan:
    """Return the plan to write ids that this node knows: uncharged, and never refused.

    It names the last reset that the node knew of: if the bucket was reset since, the store writes nothing,
    and the outcome is ``reject``.

    Args:
        birth: the birth of the store's state as the node knows it. If the store has another one, it may have
            lost that reset: it writes nothing, and the outcome is ``throttle``.
    """
    ask = _ask_of(renewal)
    (charge,) = with_spreads(ask, (charge_of(renewal.applied, ask),), secret)
    return Plan("renew", (structs.replace(charge, usage=renewal.resets),), context=birth)


def _ask_of(renewal: Renewal) -> Ask:
    return Ask({}, renewal.ids, renewal.principal)
