"""Reads the rows of a log for replays: asks and changes, each once, in the store's order.

Two steps, since one process replays what several read. ``slices_of`` reads a task's rows, sorts them, and
encodes them as plain columns, in slices. ``RowDecoder`` makes asks of the slices, where the replay is.
``in_order`` gives the slices of all tasks. Tasks whose spans of time overlap are held encoded meanwhile, with
one decoded slice of each.

Columns are decoded as a whole, since row by row would take longer than the replay itself. Repeated values,
such as quotas and callers, become one object for each distinct combination.
"""

from __future__ import annotations

import heapq
import pickle
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise, starmap
from operator import attrgetter
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from app.decision_log import columns
from app.domain.ask import AMOUNTS, COUNTS
from app.domain.decision import OUTCOMES
from app.domain.ladder import AppliedQuota
from workers.jobs.batches import Task
from workers.jobs.runner import Runner
from workers.jobs.verdicts import ORDERS_PER_MS, LogRows, flags, integers, valid
from workers.jobs.whatif.rows import (
    LoggedAsk,
    LoggedCaller,
    LoggedChange,
    LoggedRow,
    VerdictOfAsk,
    VerdictQuota,
)

COLUMNS: Final = (
    "kind", "batch", "place", "node", "at_ms", "order", "principal", "client_id", "ip", "broker", "listener",
    "mode", "deny", "recheck", "cluster_action", "usage", "ids", "decision", "throttle_ms", "charged",
    "source", "replayed", "failure", "limited_by", "verdicts", "change",
)  # fmt: skip
"""The columns that replays read."""

ROWS_OF_A_SLICE: Final = 4_096
"""How many rows are decoded at a time; it bounds the memory for Python objects."""

ROWS_OF_A_WAVE: Final = 1_000_000
"""About so many rows are encoded at a time, since Spark keeps all results of a stage."""

WITH_VERDICTS: Final = ("decision", "late", "ids", "renewal", "lease", "settlement", "undone", "undo")
"""The kinds of rows that have verdicts."""

USAGE_FIELDS: Final = (*COUNTS, *AMOUNTS)

Numbers = np.ndarray[Any, np.dtype[Any]]


class RowSlice(NamedTuple):
    """Encoded rows in their order.

    Attributes:
        first: the place of the first one.
        rows: how many there are.
        content: the columns, pickled by ``slices_of``.
    """

    first: int
    rows: int
    content: bytes


def first_place(task: Task, *, by_store: bool) -> int | None:
    """The first place of a task's rows in the store's order; None without rows.

    Args:
        by_store: times are the store's, not the callers'.

    Raises:
        JobError: the file cannot be read.
    """
    rows = _joined([rows.table for rows in task.each(("at_ms", "order"))])
    return int(_places(rows, by_store=by_store).min()) if rows.count else None


def slices_of(task: Task, *, by_store: bool) -> list[RowSlice]:
    """The rows of a task, in the store's order.

    Raises:
        JobError: the file cannot be read.
    """
    return encoded([rows.table for rows in task.each(COLUMNS)], by_store=by_store)


def encoded(tables: Sequence[pa.Table], *, by_store: bool = True) -> list[RowSlice]:
    """The rows of tables of the log, in the store's order."""
    rows = _joined(tables)
    if not rows.count:
        return []
    table, places = rows.table, _places(rows, by_store=by_store)
    if not (places[1:] >= places[:-1]).all():
        by_place = np.argsort(places, kind="stable")
        table, places = table.take(pa.array(by_place)), places[by_place]
    slices = []
    for first in range(0, len(places), ROWS_OF_A_SLICE):
        mine = places[first : first + ROWS_OF_A_SLICE]
        content = _encoded_rows(LogRows(table.slice(first, len(mine)).combine_chunks()), mine)
        slices.append(RowSlice(int(mine[0]), len(mine), pickle.dumps(content, pickle.HIGHEST_PROTOCOL)))
    return slices


