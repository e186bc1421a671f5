"""Bytes of unanswered request bodies, limited per caller and in total."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from app.admission.errors import OverloadedError

MAX_OF_CALLER: Final = 16 * 1024 * 1024
MAX_OF_ALL: Final = 64 * 1024 * 1024


class BodyBytes:
    """The bytes that one request has sent so far."""

    __slots__ = ("_intake", "_turn", "size")

    def __init__(self, intake: Intake, turn: str) -> None:
        self._intake = intake
        self._turn = turn
        self.size = 0

    def add(self, size: int) -> None:
        """Count more bytes.

        Raises:
            OverloadedError: the caller, or the node, has too many waiting bytes.
        """
        self._intake.take(self._turn, size)
        self.size += size

    def release(self) -> None:
        """Stop counting these bytes: they wait no longer, or are counted anew."""
        if self.size:
            self._intake.give_back(self._turn, self.size)
            self.size = 0


class Intake:
    """Counts waiting bytes by caller: only the size of a body is known before it is decoded.

    Args:
        of_caller, of_all: how many bytes may wait.
    """

    def __init__(self, of_caller: int = MAX_OF_CALLER, of_all: int = MAX_OF_ALL) -> None:
        self._of_caller = of_caller
        self._of_all = of_all
        self._waiting: dict[str, int] = {}
        self.total = 0

    @contextmanager
    def request(self, turn: str) -> Iterator[BodyBytes]:
        """Open a request, whose bytes wait until it is answered."""
        taken = BodyBytes(self, turn)
        try:
            yield taken
        finally:
            taken.release()

    def take(self, turn: str, size: int) -> None:
        """Count bytes of a caller.

        Raises:
            OverloadedError: there are too many waiting bytes; these are not counted.
        """
        self.require_room(turn, size)
        self._waiting[turn] = self._waiting.get(turn, 0) + size
        self.total += size

    def require_room(self, turn: str, size: int) -> None:
        """Require that so many bytes of a caller may wait, without counting them.

        Raises:
            OverloadedError: there are too many waiting bytes.
        """
        if self._waiting.get(turn, 0) + size > self._of_caller:
            raise OverloadedError("caller_bytes")
        if self.total + size > self._of_all:
            raise OverloadedError("node_bytes")

    def give_back(self, turn: str, size: int) -> None:
        """Stop counting bytes of a caller, whose request was answered."""
        self.total -= size
        left = self._waiting[turn] - size
        if left:
            self._waiting[turn] = left
        else:
            del self._waiting[turn]
