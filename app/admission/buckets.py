"""Buckets as operators see them: how they stand, which looking does not change, and emptied at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from app.admission.admission import Snapshot
from app.admission.plan import Match, plan_of
from app.domain.bucket import BucketName
from app.domain.ladder import Rules
from app.store.keys import bucket_key
from app.store.port import Answer, Plan, Said, StoreError

WITHIN_S: Final = 3.0
"""How long an operator waits for a look at a bucket, which has no policy to be answered by."""


class Counters(Protocol):
    """Where buckets are; ``app.admission.circuit`` stands before it."""

    async def decide(self, plans: Sequence[Plan]) -> list[Answer]:
        """Decide plans in order in one call, or raise ``StoreError``."""

    async def forget(self, keys: Sequence[bytes]) -> int | None:
        """Remove buckets in one call, all or none, or raise ``StoreError``; its place in the log's order."""


@dataclass(frozen=True, slots=True)
class Standing:
    """How a bucket of one quota stands; what does not fit its algorithm is None.

    Attributes:
        observed, remaining: as the detail of a peek shows them.
        tokens: of a token bucket; negative in debt.
        layers: of producer ids, how many live layers their filter has.
        fill: of producer ids, how full the newest segment's part of the newest layer is.
        remembered_ids: how many ids the live layers hold.
        charged_ids: how many ids were charged in the trailing window.
    """

    bucket: str
    quota: str
    observed: float
    remaining: float
    tokens: float | None
    layers: int | None
    fill: float | None
    remembered_ids: int | None
    charged_ids: int | None


class Buckets:
    """Shows and empties the buckets of the quotas in force.

    Args:
        snapshot: gives the quotas in force.
    """

    def __init__(self, counters: Counters, snapshot: Callable[[], Snapshot], rules: Rules) -> None:
        self._counters = counters
        self._snapshot = snapshot
        self._rules = rules

    def named(self, text: str) -> BucketName:
        """Read a name.

        Raises:
            EntityError: no bucket can have it.
        """
        return BucketName.parse(text, self._rules)

    async def standing(self, bucket: BucketName, key: str | None, at_ms: int | None) -> list[Standing]:
        """How a bucket stands for each quota that charges it, or for the one of a key, in the order of keys.

        Raises:
            StoreError: the store is away, or cannot read the bucket.
        """
        charging = self._charging(bucket, key)
        plan = plan_of(bucket.peek(at_ms), charging, b"")  # no id is named, so none is hashed
        if plan is None:
            return []
        try:
            async with asyncio.timeout(WITHIN_S):
                (answer,) = await self._counters.decide([plan])
        except TimeoutError:
            raise StoreError("timeout", f"it did not reply within {WITHIN_S:.0f} s") from None
        if answer.error is not None:
            raise answer.error
        return [_standing(match, said) for match, said in zip(charging, answer.said, strict=True)]

    async def empty(self, bucket: BucketName, key: str | None) -> tuple[list[str], int | None]:
        """Empty a bucket for each quota that charges it, or for the one of a key, all at once.

        Returns:
            the quota keys, and the place of it in the order of what is logged.

        Raises:
            StoreError: the store is away.
        """
        charging = self._charging(bucket, key)
        order = await self._counters.forget([match.key for match in charging])
        return [match.applied.quota.key for match in charging], order

    def _charging(self, bucket: BucketName, key: str | None) -> list[Match]:
        found = bucket.charged_by(self._snapshot().quotas, self._rules)
        return [Match(each, bucket_key(each)) for each in found if key in (None, each.quota.key)]


def _standing(match: Match, said: Said) -> Standing:
    quota = match.applied.quota
    has_ids, has_tokens = quota.algorithm == "producer_ids", quota.algorithm == "token_bucket"
    return Standing(
        bucket=match.applied.bucket,
        quota=quota.key,
        observed=said.observed,
        remaining=said.remaining,
        tokens=said.remaining if has_tokens else None,
        layers=said.layers if has_ids else None,
        fill=(said.fill if said.layers else 0.0) if has_ids else None,  # a dead layer holds nothing
        remembered_ids=said.remembered if has_ids else None,
        charged_ids=int(said.observed) if has_ids else None,
    )
