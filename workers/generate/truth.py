"""The ground truth of generated traffic: every use of every id, its outcome, and the sums."""

from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from app.domain.decision import OUTCOMES
from workers.generate.columns import OUTCOME, Places, column, integers
from workers.generate.traffic import CAUSES

USES: Final = pa.schema(
    [
        pa.field("event", pa.int64(), nullable=False),
        pa.field("at_ms", pa.int64(), nullable=False),
        pa.field("principal", pa.string(), nullable=False),
        pa.field("id", pa.int64(), nullable=False),
        pa.field("digest", pa.int64()),  # as in the log; null where the traffic was sent to a node
        pa.field("cause", pa.string(), nullable=False),  # how its producer comes by its ids
        pa.field("new", pa.bool_(), nullable=False),  # exact sets did not know it
        pa.field("charged", pa.bool_(), nullable=False),  # exact sets would have charged it
        pa.field("decision", pa.string(), nullable=False),
    ]
)
"""One row for each id that an ask names, in the order of the events."""

_CAUSE: Final[dict[str, int]] = {cause: place for place, cause in enumerate(CAUSES)}


class Truth:
    """The uses of ids gathered since the last flush, and the sums of all uses."""

    def __init__(self, path: Path, *, digests: bool = True) -> None:
        self._digests = digests
        self._writer = pq.ParquetWriter(path, USES, compression="zstd")
        self._names = Places()
        self.sums: dict[str, Counter[str]] = {}
        """For each principal (``""``: connections) its numbers of asks, uses, charges, and each decision."""
        self._clear()

    def _clear(self) -> None:
        self._event, self._at_ms = array("q"), array("q")
        self._id, self._digest = array("q"), bytearray()
        self._principal = array("i")
        self._cause, self._new, self._charged, self._decision = (
            array("b"),
            array("b"),
            array("b"),
            array("b"),
        )

    def asked(self, principal: str, decision: str, ids: int, new: int, charged: int) -> None:
        """Count an ask."""
        sums = self.sums.get(principal)
        if sums is None:
            sums = self.sums[principal] = Counter()
        sums["asks"] += 1
        sums[decision] += 1
        sums["uses"] += ids
        sums["new"] += new
        sums["charged"] += charged

    def used(
        self,
        event: int,
        at_ms: int,
        principal: str,
        id_: int,
        digest: bytes,
        cause: str,
        decision: str,
        *,
        new: bool,
        charged: bool,
    ) -> None:
        """Record that an ask named an id."""
        self._event.append(event)
        self._at_ms.append(at_ms)
        self._principal.append(self._names.of(principal))
        self._id.append(id_)
        self._digest += digest
        self._cause.append(_CAUSE[cause])
        self._new.append(new)
        self._charged.append(charged)
        self._decision.append(OUTCOME[decision])

    def flush(self) -> None:
        """Write the uses gathered so far."""
        columns = [
            column(self._event),
            column(self._at_ms),
            pa.array(tuple(self._names), pa.string()).take(column(self._principal)),
            column(self._id),
            integers(self._digest) if self._digests else pa.nulls(len(self._id), pa.int64()),
            pa.array(CAUSES, pa.string()).take(column(self._cause)),
            column(self._new).cast(pa.bool_()),
            column(self._charged).cast(pa.bool_()),
            pa.array(OUTCOMES, pa.string()).take(column(self._decision)),
        ]
        self._writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=USES))
        self._clear()

    def close(self) -> None:
        """Write the remaining uses, and close the file."""
        self.flush()
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
