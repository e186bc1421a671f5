"""Bodies of asks in, bodies of decisions out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from app.admission.gathering.slices import Slices, Stride, Work
from app.admission.plan import PlannedAsk
from app.admission.port import Decider
from app.domain.ask import Ask
from app.domain.errors import OutOfBoundsError
from app.domain.grant import Grant, Permission
from app.http.access.access import Access, IsGone, Sender
from app.http.bodies import MAX_IDS_IN_BATCH
from app.http.head import RequestHead
from app.http.server.hot import JSON, UNCOUNTED, BodyRoute, HttpAnswer, Result, Then
from app.http.server.intake import Intake
from app.http.wire import (
    Clock,
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
ACCOUNTED: Final = ("record", "refund")
"""The modes that need the scope ``account``."""


class DecisionRoute(BodyRoute):
    """The route of one ask.

    Args:
        shed: called with the cause whenever a request is shed.
        intake: the waiting bodies of all callers.
        slices: runs long work in slices, so that it does not block the event loop.
    """

    def __init__(
        self,
        admission: Decider,
        access: Access,
        shed: Callable[[str], None],
        intake: Intake,
        clock: Clock,
        slices: Slices,
    ) -> None:
        super().__init__("POST", access, shed, intake)
        self._admission = admission
        self._clock = clock
        self._slices = slices

    def identify(self, head: RequestHead) -> Sender:
        """Return the sender, which has the scope decide or account; the body tells which one is needed."""
        sender = self.access.asker(head)
        permission: Permission = "account" if "account" in sender.grant.scopes else "decide"
        self.access.demand(sender.grant, permission)
        return sender

    def begin(self, head: RequestHead, body: bytes, sender: Sender, is_gone: IsGone, then: Then) -> bool:  # noqa: ARG002  the body says everything
        """Decide a small, ordinary ask without a coroutine; return False for any other."""
        if len(body) > UNCOUNTED:
            return False
        grant = sender.grant
        try:
            if self.intake.total:  # else there is room for a small body
                self.intake.require_room(sender.turn, len(body))
            sent = read_ask(body, self._clock)
            if sent is None:
                return False
            self._admission.begin(self._allowed(sent[0], grant, ""), sender.caller(is_gone), then)
        except OutOfBoundsError as outside:
            then(self.access.shared(grant, outside))
        except Exception as error:  # noqa: BLE001  it is an answer; an unexpected one is logged
            then(error)
        return True

    def finish(self, result: Result, head: RequestHead) -> HttpAnswer | None:
        """Return the answer to an ask for which ``begin`` called back; None if its caller has gone."""
        if isinstance(result, PlannedAsk):
            return HttpAnswer(200, JSON, encode_decision(result.decision))
        return super().finish(result, head)

    async def reply_to(self, head: RequestHead, body: bytes, sender: Sender, is_gone: IsGone) -> bytes:  # noqa: ARG002  the body says everything
        """Decide one ask."""
        grant, caller = sender.grant, sender.caller(is_gone)
        ask = await self._slices.run(sender.turn, self._read(body, grant))
        try:
            (planned,) = await self._admission.decide((ask,), caller)
        except OutOfBoundsError as outside:
            raise self.access.shared(grant, outside) from None
        return encode_decision(planned.decision)

    def _read(self, body: bytes, grant: Grant) -> Work[Ask]:
        """Return the ask in a body."""
        require_few_values(body)
        sent = read_ask(body, self._clock)
        if sent is None:
            yield
            return self._allowed((yield from decode_ask(body, self._clock)), grant, "")
        ask, _ = sent
        return self._allowed(ask, grant, "")

    def _allowed(self, ask: Ask, grant: Grant, field: str) -> Ask:
        wanted: Permission = "account" if ask.mode in ACCOUNTED or ask.cluster_action else "decide"
        if wanted not in grant.scopes:
            self.access.demand(grant, wanted)
        return ask if grant.is_unrestricted else self.access.confine(grant, ask, field)


class BatchRoute(DecisionRoute):
    """The route of a batch of asks, which are decided in order, if all of them are allowed."""

    def begin(self, head: RequestHead, body: bytes, sender: Sender, is_gone: IsGone, then: Then) -> bool:  # noqa: ARG002  it takes more than a call
        """Return False: a batch needs a coroutine."""
        return False

    async def reply_to(self, head: RequestHead, body: bytes, sender: Sender, is_gone: IsGone) -> bytes:  # noqa: ARG002  the body says everything
        """Decide a batch of asks."""
        grant, caller = sender.grant, sender.caller(is_gone)
        asks = await self._slices.run(sender.turn, self._read_batch(body, grant))
        try:
            planned = await self._admission.decide(asks, caller)
        except OutOfBoundsError as outside:
            raise self.access.shared(grant, outside, f"/asks/{outside.place}") from None
        return await self._slices.run(sender.turn, encode_decisions([each.decision for each in planned]))

    def _read_batch(self, body: bytes, grant: Grant) -> Work[Sequence[Ask]]:
        """Return the asks of a batch."""
        require_few_values(body)
        asks = yield from self._read_valid(body)
        if asks is None:
            yield
            asks = yield from decode_batch(body, self._clock)
        return [self._allowed(ask, grant, f"/asks/{place}") for place, ask in enumerate(asks)]

    def _read_valid(self, body: bytes) -> Work[list[Ask] | None]:
        """Return the asks of a batch; None if anything is wrong."""
        asks: list[Ask] = []
        ids, stride = 0, Stride()
        for part in split_batch(body) or ():
            sent = read_ask(part, self._clock)
            if sent is None:
                return None
            ask, ask_ids = sent
            asks.append(ask)
            ids += ask_ids
            if stride.is_full(ask_ids):
                yield
        return asks if asks and ids <= MAX_IDS_IN_BATCH else None
