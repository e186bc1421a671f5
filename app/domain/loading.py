"""Loading a history into buckets: it only adds, and is idempotent.

These are the rules of ``lua/load*.lua``, in plain Python. The current time only decides which items are too
old to count, so an interrupted and repeated load ends in the same state. No given time is later than the
bucket's.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from app.domain.producer_ids import ProducerIds
from app.domain.quota import Quota
from app.domain.sampled_rate import Sample, Samples, kept_samples
from app.domain.token_bucket import Tokens, tokens_at


@dataclass(slots=True)
class LoadResult:
    """The number of assertions by result.

    Attributes:
        added: they changed the bucket.
        there: the bucket already held as much or more.
        over: they are too old: their layers have died, or their charges and samples have left the window.
        no_room: the bucket already has as many ids or charges as it may have.
    """

    added: int = 0
    there: int = 0
    over: int = 0
    no_room: int = 0


class WrittenId(NamedTuple):
    """An id, spread over 32 bytes, with the time of its last write and the beginning of the written layer."""

    spread: bytes
    at_ms: int
    layer_ms: int


class Charges(NamedTuple):
    """The number of ids charged at one time."""

    at_ms: int
    ids: int


def load_ids(
    state: ProducerIds, ids: Sequence[WrittenId], now_ms: int, quota: Quota, max_ids: int
) -> LoadResult:
    """Remember ids at least as long as the asserted write would have.

    An id goes to the oldest live layer that was open at that write or began after it, so that it is not
    forgotten too early. Without such a layer, a new one begins when the asserted layer did. An id that is
    already in such a layer stays there.
    """
    loaded, layers = LoadResult(), quota.layers
    for id_ in ids:
        begins = max(id_.layer_ms, id_.at_ms - layers.interval_ms + 1)
        if now_ms - begins >= layers.ttl_ms:
            loaded.over += 1
            continue
        place = state.find(id_.spread, now_ms, layers)
        if place is not None and id_.at_ms - state.layers[place.layer] < layers.interval_ms:
            loaded.there += 1
            continue
        if place is None and state.remembered(now_ms, layers) >= max_ids:
            loaded.no_room += 1
            continue
        live = state.live_layers(now_ms, layers)
        number = next((n for n in live if id_.at_ms - state.layers[n] < layers.interval_ms), None)
        if live:
            begins = max(begins, state.layers[live[-1]] + layers.interval_ms)
        state.write_to(number, begins, id_.spread, place, now_ms, layers, quota.limit, max_ids)
        loaded.added += 1
    return loaded


def load_charges(
    state: ProducerIds, charges: Sequence[Charges], now_ms: int, quota: Quota, max_ids: int
) -> LoadResult:
    """Take the larger number of charges at each time; if there is no room for all, add the newest."""
    window_ms = quota.window_ms
    loaded, missing = LoadResult(), []
    for at_ms, ids in charges:
        if now_ms - at_ms >= window_ms:
            loaded.over += ids
            continue
        there = bisect_right(state.charges, at_ms) - bisect_left(state.charges, at_ms)
        loaded.there += min(there, ids)
        missing += [at_ms] * (ids - there)
    room = max(max_ids - state.charged(now_ms, window_ms), 0)
    added = missing[-room:] if room else []
    loaded.added, loaded.no_room = len(added), len(missing) - len(added)
    if added:
        alive = [at for at in state.charges if now_ms - at < window_ms]
        state.charges = sorted([*alive, *added])
        state.capacity = state.room(len(state.charges), quota.limit, max_ids)
    return loaded


def load_samples(state: Samples, samples: Samples, now_ms: int, quota: Quota) -> tuple[Samples, LoadResult]:
    """Merge samples: of two that began at the same time, take the larger sum and the later event.

    Samples of two histories may overlap. Each sample lives at least as long as all that began
    before it, as in any bucket.
    """
    loaded, by_start = LoadResult(), {sample.start_ms: sample for sample in state}
    for sample in samples:
        if now_ms - sample.last_ms >= kept_samples(quota.samples) * quota.sample_ms:
            loaded.over += 1
            continue
        old = by_start.get(sample.start_ms)
        new = sample
        if old is not None:
            new = Sample(max(old.value, sample.value), old.start_ms, max(old.last_ms, sample.last_ms))
        loaded.added += new != old
        loaded.there += new == old
        by_start[sample.start_ms] = new
    if not loaded.added:
        return state, loaded
    merged, last_ms = [], min(sample.last_ms for sample in by_start.values())
    for start in sorted(by_start):
        last_ms = max(last_ms, by_start[start].last_ms)
        merged.append(by_start[start]._replace(last_ms=last_ms))
    return tuple(merged), loaded


def load_tokens(
    state: Tokens | None, tokens: Tokens, now_ms: int, quota: Quota
) -> tuple[Tokens | None, LoadResult]:
    """Take the smaller of two levels at the later of their times; from then on both refill alike."""
    limit, burst = quota.limit, quota.burst
    if tokens_at(tokens, now_ms, limit, burst) >= burst:
        return state, LoadResult(over=1)
    at_ms = tokens.at_ms if state is None else max(state.at_ms, tokens.at_ms)
    level = tokens_at(tokens, at_ms, limit, burst)
    if state is not None and tokens_at(state, at_ms, limit, burst) <= level:
        return state, LoadResult(there=1)
    return Tokens(level, at_ms), LoadResult(added=1)
