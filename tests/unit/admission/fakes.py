"""What several tests of admission share: quotas for everyone, and a fake store that is never silent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from app.admission.plan import Match, matches_of
from app.domain.ask import Ask
from app.domain.entity import ANY, Entity
from app.domain.ladder import MatchingRules
from app.domain.quota import Quota
from app.store.port import NONE_KNOWN, Answer, Came, Fault, Plan, Store, StoreError
from tests.packed import packed

EVERYONE = Entity.of(user=ANY)
IDS = Quota("producer_ids_rate", 5, "producer_ids", "deny")
RATE = Quota("request_rate", 5, "sampled_rate", "deny")


def matches_for(ask: Ask, *quotas: Quota) -> tuple[Match, ...]:
    """Return those of these quotas, each set for everyone, that apply to an ask."""
    return matches_of(ask, {quota.key: {EVERYONE: quota} for quota in quotas}, MatchingRules())


class PromptStore(Store):
    """A fake store that only decides; a test says how."""

    lost: Callable[[StoreError], None]

    def answers(self, plans: Sequence[Plan]) -> list[Answer]:
        """Return the answers of a call.

        Raises:
            StoreError: the call fails.
        """
        raise NotImplementedError

    def ask(self, plans: Sequence[Any], done: Came) -> None:
        came: list[Any] | StoreError
        try:
            came = [packed(answer) for answer in self.answers(plans)]
        except StoreError as error:
            came = error
        asyncio.get_running_loop().call_soon(done, came)

    def silent_since(self) -> float | None:
        return None

    def give_up(self, error: StoreError) -> None:
        raise AssertionError(error)

    async def forget(self, keys: Sequence[bytes], known_ms: Mapping[bytes, int] = NONE_KNOWN) -> int | None:
        raise AssertionError(keys)

    async def examine(self) -> tuple[Fault, ...]:
        return ()

    async def close(self) -> None: ...
