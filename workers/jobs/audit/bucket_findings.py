"""The findings of an audit in one bucket: counts for each principal, and single cases as examples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal, Self

import pyarrow as pa

from app.domain.oracle import Judgement
from workers.jobs.verdicts import BucketRow

Kind = Literal["falsely_seen", "charged_again", "differs", "lost", "altered", "unlogged", "same_order"]
"""The kinds of cases in one bucket:

- falsely_seen: a new id was taken as seen
- charged_again: an id was charged although the bucket had to know it
- differs: a verdict is not the exact one
- lost: the bucket no longer has charges that the log has
- altered: a charge is smaller than its row says
- unlogged: the bucket has more charges than the log has
- same_order: two rows have the same place in the store's order
"""

MANY_PRINCIPALS: Final = 10_000
MANY_CASES: Final = 5_000
"""Findings of a bucket are given out once there are this many, and the counts are summed later."""
EXAMPLES: Final = 20
"""How many cases of each kind are kept for a bucket; all of them are counted."""
ALL_KEPT: Final[frozenset[Kind]] = frozenset({"falsely_seen", "charged_again"})
"""The kinds of cases that are kept without a limit."""


@dataclass(slots=True)
class BucketTally:
    """The counts for one principal's asks in one bucket.

    Attributes:
        verdicts: verdicts that the store gave.
        judged: verdicts that were recomputed and compared.
        unjudged: verdicts not compared, as the log does not determine the bucket's state.
        lookups: ids that were new to the bucket.
        believed: ids taken as seen that could not be checked, as the log does not reach back far enough.
        lost, lost_units: how often logged charges were missing from the bucket, and how many units.
        altered: how often the bucket was charged or refunded less than the row says.
        unlogged: how often the bucket had more charges than the log.
        same_order: rows that share their place in the store's order with another row.
        worst: the most units admitted in a span of the bound's window, divided by the units allowed.
        bound: the upper bound of ``worst``; None if nothing is bounded.
        over: how many asks were admitted above the bound.
    """

    verdicts: int = 0
    judged: int = 0
    unjudged: int = 0
    differs: int = 0
    lookups: int = 0
    charged_ids: int = 0
    falsely_seen: int = 0
    charged_again: int = 0
    believed: int = 0
    lost: int = 0
    lost_units: float = 0.0
    altered: int = 0
    unlogged: int = 0
    same_order: int = 0
    corrections: int = 0
    worst: float = 0.0
    bound: float | None = None
    over: int = 0


TALLIED: Final = tuple(BucketTally.__annotations__)


class BucketFindings:
    """The findings in one bucket so far; ``noted`` counts the cases of each kind."""

    def __init__(self, quota: str, bucket: str) -> None:
        self.quota = quota
        self.bucket = bucket
        self.tallies: dict[str | None, BucketTally] = {}
        self.cases: list[dict[str, object]] = []
        self.noted: Counter[str] = Counter()

    @classmethod
    def of_tallies(cls, quota: str, bucket: str, tallies: dict[str | None, BucketTally]) -> Self:
        """The findings in a bucket without a fault: its counts."""
        found = cls(quota, bucket)
        found.tallies = tallies
        return found

    def of(self, row: BucketRow) -> BucketTally:
        """The counts of a row's principal."""
        tally = self.tallies.get(row.principal)
        if tally is None:
            tally = self.tallies[row.principal] = BucketTally()
        return tally

    def begin(self, row: BucketRow) -> BucketTally:
        """Count a verdict; returns the counts of its principal."""
        tally = self.of(row)
        tally.verdicts += 1
        tally.corrections += row.correction > 0
        return tally

    def note(
        self,
        kind: Kind,
        row: BucketRow,
        exact: str,
        *,
        digest: int | None = None,
        amount: float = 1.0,
        among: int | None = None,
    ) -> None:
        """Keep a case as an example, unless there are enough of its kind.

        Args:
            exact: the correct value.
            among: the number of new ids in the ask.
        """
        self.noted[kind] += 1
        if kind in ALL_KEPT or self.noted[kind] <= EXAMPLES:
            logged = verdict_text(row.outcome, row.throttle_ms, row.reason)
            if row.observed is not None:
                logged += f", observed {row.observed:.12g}"
            self.cases.append(
                case_of(kind, row, row, logged, exact, digest=digest, amount=amount, among=among)
            )

    def differs(self, row: BucketRow, exact: Judgement) -> None:
        """Count a verdict that is not the exact one."""
        self.of(row).differs += 1
        self.note("differs", row, verdict_text(exact.outcome, exact.throttle_ms, exact.reason))

    def lost(self, row: BucketRow, units: float, exact: str) -> None:
        """Count a loss of charges."""
        tally = self.of(row)
        tally.lost += 1
        tally.lost_units += units
        self.note("lost", row, exact, amount=units)

    def unlogged(self, row: BucketRow, exact: str, amount: float = 1.0) -> None:
        """Count a charge that the log does not have."""
        self.of(row).unlogged += 1
        self.note("unlogged", row, exact, amount=amount)

    def flush(self) -> Iterator[dict[str, object]]:
        """Return the findings as rows of ``SCHEMA``, and start again from zero."""
        for principal, tally in self.tallies.items():
            counts = {name: getattr(tally, name) for name in TALLIED}
            counts |= {"case": "tally", "quota": self.quota, "bucket": self.bucket, "principal": principal}
            yield counts
        yield from self.cases
        self.clear()

    @property
    def is_large(self) -> bool:
        """Whether it is time to flush."""
        return len(self.tallies) >= MANY_PRINCIPALS or len(self.cases) >= MANY_CASES

    def clear(self) -> None:
        """Start again from zero; examples that were kept still count towards their limit."""
        self.tallies.clear()
        self.cases.clear()


