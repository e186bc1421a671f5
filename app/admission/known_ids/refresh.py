"""Refreshes the seen producer ids of asks that were refused without the store, after the answer was sent."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Final, NamedTuple

from app.admission.errors import OverloadedError
from app.admission.gathering.gatherer import CLOSE_WITHIN_S, MAX_ASKS, Gathering
from app.admission.plan import PlannedAsk, with_spreads
from app.admission.recorder import UNRECORDED, Recorder
from app.domain.ask import Ask
from app.node.tasks import finish
from app.store.port import Answer, Charge, Plan

MAX_WAITING: Final = 10_000
MAX_WAITING_IDS: Final = 200_000
"""How many asks may wait to be refreshed, and how many ids of 32 bytes each. Beyond that the oldest are
dropped: an id that is still in use will be asked for again soon."""


class RefreshRequest(NamedTuple):
    """An ask whose ids are to be refreshed, with the charge that counts them, and the plan for the store."""

    planned: PlannedAsk
    plan: Plan


class Refresher:
    """Refreshes ids in the background, in one call of up to 100 asks at a time.

    Args:
        gatherer: sends the calls.
        recorder: receives which ids were refreshed.
    """

    def __init__(
        self,
        gatherer: Gathering,
        recorder: Recorder = UNRECORDED,
    ) -> None:
        self._gatherer = gatherer
        self._recorder = recorder
        self._waiting: deque[RefreshRequest] = deque()
        self._ids = 0
        self._working: asyncio.Task[None] | None = None

    def add(self, ask: Ask, charges: Sequence[Charge], secret: bytes) -> None:
        """Schedule a refresh of the seen ids of an ask; nothing is charged."""
        id_charges = with_spreads(ask, charges[:1], secret) if ask.producer_ids else ()
        plan = Plan("refresh", tuple(id_charges), at_ms=ask.at_ms)
        if not plan.ids:
            return
        self._waiting.append(RefreshRequest(PlannedAsk(ask, id_charges, plan), plan))
        self._ids += plan.ids
        while self._ids > MAX_WAITING_IDS or len(self._waiting) > MAX_WAITING:
            self._next()
        if self._working is None:
            self._working = asyncio.create_task(self._work(), name="refresh ids")

    async def close(self) -> None:
        """Wait for the current call, for at most ``CLOSE_WITHIN_S``."""
        await finish(self._working, CLOSE_WITHIN_S)

    async def _work(self) -> None:
        try:
            while self._waiting:
                now = [self._next() for _ in range(min(MAX_ASKS, len(self._waiting)))]
                came = partial(self._received, now)
                with suppress(OverloadedError):  # then the ids are dropped
                    answers, _ = await self._gatherer.decide([each.plan for each in now], came)
                    for place, answer in enumerate(answers):
                        came(place, answer)
        finally:
            self._working = None

    def _next(self) -> RefreshRequest:
        first = self._waiting.popleft()
        self._ids -= first.plan.ids
        return first

    def _received(self, asked: Sequence[RefreshRequest], place: int, answer: Answer) -> None:
        if answer.error is None:
            self._recorder.refreshed(asked[place].planned, answer)
