"""Slots: the hash function of a server, a tag for each slot, and groups that lose no charge."""

from __future__ import annotations

import redis
from hypothesis import given
from hypothesis import strategies as st

from app.domain.slots import SLOTS, groups_of, slot_of, slot_of_tag, slot_tags, tag_of
from tests import stores

KEYS = st.one_of(st.binary(max_size=20), st.text("ab{}", max_size=8).map(str.encode))


def test_server_puts_keys_in_the_same_slots() -> None:
    with (
        stores.server("valkey", "--cluster-enabled", "yes") as server,
        redis.Redis.from_url(server.url) as store,
    ):

        @given(KEYS)
        def compare(key: bytes) -> None:
            assert slot_of(key) == store.execute_command("CLUSTER KEYSLOT", key)

        compare()


def test_each_slot_has_a_tag() -> None:
    tags = slot_tags()
    assert len(tags) == SLOTS
    assert [slot_of_tag(tag) for tag in tags] == list(range(SLOTS))
    assert all(tag_of(b"qg1:{%b}:order" % tag) == tag for tag in tags)
    assert max(map(len, tags)) <= 6


@given(st.lists(st.integers(0, 5), min_size=1, max_size=10), st.one_of(st.none(), st.integers(0, SLOTS - 1)))
def test_groups_have_each_charge_once_in_order(slots: list[int], home: int | None) -> None:
    groups = groups_of(slots, home)
    every = (*groups.others, groups.home)
    assert len({group.slot for group in every}) == len(every)
    assert sorted(place for group in every for place in group.places) == list(range(len(slots)))
    assert all(slots[place] == group.slot for group in every for place in group.places)
    assert all(list(group.places) == sorted(group.places) for group in every)
    firsts = [group.places[0] for group in groups.others]
    assert firsts == sorted(firsts)
    if home is None:
        assert groups.home.places, "without a home of its own, the last group is charged last"
        assert all(groups.home.places[0] > first for first in firsts)
    else:
        assert groups.home.slot == home
