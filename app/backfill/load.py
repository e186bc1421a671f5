"""Loads a folder of assertions into the store, at a bounded rate, while the store serves live traffic."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, field
from functools import partial
from itertools import groupby
from operator import add
from typing import Final, TypeVar, cast

from app.backfill.assertions import AssertionFolder
from app.backfill.errors import LogFullError
from app.backfill.log import LoadLog
from app.catalog.catalog import Catalog
from app.domain.assertion import Assertion, identity_of
from app.domain.bucket import BucketName
from app.domain.digest import fingerprint
from app.domain.errors import EntityError
from app.domain.ladder import AppliedQuota, MatchingRules, Quotas
from app.domain.loading import Charges, LoadResult
from app.domain.sampled_rate import Sample
from app.domain.token_bucket import Tokens
from app.node.errors import CommandError
from app.store.loading import MOST_AT_ONCE, Items, Load, Loader, written_id
from app.store.port import StoreError

T = TypeVar("T")

BUCKETS_AT_ONCE: Final = 100
AHEAD_MS: Final = 5_000
"""How far the assertions may be ahead of the store's clock; the load waits that long."""
PAUSES_S: Final = (0.1, 0.3, 1.0, 3.0, 10.0)
"""Pauses between the attempts of one call, long enough for a failover or a restart of the store."""

NO_QUOTA: Final = "no quota charges the bucket"
EMPTIED: Final = "the bucket was emptied since by a change of its quota"
NO_BUCKET: Final = "no bucket can have the name"

CallBatch = tuple[list[Load], int]
"""The loads of one call, and the number of assertions done once it has succeeded."""


@dataclass(slots=True)
class LoadCounts:
    """The number of assertions by result; charges are counted one by one."""

    loaded: LoadResult = field(default_factory=LoadResult)
    skipped: Counter[str] = field(default_factory=Counter)

    def add(self, result: LoadResult) -> None:
        """Add the result for one bucket."""
        self.loaded = LoadResult(*map(add, astuple(self.loaded), astuple(result)))


class QuotaResolver:
    """Finds the quota in force that charges a bucket."""

    def __init__(self, quotas: Callable[[], Quotas], rules: MatchingRules, counts: LoadCounts) -> None:
        self._quotas, self._rules, self._counts = quotas, rules, counts

    def load_of(self, assertions: Sequence[Assertion]) -> Load | None:
        """Return assertions of one bucket and kind as a load; None if they are skipped and counted."""
        first = assertions[0]
        applied = self._applied(first.quota, first.bucket)
        if isinstance(applied, AppliedQuota) and first.identity not in {None, identity_of(applied.quota)}:
            applied = EMPTIED
        if isinstance(applied, str):
            self._counts.skipped[applied] += len(assertions)
            return None
        return Load(applied, _items(sorted(assertions, key=lambda one: one.at_ms)))

    def _applied(self, quota: str, bucket: str) -> AppliedQuota | str:
        """Return the quota that charges the bucket, or the reason why no quota does."""
        try:
            name = BucketName.parse(bucket, self._rules)
        except EntityError:
            return NO_BUCKET
        charging = name.charged_by(self._quotas(), self._rules)
        return next((applied for applied in charging if applied.quota.key == quota), NO_QUOTA)


def call_batches(parts: Iterator[list[Assertion]], done: int, resolver: QuotaResolver) -> Iterator[CallBatch]:
    """Group assertions into calls, each with a bounded number of buckets and assertions."""
    loads: list[Load] = []
    size = 0
    for part in parts:
        for _, group in groupby(part, key=lambda one: (one.quota, one.bucket, one.identity, one.kind)):
            assertions = list(group)
            while assertions:
                taken = assertions[: MOST_AT_ONCE - size]
                assertions = assertions[len(taken) :]
                if load := resolver.load_of(taken):
                    loads.append(load)
                size += len(taken)
                done += len(taken)
                if size == MOST_AT_ONCE or len(loads) == BUCKETS_AT_ONCE:
                    yield loads, done
                    loads, size = [], 0
    yield loads, done


async def load(
    folder: AssertionFolder,
    catalog: Catalog,
    loader: Loader,
    rules: MatchingRules,
    *,
    rate: float,
    progress: Callable[[int], None],
    log: LoadLog | None = None,
) -> LoadCounts:
    """Load the assertions into the store; continue where an interrupted run stopped.

    Args:
        rate: the most assertions a second.
        progress: called with the number of assertions done.
        log: gets the loaded buckets; None if nothing is logged.

    Raises:
        CommandError: the assertions belong to another deployment, or the store is unreachable or the log full
            for too long.
    """
    if folder.secret not in {None, fingerprint(catalog.hash_secret)}:
        raise CommandError(
            "the ids were hashed with a secret that is not this deployment's; nothing was loaded"
        )
    await _wait_until(folder.at_ms, loader)
    counts = LoadCounts()
    done = await _retry(loader.done)
    progress(done)
    resolver = QuotaResolver(lambda: catalog.snapshot.quotas, rules, counts)
    clock = asyncio.get_running_loop().time
    due = clock()
    for loads, upto in call_batches(folder.read(done), done, resolver):
        await asyncio.sleep(due - clock())
        due = max(due, clock()) + sum(len(each.items) for each in loads) / rate
        if loads and log is not None:
            batch = await _retry(partial(log.batch, loads))
            await _retry(partial(log.append, *batch))
        if loads:
            for result in await _retry(partial(loader.load, loads, upto)):
                counts.add(result)
        progress(upto)
    await _retry(loader.finish)
    return counts


async def _wait_until(at_ms: int, loader: Loader) -> None:
    """Wait until the store's clock reaches the time, which must be near."""
    ahead_ms = at_ms - await _retry(loader.now_ms)
    if ahead_ms > AHEAD_MS:
        raise CommandError(
            f"the assertions are for a time {ahead_ms / 1000:.1f} s ahead of the store's clock"
        )
    await asyncio.sleep(max(ahead_ms, 0) / 1000)


async def _retry(call: Callable[[], Awaitable[T]]) -> T:
    """Repeat a call until it succeeds; loading twice has the same result as once.

    Raises:
        CommandError: the call failed for longer than a failover takes.
    """
    for pause_s in (*PAUSES_S, None):
        try:
            return await call()
        except (StoreError, LogFullError) as error:
            if pause_s is None:
                why = error if isinstance(error, LogFullError) else f"the store is unreachable: {error}"
                raise CommandError(f"{why}; run the same command again to continue") from None
            await asyncio.sleep(pause_s)
    raise AssertionError("the last attempt answers or raises")


def _items(assertions: Sequence[Assertion]) -> Items:
    """Assertions of one kind as the store takes them; ``AssertionFolder`` has checked their fields."""
    match assertions[0].kind:
        case "id":
            return [written_id(cast("int", a.digest), a.at_ms, cast("int", a.layer_ms)) for a in assertions]
        case "charge":
            return [Charges(a.at_ms, int(cast("float", a.value))) for a in assertions]
        case "sample":
            return [Sample(cast("float", a.value), a.at_ms, cast("int", a.last_ms)) for a in assertions]
        case "tokens":
            return [Tokens(cast("float", a.value), a.at_ms) for a in assertions]
