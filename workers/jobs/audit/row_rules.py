"""A sieve for the rules on single rows: confirms honest rows by column, and leaves the others to the rules.

``workers.jobs.audit.contradictions`` has the rules as functions of one row, which take tens of microseconds
a verdict. The sieve has them in two cheaper forms. A rule over values that differ in every row is arithmetic
by column. A rule over few distinct values runs as it is, once for each distinct combination of them.

A row that is not suspect has no finding by the rules. A suspect row may have one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from typing import Any, Final, TypeAlias

import pyarrow as pa
from pyarrow import compute

from app.domain.decision import BYTE_RATES, OUTCOMES, REQUEST_RATES
from app.domain.entity import COMBINATIONS, TYPES, spell
from app.domain.quota import KEYS, MAX_THROTTLE_MS
from workers.decision_log.schema import SCHEMA, VERDICT
from workers.jobs.audit.bucket_findings import SCHEMA as FINDINGS
from workers.jobs.audit.contradictions import (
    CLOCK_MS,
    CLOSE,
    SINCE_MS,
    DecisionRow,
    VerdictRow,
    checking,
    contradictions,
)
from workers.jobs.verdicts import ORDERS_PER_MS

CHECKED_KINDS: Final = ("decision", "late", "ids")

Mask: TypeAlias = pa.BooleanArray
"""Whether a rule certainly holds for each row, or for each verdict; null means no, as false does."""
Places: TypeAlias = pa.Int64Array
"""Places of rows in the batch, or of verdicts among all verdicts of the batch."""

_MOST: Final = 2**29
"""More than the verdicts of a batch. Rank, wait and place of a verdict have room in one signed integer."""
_LARGEST: Final = 2**62
"""The largest number of a combination of values; larger ones are numbered anew."""
_LIMITED_BY: Final = ("quota", "bucket", "entity", "reason")
_VERDICT: Final = VerdictRow(
    *("request_rate", "user=*", "user=a", 1.0, "sampled_rate", "delay", False, "cluster", 0.0),
    *("admit", 0, None, None, None),
)
_ROW: Final = DecisionRow(
    *("ids", "", 0, 0, None, None, None, None, None, None, "admit", False, False, (), None),
    *("admit", 0, False, 0, None, False, None, {"quota": "throttle_factor"}, ()),
)
"""A row in which a combination of values takes its place.