def in_order(runner: Runner, tasks: Sequence[Task], share: float, *, by_store: bool) -> Iterator[RowSlice]:
    """The slices of all tasks, by the places of their first rows.

    Args:
        share: see ``Runner``.
        by_store: times are the store's, not the callers'.

    Raises:
        JobError: a file cannot be read.
    """
    firsts = zip(runner.each(partial(first_place, by_store=by_store), tasks, share / 10), tasks, strict=True)
    sorted_ = sorted(
        ((first, number, task) for number, (first, task) in enumerate(firsts) if first is not None)
    )
    rows = sum(task.rows for _, _, task in sorted_)
    unread = deque(sorted_)
    held: list[tuple[int, int, int, RowSlice]] = []
    while unread:
        wave = [unread.popleft()]
        while unread and sum(task.rows for _, _, task in wave) < ROWS_OF_A_WAVE:
            wave.append(unread.popleft())
        part = share * 0.9 * sum(task.rows for _, _, task in wave) / rows
        found = runner.each(partial(slices_of, by_store=by_store), [task for _, _, task in wave], part)
        after = [first for first, _, _ in wave[1:]] + [unread[0][0] if unread else None]
        for (_, number, _), slices, next_first in zip(wave, found, after, strict=True):
            for at, each in enumerate(slices):
                heapq.heappush(held, (each.first, number, at, each))
            while held and (next_first is None or held[0][0] < next_first):
                yield heapq.heappop(held)[-1]


@dataclass(slots=True)
class RowDecoder:
    """Decodes slices.

    It remembers each distinct quota with its bucket, and each distinct caller, but no rows.
    """

    callers: dict[tuple[Any, ...], LoggedCaller] = field(default_factory=dict)
    quotas: dict[tuple[Any, ...], VerdictQuota] = field(default_factory=dict)

    def rows(self, slices: Iterable[RowSlice]) -> Iterator[LoggedRow]:
        """All rows in the store's order.

        Args:
            slices: by the places of their first rows; their rows may overlap.
        """
        held: list[LoggedRow] = []
        for each in slices:
            before = bisect_left(held, each.first, key=_place)
            yield from held[:before]
            held = [*held[before:], *self._decoded(each)]
            held.sort(key=_place)
        yield from held

    def _decoded(self, encoded_: RowSlice) -> Iterator[LoggedRow]:
        has_verdicts, asks, changes = pickle.loads(encoded_.content)  # noqa: S301  made by ``slices_of``
        if not changes:
            return self._asks(*asks)
        return _alternating(has_verdicts, self._asks(*asks), starmap(LoggedChange, changes))

    def _asks(
        self,
        kinds: list[str],
        places: Numbers,
        has_order: Numbers,
        at_ms: Numbers,
        nodes: list[str],
        callers: tuple[list[tuple[Any, ...]], Numbers],
        modes: list[str],
        deny: Numbers,
        recheck: Numbers,
        amounts: tuple[Numbers, Numbers],
        ids: tuple[Numbers, bytes],
        ranks: Numbers,
        waits: Numbers,
        charged: Numbers,
        sources: list[str | None],
        replayed: Numbers,
        failures: list[str | None],
        limiting: list[str | None],
        change: list[Any] | None,
        batches: list[str],
        batch_places: Numbers,
        verdicts: tuple[Any, ...],
    ) -> Iterator[LoggedAsk]:
        distinct = [self._caller(key) for key in callers[0]]
        return map(
            LoggedAsk,
            kinds,
            places.tolist(),
            has_order.tolist(),
            at_ms.tolist(),
            nodes,
            [distinct[code] for code in callers[1].tolist()],
            modes,
            deny.tolist(),
            recheck.tolist(),
            _tuples(*amounts),
            _digests(*ids),
            ranks.tolist(),
            waits.tolist(),
            charged.tolist(),
            sources,
            replayed.tolist(),
            failures,
            limiting,
            change or [None] * len(kinds),
            zip(batches, batch_places.tolist(), strict=True),
            self._verdicts(*verdicts),
        )

    def _verdicts(
        self,
        ends: Numbers,
        quotas: tuple[list[tuple[Any, ...]], Numbers],
        usage: Numbers,
        ranks: Numbers,
        waits: Numbers,
        observed: Numbers,
        remaining: Numbers,
        reasons: list[str | None] | None,
        corrections: Numbers,
        orders: list[int | None] | None,
        charged_ids: tuple[Numbers, bytes],
    ) -> Iterator[list[VerdictOfAsk]]:
        """The verdicts of each row."""
        distinct = [self._quota(key) for key in quotas[0]]
        nothing = [None] * len(usage)
        verdicts = list(
            map(
                VerdictOfAsk,
                [distinct[code] for code in quotas[1].tolist()],
                usage.tolist(),
                ranks.tolist(),
                waits.tolist(),
                _numbers(observed),
                _numbers(remaining),
                reasons or nothing,
                corrections.tolist(),
                orders or nothing,
                _digests(*charged_ids),
            )
        )
        return (verdicts[first:last] for first, last in pairwise(ends.tolist()))

    def _caller(self, key: tuple[Any, ...]) -> LoggedCaller:
        found = self.callers.get(key)
        if found is None:
            fields: Any = tuple(name for bit, name in enumerate(USAGE_FIELDS) if key[-1] >> bit & 1)
            found = self.callers[key] = LoggedCaller(*(*key[:7], fields))
        return found

    def _quota(self, key: tuple[Any, ...]) -> VerdictQuota:
        """A quota as the domain has it."""
        found = self.quotas.get(key)
        if found is None:
            named = dict(zip(columns.QUOTA, key, strict=True))
            applied = AppliedQuota(columns.as_quota(named), named["entity"], named["bucket"], "")
            found = self.quotas[key] = VerdictQuota(applied)
        return found


