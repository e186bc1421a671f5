"""A cache bounded in bytes that keeps what is in use, and a memory of what came before."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

SIGHTINGS: Final = 2**17
"""How many keys are remembered at most."""


class Generations(Generic[K, V]):
    """What was used lately, and what was used before.

    When one half is full, the other half is forgotten. So whoever asks for ever new keys makes the cache
    forget what is not in use, but never what is.

    >>> cache = Generations[str, int](4)
    >>> for name in "abcd":
    ...     cache.add(name, ord(name), size=1)
    ...     found = cache.get("a")
    >>> [name for name in "abcd" if cache.get(name) is not None]
    ['a', 'c', 'd']

    Args:
        most_bytes: the size of both halves together.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes // 2
        self._bytes = 0
        self._lately: dict[K, tuple[V, int]] = {}
        self._before: dict[K, tuple[V, int]] = {}

    def __len__(self) -> int:
        return len(self._lately) + len(self._before)

    @property
    def has_forgotten(self) -> bool:
        """Whether it has been so full that it forgot something, or is about to."""
        return bool(self._before)

    def get(self, key: K) -> V | None:
        """Return what is kept under a key, or None."""
        kept = self._lately.get(key)
        if kept is None:
            kept = self._before.pop(key, None)
            if kept is None:
                return None
            self.add(key, *kept)
        return kept[0]

    def add(self, key: K, value: V, size: int) -> None:
        """Keep a value of this size in bytes; nothing may be kept under its key."""
        self._bytes += size
        if self._bytes > self._most_bytes:
            self._before, self._lately, self._bytes = self._lately, {}, size
        self._lately[key] = (value, size)

    def remove(self, key: K) -> None:
        """Forget what is kept under a key that was just found."""
        _, size = self._lately.pop(key)
        self._bytes -= size


class Sightings:
    """Remembers what came lately, in a byte each, to tell what comes again from what comes only once.

    Whoever sends ever new keys makes it forget others: it is then as if these had not come before. With one
    new key in 255 it says wrongly that it came before.

    >>> seen = Sightings()
    >>> seen.again("a"), seen.again("a"), seen.again("b")
    (False, True, False)
    """

    def __init__(self) -> None:
        self._marks = bytearray(SIGHTINGS)

    def again(self, key: Hashable) -> bool:
        """Return whether a key came before; from now on it did."""
        hashed = hash(key)
        place = hashed % SIGHTINGS
        mark = (hashed >> 24) % 255 + 1  # 0 is for nothing
        if self._marks[place] == mark:
            return True
        self._marks[place] = mark
        return False
