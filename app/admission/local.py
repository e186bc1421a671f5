"""Answers for producer ids that this node knows without the store, and renews them in the background.

``app.domain.known_ids`` has the rules. The marks of the store are read four times a second, so a loss of its
state and resets by other nodes are noticed.
"""

from __future__ import annotations

import asyncio
import time
from asyncio import sleep
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final, NamedTuple

import structlog

from app.admission.ending import end, finish
from app.admission.errors import CallerGoneError, OverloadedError
from app.admission.gather import CLOSE_WITHIN_S, Gathering
from app.admission.logs import UNLOGGED, Logs
from app.admission.metrics import Fill, Metrics
from app.admission.plan import (
    LocalVerdict,
    Match,
    ids_match,
    local_verdict,
    may_answer_alone,
    renewal_plan,
)
from app.domain.ask import NO_PRODUCER_ID, Ask
from app.domain.decision import Verdict
from app.domain.entity import Entity
from app.domain.known_ids import FALL_MS, Id, KnownIds, Renewal, StoreTime
from app.domain.ladder import AppliedQuota, Quotas
from app.domain.quota import PRODUCER_IDS_RATE
from app.store.encoding import decode_answer
from app.store.port import Answer, ChargeResult, Mark, PackedAnswer, Plan, StoreError

LOOK_EVERY_S: Final = 0.25
"""How often the marks of the store are read."""

GATHER_S: Final = 0.01
"""How long renewals are gathered, so that those of one bucket share an ask; not while a call is full."""

IDS_IN_CALL: Final = 50
"""The most ids that are renewed at a time: a quarter of a call, so that asks need not wait for another."""

PAUSE_S: Final = 0.25
"""The pause after a renewal that could not be sent."""

log: Final = structlog.get_logger("quotagate.store")


class PendingRenewal(NamedTuple):
    """A renewal on its way, and what it is logged by."""

    key: bytes
    renewal: Renewal
    ask: Ask
    match: Match
    plan: Plan


