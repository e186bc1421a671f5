"""Refreshes the seen producer ids of asks that were refused without the store, after the answer was sent."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Final, NamedTuple

from msgspec.structs import replace

from app.admission.ending import finish
from app.admission.errors import OverloadedError
from app.admission.gather import CLOSE_WITHIN_S, MAX_ASKS, Gathering
from app.admission.logs import UNLOGGED, Logs
from app.admission.plan import Match, plan_of
from app.domain.ask import Ask
from app.store.encoding import decode_answer
from app.store.port import PackedAnswer, Plan

MAX_WAITING: Final = 10_000
MAX_WAITING_IDS: Final = 200_000
"""How many asks may wait to be refreshed, and how many ids of 32 bytes each. Beyond that the oldest are
dropped: an id that is still in use will be asked for again soon."""


class RefreshRequest(NamedTuple):
    """An ask whose ids are to be refreshed, the quotas that count them, and the plan for the store."""

    ask: Ask
    matches: tuple[Match, ...]
    plan: Plan


class Refresher:
    """Refreshes ids in the background, in one call of up to 100 asks at a time.

    Args:
        gatherer: sends the calls.
        logs: receives which ids were refreshed.
    """

    def __init__(
        self,
        gatherer: Gathering,
        logs: Logs = UNLOGGED,
    ) -> None:
        self._gatherer = gatherer
        self._logs = logs
        self._waiting: deque[RefreshRequest] = deque()
        self._ids = 0
        self._working: asyncio.Task[None] | None = None

    def add(self, ask: Ask, matches: Sequence[Match], secret: bytes) -> None:
        """Schedule a refresh of the seen ids of an ask; nothing is charged."""
        its = tuple(match for match in matches if match.applied.quota.algorithm == "producer_ids")
        plan = plan_of(ask, its, secret) if ask.producer_ids else None
        if plan is None or not plan.ids:
            return
        self._waiting.append(RefreshRequest(ask, its, replace(plan, mode="refresh", retry=None, context=b"")))
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
                came = partial(self._came, now)
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

    def _came(self, asked: Sequence[RefreshRequest], place: int, packed: PackedAnswer) -> None:
        answer = decode_answer(packed)
        if answer.error is None:
            self._logs.refreshed(asked[place].ask, asked[place].matches, answer)