_place = attrgetter("place")


def _alternating(
    has_verdicts: list[bool], asks: Iterator[LoggedAsk], changes: Iterator[LoggedChange]
) -> Iterator[LoggedRow]:
    for is_ask in has_verdicts:
        yield next(asks) if is_ask else next(changes)


def _joined(tables: Sequence[pa.Table]) -> LogRows:
    if not tables:
        return LogRows(pa.table({}))
    return LogRows(pa.concat_tables(tables, promote_options="default").unify_dictionaries().combine_chunks())


def _places(rows: LogRows, *, by_store: bool) -> Numbers:
    """Each row's place in the store's order.

    A row without an order comes after all that was decided in its millisecond. Callers' times say nothing
    about the store's order: there such a row comes after all rows before it, as nodes log answers in turn.
    """
    has_order = valid(rows.column("order"))
    orders = integers(rows.column("order"))
    if by_store or not has_order.any():
        by_time = (integers(rows.column("at_ms")) + 1) * ORDERS_PER_MS - 1
        return np.where(has_order, orders, by_time)
    before = np.maximum.accumulate(np.where(has_order, orders, orders[has_order.argmax()]))
    return np.where(has_order, orders, before)


def _encoded_rows(
    rows: LogRows, places: Numbers
) -> tuple[list[bool], tuple[Any, ...], list[tuple[Any, ...]]]:
    """Whether each row has verdicts, the columns of the rows that do, and the other rows one by one."""
    has_verdicts = np.array([kind in WITH_VERDICTS for kind in _texts(rows.column("kind"))], bool)
    changes: list[tuple[Any, ...]] = []
    if not has_verdicts.all():
        others = LogRows(rows.table.filter(pa.array(~has_verdicts)))
        named = zip(
            _texts(others.column("kind")),
            places[~has_verdicts].tolist(),
            others.column("at_ms").to_pylist(),
            _texts(others.column("node")),
            others.column("change").to_pylist(),
            strict=True,
        )
        changes = [(*first, change or {}) for *first, change in named]
        rows, places = LogRows(rows.table.filter(pa.array(has_verdicts))), places[has_verdicts]
    return has_verdicts.tolist(), _encoded_asks(rows, places), changes


