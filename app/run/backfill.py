"""Putting a folder of assertions into the store, at a bounded rate, beside live traffic."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Final, TypeVar, cast

from app.catalog.catalog import Catalog
from app.domain.assertion import Assertion, identity_of
from app.domain.bucket import BucketName
from app.domain.digest import fingerprint
from app.domain.entity import EntityError
from app.domain.ladder import Applied, Quotas, Rules
from app.domain.loading import Charges, Loaded
from app.domain.sampled_rate import Sample
from app.domain.token_bucket import Tokens
from app.run.assertions import Folder
from app.run.errors import CannotRun
from app.run.load_log import LoadLog, LogFull
from app.store.loading import MOST_AT_ONCE, Items, Load, Loader, written_id
from app.store.port import StoreError

T = TypeVar("T")

BUCKETS_AT_ONCE: Final = 100
AHEAD_MS: Final = 5_000
"""As far as this the assertions may be ahead of the store's clock: it is waited for."""
PAUSES_S: Final = (0.1, 0.3, 1.0, 3.0, 10.0)
"""Between attempts at one call: a store that fails over, or loads its file, is soon back."""

NO_QUOTA: Final = "no quota charges the bucket"
EMPTIED: Final = "the bucket was emptied since by a change of its quota"
NO_BUCKET: Final = "no bucket can have the name"

Call = tuple[list[Load], int]
"""What goes into one call, and the assertions that are done with it and before."""


@dataclass(slots=True)
class Tally:
    """What became of all assertions; charges are counted one by one."""

    loaded: Loaded = field(default_factory=Loaded)
    skipped: Counter[str] = field(default_factory=Counter)

    def add(self, loaded: Loaded) -> None:
        """Count what one call did."""
        self.loaded.added += loaded.added
        self.loaded.there += loaded.there
        self.loaded.over += loaded.over
        self.loaded.no_room += loaded.no_room


class Resolved:
    """Which quota of those in force charges a bucket; of a run of the same bucket it is looked for once."""

    def __init__(self, quotas: Callable[[], Quotas], rules: Rules, tally: Tally) -> None:
        self._quotas, self._rules, self._tally = quotas, rules, tally

    def load_of(self, assertions: Sequence[Assertion]) -> Load | None:
        """What these assertions of one bucket and kind are to the store; None if they are skipped."""
        first = assertions[0]
        found = self._applied(first.quota, first.bucket)
        if isinstance(found, Applied) and first.identity not in {None, identity_of(found.quota)}:
            found = EMPTIED
        if isinstance(found, str):
            self._tally.skipped[found] += len(assertions)
            return None
        return Load(found, _items(sorted(assertions, key=lambda one: one.at_ms)))

    def _applied(self, quota: str, bucket: str) -> Applied | str:
        try:
            name = BucketName.parse(bucket, self._rules)
        except EntityError:
            return NO_BUCKET
        charging = name.charged_by(self._quotas(), self._rules)
        return next((found for found in charging if found.quota.key == quota), NO_QUOTA)


def calls(parts: Iterator[list[Assertion]], done: int, resolved: Resolved) -> Iterator[Call]:
    """The assertions as calls: a bounded number of buckets and of assertions in each."""
    loads: list[Load] = []
    waiting = 0
    for part in parts:
        for _, group in groupby(part, key=lambda one: (one.quota, one.bucket, one.identity, one.kind)):
            assertions = list(group)
            while assertions:
                taken = assertions[: MOST_AT_ONCE - waiting]
                assertions = assertions[len(taken) :]
                if load := resolved.load_of(taken):
                    loads.append(load)
                waiting += len(taken)
                done += len(taken)
                if waiting == MOST_AT_ONCE or len(loads) == BUCKETS_AT_ONCE:
                    yield loads, done
                    loads, waiting = [], 0
    yield loads, done


async def load(
    folder: Folder,
    catalog: Catalog,
    loader: Loader,
    rules: Rules,
    *,
    rate: float,
    progress: Callable[[int], None],
    log: LoadLog | None = None,
) -> Tally:
    """Put what is asserted into the store; what an earlier run had done is not done again.

    Args:
        rate: assertions a second, at most.
        progress: told how many assertions are done.
        log: takes down which buckets are loaded; None if nothing is logged.

    Raises:
        CannotRun: the assertions do not fit this deployment, or the store is away for too long, or the
            log full.
    """
    if folder.secret not in {None, fingerprint(catalog.hash_secret)}:
        raise CannotRun("the ids were hashed with another secret than this deployment's: nothing was loaded")
    await _until(folder.at_ms, loader)
    tally = Tally()
    done = await _insist(loader.done)
    progress(done)
    resolved = Resolved(lambda: catalog.snapshot.quotas, rules, tally)
    clock = asyncio.get_running_loop().time
    due = clock()
    for loads, upto in calls(folder.read(done), done, resolved):
        await asyncio.sleep(due - clock())
        due = max(due, clock()) + sum(len(each.items) for each in loads) / rate
        if loads and log is not None:
            batch = await _insist(partial(log.told, loads))
            await _insist(partial(log.leave, *batch))
        if loads:
            for loaded in await _insist(partial(loader.load, loads, upto)):
                tally.add(loaded)
        progress(upto)
    await _insist(loader.finish)
    return tally


async def _until(at_ms: int, loader: Loader) -> None:
    """Wait until the store's clock has come to a moment that is near."""
    ahead_ms = at_ms - await _insist(loader.now_ms)
    if ahead_ms > AHEAD_MS:
        raise CannotRun(f"the assertions are of a moment {ahead_ms / 1000:.1f} s ahead of the store's clock")
    await asyncio.sleep(max(ahead_ms, 0) / 1000)


async def _insist(call: Callable[[], Awaitable[T]]) -> T:
    """Make a call until the store answers it; a load twice is as once.

    Raises:
        CannotRun: it does not, for longer than a failover takes.
    """
    for pause_s in (*PAUSES_S, None):
        try:
            return await call()
        except (StoreError, LogFull) as error:
            if pause_s is None:
                why = error if isinstance(error, LogFull) else f"the store is away: {error}"
                raise CannotRun(f"{why}; the same command goes on where it was") from None
            await asyncio.sleep(pause_s)
    raise AssertionError("the last attempt answers or raises")


def _items(assertions: Sequence[Assertion]) -> Items:
    """Assertions of one kind, as the store takes them; what their kind needs is there (``Folder``)."""
    match assertions[0].kind:
        case "id":
            return [written_id(cast("int", a.digest), a.at_ms, cast("int", a.layer_ms)) for a in assertions]
        case "charge":
            return [Charges(a.at_ms, int(cast("float", a.value))) for a in assertions]
        case "sample":
            return [Sample(cast("float", a.value), a.at_ms, cast("int", a.last_ms)) for a in assertions]
        case "tokens":
            return [Tokens(cast("float", a.value), a.at_ms) for a in assertions]
