"""Spans of time that a job looks at, and instants as people write them."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

import numpy as np
from numpy.typing import NDArray

from workers.decision_log.schema import HOUR_MS
from workers.jobs.errors import JobUsageError

END_MS: Final = 32_503_680_000_000
"""The end of the year 2999."""


@dataclass(frozen=True, slots=True)
class Period:
    """A span of time in milliseconds, excluding its end; None is unbounded."""

    from_ms: int | None = None
    to_ms: int | None = None

    @classmethod
    def of(cls, from_: str | None, to: str | None) -> Period:
        """The period between two ISO 8601 instants.

        >>> Period.of("2026-11-21T10:00:00Z", None)
        Period(from_ms=1795255200000, to_ms=None)

        Raises:
            JobUsageError: a text is not an instant, or the end is not after the beginning.
        """
        period = cls(parse_instant("--from", from_), parse_instant("--to", to))
        if period.from_ms is not None and period.to_ms is not None and period.to_ms <= period.from_ms:
            raise JobUsageError(f"--to: {to} is not after --from {from_}")
        return period

    def __str__(self) -> str:
        begin = "the beginning" if self.from_ms is None else format_instant(self.from_ms)
        return f"from {begin} to {'the end' if self.to_ms is None else format_instant(self.to_ms)}"

    def widened(self, before_ms: int, after_ms: int = 0) -> Period:
        """The period with a lead-in before it, and some time after it."""
        from_ms = None if self.from_ms is None else self.from_ms - before_ms
        return Period(from_ms, None if self.to_ms is None else self.to_ms + after_ms)

    def mask(self, at_ms: NDArray[np.int64]) -> NDArray[np.bool_]:
        """True for each time in the period."""
        inside = np.ones(len(at_ms), bool) if self.from_ms is None else at_ms >= self.from_ms
        return inside if self.to_ms is None else inside & (at_ms < self.to_ms)

    def overlaps_hour(self, hour_ms: int) -> bool:
        """Whether part of an hour is in the period."""
        is_begun = self.to_ms is None or hour_ms < self.to_ms
        return is_begun and (self.from_ms is None or hour_ms + HOUR_MS > self.from_ms)


def partial_log(work: str, period: Period) -> str:
    """The text of an error: a log that leaves decisions out is no basis for this work.

    Args:
        work: the name of the log, and of the work.
    """
    return (
        f"{work} needs every decision, a log of QUOTAGATE_LOG=all; this one, {period}, leaves out admitted "
        "asks, as QUOTAGATE_LOG=denied does; if the nodes log all since a later time, begin there: --from"
    )


def parse_instant(field: str, text: str | None) -> int | None:
    """An ISO 8601 instant in milliseconds; UTC unless it has an offset.

    Raises:
        JobUsageError: it is no instant of the years 1970 to 2999; the message names the field.
    """
    if text is None:
        return None
    with suppress(ValueError, OverflowError):
        at = datetime.fromisoformat(text)
        at_ms = round((at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() * 1000)
        if 0 <= at_ms < END_MS:
            return at_ms
    raise JobUsageError(
        f"{field}: {text!r} must be an instant such as 2026-11-21T10:00:00Z, in the years 1970 to 2999"
    )


def format_instant(at_ms: int) -> str:
    """An instant in ISO form, for people."""
    return f"{datetime.fromtimestamp(at_ms / 1000, UTC):%Y-%m-%d %H:%M:%S}.{at_ms % 1000:03} UTC"
