"""What an audit finds in one bucket: counts for each principal, and the cases worth a row of their own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Final, Literal, NamedTuple

import pyarrow as pa

from workers.spark.buckets import Asked

Kind = Literal["falsely_seen", "charged_again", "differs", "lost", "altered", "unlogged", "same_order"]
"""An id taken as seen though it was new; one charged though it was known; a verdict that is not the exact
one; charges that the store has no more; one that is smaller than its row says; more of them than rows tell
of; two rows in one place of the store's order."""

MANY_PRINCIPALS: Final = 10_000
"""A shared bucket's counts are handed on once it has so many principals, and summed later; cases too."""
MANY_CASES: Final = 5_000
EXAMPLES: Final = 20
"""Of verdicts that differ, and of losses, a bucket shows so many; all of them are counted."""
EVERY_ONE: Final[frozenset[Kind]] = frozenset({"falsely_seen", "charged_again"})
"""Of these every one is named."""


@dataclass(slots=True)
class Tally:
    """What one principal's asks met in one bucket.

    Attributes:
        verdicts: that the store gave.
        judged: of them recomputed and compared.
        unjudged: not compared, since the bucket's state was not known from the log.
        lookups: ids that were new when they were asked for.
        believed: ids taken as seen on the store's word, as the log does not reach back far enough.
        lost, lost_units: how often charges were missing that the log tells of, and how much.
        altered: how often the bucket was charged less, or given back less, than the row says.
        unlogged: how often there was more charged than the log tells of.
        same_order: rows in a place of the store's order that another one has.
        worst: the most that was admitted in any span of the bound's window, over what the limit allows.
        bound: what ``worst`` may be at most; None if nothing is bounded.
        over: how many of the asks were admitted above the bound.
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


class Case(NamedTuple):
    """One case; ``exact`` says what should have been, ``among`` how many new ids its ask had named."""

    case: Kind
    principal: str | None
    at_ms: int
    order: int
    digest: int | None
    amount: float
    logged: str
    exact: str
    among: int | None = None


class Found:
    """What was found in one bucket so far."""

    def __init__(self, quota: str, bucket: str) -> None:
        self.quota = quota
        self.bucket = bucket
        self.tallies: dict[str | None, Tally] = {}
        self.cases: list[Case] = []
        self._shown: Counter[Kind] = Counter()

    def of(self, row: Asked) -> Tally:
        """The counts of a row's principal."""
        tally = self.tallies.get(row.principal)
        if tally is None:
            tally = self.tallies[row.principal] = Tally()
        return tally

    def note(
        self,
        case: Kind,
        row: Asked,
        exact: str,
        *,
        digest: int | None = None,
        amount: float = 1.0,
        among: int | None = None,
    ) -> None:
        """Keep a case, if there are not enough of its kind."""
        self._shown[case] += 1
        if case in EVERY_ONE or self._shown[case] <= EXAMPLES:
            logged = spelled(row.outcome, row.throttle_ms, row.reason)
            if row.observed is not None:
                logged += f", observed {row.observed:.12g}"
            which = case, row.principal, row.at_ms, row.order
            self.cases.append(Case(*which, digest, amount, logged, exact, among))

    def taken(self) -> Iterator[dict[str, object]]:
        """The rows of all this, which is then forgotten."""
        where: dict[str, object] = {"quota": self.quota, "bucket": self.bucket}
        for principal, tally in self.tallies.items():
            yield {**where, "case": "tally", "principal": principal, **asdict(tally)}
        for case in self.cases:
            yield {**where, **case._asdict()}
        self.forget()

    @property
    def is_large(self) -> bool:
        """Whether it is time to hand it on."""
        return len(self.tallies) >= MANY_PRINCIPALS or len(self.cases) >= MANY_CASES

    def forget(self) -> None:
        """Begin anew; of cases as many are shown as before."""
        self.tallies.clear()
        self.cases.clear()


def spelled(outcome: str, throttle_ms: int, reason: str | None) -> str:
    """A verdict in words.

    >>> spelled("throttle", 300, "capacity"), spelled("admit", 0, None)
    ('throttle 300 ms (capacity)', 'admit')
    """
    waits = f" {throttle_ms:,} ms" if throttle_ms else ""
    return f"{outcome}{waits}{f' ({reason})' if reason else ''}"


COUNTS: Final = (
    *(name for name, type_ in Tally.__annotations__.items() if type_ == "int"),
    "untold",
    "stale",
    "unlikely",
    "contradicts",
    "clock",
)
"""What is counted of principals and buckets; the last ones are found beside the buckets. By ``missing``: more
charged than rows tell of, and than there may be; by ``stale``: verdicts whose limit did not stand; by
``frames``: asks with more new ids taken as seen than chance explains; by ``contradictions``: rows that
contradict themselves, or whose time is not that of their place in the store's order."""
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
"""The columns of ``Found.taken``: cases, and among them tallies, of which only the counts are set."""
