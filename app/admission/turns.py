"""Fair turns: of all who have something waiting, the one who has been given least goes next."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappush, heapreplace
from typing import Generic, TypeVar

T = TypeVar("T")


class Turns(Generic[T]):
    """What waits, by whom it waits for.

    Each has been given so much, in units that the user of this class chooses. The next turn is of who has
    been given least. Who comes anew begins with what one has been given who was there all the time (the
    virtual time of fair queueing: Parekh, Gallager 1993). So nobody saves up turns by staying away, and
    nobody who waits is passed by ever new ones.

    >>> turns = Turns(list)
    >>> turns.of("flood").extend([1, 2, 3])
    >>> turns.of("alice").append(4)
    >>> for _ in range(3):
    ...     who, waiting = turns.first()
    ...     print(who, waiting.pop(0))
    ...     turns.took(1.0, is_left=bool(waiting))
    flood 1
    alice 4
    flood 2
    >>> len(turns)
    1

    Args:
        empty: makes what holds one's waiting things.
    """

    __slots__ = ("_count", "_empty", "_heap", "_now", "_waiting")

    def __init__(self, empty: Callable[[], T]) -> None:
        self._empty = empty
        self._waiting: dict[str, T] = {}
        self._heap: list[tuple[float, bool, int, str]] = []
        """What each has been given; whether in a turn, as new ones go before; a number that breaks ties."""
        self._now = 0.0
        self._count = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def of(self, who: str) -> T:
        """What waits for one, to which something is about to be added."""
        waiting = self._waiting.get(who)
        if waiting is None:
            waiting = self._waiting[who] = self._empty()
            self._count += 1
            heappush(self._heap, (self._now, False, self._count, who))
        return waiting

    def waiting(self, who: str) -> T | None:
        """What waits for one; None if nothing does."""
        return self._waiting.get(who)

    def first(self) -> tuple[str, T]:
        """Whose turn it is, and what waits for them; only while something waits."""
        given, _, _, who = self._heap[0]
        self._now = max(self._now, given)
        return who, self._waiting[who]

    def took(self, weight: float, *, is_left: bool) -> None:
        """Charge a turn to whom it was.

        Args:
            is_left: whether something still waits for them.
        """
        given, _, _, who = self._heap[0]
        self._now += weight / len(self._waiting)
        if is_left:
            self._count += 1
            heapreplace(self._heap, (given + weight, True, self._count, who))
            return
        del self._waiting[who]
        last = self._heap.pop()
        if self._heap:
            heapreplace(self._heap, last)
