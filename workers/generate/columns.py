"""Gathers rows of the decision log as columns that convert to Arrow without a loop over the rows."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from app.decision_log.columns import QUOTA, quota_fields
from app.domain.decision import OUTCOMES
from app.domain.quota import Quota
from workers.decision_log.schema import CHANGE, LIMITED_BY, SCHEMA, VERDICT

OUTCOME: Final[dict[str, int]] = {outcome: place for place, outcome in enumerate(OUTCOMES)}
REASONS: Final = ("too_large",)
NONE: Final = -1

_QUOTA: Final = pa.schema([VERDICT.field(name) for name in QUOTA])
_BUFFERS: Final = {"b": pa.int8(), "i": pa.int32(), "q": pa.int64(), "d": pa.float64()}


class Places(dict[str, int]):
    """Numbers texts in the order of their first use; a column holds these numbers."""

    def of(self, text: str) -> int:
        """The number of a text."""
        return self.setdefault(text, len(self))


class Quotas:
    """The distinct quotas of all verdicts; a verdict refers to one by its place."""

    def __init__(self) -> None:
        self._rows: list[dict[str, Any]] = []

    def add(self, quota: Quota, entity: str, bucket: str) -> int:
        """Return the place of a quota as applied to a bucket."""
        self._rows.append(quota_fields(quota, entity, bucket))
        return len(self._rows) - 1

    def taken(self, places: pa.Array) -> dict[str, pa.Array]:
        """The columns of a verdict that depend on its quota only, for each place."""
        table = pa.Table.from_pylist(self._rows, schema=_QUOTA).take(places).combine_chunks()
        return {name: _one(table.column(name)) for name in _QUOTA.names}


class Digests:
    """A column of lists of digests, each as 8 bytes; empty or null where nothing was added."""

    def __init__(self) -> None:
        self.values = bytearray()
        self.sizes = array("i")
        self.nulls = bytearray()

    def add(self, values: Sequence[bytes] | None) -> None:
        """Append the next row's list; None for null."""
        self.nulls.append(values is None)
        self.sizes.append(len(values) if values else 0)
        if values:
            self.values += b"".join(values)

    def array(self) -> pa.Array:
        """The column."""
        nulls = pa.array(self.nulls, pa.uint8()).cast(pa.bool_())
        return pa.ListArray.from_arrays(offsets(self.sizes), integers(self.values), mask=nulls)