The throttle factor is its limit, so that its decision is not compared with its verdicts, see ``follows``.
"""


class Columns:
    """The checked columns of rows of the log, and the checked fields of their verdicts.

    Attributes:
        row: columns with a value for each row.
        verdict: fields with a value for each verdict.
        parent: the place of each verdict's row.
        by_store, sequential: as for ``suspects``.
    """

    def __init__(self, rows: pa.RecordBatch, *, by_store: bool, sequential: bool) -> None:
        self.by_store, self.sequential = by_store, sequential
        nested = rows.column("verdicts")
        flat = nested.flatten()
        self.parent: Places = compute.list_parent_indices(nested)
        self.row = {name: rows.column(name) for name in DecisionRow._fields[:-1]}
        self.row |= {
            "fails": self.row["failure"].is_valid(),
            "waits": compute.greater(self.row["throttle_ms"], 0),
            "ordered": self.row["order"].is_valid(),
            "verdicts": _sizes(nested),
        }
        self.verdict = {name: compute.struct_field(flat, name) for name in VerdictRow._fields}
        self.verdict |= {
            "waits": compute.greater(self.verdict["throttle_ms"], 0),
            "charges": compute.greater(_sizes(self.verdict["charged_ids"]), 0),
            "refreshes": compute.greater(_sizes(self.verdict["refreshed_ids"]), 0),
        }

    def of_row(self, name: str) -> pa.DictionaryArray:
        """A column of the row, for each verdict."""
        return self.row[name].dictionary_encode().take(self.parent)


def suspects(rows: pa.Table | pa.RecordBatch, *, by_store: bool, sequential: bool) -> Places:
    """The places of the rows that may have findings, ascending.

    Args:
        rows: rows of the log; columns that ``DecisionRow`` does not have are not read.
        by_store: times are the store's, not the callers'.
        sequential: request delays are added to byte delays (``QUOTAGATE_COMBINE_DELAYS``).
    """
    batch = _one_batch(rows)
    lacking = _lacking(batch)
    places = _range(len(batch))
    if len(lacking):
        places = places.filter(compute.invert(_is_in(places, lacking)))
        columns = Columns(batch.take(places), by_store=by_store, sequential=sequential)
    else:
        columns = Columns(batch, by_store=by_store, sequential=sequential)
    failing = [rule(columns) for rule in ROW_RULES]
    failing += [columns.parent.take(rule(columns)) for rule in VERDICT_RULES]
    found = pa.concat_arrays([lacking, places.take(pa.concat_arrays(failing).unique())])
    found = found.filter(compute.is_in(batch["kind"].take(found), pa.array(CHECKED_KINDS)))
    return found.take(compute.sort_indices(found))


def findings(rows: pa.Table | pa.RecordBatch, *, by_store: bool, sequential: bool) -> pa.Table:
    """The findings that ``contradictions.checking`` gives for the same rows in one batch."""
    batch = _one_batch(rows)
    odd = batch.take(suspects(batch, by_store=by_store, sequential=sequential))
    return pa.Table.from_batches(checking(by_store=by_store, sequential=sequential)([odd]), FINDINGS)


def clock(columns: Columns) -> Places:
    """A row's time is near the time in its place in the store's order."""
    order = columns.row["order"]
    ordered_ms = compute.divide(order, ORDERS_PER_MS)
    after = compute.subtract(columns.row["at_ms"], ordered_ms)
    near = _all(compute.less_equal(after, CLOCK_MS), compute.greater_equal(after, -CLOCK_MS))
    return _failing(
        _any(pa.scalar(not columns.by_store), order.is_null(), near, compute.less(ordered_ms, SINCE_MS))
    )


ROW_WORDS: Final = ("kind", "mode", "decision", "source", "replayed", "charged", "applied")


def row_words(columns: Columns) -> Places:
    """The words of a row go together."""

    def holds(fails: bool, waits: bool, ordered: bool, verdicts: int, *words: Any) -> bool:
        row = _ROW._replace(
            failure="failed" if fails else None,
            throttle_ms=int(waits),
            order=0 if ordered else None,
            verdicts=(_VERDICT,) * verdicts,
            **dict(zip(ROW_WORDS, words, strict=True)),
        )
        return all(found.verdict is not None for found in contradictions(row, by_store=False))

    names = ("fails", "waits", "ordered", "verdicts", *ROW_WORDS)
    return _failing_once([columns.row[name].dictionary_encode() for name in names], holds)


def follows(columns: Columns) -> Places:
    """A decision is the one that ``combine`` makes of its verdicts.

    Of a decision without the store only outcome and wait are compared, and not if the factor refused the ask.
    """
    row, verdict = columns.row, columns.verdict
    said = dict(zip(row["limited_by"].type.names, row["limited_by"].flatten(), strict=True))
    decided = _all(compute.not_equal(row["kind"], "ids"), compute.invert(row["replayed"]))
    by_store = _all(decided, compute.equal(row["source"], "store"), row["ordered"])
    without = _all(decided, compute.equal(row["source"], "fallback"))
    winner, wait = _combined(columns)
    outcome = verdict["outcome"].take(winner).fill_null("admit")
    is_exact = _all(compute.equal(row["decision"], outcome), compute.equal(row["throttle_ms"], wait))
    is_named = _all(*(_same(said[name], verdict[name].take(winner)) for name in _LIMITED_BY))
    by_factor = compute.equal(said["quota"], "throttle_factor")
    return _failing(
        _any(
            compute.invert(_any(by_store, without)),
            _all(is_exact, is_named),
            _all(without, _any(is_exact, by_factor)),
        )
    )


def _combined(columns: Columns) -> tuple[Places, pa.Int64Array]:
    """For each row, the place of the verdict that decides, or null, and the wait: ``combine`` by column."""
    verdict = columns.verdict
    rows = _range(len(columns.row["kind"]))
    refusing = _all(compute.not_equal(verdict["outcome"], "admit"), compute.invert(verdict["shadow"]))
    at = compute.indices_nonzero(refusing).cast(pa.int64())
    row = columns.parent.take(at)
    wait, outcome, quota = (verdict[name].take(at) for name in ("throttle_ms", "outcome", "quota"))
    candidates = pa.scalar(True)
    if columns.sequential:
        delays = compute.equal(outcome, "delay")
        of_bytes, of_requests = (_is_in(quota, names) for names in (BYTE_RATES, REQUEST_RATES))
        of_other = compute.invert(compute.or_(of_bytes, of_requests))
        parts = [compute.if_else(of_bytes, wait, 0), compute.if_else(of_requests, wait, 0)]
        parts = [*parts, compute.if_else(of_other, wait, -1)]
        of_bytes, of_requests, other = (_largest(rows, row, part, delays) for part in parts)
        summed = compute.add(of_bytes, of_requests)
        sum_of_row, other_of_row = summed.take(row), other.take(row)
        is_part = compute.or_(compute.invert(of_other), compute.equal(wait, sum_of_row))
        longest = compute.if_else(compute.greater(other_of_row, sum_of_row), of_other, is_part)
        candidates = _any(compute.invert(delays), longest)
        summed = compute.max_element_wise(other, compute.min_element_wise(summed, MAX_THROTTLE_MS))
    rank = compute.index_in(outcome, pa.array(OUTCOMES)).cast(pa.int64())
    score = compute.add(compute.multiply(rank, MAX_THROTTLE_MS + 1), wait)
    score = compute.add(compute.multiply(score, _MOST), compute.subtract(_MOST - 1, at))  # first in a tie
    best = _largest(rows, row, score, candidates)
    winner = compute.subtract(_MOST - 1, compute.bit_wise_and(best, _MOST - 1))
    wait = verdict["throttle_ms"].take(winner).fill_null(0)
    if columns.sequential:
        is_delay = compute.equal(verdict["outcome"].take(winner), "delay").fill_null(False)
        wait = compute.if_else(is_delay, summed, wait)
    return winner, wait


def _largest(rows: Places, row: Places, values: pa.Int64Array, counts: Mask) -> pa.Int64Array:
    """The largest of the values that count for each row, or null."""
    groups = pa.table({"row": row, "value": values})
    groups = groups.filter(counts) if isinstance(counts, pa.Array) else groups
    groups = groups.group_by("row", use_threads=False).aggregate([("value", "max")]).combine_chunks()
    return groups["value_max"].take(compute.index_in(rows, groups["row"]))


def waits(columns: Columns) -> Places:
    """A verdict's wait is one that ``_combined`` can compare."""
    wait = columns.verdict["throttle_ms"]
    return _failing(_all(compute.greater_equal(wait, 0), compute.less_equal(wait, MAX_THROTTLE_MS)))


