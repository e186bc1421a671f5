"""The bytes of bodies that a node has taken in and not answered: bounded for each caller, and for all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from app.admission.queue import OverloadedError

MAX_OF_CALLER: Final = 16 * 1024 * 1024
MAX_OF_ALL: Final = 64 * 1024 * 1024


class Taken:
    """What one request has brought in so far, for whom takes turns by that name."""

    __slots__ = ("_intake", "_turn", "size")

    def __init__(self, intake: Intake, turn: str) -> None:
        self._intake = intake
        self._turn = turn
        self.size = 0

    def add(self, size: int) -> None:
        """Take in so many bytes more.

        Raises:
            OverloadedError: the caller, or the node, has too many that wait.
        """
        self._intake.take(self._turn, size)
        self.size += size


class Intake:
    """Counts the bytes that wait, by caller: before a body is decoded nothing else is known of it.

    Args:
        of_caller, of_all: how many may wait.
    """

    def __init__(self, of_caller: int = MAX_OF_CALLER, of_all: int = MAX_OF_ALL) -> None:
        self._of_caller = of_caller
        self._of_all = of_all
        self._waiting: dict[str, int] = {}
        self.total = 0

    @contextmanager
    def request(self, turn: str) -> Iterator[Taken]:
        """One request, whose bytes wait until it is answered."""
        taken = Taken(self, turn)
        try:
            yield taken
        finally:
            if taken.size:
                self._give_back(turn, taken.size)

    def take(self, turn: str, size: int) -> None:
        """Count bytes of a caller.

        Raises:
            OverloadedError: there are too many that wait, and these are not counted.
        """
        its = self._waiting.get(turn, 0) + size
        if its > self._of_caller:
            raise OverloadedError("caller_bytes")
        if self.total + size > self._of_all:
            raise OverloadedError("node_bytes")
        self._waiting[turn] = its
        self.total += size

    def _give_back(self, turn: str, size: int) -> None:
        self.total -= size
        left = self._waiting[turn] - size
        if left:
            self._waiting[turn] = left
        else:
            del self._waiting[turn]
