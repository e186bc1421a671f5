"""Refreshing the ids of asks that were refused without the store, after they were answered."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Final, NamedTuple, Protocol

from app.admission.ending import finish
from app.admission.gather import CLOSE_WITHIN_S, MAX_ASKS
from app.admission.logs import UNLOGGED, Logs
from app.admission.plan import Match, plan_of
from app.admission.queue import Late, OverloadedError
from app.domain.ask import Ask
from app.store.port import Answer, Plan, StoreError

MAX_WAITING: Final = 10_000
MAX_WAITING_IDS: Final = 200_000
"""Asks whose ids wait to be refreshed, and their ids, of 32 bytes each; beyond, the oldest are let go: who is
still in use asks again soon."""


class Waiting(NamedTuple):
    """An ask whose ids wait, the quotas that count them, and what to ask of the store."""

    ask: Ask
    matches: tuple[Match, ...]
    plan: Plan


class Decide(Protocol):
    """Makes a call; ``app.admission.gather`` does."""

    async def __call__(
        self, plans: Sequence[Plan], late: Late | None = None
    ) -> tuple[list[Answer], StoreError | None]:
        """The answers as far as they came, and the failure; those that come later go to ``late``."""


class Refresher:
    """One call at a time, beside the answers; what waits meanwhile goes together.

    Args:
        decide: makes a call; ``app.admission.gather`` does.
        logs: takes down which ids were refreshed.
    """

    def __init__(
        self,
        decide: Decide,
        logs: Logs = UNLOGGED,
    ) -> None:
        self._decide = decide
        self._logs = logs
        self._waiting: deque[Waiting] = deque()
        self._ids = 0
        self._working: asyncio.Task[None] | None = None

    def add(self, ask: Ask, matches: Sequence[Match], secret: bytes) -> None:
        """Have the ids of an ask refreshed, as far as they are seen; nothing is charged."""
        its = tuple(match for match in matches if match.applied.quota.algorithm == "producer_ids")
        plan = plan_of(ask, its, secret) if ask.producer_ids else None
        if plan is None or not plan.ids:
            return
        self._waiting.append(Waiting(ask, its, replace(plan, mode="refresh", retry=None, context=b"")))
        self._ids += plan.ids
        while self._ids > MAX_WAITING_IDS or len(self._waiting) > MAX_WAITING:
            self._next()
        if self._working is None:
            self._working = asyncio.create_task(self._work(), name="refresh ids")

    async def close(self) -> None:
        """Wait for what is under way, but not for ever."""
        await finish(self._working, CLOSE_WITHIN_S)

    async def _work(self) -> None:
        try:
            while self._waiting:
                now = [self._next() for _ in range(min(MAX_ASKS, len(self._waiting)))]
                came = partial(self._came, now)
                with suppress(OverloadedError):  # then the ids are let go
                    answers, _ = await self._decide([each.plan for each in now], came)
                    for place, answer in enumerate(answers):
                        came(place, answer)
        finally:
            self._working = None

    def _next(self) -> Waiting:
        first = self._waiting.popleft()
        self._ids -= first.plan.ids
        return first

    def _came(self, asked: Sequence[Waiting], place: int, answer: Answer) -> None:
        if answer.error is None:
            self._logs.refreshed(asked[place].ask, asked[place].matches, answer)