_ENTRIES: Final = pa.list_(pa.struct([("name", pa.string()), ("amount", pa.float64())]))
"""A map as a list, which Arrow can flatten."""


def usages(columns: Columns) -> Places:
    """A verdict's usage is the ask's."""
    row, verdict = columns.row, columns.verdict
    asked = pa.nulls(len(columns.parent), pa.float64())
    entries = row["usage"].cast(_ENTRIES)
    names, amounts = entries.flatten().flatten()
    owners = compute.list_parent_indices(entries)
    for key in KEYS.values():
        of_key = compute.equal(verdict["quota"], key.name)
        if of_key.true_count:
            mine = compute.equal(names, key.usage)
            first = compute.index_in(columns.parent, owners.filter(mine))
            amount = compute.divide(amounts.filter(mine).take(first), key.per_unit)
            asked = compute.if_else(of_key, amount, asked)
    ids = _sizes(row["ids"]).cast(pa.float64()).take(columns.parent)
    asked = compute.if_else(compute.equal(verdict["algorithm"], "producer_ids"), ids, asked)
    apart = compute.abs(compute.subtract(asked, verdict["usage"]))
    close = compute.multiply(compute.max_element_wise(compute.abs(asked), 1.0, skip_nulls=False), CLOSE)
    return _failing(compute.less_equal(apart, close))


def ids(columns: Columns) -> Places:
    """The ids that a verdict charged or refreshed are the ask's, and none is in both lists."""
    verdict = columns.verdict
    asked = columns.row["ids"]
    known = asked.flatten().unique()

    def keys(lists: pa.ListArray, owner: Places | None = None) -> tuple[Places, pa.Int64Array]:
        """The place of each id's list, and one number for the id and the owner of its list."""
        at = compute.list_parent_indices(lists)
        number = compute.index_in(lists.flatten(), known).cast(pa.int64())
        return at, compute.add(compute.multiply(at if owner is None else owner.take(at), len(known)), number)

    _, own = keys(asked)
    failing = []
    for name in ("charged_ids", "refreshed_ids"):
        at, wrote = keys(verdict[name], columns.parent)
        failing.append(at.filter(compute.invert(_is_in(wrote, own))))
    at, charged = keys(verdict["charged_ids"])
    failing.append(at.filter(_is_in(charged, keys(verdict["refreshed_ids"])[1])))
    return pa.concat_arrays(failing)


