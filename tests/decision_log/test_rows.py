"""Each field of a batch arrives in its column; compared with a second, slow and simple conversion."""

from __future__ import annotations

import math
import struct
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from msgspec.structs import replace

from app.decision_log.batch import (
    CHARGED,
    OLDEST,
    REFRESHED,
    VERSION,
    AskRow,
    Batch,
    FullRow,
    LoggedVerdict,
    Row,
    SentBatch,
    Sibling,
)
from app.domain.decision import OUTCOMES
from app.domain.digest import digest
from app.domain.quota import PRODUCER_IDS_RATE
from tests.decision_log.batches import SECRET, Node, ids_quota, packed, table_of
from workers.decision_log.rows import UnreadableError, decode, table
from workers.decision_log.schema import CHANGE, SCHEMA


def plainly(batch: SentBatch) -> list[dict[str, Any]]:
    """The expected rows of the columns."""
    return [_row(batch, place, row) for place, row in enumerate(batch.rows)]


def _row(batch: SentBatch, place: int, row: AskRow | FullRow) -> dict[str, Any]:
    known = dict(msgspec.structs.asdict(row)) | (_of_ask(row) if isinstance(row, AskRow) else {})
    known = {name: known[name] for name in SCHEMA.names if name in known}
    ids = _signed(row.ids)
    change: dict[str, Any] | None = None
    if isinstance(row, FullRow):
        verdicts = [_verdict(batch, verdict, ids) for verdict in row.verdicts]
        change = {field.name: getattr(row, field.name) for field in CHANGE} if row.what is not None else None
    else:
        verdicts = _verdicts(batch, row, ids)
        if row.lease is not None:
            of_lease = {"what": row.lease[0].hex(), "after": f'{{"lease_ms": {row.lease[1]}}}'}
            change = {field.name: of_lease.get(field.name) for field in CHANGE}
    siblings = [each._asdict() for each in batch.siblings]
    return known | {
        "batch": batch.id,
        "place": place,
        "node": batch.node,
        "usage": list(row.usage.items()),
        "ids": ids or None,
        "limited_by": msgspec.structs.asdict(row.limited_by) if row.limited_by else None,
        "verdicts": verdicts,
        "change": change,
        "batch_rows": len(batch.rows),
        "siblings": siblings if place == 0 and siblings else None,
    }


def _of_ask(row: AskRow) -> dict[str, Any]:
    bits = ("deny", "recheck", "cluster_action", "charged", "replayed")
    return {
        "kind": ("decision", "late", "lease", "settlement")[row.kind],
        "mode": ("admit", "peek", "record", "refund")[row.mode],
        "decision": OUTCOMES[row.decision],
        "source": ("store", "local", "fallback")[row.source],
        **{name: bool(row.flags & 1 << at) for at, name in enumerate(bits)},
    }


def _verdict(batch: SentBatch, verdict: LoggedVerdict, ids: list[int]) -> dict[str, Any]:
    quota = msgspec.structs.asdict(batch.quotas[verdict.quota])
    del quota["applied_as"]
    columns = {
        name: value for name, value in msgspec.structs.asdict(verdict).items() if name not in {"quota", "ids"}
    }
    return quota | columns | _marked(quota["quota"], ids, verdict.ids)


def _verdicts(batch: SentBatch, row: AskRow, ids: list[int]) -> list[dict[str, Any]]:
    found = []
    for at, (place, bucket) in enumerate(zip(row.quotas, row.buckets, strict=True)):
        quota = msgspec.structs.asdict(batch.quotas[place])
        counts_ids = quota["quota"] == PRODUCER_IDS_RATE
        enforcement = quota.pop("applied_as")
        usage = {"request_rate": "requests", "producer_byte_rate": "produce_bytes"}.get(quota["quota"], "")
        found.append(
            quota
            | _said(row, at - row.alone)
            | _marked(quota["quota"], ids, row.outcomes)
            | {
                "bucket": bucket,
                "enforcement": enforcement,
                "usage": float(len(ids)) if counts_ids else row.usage[usage],
                "bucket_order": row.orders[at - row.alone] if row.orders and at >= row.alone else None,
                "known_until_ms": row.known[0] if row.known and counts_ids else None,
                "known_resets": row.known[1] if row.known and counts_ids else None,
            }
        )
    return found


def _said(row: AskRow, at: int) -> dict[str, Any]:
    """The store's result for a quota; an empty result if the node answered for it."""
    outcome, reason, clock, wait_ms, observed, remaining = 0, 0, 0, 0.0, math.nan, math.nan
    if at >= 0 and row.answer[0] == 3:
        observed, remaining = struct.unpack_from("<dd", row.answer, 1 + 16 * at)
    elif at >= 0:
        said = struct.unpack_from("<BBBddd", row.answer, 1 + 51 * at)
        outcome, reason, clock, wait_ms, observed, remaining = said
    return {
        "outcome": OUTCOMES[outcome],
        "reason": (None, "capacity", "too_large", "store_failure", "store_full")[reason],
        "correction": clock % 4,
        "throttle_ms": int(wait_ms),
        "observed": None if math.isnan(observed) else observed,
        "remaining": None if math.isnan(observed) else remaining,
    }


