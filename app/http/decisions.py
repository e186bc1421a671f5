"""Bodies of asks in, bodies of decisions out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from app.admission.plain import PlainAsk
from app.admission.port import Decider
from app.admission.slices import STRIDE, Slices, Work, weight_of
from app.domain.ask import Ask
from app.domain.caller import Caller
from app.domain.decision import Decision
from app.domain.errors import OutOfBoundsError
from app.domain.grant import Grant
from app.http.access import Access
from app.http.bodies import MAX_IDS_IN_BATCH
from app.http.known_bodies import KnownBodies
from app.http.wire import (
    Clock,
    SentAsk,
    decode_ask,
    decode_batch,
    encode_decision,
    encode_decisions,
    read_ask,
    require_few_values,
    split_batch,
)

ONE: Final = "/v1/decisions"
BATCH: Final = "/v1/decisions:batch"


class DecisionRoutes:
    """Turns bodies of asks into bodies of decisions.

    Args:
        slices: runs long work in slices, so that it does not block the event loop.
    """

    def __init__(self, admission: Decider, access: Access, clock: Clock, slices: Slices) -> None:
        self._admission = admission
        self._access = access
        self._clock = clock
        self._is_timed = clock == "caller"
        """Whether asks have times, which are noted after a decision."""
        self._slices = slices
        self._known = KnownBodies()

    async def one(self, body: bytes, grant: Grant, caller: Caller) -> bytes:
        """Decide one ask."""
        ask: Ask | PlainAsk
        known = self._known.get(body, self._admission.edition) if grant.is_unrestricted else None
        if known is not None:
            self._access.demand(grant, "decide")
            ask = known.ask
        else:
            ask = await self._slices.run(caller.turn, self._read(body, grant))
        try:
            (decision,) = await self._admission.decide((ask,), caller)
        except OutOfBoundsError as outside:
            raise self._access.shared(grant, outside) from None
        return encode_decision(decision)

    def begin(
        self, body: bytes, grant: Grant, caller: Caller, then: Callable[[Decision | Exception], None]
    ) -> bool:
        """Decide one ask; return False, and do nothing, if it is invalid or more has to be looked at.

        ``then`` is called once, perhaps before this returns, with the decision that ``one`` would encode, or
        what it would raise.

        Raises:
            ProblemError, OverloadedError: instead of the call.
        """
        if not grant.is_unrestricted or self._is_timed:
            return False
        known = self._known.get_any(body)
        if known is None:
            ask = self._slices.at_once(caller.turn, lambda: self._read_valid(body, grant))
            if ask is None:
                return False
            self._admission.begin(ask, caller, then)
            return True
        if "decide" not in grant.scopes:
            self._access.demand(grant, "decide")
        if self._admission.begin(known.ask, caller, then) is not known.ask.quotas.edition:
            self._known.remove(body)
        return True

    async def batch(self, body: bytes, grant: Grant, caller: Caller) -> bytes:
        """Decide a batch of asks, in order, if all of them are allowed."""
        asks = await self._slices.run(caller.turn, self._read_batch(body, grant))
        try:
            decisions = await self._admission.decide(asks, caller)
        except OutOfBoundsError as outside:
            raise self._access.shared(grant, outside, f"/asks/{outside.place}") from None
        return await self._slices.run(caller.turn, encode_decisions(decisions))

    def _read(self, body: bytes, grant: Grant) -> Work[Ask | PlainAsk]:
        """Return the ask in a body that is not known; remember the body if the ask is plain."""
        require_few_values(body)
        ask = self._read_valid(body, grant)
        if ask is None:
            yield
            ask = self._allowed((yield from decode_ask(body, self._clock)), grant, "")
        return ask

    def _read_valid(self, body: bytes, grant: Grant) -> Ask | PlainAsk | None:
        """Return the ask in a body as ``_read`` does; None if it may be invalid."""
        sent = read_ask(body, self._clock)
        if sent is None:
            return None
        ask = self._allowed(sent.ask, grant, "")
        return self._remembered(body, sent) if grant.is_unrestricted else ask

    def _remembered(self, body: bytes, sent: SentAsk) -> Ask | PlainAsk:
        plain = self._admission.plain(sent.ask)
        if plain is None:
            return sent.ask
        if sent.ask.at_ms is None:  # no time comes again
            self._known.add(body, plain, sent.ids)
        return plain

    def _read_batch(self, body: bytes, grant: Grant) -> Work[Sequence[Ask | PlainAsk]]:
        """Return the asks of a batch."""
        require_few_values(body)
        if grant.is_unrestricted and (asks := (yield from self._read_quickly(body, grant))):
            return asks
        yield
        sent = yield from decode_batch(body, self._clock)
        return [self._allowed(ask, grant, f"/asks/{place}") for place, ask in enumerate(sent)]

    def _read_quickly(self, body: bytes, grant: Grant) -> Work[list[Ask | PlainAsk] | None]:
        """Return the asks of a batch, those that are known unread; None if anything is wrong."""
        asks: list[Ask | PlainAsk] = []
        ids = weight = 0
        are_plain, edition, get_known = "decide" in grant.scopes, self._admission.edition, self._known.get_any
        for part in split_batch(body) or ():
            known = get_known(part)
            if known is not None and known.ask.quotas.edition is edition:
                asks.append(known.ask)
                ids += known.ids
                weight += 1
            else:
                if known is not None:
                    self._known.remove(part)
                sent = read_ask(part, self._clock)
                if sent is None:
                    return None
                ask = self._remembered(part, sent)
                are_plain = are_plain and isinstance(ask, PlainAsk)
                asks.append(ask)
                ids += sent.ids
                weight += weight_of(sent.ids)
            if weight >= STRIDE:
                weight = 0
                yield
        if ids > MAX_IDS_IN_BATCH:
            return None
        if not are_plain:  # plain ones only ask
            for place, ask in enumerate(asks):
                self._allowed(ask.planned.ask if isinstance(ask, PlainAsk) else ask, grant, f"/asks/{place}")
        return asks

    def _allowed(self, ask: Ask, grant: Grant, field: str) -> Ask:
        accounts = ask.cluster_action or ask.mode in ("record", "refund")
        self._access.demand(grant, "account" if accounts else "decide")
        return ask if grant.is_unrestricted else self._access.confine(grant, ask, field)