VERDICT_WORDS: Final = ("quota", "algorithm", "enforcement", "outcome", "reason")


def verdict_words(columns: Columns) -> Places:
    """The words of a verdict fit each other and the words of its row."""

    def holds(waits: bool, charges: bool, refreshes: bool, *words: Any) -> bool:
        verdict = _VERDICT._replace(
            throttle_ms=int(waits),
            charged_ids=(1,) if charges else None,
            refreshed_ids=(2,) if refreshes else None,
            **dict(zip(VERDICT_WORDS, words[4:], strict=True)),
        )
        row = _ROW._replace(**dict(zip(of_row, words[:4], strict=True)), verdicts=(verdict,))
        found = {each.field for each in contradictions(row, by_store=False) if each.verdict is not None}
        return found <= {*OF_BUCKET, "usage", "ids"}

    of_row = ("kind", "mode", "deny", "decision")
    signs = [columns.verdict[name].dictionary_encode() for name in ("waits", "charges", "refreshes")]
    words = [columns.verdict[name].dictionary_encode() for name in VERDICT_WORDS]
    return _failing_once([*signs, *map(columns.of_row, of_row), *words], holds)


OF_BUCKET: Final = ("entity", "bucket", "broker")
"""The fields of contradictions between a verdict's bucket and the caller."""
CALLER: Final = dict(zip(("principal", "client_id", "ip", "broker", "listener"), TYPES, strict=True))
DEFAULTS: Final = tuple(",".join(f"{type_}=*" for type_ in types) for types in COMBINATIONS)
ANYBODY: Final = "192.0.2.1"
"""A name of any type, in place of names that are alike."""


def buckets(columns: Columns) -> Places:
    """A verdict's bucket is the caller's under the entity's quota.

    It depends on the parts of the caller that the entity names, and on the broker if the scope is a broker.
    An IPv6 address always matters: if it is not valid, no ladder of its quota key is. Under a default entity
    all names are alike, so callers whose names the bucket spells are one distinct combination.
    """

    def holds(
        cluster_action: bool, quota: str, scope: str, entity: str, own: str | None, more: str, *caller: Any
    ) -> bool:
        bucket = (entity.replace("*", ANYBODY) if own is None else own) + more
        verdict = _VERDICT._replace(quota=quota, scope=scope, entity=entity, bucket=bucket)
        row = _ROW._replace(cluster_action=cluster_action, verdicts=(verdict,))
        row = row._replace(**dict(zip(CALLER, caller, strict=True)))
        return not any(found.field in OF_BUCKET for found in contradictions(row, by_store=False))

    verdict = {name: columns.verdict[name].dictionary_encode() for name in ("quota", "scope", "entity")}
    bucket = columns.verdict["bucket"].dictionary_encode()
    own, more = (_without(bucket, pattern) for pattern in (r"(?s);.*", r"^[^;]*"))
    entity, by_broker = verdict["entity"], _has(verdict["scope"], "broker")
    spelled, caller = [], []
    for name, type_ in CALLER.items():
        part = columns.of_row(name)
        is_named = _has(entity, f"{type_}=")
        names = pa.array([_spelled(type_, each) for each in part.dictionary.to_pylist()], pa.string())
        spelled.append(compute.if_else(is_named, names.take(part.indices), pa.scalar(None, pa.string())))
        matters = _has(part, ":") if type_ == "ip" else by_broker if type_ == "broker" else pa.scalar(False)
        caller.append(_replaced(part, compute.invert(_any(is_named, matters)), None))
    expected = compute.binary_join_element_wise(*spelled, "", null_handling="replace", null_replacement="")
    alike = compute.equal(
        expected, compute.binary_join_element_wise(own.dictionary, ",", "").take(own.indices)
    )
    alike = _all(alike, compute.is_in(entity.dictionary, pa.array(DEFAULTS)).take(entity.indices))
    caller = [
        _replaced(part, _all(alike, names.is_valid()), ANYBODY)
        for part, names in zip(caller, spelled, strict=True)
    ]
    words = [columns.of_row("cluster_action"), *verdict.values(), _replaced(own, alike, None), more]
    return _failing_once([*words, *caller], holds)


def _spelled(type_: str, name: str) -> str | None:
    """A part of a bucket's name; None for an IPv6 address, of which the bucket may have only the network."""
    return None if type_ == "ip" and ":" in name else f"{type_}={spell(name)},"


