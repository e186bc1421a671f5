"""The routes of leases: parts of quotas that a caller takes, to decide alone for a short time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from app.admission.gathering.slices import Slices
from app.admission.leases.leases import LeaseAnswer, Leases, Settlement, lasting_ms
from app.admission.throttle_factor.caller_clock import CallerTime
from app.domain.ask import Ask
from app.domain.errors import OutOfBoundsError
from app.domain.grant import Grant
from app.domain.quota import MAX_EXACT
from app.domain.quota_value import pointer
from app.http.access.access import LEASES, Access, IsGone, Sender
from app.http.bodies import SettledBody
from app.http.head import RequestHead
from app.http.problems import FieldError, unprocessable
from app.http.query import Parameters
from app.http.server.hot import BodyRoute
from app.http.server.intake import Intake
from app.http.wire import (
    Clock,
    decode_lease,
    decode_spent,
    encode_lease,
    lease_body,
    require_few_values,
)

NEXT_AFTER: Final = 0.8
"""After this part of a lease its holder should ask for the next one."""


class LeaseRoutes:
    """Grants and settles leases for requests.

    Args:
        slices: reads large bodies in slices, by fair turns.
        time: notes the times of asks, under the caller's clock; None under the store's.
    """

    def __init__(
        self, leases: Leases, access: Access, clock: Clock, slices: Slices, time: CallerTime | None = None
    ) -> None:
        self._leases = leases
        self._access = access
        self._clock = clock
        self._slices = slices
        self._time = time

    async def take(self, head: RequestHead, body: bytes, sender: Sender, is_gone: IsGone) -> bytes:
        """Settle leases and grant one."""
        Parameters(head.query).check()
        sent = await self._slices.run(sender.turn, decode_lease(body, self._clock))
        grant = sender.grant
        wish = self._access.confine(grant, sent.wish, "/ask")
        settlements = [
            self._settlement(text, spent, grant, "settle", place)
            for place, (text, spent) in enumerate(sent.settle)
        ]
        try:
            answer = await self._ask(wish, lasting_ms(wish, sent.lease_ms), settlements, sender, is_gone)
        except OutOfBoundsError as outside:
            raise self._access.shared(grant, outside, "/ask") from None
        renew_ms = max(int(answer.lease_ms * NEXT_AFTER), min(answer.lease_ms, 1))
        leased = lease_body(answer.decision, answer.name, answer.granted, answer.lease_ms, renew_ms)
        leased.settled = [
            SettledBody(text, ok) for (text, _), ok in zip(sent.settle, answer.settled, strict=True)
        ]
        return encode_lease(leased)

    async def end(self, head: RequestHead, body: bytes, sender: Sender, is_gone: IsGone) -> bytes:
        """Settle the lease that the path names; without a body all of it was spent."""
        lease = head.path.removeprefix(f"{LEASES}/")
        query = Parameters(head.query, *(["at_ms"] if self._time is not None else []))
        at_ms = query.integer("at_ms", 0, MAX_EXACT) if self._time is not None else None
        query.check()
        if at_ms is None and self._time is not None:
            at_ms = self._time.newest_ms
        spent = None
        if body.strip():
            spent = await self._slices.run(sender.turn, decode_spent(body))
        settlement = self._settlement(lease, spent, sender.grant)
        answer = await self._ask(Ask(at_ms=at_ms), 0, [settlement], sender, is_gone)
        return encode_lease(SettledBody(lease, answer.settled[0]))

    async def _ask(
        self, wish: Ask, lease_ms: int, settlements: Sequence[Settlement], sender: Sender, is_gone: IsGone
    ) -> LeaseAnswer:
        if self._time is not None and wish.at_ms is not None:
            self._time.note(wish.at_ms)
        return await self._leases.take(wish, lease_ms, settlements, sender.caller(is_gone))

    def _settlement(
        self, text: str, spent: dict[str, float] | None, grant: Grant, *at: str | int
    ) -> Settlement:
        """Return a settlement; without ``spent`` all of the lease was spent.

        Args:
            at: the path to the settlement in the body.

        Raises:
            ProblemError: 422 if more was spent than granted.
        """
        name = self._leases.named(text, grant.name, grant.created_ms)
        if name is None or spent is None:
            return Settlement(name, name.granted if name is not None else {})
        wrong = [
            FieldError(
                pointer(*at, "usage", field), f"is more than the {name.granted.get(field, 0):g} granted"
            )
            for field, amount in spent.items()
            if amount > name.granted.get(field, 0)
        ]
        if wrong:
            raise unprocessable(*wrong)
        return Settlement(name, spent)


class LeaseRoute(BodyRoute):
    """A path of leases: needs the scope ``account``.

    Args:
        answer: returns the body of the answer to a whole request.
    """

    def __init__(
        self,
        method: str,
        answer: Callable[[RequestHead, bytes, Sender, IsGone], Awaitable[bytes]],
        access: Access,
        shed: Callable[[str], None],
        intake: Intake,
    ) -> None:
        super().__init__(method, access, shed, intake)
        self._answer = answer

    def identify(self, head: RequestHead) -> Sender:
        """Return the sender, which may account."""
        return self.access.sender(self.access.require(head, "account"), head)

    async def reply_to(self, head: RequestHead, body: bytes, sender: Sender, is_gone: IsGone) -> bytes:
        """Return the answer to a whole request."""
        require_few_values(body)
        return await self._answer(head, body, sender, is_gone)