class LocalAnswers:
    """The node's memory for producer ids.

    Args:
        mark: reads the marks of the store; None for a node that remembers nothing.
        quotas: returns the quotas in force.
        secret: returns the deployment's hash secret.
        away: whether the store is known to be away; then nothing is sent.
        known: what the node knows.
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
        logs: Logs = UNLOGGED,
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
        self._logs = logs
        self._known = KnownIds() if known is None else known
        self._now_s = now_s
        self._time = StoreTime()
        self._looking: asyncio.Task[None] | None = None
        self._renewing: asyncio.Task[None] | None = None

    @property
    def edition(self) -> int:
        """Changes whenever the node forgets something; see ``learn``."""
        return self._known.edition

    @property
    def waits(self) -> bool:
        """Whether something has to be renewed."""
        return self._renewing is not None or self._known.has_renewals

    def verdict(self, ask: Ask, matches: Sequence[Match]) -> LocalVerdict | None:
        """Return the verdict of the first match if it counts ids and the node knows it; else None.

        A peek, an ask with an ``id`` or with ``detail`` and one by the caller's clock ask the store. A
        refusal is repeated only if no other quota applies.
        """
        match, ids = ids_match(ask, matches), ask.producer_ids or ()
        if match is None:
            return None
        if ask.mode == "record" and (now_ms := self._now_ms()) is not None:
            self._known.wrote(match.key, now_ms, quiet=True)
        if not may_answer_alone(ask):
            return None
        known_ms = self.known_at(match, ids)
        if known_ms is not None:
            return LocalVerdict(local_verdict(ask, match), known_ms)
        return self.refusal(ask, matches)

    def known_at(self, match: Match, ids: Sequence[Id]) -> int | None:
        """Return the store's time now, if the node knows these ids of an ask; None if not all of them.

        The ask must be one that it may answer alone: the use of the ids is noted, and counted as answered.
        """
        now_ms, known = self._time.at_ms(self._now_s() * 1000), self._known
        if now_ms is None:
            return None
        applied = match.applied
        knows = known.answers(match.key, applied, ids, now_ms)
        if knows:
            self._metrics.count_local(PRODUCER_IDS_RATE, applied.bucket, len(ids))
        if self._renewing is None and known.has_renewals:
            self._renew_soon()
        return now_ms if knows else None

    def refusal(self, ask: Ask, matches: Sequence[Match]) -> LocalVerdict | None:
        """Return the refusal to repeat for an ask's ids, which the node does not know; else None."""
        ids, match = ask.producer_ids or (), matches[0]
        if len(matches) > 1 or len(ids) > 1 or not self._known.has_refusals(match.key):
            return None
        if ask.mode == "record" or (now_ms := self._now_ms()) is None:
            return None
        refusal = self._known.refusal(match.key, match.applied, ids[0], now_ms)
        if refusal is None:
            return None
        self._metrics.count_repeated_refusal(match.applied.bucket)
        earliest_ms = self._time.earliest_ms(self._now_s() * 1000) or 0
        throttle_ms = refusal.passes_ms - earliest_ms if refusal.passes_ms else 0
        return LocalVerdict(local_verdict(ask, match, refusal.outcome, throttle_ms, refusal.largest), now_ms)

    def unknown(self, ask: Ask, matches: Sequence[Match]) -> Ask | None:
        """Return the ask without the ids that this node knows; None if it knows none of several.

        To be called after ``verdict`` returned None. The ids that are left out are in the open layer.
        """
        ids = ask.producer_ids or ()
        if len(ids) < 2 or (match := ids_match(ask, matches)) is None or not may_answer_alone(ask):
            return None
        now_ms = self._now_ms()
        rest = None if now_ms is None else self._known.unknown(match.key, match.applied, ids, now_ms)
        if rest is None:
            return None
        self._metrics.count_local(PRODUCER_IDS_RATE, match.applied.bucket, len(ids) - len(rest))
        return replace(ask, producer_ids=rest)

    def passes(self, ask: Ask, matches: Sequence[Match]) -> Verdict | None:
        """Return the verdict of the quota of ids while the store is away, if all ids are known."""
        ids = ask.producer_ids or ()
        match, now_ms = ids_match(ask, matches), self._now_ms()
        if match is None or now_ms is None or ask.mode == "refund":
            return None
        return (
            local_verdict(ask, match) if self._known.passes(match.key, match.applied, ids, now_ms) else None
        )

    def learn(self, ask: Ask, matches: Sequence[Match], plan: Plan, answer: Answer, edition: int) -> None:
        """Note what the store answered.

        Args:
            edition: that in which the ask was planned. If the node forgot something since, it learns nothing.
        """
        match = ids_match(ask, matches)
        if match is None or self._mark is None or not plan.charges or ask.mode not in {"admit", "record"}:
            return
        result = answer.results[0]
        if ask.mode == "record":
            self._known.wrote(match.key, answer.at_ms, quiet=True)
        elif result.outcome == "admit":
            self.learn_admission(ask, match, result.open_ms, answer.at_ms, edition)
            return
        if result.open_ms:
            self._learn_ids(ask, match, result.open_ms, answer.at_ms, edition)
        elif edition == self._known.edition and _is_lasting(ask, matches, result):
            self._known.learn_refusal(
                match.key,
                match.applied,
                ask.principal or "",
                (ask.producer_ids or ())[0],
                result.outcome,
                result.throttle_ms,
                result.largest,
                answer.at_ms,
            )

    def learn_admission(self, ask: Ask, match: Match, open_ms: int, at_ms: int, edition: int) -> None:
        """Note that the store admitted the ids of an ask of mode admit, as ``learn`` does.

        Args:
            open_ms: as in the result for them.
            at_ms: the store's time.
        """
        if open_ms and self._mark is not None:
            self._learn_ids(ask, match, open_ms, at_ms, edition, wrote=True)

    def _learn_ids(
        self, ask: Ask, match: Match, open_ms: int, at_ms: int, edition: int, *, wrote: bool = False
    ) -> None:
        known = self._known
        if edition == known.edition:
            principal, ids = ask.principal or "", ask.producer_ids or ()
            known.learn(match.key, match.applied, principal, ids, at_ms + open_ms, at_ms, wrote=wrote)
        elif wrote:
            known.wrote(match.key, at_ms)

    def reset(self, keys: Sequence[bytes]) -> None:
        """Forget buckets that this node reset, or tried to."""
        self._known.reset(keys)

    async def open(self) -> None:
        """Read the marks now, and regularly from then on."""
        if self._mark is not None:
            await self._look()
            self._looking = asyncio.create_task(self._look_on(), name="look at the marks of the store")

    async def close(self) -> None:
        """Renew what waits, for at most ``CLOSE_WITHIN_S``, and stop."""
        await end(self._looking)
        await finish(self._renewing, 0 if self._away() else CLOSE_WITHIN_S)

    def _now_ms(self) -> int | None:
        return self._time.at_ms(self._now_s() * 1000)

    async def _look_on(self) -> None:
        while True:
            await sleep(LOOK_EVERY_S)
            try:
                if not self._away():
                    await self._look()
            except Exception:
                log.exception("cannot read the marks of the store")

    async def _look(self) -> None:
        assert self._mark is not None
        sent_ms = self._now_s() * 1000
        try:
            mark = await self._mark()
        except StoreError as error:
            log.debug("cannot read the marks of the store", why=str(error))
            return
        if self._time.read(mark.now_ms, sent_ms, self._now_s() * 1000) > FALL_MS:
            self._known.forget_all()
        self._known.look(mark.birth, mark.resets)
        self._metrics.set_known_ids(self._known.ids)
        if self._known.has_renewals and self._renewing is None:
            self._renew_soon()

    def _renew_soon(self) -> None:
        self._renewing = asyncio.create_task(self._renew(), name="renew ids")

    async def _renew(self) -> None:
        try:
            while self._known.has_renewals:
                is_full = self._known.is_restoring or self._known.waiting >= IDS_IN_CALL
                gather_s = 0 if is_full else GATHER_S
                await sleep(PAUSE_S if self._away() else gather_s)
                if not self._away() and (pending := self._next()) and not await self._sent(pending):
                    await sleep(PAUSE_S)
        finally:
            self._renewing = None

    def _next(self) -> list[PendingRenewal]:
        """Take the renewals of the next call."""
        pending: list[PendingRenewal] = []
        room, secret = IDS_IN_CALL, self._secret()
        now_ms = self._now_ms()
        while (
            now_ms is not None
            and room > 0
            and (taken := self._known.next_renewal(room, now_ms, self._in_force))
        ):
            key, renewal = taken
            room -= max(len(renewal.ids), 1)
            ask = Ask({}, renewal.ids, renewal.principal)
            match = Match(renewal.applied, key)
            plan = renewal_plan(match, ask, renewal.resets, renewal.birth, secret)
            pending.append(PendingRenewal(key, renewal, ask, match, plan))
        return pending

    async def _sent(self, pending: Sequence[PendingRenewal]) -> bool:
        """Send renewals; return whether all were done. The others are kept."""
        edition, answers = self._known.edition, list[PackedAnswer]()

        def came_late(place: int, answer: PackedAnswer) -> None:
            self._renewed(pending[place], decode_answer(answer), edition)

        with suppress(OverloadedError, CallerGoneError):
            answers, _ = await self._gatherer.decide([each.plan for each in pending], came_late)
        left = [
            each
            for each, answer in zip(pending, answers, strict=False)
            if not self._renewed(each, decode_answer(answer), edition)
        ]
        left += pending[len(answers) :]
        for each in left:
            self._known.put_back(each.key, each.renewal, edition, self._now_ms() or 0)
        return not left

    def _renewed(self, pending: PendingRenewal, answer: Answer, edition: int) -> bool:
        """Note the answer to a renewal; return false if the store's state is not known."""
        key, renewal = pending.key, pending.renewal
        if answer.error is not None or not answer.results:
            return True
        result = answer.results[0]
        if result.outcome == "throttle":
            return False
        was_reset = result.outcome == "reject"
        is_written = was_reset or result.open_ms > 0
        self._known.renewed(key, renewal, edition, answer.at_ms, was_reset=was_reset, is_written=is_written)
        if edition == self._known.edition and result.open_ms:
            closes_ms = answer.at_ms + result.open_ms
            applied, principal = renewal.applied, renewal.principal
            self._known.learn(key, applied, principal, renewal.ids, closes_ms, answer.at_ms)
        if result.outcome == "admit":
            self._known.wrote(key, answer.at_ms)
            self._metrics.count_renewal(
                Fill(renewal.applied.bucket, result.remembered, result.fill, result.remaining)
            )
            self._logs.renewed(pending.ask, (pending.match,), answer)
        return True

    def _in_force(self, applied: AppliedQuota) -> AppliedQuota | None:
        """Return a quota as it is now; None if it is gone or has another bucket."""
        quota = self._quotas().get(PRODUCER_IDS_RATE, {}).get(Entity.parse(applied.entity))
        before = applied.quota
        if quota is None or (quota.identity, quota.epoch) != (before.identity, before.epoch):
            return None
        return AppliedQuota(quota, applied.entity, applied.bucket, applied.owner)


def _is_lasting(ask: Ask, matches: Sequence[Match], result: ChargeResult) -> bool:
    """Whether a refusal stays the same until its wait ends: of one unseen id, by the rate or a limit of 0."""
    if ask.mode != "admit" or len(matches) > 1 or matches[0].applied.quota.shadow:
        return False
    ids = ask.producer_ids or ()
    if len(ids) != 1 or ids[0] == NO_PRODUCER_ID:
        return False
    if result.outcome == "throttle":
        return result.reason is None
    return result.outcome == "reject" and result.largest == 0
