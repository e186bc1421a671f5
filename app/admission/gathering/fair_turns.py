"""Fair turns between callers: the caller that has been served least goes next.

This is fair queueing by virtual time (Parekh, Gallager 1993). Each caller with waiting items has a total of
the weight that it was served; the lowest total is next. A newcomer starts at the virtual time, which is the
total that a caller would have by now if it had been waiting all along. So nobody saves up turns by staying
away, and a stream of newcomers cannot starve a caller that waits.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappush, heapreplace
from typing import Generic, TypeVar

T = TypeVar("T")


class FairTurns(Generic[T]):
    """A container of waiting items for each name, and whose turn it is.

    >>> turns = FairTurns(list)
    >>> turns.of("flood").extend([1, 2, 3])
    >>> turns.of("alice").append(4)
    >>> for _ in range(3):
    ...     name, waiting = turns.first()
    ...     print(name, waiting.pop(0))
    ...     turns.charge(1.0, is_left=bool(waiting))
    flood 1
    alice 4
    flood 2
    >>> len(turns)
    1

    Args:
        empty: makes an empty container.
    """

    __slots__ = ("_count", "_empty", "_heap", "_now", "_waiting")

    def __init__(self, empty: Callable[[], T]) -> None:
        self._empty = empty
        self._waiting: dict[str, T] = {}
        self._heap: list[tuple[float, bool, int, str]] = []
        """Per name: the weight served, whether it was ever served (newcomers win ties), and a tie breaker."""
        self._now = 0.0
        self._count = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def of(self, name: str) -> T:
        """Return the container of a name, made if need be; the caller must add an item to it."""
        waiting = self._waiting.get(name)
        if waiting is None:
            waiting = self._waiting[name] = self._empty()
            self._count += 1
            heappush(self._heap, (self._now, False, self._count, name))
        return waiting

    def waiting(self, name: str) -> T | None:
        """Return the container of a name; None if nothing waits for it."""
        return self._waiting.get(name)

    def first(self) -> tuple[str, T]:
        """Return the name whose turn it is, and its container. Something must be waiting."""
        served, _, _, name = self._heap[0]
        self._now = max(self._now, served)
        return name, self._waiting[name]

    def charge(self, weight: float, *, is_left: bool) -> None:
        """Charge the turn that ``first`` returned.

        Args:
            weight: how much was served, in any unit.
            is_left: whether the container still has items.
        """
        served, _, _, name = self._heap[0]
        self._now += weight / len(self._waiting)
        if is_left:
            self._count += 1
            heapreplace(self._heap, (served + weight, True, self._count, name))
            return
        del self._waiting[name]
        last = self._heap.pop()
        if self._heap:
            heapreplace(self._heap, last)
