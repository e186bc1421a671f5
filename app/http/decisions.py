"""Bodies of asks in, bodies of decisions out."""

from __future__ import annotations

from typing import Final

from app.admission.port import Decider
from app.admission.slices import Slices, Work, step
from app.domain.ask import Ask
from app.domain.caller import Caller
from app.domain.errors import OutOfBoundsError
from app.domain.grant import Grant
from app.http.access import Access
from app.http.wire import Clock, decode_ask, decode_batch, encode_decision, encode_decisions

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
        self._slices = slices

    async def one(self, body: bytes, grant: Grant, caller: Caller) -> bytes:
        """Decide one ask."""
        ask = await self._slices.run(caller.turn, step(lambda: decode_ask(body, self._clock)))
        try:
            (decision,) = await self._admission.decide((self._allowed(ask, grant, ""),), caller)
        except OutOfBoundsError as outside:
            raise self._access.shared(grant, outside) from None
        return encode_decision(decision)

    async def batch(self, body: bytes, grant: Grant, caller: Caller) -> bytes:
        """Decide a batch of asks, in order, if all of them are allowed."""
        asks = await self._slices.run(caller.turn, self._allowed_batch(body, grant))
        try:
            decisions = await self._admission.decide(asks, caller)
        except OutOfBoundsError as outside:
            raise self._access.shared(grant, outside, f"/asks/{outside.place}") from None
        return await self._slices.run(caller.turn, encode_decisions(decisions))

    def _allowed_batch(self, body: bytes, grant: Grant) -> Work[list[Ask]]:
        asks = yield from decode_batch(body, self._clock)
        return [self._allowed(ask, grant, f"/asks/{place}") for place, ask in enumerate(asks)]

    def _allowed(self, ask: Ask, grant: Grant, field: str) -> Ask:
        accounts = ask.cluster_action or ask.mode in ("record", "refund")
        self._access.demand(grant, "account" if accounts else "decide")
        return ask if grant.is_unrestricted else self._access.confine(grant, ask, field)