def _signed(digests: bytes) -> list[int]:
    return [int.from_bytes(digests[at : at + 8], "big", signed=True) for at in range(0, len(digests), 8)]


def _marked(quota: str, ids: list[int], marks: bytes) -> dict[str, Any]:
    if quota != PRODUCER_IDS_RATE:
        return {"charged_ids": None, "refreshed_ids": None}
    pairs = list(zip(ids, marks, strict=False))
    return {
        name: [one for one, found in pairs if found == mark]
        for name, mark in (("charged_ids", CHARGED), ("refreshed_ids", REFRESHED))
    }


def test_each_field_arrives_in_its_column():
    batches = [*Node("a", seed=3).batches(5), *Node("b", seed=4).batches(5, rows=1), Node("c").batch(rows=0)]
    batches[1] = replace(batches[1], siblings=[Sibling("b", 5, 17), Sibling("c", 1, 19)])
    found = table_of(*batches)
    assert found.schema.equals(SCHEMA, check_metadata=True)
    found.validate(full=True)
    expected = [row for batch in batches for row in plainly(batch)]
    assert found.to_pylist() == expected
    assert {row["kind"] for row in expected} == {"decision", "lease", "ids", "quota"}
    assert any(verdict["charged_ids"] for row in expected for verdict in row["verdicts"])
    assert sum(row["siblings"] is not None for row in expected) == 1
    assert any(verdict["refreshed_ids"] for row in expected for verdict in row["verdicts"])


def test_no_rows_become_an_empty_table():
    assert table([]).equals(SCHEMA.empty_table())
    assert table_of(Node().batch(rows=0)).equals(SCHEMA.empty_table())


def test_digest_is_a_big_endian_signed_integer():
    digests = [b"\xff" * 8, b"\x00" * 7 + b"\x07", b"\x80" + b"\x00" * 7, digest(SECRET, "alice", 4711)]
    row = Row("ids", 1, principal="alice", ids=b"".join(digests))
    found = table([Batch(OLDEST, "n-1", "n", 1, [], [row])])["ids"].to_pylist()
    assert found == [[-1, 7, -(2**63), int.from_bytes(digests[3], "big", signed=True)]]


def _with(**row: Any) -> Batch:
    return Batch(OLDEST, "n-000000000001", "n", 1, [ids_quota("alice")], [Row("decision", 1, **row)])


def _verdict_of(quota: int, ids: bytes = b"", **other: Any) -> LoggedVerdict:
    return replace(LoggedVerdict(quota, "deny", 1.0, "admit", 0, None, None, None, 0, ids), **other)


@pytest.mark.parametrize(
    ("batch", "why"),
    [
        (_with(ids=b"1234567"), "eight bytes"),
        (_with(ids=b"1234567812"), "eight bytes"),
        (_with(verdicts=[_verdict_of(1)]), "quota 1 of 1"),
        (_with(verdicts=[_verdict_of(-1)]), "quota -1 of 1"),
        (_with(ids=b"12345678", verdicts=[_verdict_of(0, b"\1\1")]), "2 marks for 1 ids"),
        (_with(throttle_ms=2**63), "too large|int"),
        (_with(applied=2**31), "2147483648"),
        (_with(verdicts=[_verdict_of(0, correction=200)]), "200"),
    ],
)
def test_inconsistent_batch_is_unreadable(batch, why):
    with pytest.raises(UnreadableError, match=why):
        table([decode(packed(batch))])


def test_wrong_lengths_with_the_right_sum_are_unreadable():
    batch = _with(ids=b"1234567")
    with pytest.raises(UnreadableError, match="eight bytes"):
        table([replace(batch, rows=[batch.rows[0], replace(batch.rows[0], ids=b"123456789")])])


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "truncated"),
        (b"\xc1", "malformed|MessagePack"),
        (packed(Node().batch())[:-5], "truncated"),
        (packed(["1", "n-1", "n", 1, [], []]), "int"),
        (packed({"version": 1}), "array"),
        (packed(_with(principal="x")).replace(b"\xa1x", b"\xa1\xff"), "UTF-8|utf"),
        (packed([VERSION + 1, {"laid": "out anew"}]), f"version is {VERSION + 1}, newer than {VERSION}"),
        (packed(replace(_with(), version=VERSION + 2)), f"version is {VERSION + 2}, newer than {VERSION}"),
        (packed(replace(_with(), version=0)), "version is 0, older than 1"),
    ],
)
def test_malformed_batch_is_refused_with_the_reason(data, why):
    with pytest.raises(UnreadableError, match=why):
        decode(data)


def test_table_outlives_the_batches_it_was_made_from():
    """Columns share memory with Python arrays, which must live as long as the columns."""
    found = table_of(Node().batch())
    again = pa.concat_tables([found.slice(0, 100), found.slice(100)]).combine_chunks()
    del found
    assert again["ids"].to_pylist() == [row["ids"] for row in plainly(Node().batch())]
