"""Producer ids: the exact count, how long an id is remembered, waits, capacity."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.domain.digest import digest, spread
from app.domain.producer_ids import ProducerIds
from app.domain.quota import LAYER_POLICIES, Layers
from app.domain.shape import LAYERS

WINDOW = 1_200
REMEMBERED = {"layered": WINDOW, "kip936": WINDOW * 3 // 4, "timed": WINDOW // 2}
POLICIES = st.sampled_from(list(LAYER_POLICIES))
GAPS = st.one_of(
    st.integers(0, WINDOW), st.sampled_from((0, 1, 299, 300, 301, 399, 400, 401, WINDOW - 1, WINDOW))
)


@cache
def an_id(number: int) -> bytes:
    return spread(digest(b"s" * 32, "alice", number))


def sight(state: ProducerIds, spread_: bytes, now: int, layers: Layers, max_ids: int = 10_000) -> bool:
    """Record an id, and return whether it had been seen."""
    if state.find(spread_, now, layers):
        state.refresh(spread_, now, layers, 100, max_ids)
        return True
    state.charge([spread_], now, WINDOW, layers, 100, max_ids)
    return False


@given(POLICIES, st.lists(st.tuples(GAPS, st.integers(0, 3)), min_size=1, max_size=25), st.data())
def test_id_is_remembered_long_enough_after_it_was_last_seen(
    policy: str, sights: list[tuple[int, int]], data: st.DataObject
):
    """With any other ids in between, and wherever in its layer the id was last seen."""
    layers = Layers.named(policy, WINDOW)
    state, now = ProducerIds(), 5_000
    last: dict[int, int] = {}
    for gap, number in sights:
        now += gap
        seen = sight(state, an_id(number), now, layers)
        if number in last and now - last[number] <= REMEMBERED[policy]:
            assert seen, (number, now - last[number])
        last[number] = now
    later = data.draw(st.integers(0, REMEMBERED[policy]))
    assert state.find(an_id(sights[-1][1]), now + later, layers)


@pytest.mark.parametrize(("policy", "dies"), [("layered", 4 / 3), ("kip936", 1.0), ("timed", 1.5)])
def test_id_dies_with_its_layer(policy: str, dies: float):
    layers = Layers.named(policy, WINDOW)
    state = ProducerIds()
    sight(state, an_id(0), 0, layers)
    ttl = round(WINDOW * dies)
    assert state.find(an_id(0), ttl - 1, layers)
    assert state.find(an_id(0), ttl, layers) is None
    assert state.live_layers(ttl, layers) == []


@given(POLICIES, st.lists(st.tuples(GAPS, st.integers(1, 9)), max_size=20), st.integers(0, 2 * WINDOW))
def test_count_of_charged_ids_is_exact(policy: str, charges: list[tuple[int, int]], later: int):
    layers = Layers.named(policy, WINDOW)
    state, now, made, number = ProducerIds(), 0, [], 0
    for gap, many in charges:
        now += gap
        state.charge([an_id(number + n) for n in range(many)], now, WINDOW, layers, 100, 10_000)
        made += [now] * many
        number += many
        assert state.charged(now, WINDOW) == sum(now - at < WINDOW for at in made)
        assert len(state.live_layers(now, layers)) <= LAYERS
    assert state.charged(now + later, WINDOW) == sum(now + later - at < WINDOW for at in made)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 4)), min_size=1, max_size=15), st.data())
def test_wait_for_the_rate_is_the_least(charges: list[tuple[int, int]], data: st.DataObject):
    window = 60
    layers = Layers.named("layered", window)
    state, now = ProducerIds(), 0
    for gap, many in charges:
        now += gap
        state.charge([an_id(n) for n in range(many)], now, window, layers, 100, 10_000)
    alive = state.charged(now, window)
    limit = data.draw(st.integers(1, alive))
    unseen = data.draw(st.integers(limit - alive + 1 if limit > alive else 1, limit))
    if alive + unseen <= limit:
        return
    wait = state.wait_for_rate(unseen, now, limit, window)
    least = next(d for d in range(1, 2 * window) if state.charged(now + d, window) + unseen <= limit)
    assert wait == least


@given(POLICIES, st.lists(st.tuples(GAPS, st.integers(0, 200)), min_size=1, max_size=60))
def test_remembered_ids_stay_within_the_cap(policy: str, sights: list[tuple[int, int]]):
    layers = Layers.named(policy, WINDOW)
    state, now = ProducerIds(), 0
    for gap, number in sights:
        now += gap // 8
        sight(state, an_id(number), now, layers, max_ids=20)
        remembered = state.remembered(now, layers)
        assert remembered <= 20
        if remembered:
            wait = state.wait_for_capacity(now, layers)
            least = next(d for d in range(1, 3 * WINDOW) if state.remembered(now + d, layers) < remembered)
            assert wait == least


def test_new_segment_keeps_every_id_and_counts_each_once():
    layers = Layers.named("layered", WINDOW)
    state = ProducerIds()
    for number in range(1_000):
        assert not sight(state, an_id(number), 0, layers)
    assert [segment.shape.ids for segment in state.segments] == [34, 100, 400, 1_600]
    assert state.remembered(0, layers) == 1_000
    assert all(sight(state, an_id(number), 1, layers) for number in range(1_000))
    assert state.charged(1, WINDOW) == state.remembered(1, layers) == 1_000


def test_move_keeps_every_age():
    layers = Layers.named("layered", WINDOW)
    state = ProducerIds()
    sight(state, an_id(0), 10_000, layers)
    state.move(-9_000)
    assert state.newest_ms == 1_000
    assert state.find(an_id(0), 1_000 + WINDOW, layers)
    assert (state.charged(1_000 + WINDOW - 1, WINDOW), state.charged(1_000 + WINDOW, WINDOW)) == (1, 0)


def test_newest_time_of_a_bucket_is_that_of_its_last_charge():
    """The second id is charged, but not remembered: one id may be remembered."""
    layers = Layers.named("layered", WINDOW)
    state = ProducerIds()
    newest = [state.newest_ms]
    for now in (1_000, 1_100):
        state.charge([an_id(now)], now, WINDOW, layers, 100, 1)
        newest.append(state.newest_ms)
    assert newest == [None, 1_000, 1_100]


def test_fill_is_the_part_of_the_newest_segment_that_is_used():
    layers = Layers.named("layered", WINDOW)
    state = ProducerIds()
    assert state.fill() == 0
    fills = []
    for number in range(34):  # as many as the first segment of this limit holds
        state.charge([an_id(number)], 0, WINDOW, layers, 100, 1_000)
        fills.append(state.fill())
    assert (fills[0], fills[16], fills[33]) == (1 / 34, 0.5, 1.0)


def test_id_is_stale_in_the_next_layer_until_it_is_refreshed():
    layers = Layers.named("layered", WINDOW)
    state = ProducerIds()
    state.charge([an_id(0)], 0, WINDOW, layers, 100, 1_000)
    assert [state.stale(an_id(0), now, layers) for now in (0, 399, 400)] == [False, False, True]
    state.refresh(an_id(0), 400, layers, 100, 1_000)
    assert not state.stale(an_id(0), 400, layers)


@pytest.mark.parametrize("there", [33, 34])
def test_full_store_remembers_ids_as_long_as_their_layer_has_room(there: int):
    """The first segment of this limit has room for 34 ids in each layer."""
    layers = Layers.named("layered", WINDOW)
    state = ProducerIds()
    state.charge([an_id(n) for n in range(there)], 0, WINDOW, layers, 100, 1_000)
    state.charge([an_id(34)], 1, WINDOW, layers, 100, 1_000, full=True)
    assert (state.find(an_id(34), 1, layers) is not None) == (there < 34)
    assert len(state.segments) == 1


@pytest.mark.parametrize("there", [33, 34])
def test_full_store_refreshes_ids_as_long_as_their_layer_has_room(there: int):
    layers = Layers.named("layered", WINDOW)
    state = ProducerIds()
    state.charge([an_id(34)], 0, WINDOW, layers, 100, 1_000)
    state.charge([an_id(n) for n in range(there)], 400, WINDOW, layers, 100, 1_000)
    state.refresh(an_id(34), 500, layers, 100, 1_000, full=True)
    assert state.stale(an_id(34), 500, layers) == (there == 34)
    assert len(state.segments) == 1


@pytest.mark.parametrize(
    ("charges", "limit", "room"),
    [
        (100, 1_000, 100),  # unchanged
        (101, 1_000, 125),  # a quarter more
        (130, 1_000, 130),
        (101, 110, 110),  # but no more than the limit
        (111, 110, 125),  # records exceed the limit
        (300, 110, 200),  # at most as many as may be remembered
    ],
)
def test_room_for_charges_grows_by_a_quarter(charges: int, limit: float, room: int):
    assert ProducerIds(capacity=100).room(charges, limit, 200) == room
