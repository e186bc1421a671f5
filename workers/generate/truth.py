"""The ground truth of generated traffic: every use of every id, its outcome, and the sums."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from app.domain.decision import OUTCOMES

USES: Final = pa.schema(
    [
        pa.field("event", pa.int64(), nullable=False),
        pa.field("at_ms", pa.int64(), nullable=False),
        pa.field("principal", pa.string(), nullable=False),
        pa.field("id", pa.int64(), nullable=False),
        pa.field("digest", pa.int64()),  # as in the log; null where the traffic was sent to a node
        pa.field("cause", pa.string(), nullable=False),  # how its producer gets ids
        pa.field("new", pa.bool_(), nullable=False),  # exact sets did not know it
        pa.field("charged", pa.bool_(), nullable=False),  # exact sets would have charged it
        pa.field("decision", pa.string(), nullable=False),
    ]
)
"""One row for each id that an ask names, in the order of the events."""

USES_AT_ONCE: Final = 50_000


class Use(NamedTuple):
    """An ask's use of an id: a row of ``USES``."""

    event: int
    at_ms: int
    principal: str
    id: int
    digest: int | None
    cause: str
    new: bool
    charged: bool
    decision: str


class Truth:
    """The uses of ids gathered since the last flush, and the sums of all uses."""

    def __init__(self, path: Path) -> None:
        self._writer = pq.ParquetWriter(path, USES, compression="zstd")
        self._uses: list[Use] = []
        self.sums: defaultdict[str, Counter[str]] = defaultdict(Counter)
        """For each principal (``""``: connections) its numbers of asks, uses, charges, and each decision."""

    def asked(self, principal: str, decision: str, uses: Sequence[Use]) -> None:
        """Count an ask, and record that it named these ids."""
        self.sums[principal].update(
            {
                "asks": 1,
                decision: 1,
                "uses": len(uses),
                "new": sum(use.new for use in uses),
                "charged": sum(use.charged for use in uses),
            }
        )
        self._uses += uses
        if len(self._uses) >= USES_AT_ONCE:
            self._flush()

    def _flush(self) -> None:
        if self._uses:
            columns = [list(column) for column in zip(*self._uses, strict=True)]
            self._writer.write_batch(pa.record_batch(columns, schema=USES))
            self._uses = []

    def close(self) -> None:
        """Write the remaining uses, and close the file."""
        self._flush()
        self._writer.close()


def write_totals(
    folder: Path, parameters: Mapping[str, Any], sums: Iterable[Mapping[str, Mapping[str, int]]]
) -> dict[str, Any]:
    """Write ``totals.json``: the parameters of the traffic, and its sums by principal and overall."""
    principals: dict[str, Counter[str]] = {}
    for each in sums:
        for name, counts in each.items():
            principals.setdefault(name, Counter()).update(counts)
    overall: Counter[str] = Counter()
    for counts in principals.values():
        overall.update(counts)
    connections = principals.pop("", Counter())
    totals = {
        **parameters,
        "overall": _ordered(overall),
        "connections": _ordered(connections),
        "principals": {name: _ordered(principals[name]) for name in sorted(principals)},
    }
    (folder / "totals.json").write_text(json.dumps(totals, indent=1) + "\n", encoding="utf-8")
    return totals


NAMES: Final[Sequence[str]] = ("asks", *OUTCOMES, "uses", "new", "charged")


def _ordered(counts: Mapping[str, int]) -> dict[str, int]:
    return {name: counts.get(name, 0) for name in NAMES}
