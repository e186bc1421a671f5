"""The state of a bucket for operators, read without a change, and the reset of buckets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from app.admission.compiled import charge_of
from app.admission.plan import plan_of
from app.catalog.snapshot import Snapshot
from app.domain.bucket import BucketName
from app.domain.ladder import MatchingRules
from app.domain.quota import Quota
from app.store.encoding import answers_of
from app.store.port import Charge, ChargeResult, IdsResult, LiveLayer, StoreCalls, StoreError

SLACK_MS: Final = 60_000

WITHIN_S: Final = 3.0
"""How long to wait for the store; unlike a decision, this request has no fallback."""


@dataclass(frozen=True, slots=True)
class BucketStatus:
    """The state of the bucket of one quota; a field that does not fit its algorithm holds None.

    Attributes:
        observed, remaining: as in the detail of a peek.
        tokens: for a token bucket; negative in debt.
        layers: for producer ids, the number of live layers of the filter.
        live_layers: for producer ids, these layers, oldest first.
        fill: for producer ids, the fill of the newest segment in the newest layer.
        remembered_ids: how many ids the live layers hold together.
        charged_ids: how many ids were charged in the trailing window.
    """

    bucket: str
    quota: str
    observed: float
    remaining: float
    tokens: float | None
    layers: int | None
    live_layers: list[LiveLayer] | None
    fill: float | None
    remembered_ids: int | None
    charged_ids: int | None


class Buckets:
    """Shows and resets the buckets of the quotas in force.

    Args:
        snapshot: returns the quotas in force.
        forgot: called with the keys of buckets that were reset, or may have been.
    """

    def __init__(
        self,
        store: StoreCalls,
        snapshot: Callable[[], Snapshot],
        rules: MatchingRules,
        forgot: Callable[[Sequence[bytes]], None] = lambda _: None,
    ) -> None:
        self._forgot = forgot
        self._store = store
        self._snapshot = snapshot
        self._rules = rules

    def parse(self, text: str) -> BucketName:
        """Parse the name of a bucket.

        Raises:
            EntityError: no bucket can have it.
        """
        return BucketName.parse(text, self._rules)

    async def status(self, bucket: BucketName, key: str | None, at_ms: int | None) -> list[BucketStatus]:
        """Return the state of a bucket for each quota that charges it, or for one quota key, sorted by key.

        Raises:
            StoreError: the store is not available, or cannot read the bucket.
        """
        charging = self._charging(bucket, key)
        plan = plan_of(bucket.peek(at_ms), charging, b"")
        if plan is None:
            return []
        try:
            async with asyncio.timeout(WITHIN_S):
                (answer,) = await answers_of(self._store, [plan])
                if answer.error is not None:
                    raise answer.error
                now_ms = answer.at_ms if at_ms is None else at_ms
                return [
                    await self._status(charge, result, now_ms)
                    for charge, result in zip(charging, answer.results, strict=True)
                ]
        except TimeoutError:
            raise StoreError("timeout", f"it did not reply within {WITHIN_S:.0f} s") from None

    async def _status(self, charge: Charge, result: ChargeResult, now_ms: int) -> BucketStatus:
        """The state of a bucket from a peek at it, and from its layers if it has some."""
        quota, live, fill, charged = charge.quota, None, None, None
        if isinstance(result, IdsResult):
            live = await self._store.live_layers(charge.key, now_ms, quota.layers.ttl_ms)
            fill = result.fill if live else 0.0  # a dead layer holds nothing
            charged = int(result.observed)
        return BucketStatus(
            bucket=charge.bucket,
            quota=quota.key,
            observed=result.observed,
            remaining=result.remaining,
            tokens=result.remaining if quota.algorithm == "token_bucket" else None,
            # of one read, so that they agree while others write
            layers=None if live is None else len(live),
            live_layers=live,
            fill=fill,
            remembered_ids=None if live is None else sum(layer.ids for layer in live),
            charged_ids=charged,
        )

    async def reset(self, bucket: BucketName, key: str | None) -> tuple[list[str], int | None]:
        """Reset a bucket for each quota that charges it, or for one quota key, in one call.

        Returns:
            the quota keys, and the position in the order of the decision log.

        Raises:
            StoreError: the store is not available.
        """
        charging = self._charging(bucket, key)
        known_ms = {charge.key: _known_ms(charge.quota) for charge in charging if charge.compiled.counts_ids}
        try:
            order = await self._store.forget([charge.key for charge in charging], known_ms)
        finally:
            self._forgot(list(known_ms))
        return [charge.quota.key for charge in charging], order

    def _charging(self, bucket: BucketName, key: str | None) -> list[Charge]:
        ask = bucket.peek()
        return [
            charge_of(each, ask)
            for each in bucket.charged_by(self._snapshot().quotas, self._rules)
            if key in (None, each.quota.key)
        ]


def _known_ms(quota: Quota) -> int:
    """How long a node may know an id of a bucket: the longer of layer lifetime and window, plus slack."""
    return max(quota.window_ms, quota.layers.ttl_ms) + SLACK_MS