def _encoded_asks(rows: LogRows, places: Numbers) -> tuple[Any, ...]:
    """The columns that ``RowDecoder._asks`` takes."""
    callers, amounts = _callers(rows)
    by, change = rows.column("limited_by"), rows.column("change")
    return (
        _texts(rows.column("kind")),
        places,
        valid(rows.column("order")),
        integers(rows.column("at_ms")),
        _texts(rows.column("node")),
        callers,
        [mode or "admit" for mode in _texts(rows.column("mode"))],
        flags(rows.column("deny")),
        flags(rows.column("recheck")),
        amounts,
        _digest_bytes(rows.column("ids")),
        _ranks(rows.column("decision")),
        integers(rows.column("throttle_ms")),
        flags(rows.column("charged")),
        _texts(rows.column("source")),
        flags(rows.column("replayed")),
        _texts(rows.column("failure")),
        _texts(_field(by, "quota")),
        _rare(change),
        _texts(rows.column("batch")),
        integers(rows.column("place")),
        _encoded_verdicts(rows),
    )


def _encoded_verdicts(rows: LogRows) -> tuple[Any, ...]:
    """The columns that ``RowDecoder._verdicts`` takes."""
    reasons, orders = rows.verdict("reason"), rows.verdict("bucket_order")
    parts = [_codes(rows.verdict(name)) for name in columns.QUOTA]
    return (
        np.concatenate([[0], np.cumsum(rows.sizes)]),
        _distinct(parts),
        np.asarray(rows.verdict("usage")),
        _ranks(rows.verdict("outcome")),
        integers(rows.verdict("throttle_ms")),
        _floats(rows.verdict("observed")),
        _floats(rows.verdict("remaining")),
        _texts(reasons) if reasons.null_count < len(reasons) else None,
        integers(rows.verdict("correction")),
        orders.to_pylist() if orders.null_count < len(orders) else None,
        _digest_bytes(rows.verdict("charged_ids")),
    )


def _callers(rows: LogRows) -> tuple[tuple[list[tuple[Any, ...]], Numbers], tuple[Numbers, Numbers]]:
    """The distinct callers, the place of each row's among them, and the rows' amounts."""
    has, amounts = _usage(rows.column("usage"))
    names = ("principal", "client_id", "ip", "broker", "listener", "cluster_action")
    parts = [_codes(rows.column(name)) for name in names]
    parts += [(valid(rows.column("ids")).astype(np.int64), [False, True]), (has, None)]
    return _distinct(parts), amounts


def _distinct(parts: list[tuple[Numbers, list[Any] | None]]) -> tuple[list[tuple[Any, ...]], Numbers]:
    """The distinct combinations of values in some columns, and for each row the place of its own."""
    codes, firsts = _combined([codes for codes, _ in parts])
    keys = [
        tuple([int(code[at]) if values is None else values[code[at]] for code, values in parts])
        for at in firsts.tolist()
    ]
    return keys, codes


def _codes(array: pa.Array) -> tuple[Numbers, list[Any] | None]:
    """The values of an array as places in a list of the distinct values, which ends with None."""
    if pa.types.is_null(array.type):
        return np.zeros(len(array), np.int64), [None]
    kept = array if pa.types.is_dictionary(array.type) else array.dictionary_encode()
    distinct = kept.dictionary.to_pylist()
    return integers(pc.fill_null(kept.indices, len(distinct))), [*distinct, None]


def _texts(array: pa.Array) -> list[Any]:
    """The values of an array, of which many are equal."""
    codes, distinct = _codes(array)
    assert distinct is not None
    return [distinct[code] for code in codes.tolist()]


def _field(structs: pa.Array, name: str) -> pa.Array:
    """A field of structs; null where the struct is."""
    if pa.types.is_null(structs.type):
        return structs
    return pc.if_else(structs.is_valid(), structs.field(name), pa.scalar(None, pa.string()))


