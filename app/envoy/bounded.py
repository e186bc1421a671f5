"""A bounded set of the items that callers hold; at the bound, the largest holder loses one."""

from __future__ import annotations

from typing import Protocol


class Evictable(Protocol):
    """Something that a caller holds, such as an open request."""

    def evict(self) -> None:
        """End it; the set has dropped it already."""


class BoundedBySource:
    """At most ``most`` items in the process.

    A newcomer at the bound evicts the oldest item of the source that holds most. So a flood from one source
    evicts itself, and others get in.

    >>> class Item:
    ...     def evict(self):
    ...         print("evicted")
    >>> requests = BoundedBySource(2)
    >>> flood, other = Item(), Item()
    >>> requests.add("flood", flood), requests.add("flood", Item())
    (None, None)
    >>> requests.add("other", other)
    evicted
    >>> requests.discard("flood", flood)
    >>> len(requests), other in requests.of("other")
    (2, True)
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._count = 0
        self._by_source: dict[str, dict[Evictable, None]] = {}

    def __len__(self) -> int:
        return self._count

    def of(self, source: str) -> tuple[Evictable, ...]:
        """Return the items of a source, the oldest first."""
        return tuple(self._by_source.get(source, ()))

    def add(self, source: str, item: Evictable) -> None:
        """Add an item, which is not in the set yet."""
        if self._count >= self._most:
            largest = max(self._by_source, key=lambda each: len(self._by_source[each]))
            oldest = next(iter(self._by_source[largest]))
            self.discard(largest, oldest)
            oldest.evict()
        self._by_source.setdefault(source, {})[item] = None
        self._count += 1

    def discard(self, source: str, item: Evictable) -> None:
        """Remove an item, if it is in the set."""
        items = self._by_source.get(source)
        if items is None or item not in items:
            return
        del items[item]
        self._count -= 1
        if not items:
            del self._by_source[source]
