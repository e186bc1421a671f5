"""Slots of a cluster: the slot of a key, and grouping the charges of an ask by slot."""

from __future__ import annotations

from binascii import crc_hqx
from collections.abc import Sequence
from functools import cache
from itertools import count
from typing import Final, NamedTuple

SLOTS: Final = 16_384
"""How many slots a cluster has; each belongs to one primary at a time."""


class SlotGroup(NamedTuple):
    """Charges of an ask that are in one slot.

    Attributes:
        places: the indexes of the charges in the ask, in order; empty if the slot only keeps the answer.
    """

    slot: int
    places: tuple[int, ...]


class SlotGroups(NamedTuple):
    """The charges of an ask by slot.

    Attributes:
        home: the group that is charged last, and where the answer is kept.
        others: the other groups, in the order of their first charges.
    """

    home: SlotGroup
    others: tuple[SlotGroup, ...]


def tag_of(key: bytes) -> bytes:
    """The part of a key that decides its slot.

    >>> tag_of(b"qg1:{user=alice}:request_rate"), tag_of(b"qg1:order"), tag_of(b"a{}b"), tag_of(b"{a}{b}")
    (b'user=alice', b'qg1:order', b'a{}b', b'a')
    """
    begin = key.find(b"{")
    end = key.find(b"}", begin + 1) if begin >= 0 else -1
    return key[begin + 1 : end] if end > begin + 1 else key


def slot_of_tag(tag: bytes) -> int:
    """The slot of all keys with a tag.

    >>> slot_of_tag(b"123456789")
    12739
    """
    return crc_hqx(tag, 0) % SLOTS


def slot_of(key: bytes) -> int:
    """The slot of a key.

    >>> slot_of(b"a{123456789}b")
    12739
    """
    return slot_of_tag(tag_of(key))


@cache
def slot_tags() -> tuple[bytes, ...]:
    """A tag for each slot, in the order of the slots: the least decimal number in the slot."""
    tags: list[bytes | None] = [None] * SLOTS
    missing = SLOTS
    for number in count():
        tag = b"%d" % number
        slot = slot_of_tag(tag)
        if tags[slot] is None:
            tags[slot] = tag
            missing -= 1
            if not missing:
                break
    return tuple(tag for tag in tags if tag is not None)


def groups_of(slots: Sequence[int], home: int | None) -> SlotGroups:
    """Group charges by their slots.

    >>> groups_of((7, 9, 7), home=7).home
    SlotGroup(slot=7, places=(0, 2))
    >>> groups_of((7, 9, 7), home=None)
    SlotGroups(home=SlotGroup(slot=9, places=(1,)), others=(SlotGroup(slot=7, places=(0, 2)),))

    Args:
        slots: the slots of the charges, in order; at least one if no home is given.
        home: the slot of the principal, or of the kept answer; without it the last group is the home.
    """
    by_slot: dict[int, list[int]] = {}
    for place, slot in enumerate(slots):
        by_slot.setdefault(slot, []).append(place)
    if home is None:
        home = next(reversed(by_slot))
    at_home = SlotGroup(home, tuple(by_slot.pop(home, ())))
    return SlotGroups(at_home, tuple(SlotGroup(slot, tuple(places)) for slot, places in by_slot.items()))