def case_of(
    kind: str, ask: Any, verdict: Any, logged: str, exact: str, **more: float | None
) -> dict[str, object]:
    """A case as a row of ``SCHEMA``.

    Args:
        ask: has the principal, time and order of the ask.
        verdict: has the quota and the bucket; None if the case concerns the whole ask.
        exact: the correct value.
    """
    of_ask = {name: getattr(ask, name) for name in ("principal", "at_ms", "order")}
    of_verdict = {name: getattr(verdict, name, None) for name in ("quota", "bucket")}
    return {"case": kind, **of_ask, **of_verdict, "logged": logged, "exact": exact, **more}


def verdict_text(outcome: str, throttle_ms: int, reason: str | None) -> str:
    """A verdict in words.

    >>> verdict_text("throttle", 300, "capacity"), verdict_text("admit", 0, None)
    ('throttle 300 ms (capacity)', 'admit')
    """
    wait = f" {throttle_ms:,} ms" if throttle_ms else ""
    return f"{outcome}{wait}{f' ({reason})' if reason else ''}"


COUNTS: Final = (
    *(name for name, type_ in BucketTally.__annotations__.items() if type_ == "int"),
    "untold",
    "stale",
    "unlikely",
    "contradicts",
    "clock",
)
"""The counts for principals and buckets. The last five are not found by replaying a bucket:

- untold (``replay``): more unlogged charges than decisions without the store explain
- stale (``stale_limits``): verdicts by a limit that was not in force
- unlikely (``replay``): asks with more new ids taken as seen than chance explains
- contradicts, clock (``contradictions``): rows that contradict themselves or the store's clock
"""
SCHEMA: Final = pa.schema(
    [
        ("case", pa.string()),
        ("quota", pa.string()),
        ("bucket", pa.string()),
        ("principal", pa.string()),
        ("at_ms", pa.int64()),
        ("order", pa.int64()),
        ("digest", pa.int64()),
        ("amount", pa.float64()),
        ("logged", pa.string()),
        ("exact", pa.string()),
        ("among", pa.int64()),
        *((name, pa.int64()) for name in COUNTS),
        ("lost_units", pa.float64()),
        ("worst", pa.float64()),
        ("bound", pa.float64()),
    ]
)
"""The columns of all findings. A row is a case, or counts: ``case`` is then ``tally`` or null."""
