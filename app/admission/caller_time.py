"""The time under the caller's clock: what callers have told of it."""

from __future__ import annotations


class CallerTime:
    """The newest time that any caller told.

    Attributes:
        first_ms: the first one, with which everything begins; None before it.
        newest_ms: 0 before there was any.
    """

    def __init__(self) -> None:
        self.first_ms: int | None = None
        self.newest_ms = 0

    def begin(self, at_ms: int) -> None:
        """Let everything begin at this time, if nothing has begun."""
        if self.first_ms is None:
            self.first_ms = at_ms

    def first(self, at_ms: int | None) -> int | None:
        """The time with which everything begins: this one, if nothing has begun."""
        return at_ms if self.first_ms is None else self.first_ms

    def seen(self, at_ms: int) -> None:
        """Take note of a time that a caller told."""
        self.begin(at_ms)
        self.newest_ms = max(self.newest_ms, at_ms)