def _ranks(outcomes: pa.Array) -> Numbers:
    """The places of outcomes in ``OUTCOMES``; 0 for none."""
    codes, distinct = _codes(outcomes)
    assert distinct is not None
    places = {name: place for place, name in enumerate(OUTCOMES)}
    return np.array([places.get(each, 0) for each in distinct], np.int64)[codes]


def _floats(array: pa.Array) -> Numbers:
    """The numbers of an array; NaN for null."""
    return np.asarray(pc.fill_null(array.cast(pa.float64()), float("nan")))


def _numbers(array: Numbers) -> list[float | None]:
    """The numbers of ``_floats``."""
    found: list[float | None] = array.tolist()
    for at in np.flatnonzero(np.isnan(array)).tolist():
        found[at] = None
    return found


def _combined(parts: list[Numbers]) -> tuple[Numbers, Numbers]:
    """A number for each distinct combination of codes in the rows; and where each first occurs."""
    combined = parts[0]
    firsts = np.zeros(0, np.int64)
    for part in parts[1:]:
        if len(part) and part.any():
            _, combined = np.unique(combined * (int(part.max()) + 1) + part, return_inverse=True)
    _, firsts, codes = np.unique(combined, return_index=True, return_inverse=True)
    return codes, firsts


def _usage(usages: pa.MapArray) -> tuple[Numbers, tuple[Numbers, Numbers]]:
    """The fields of each usage as bits, and the amounts of these fields, in the order of ``USAGE_FIELDS``.

    The amounts are flat, with the place where each row's amounts begin, and where the last ones end.
    """
    offsets = np.asarray(usages.offsets)
    names, items = (each[offsets[0] : offsets[-1]] for each in (usages.keys, usages.items))
    fields = integers(pc.fill_null(pc.index_in(names, pa.array(USAGE_FIELDS)), -1))
    amounts = np.asarray(items)
    of_row = np.repeat(np.arange(len(usages)), np.diff(offsets))
    known = fields >= 0
    fields, amounts, of_row = fields[known], amounts[known], of_row[known]
    has = np.bincount(of_row, weights=1 << fields, minlength=len(usages)).astype(np.int64)
    ends = np.concatenate([[0], np.cumsum(np.bincount(of_row, minlength=len(usages)))])
    return has, (ends, amounts[np.lexsort((fields, of_row))])


def _tuples(ends: Numbers, values: Numbers) -> list[tuple[float, ...]]:
    flat = values.tolist()
    return [tuple(flat[first:last]) for first, last in pairwise(ends.tolist())]


def _digest_bytes(lists: pa.Array) -> tuple[Numbers, bytes]:
    """Where the digests of each row begin, and the last ones end; and all digests, in big-endian order."""
    if pa.types.is_null(lists.type):
        return np.zeros(len(lists) + 1, np.int64), b""
    lengths = integers(pc.fill_null(pc.list_value_length(lists), 0))
    digests = np.asarray(lists.flatten()).astype(">i8").tobytes()
    return np.concatenate([[0], np.cumsum(lengths)]), digests


def _digests(ends: Numbers, digests: bytes) -> list[tuple[bytes, ...]]:
    """The digests of each row."""
    found: list[tuple[bytes, ...]] = [()] * (len(ends) - 1)
    bounds = ends.tolist()
    for at in np.flatnonzero(np.diff(ends)).tolist():
        found[at] = tuple([digests[8 * each : 8 * each + 8] for each in range(bounds[at], bounds[at + 1])])
    return found


def _rare(array: pa.Array) -> list[Any] | None:
    """The values of a column that is mostly null; None if all are."""
    if array.null_count == len(array):
        return None
    values: list[Any] = [None] * len(array)
    for at in np.flatnonzero(valid(array)).tolist():
        values[at] = array[at].as_py()
    return values