def _without(words: pa.DictionaryArray, pattern: str) -> pa.DictionaryArray:
    left = compute.replace_substring_regex(words.dictionary, pattern, "")
    return left.take(words.indices).dictionary_encode()


def _replaced(words: pa.DictionaryArray, where: Mask, word: str | None) -> pa.DictionaryArray:
    """Words, with another word, or null, in some places."""
    dictionary = words.dictionary if word is None else pa.concat_arrays([words.dictionary, pa.array([word])])
    place = pa.scalar(None if word is None else len(words.dictionary), pa.int32())
    return pa.DictionaryArray.from_arrays(compute.if_else(where, place, words.indices), dictionary)


ROW_RULES: Final[tuple[Callable[[Columns], Places], ...]] = (clock, row_words, follows)
"""Rules that give the places of rows for which they may not hold."""
VERDICT_RULES: Final[tuple[Callable[[Columns], Places], ...]] = (waits, usages, ids, verdict_words, buckets)
"""Rules that give the places of verdicts for which they may not hold."""


def _one_batch(rows: pa.Table | pa.RecordBatch) -> pa.RecordBatch:
    """The columns that the rules read, as one record batch."""
    table = rows if isinstance(rows, pa.Table) else pa.Table.from_batches([rows])
    (batch,) = table.select(DecisionRow._fields).combine_chunks().to_batches() or [_EMPTY]
    return batch


_EMPTY: Final = pa.RecordBatch.from_pylist(
    [], pa.schema([SCHEMA.field(name) for name in DecisionRow._fields])
)


def _lacking(rows: pa.RecordBatch) -> Places:
    """The places of rows with a null where the log's schema allows none; no other rule reads these rows."""
    nested = rows.column("verdicts")
    verdicts, parent = nested.flatten(), compute.list_parent_indices(nested)
    required = [rows.column(name) for name in DecisionRow._fields if not SCHEMA.field(name).nullable]
    lacking = [_failing(column.is_valid()) for column in required if column.null_count]
    for name in VerdictRow._fields:
        field = compute.struct_field(verdicts, name)
        if field.null_count and not VERDICT.field(name).nullable:
            lacking.append(parent.take(_failing(field.is_valid())))
    return pa.concat_arrays([_range(0), *lacking]).unique()


def _failing_once(columns: Sequence[pa.DictionaryArray], holds: Callable[..., bool]) -> Places:
    """The places where a rule does not hold, which runs once for each distinct combination of values."""
    numbers, below = pa.repeat(pa.scalar(0, pa.int64()), len(columns[0])), 1
    for column in columns:
        null = len(column.dictionary)
        if below * (null + 1) > _LARGEST:
            encoded = numbers.dictionary_encode()
            numbers, below = encoded.indices.cast(pa.int64()), len(encoded.dictionary)
        numbers = compute.add(compute.multiply(numbers, null + 1), column.indices.fill_null(null))
        below *= null + 1
    distinct = numbers.unique()
    first = compute.index_in(distinct, numbers)
    values = zip(*(column.take(first).to_pylist() for column in columns), strict=True)
    failing = distinct.filter(pa.array([not holds(*each) for each in values], pa.bool_()))
    return compute.indices_nonzero(_is_in(numbers, failing)).cast(pa.int64())


def _failing(held: Mask) -> Places:
    return compute.indices_nonzero(compute.invert(held.fill_null(False))).cast(pa.int64())


def _range(end: int) -> Places:
    return pa.arange(0, end)


def _sizes(lists: pa.ListArray) -> pa.Int32Array:
    """The length of each list; 0 for null."""
    return lists.value_lengths().fill_null(0)


def _has(words: pa.DictionaryArray, text: str) -> Mask:
    return compute.match_substring(words.dictionary, text).take(words.indices)


def _is_in(values: pa.Array, wanted: Iterable[Any]) -> Mask:
    return compute.is_in(values, wanted if isinstance(wanted, pa.Array) else pa.array(wanted))


def _same(one: pa.Array, other: pa.Array | pa.Scalar) -> Mask:
    """Whether values are equal, or both null."""
    return _any(compute.equal(one, other), _all(compute.is_null(one), compute.is_null(other)))


def _all(*masks: Mask | pa.BooleanScalar) -> Mask:
    return reduce(compute.and_kleene, masks)


def _any(*masks: Mask | pa.BooleanScalar) -> Mask:
    return reduce(compute.or_kleene, masks)