class Columns:
    """Rows being gathered; ``quotas`` and the texts are kept from batch to batch."""

    def __init__(self, node: str) -> None:
        self.node = node
        self.quotas = Quotas()
        self.names = Places()
        self._clear()

    def __len__(self) -> int:
        return len(self.at_ms)

    def _clear(self) -> None:
        self.batch = array("q")
        self.place = array("i")
        self.batch_rows = array("i")
        self.at_ms = array("q")
        self.order = array("q")
        self.principal = array("i")
        self.client_id = array("i")
        self.ip = array("i")
        self.broker = array("i")
        self.listener = array("i")
        self.usage_names: list[str] = []
        self.usage_values = array("d")
        self.usage_sizes = array("i")
        self.ids = Digests()
        self.decision = array("b")
        self.throttle_ms = array("q")
        self.charged = array("b")
        self.limited_by = array("i")
        """The index of the quota that limited the ask; NONE for an admit."""
        self.limited_why = array("b")
        self.verdicts = array("i")
        """The number of verdicts of each row."""
        self.v_quota = array("i")
        self.v_usage = array("d")
        self.v_outcome = array("b")
        self.v_throttle_ms = array("q")
        self.v_observed = array("d")
        self.v_remaining = array("d")
        self.v_reason = array("b")
        self.v_charged_ids = Digests()
        self.v_refreshed_ids = Digests()

    def verdict(
        self,
        quota: int,
        usage: float,
        outcome: str,
        throttle_ms: int,
        shows: tuple[float, float],
        reason: str | None = None,
        charged_ids: Sequence[bytes] | None = None,
        refreshed_ids: Sequence[bytes] | None = None,
    ) -> None:
        """Add the verdict of the next quota of the current row."""
        self.v_quota.append(quota)
        self.v_usage.append(usage)
        self.v_outcome.append(OUTCOME[outcome])
        self.v_throttle_ms.append(throttle_ms)
        self.v_observed.append(shows[0])
        self.v_remaining.append(shows[1])
        self.v_reason.append(NONE if reason is None else REASONS.index(reason))
        self.v_charged_ids.add(charged_ids)
        self.v_refreshed_ids.add(refreshed_ids)

    def taken(self) -> pa.RecordBatch:
        """Return the rows gathered so far as Arrow, and start over."""
        rows = len(self)
        decisions = _chosen(OUTCOMES, self.decision)
        stamps = pc.utf8_lpad(column(self.batch).cast(pa.string()), 12, "0")
        false = pa.repeat(pa.scalar(value=False), rows)
        columns: dict[str, pa.Array] = {
            "kind": pa.repeat("decision", rows),
            "batch": pc.binary_join_element_wise(self.node, stamps, "-"),
            "place": column(self.place),
            "batch_rows": column(self.batch_rows),
            "node": pa.repeat(self.node, rows),
            "at_ms": column(self.at_ms),
            "order": column(self.order),
            "mode": pa.repeat("admit", rows),
            "deny": false,
            "recheck": false,
            "cluster_action": false,
            "usage": pa.MapArray.from_arrays(
                offsets(self.usage_sizes), pa.array(self.usage_names, pa.string()), column(self.usage_values)
            ),
            "ids": self.ids.array(),
            "decision": decisions,
            "throttle_ms": column(self.throttle_ms),
            "charged": column(self.charged).cast(pa.bool_()),
            "applied": column(self.verdicts),
            "source": pa.repeat("store", rows),
            "replayed": false,
            "limited_by": self._limited_by(),
            "change": _no_change(rows),
            "verdicts": pa.ListArray.from_arrays(offsets(self.verdicts), self._verdicts()),
        }
        for name in ("principal", "client_id", "ip", "broker", "listener"):
            columns[name] = _chosen(tuple(self.names), getattr(self, name))
        for field in SCHEMA:
            if field.name not in columns:
                columns[field.name] = pa.nulls(rows, field.type)
        self._clear()
        return pa.RecordBatch.from_arrays([columns[field.name] for field in SCHEMA], schema=SCHEMA)

    def _limited_by(self) -> pa.Array:
        places = column(self.limited_by)
        none = pc.equal(places, NONE)
        quotas = self.quotas.taken(pc.if_else(none, pa.scalar(0, pa.int32()), places))
        parts = [quotas["quota"], quotas["entity"], quotas["bucket"], _chosen(REASONS, self.limited_why)]
        return pa.StructArray.from_arrays(parts, fields=list(LIMITED_BY), mask=none)

    def _verdicts(self) -> pa.Array:
        columns = self.quotas.taken(column(self.v_quota))
        columns["usage"] = column(self.v_usage)
        columns["outcome"] = _chosen(OUTCOMES, self.v_outcome)
        columns["throttle_ms"] = column(self.v_throttle_ms)
        columns["observed"] = column(self.v_observed)
        columns["remaining"] = column(self.v_remaining)
        columns["reason"] = _chosen(REASONS, self.v_reason)
        columns["correction"] = pa.repeat(pa.scalar(0, pa.int8()), len(self.v_quota))
        columns["charged_ids"] = self.v_charged_ids.array()
        columns["refreshed_ids"] = self.v_refreshed_ids.array()
        return pa.StructArray.from_arrays([columns[field.name] for field in VERDICT], fields=list(VERDICT))


def column(values: array[Any]) -> pa.Array:
    """A column without nulls. It shares the array's memory, so nothing may be appended to the array later."""
    return pa.Array.from_buffers(_BUFFERS[values.typecode], len(values), [None, pa.py_buffer(values)])


def integers(digests: bytes | bytearray) -> pa.Array:
    """The joined digests as signed big-endian integers."""
    found = array("q", bytes(digests))
    if sys.byteorder == "little":
        found.byteswap()
    return column(found)


def offsets(sizes: array[int]) -> pa.Array:
    """The offset at which each list begins, and the end of the last one."""
    return column(array("i", accumulate(sizes, initial=0)))


def _chosen(texts: Sequence[str], places: array[int]) -> pa.Array:
    """The text of each number; null for NONE."""
    found = column(places)
    none = pc.equal(found, NONE)
    return pa.array(texts, pa.string()).take(pc.if_else(none, pa.scalar(None, found.type), found))


def _one(chunked: pa.ChunkedArray) -> pa.Array:
    return chunked.chunk(0) if chunked.num_chunks else pa.array([], chunked.type)


def _no_change(rows: int) -> pa.Array:
    """Parquet refuses a null in a field that is not nullable, even inside a null struct."""
    parts = [pa.repeat("", rows), *(pa.nulls(rows, field.type) for field in list(CHANGE)[1:])]
    return pa.StructArray.from_arrays(parts, fields=list(CHANGE), mask=pa.repeat(True, rows))
