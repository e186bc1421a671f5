"""A cache bounded in bytes, of two generations: full, it forgets what was not used lately, not everything."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


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
