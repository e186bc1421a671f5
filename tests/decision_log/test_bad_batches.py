"""Bad batches of version 4 are set aside with a reason, whatever is wrong with them; the writer goes on."""

from __future__ import annotations

import random
import struct
from collections import Counter
from pathlib import Path
from typing import Any, Final

import msgspec
import pyarrow as pa
import pytest
from msgspec.structs import replace

from app.decision_log.batch import KINDS, REPLAYED, AskRow, SentBatch
from app.decision_log.stream import StreamEntry
from app.domain.ask import MODES
from app.domain.decision import OUTCOMES, SOURCES
from tests.decision_log.batches import ADMIT, Node, brief, full, packed, result
from tests.decision_log.conftest import known, written
from workers.decision_log.flush import UNREADABLE, Flush
from workers.decision_log.folder import Folder
from workers.decision_log.rows import UnreadableError, decode, table

MUTATIONS: Final = 4_000
ODD: Final[tuple[Any, ...]] = (
    *(None, True, -1, 0, 1, 3, 255, 2**31, 2**40, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)),
    *("", "x", "\u00e9", b"", b"\0", b"\1\0\0\xc1", b"\3", b"\xff" * 51, b"\0" * 52, 1.5, float("inf")),
    *([], [0], [2**40], ["x"], {}, {"requests": 1.0}, [None] * 30),
)
"""Values to put in the place of any other."""


def asked() -> AskRow:
    """A row of three quotas, as a node sends it."""
    rows = (row for row in Node().batch().rows if isinstance(row, AskRow))
    return next(row for row in rows if len(row.quotas) == 3 and not row.orders)


def batch_of(row: AskRow) -> SentBatch:
    """A batch with this row behind a good one."""
    batch = Node().batch()
    return replace(batch, rows=[batch.rows[0], row])


INFINITE = struct.pack("<BBBdddddd", ADMIT, 0, 0, float("inf"), *[0.0] * 5)
WRONG: dict[str, dict[str, Any]] = {
    "a kind that there is not": {"kind": len(KINDS)},
    "a kind before the first": {"kind": -1},
    "a mode that there is not": {"mode": len(MODES)},
    "a mode before the first": {"mode": -1},
    "a decision that there is not": {"decision": len(OUTCOMES)},
    "a decision before the first": {"decision": -2},
    "a source that there is not": {"source": len(SOURCES)},
    "a source before the first": {"source": -1},
    "a quota that there is not": {"quotas": [0, 1, 1_000]},
    "a quota before the first": {"quotas": [0, 1, -1]},
    "a quota of too many": {"quotas": [0, 1, 2, 2]},
    "a bucket of too few": {"buckets": ["user=a", "user=a"]},
    "a place in the order of too few": {"orders": [1, 2]},
    "a place in the order of too many": {"orders": [1, 2, 3, 4]},
    "an answer of too few": {"answer": full(result(), result())},
    "an answer of too many": {"answer": full(*[result()] * 4)},
    "a brief answer of too few": {"answer": brief((1.0, 2.0), (1.0, 2.0))},
    "an answer that is cut": {"answer": full(*[result()] * 3)[:-1]},
    "a brief answer that is cut": {"answer": brief(*[(1.0, 2.0)] * 3)[:-1]},
    "an answer with stamps that is cut": {"answer": b"\4" + result()},
    "no answer": {"answer": b""},
    "an answer of no form": {"answer": b"\x09" + b"".join([result()] * 3)},
    "a kept answer": {"answer": b"\1\0\0" + b"".join([result()] * 3)},
    "a kept answer of another slot": {"answer": b"\1\x06\0\xc1\x93\xc4\0\x91\x05\xc4" + result() * 3},
    "an error": {"answer": b"\2the bucket cannot be read"},
    "an outcome that there is not": {"answer": full(result(4), result(), result())},
    "a reason that there is not": {"answer": full(result(reason=5), result(), result())},
    "a wait without an end": {"answer": full(INFINITE, result(), result())},
    "a wait that is no number": {"answer": full(result(wait_ms=float("nan")), result(), result())},
    "a wait beyond its column": {"answer": full(result(wait_ms=1e300), result(), result())},
    "more answered alone than there are": {"alone": 4, "answer": b""},
    "very many answered alone": {"alone": 2**40, "answer": b""},
    "fewer than none answered alone": {"alone": -1},
    "usage that a quota needs": {"usage": {"requests": 1.0}},
    "an id too many": {"outcomes": bytes(40)},
    "ids that are cut": {"ids": b"1234567"},
    "a time beyond its column": {"at_ms": 2**63},
    "a place in the order beyond its column": {"order": 2**63},
    "knowledge beyond its column": {"known": (2**63, 0)},
    "a wait of the decision beyond its column": {"throttle_ms": 2**63},
    "more quotas than their column has": {"applied": 2**31},
    "a principal that is no text": {"principal": 7},
    "a bucket that is no text": {"buckets": ["user=a", None, "user=a"]},
    "a plain id that is no text": {"plain_ids": [7]},
    "usage that is no number": {"usage": {"requests": "1"}},
    "a lease without its length": {"lease": (b"l",)},
    "half of what the node knew": {"known": (1,)},
}
"""Faults of a row, and the fields that have them."""


@pytest.mark.parametrize("what", WRONG)
def test_batch_with_a_bad_row_is_set_aside_with_a_reason(what: str, folder: Path) -> None:
    bad = batch_of(replace(asked(), **WRONG[what]))
    with pytest.raises(UnreadableError, match=r"\w"):
        table([decode(packed(bad))])
    good = Node("n2").batch()
    entries = [StreamEntry(b"1-0", packed(bad), 2), StreamEntry(b"2-0", packed(good), 200)]
    flush = Flush(entries, "a")
    flush.write(Folder(folder))
    assert flush.done == [(b"1-0", 0, 2), (b"2-0", 200, 0)]
    assert (folder / UNREADABLE / "1-0.batch").read_bytes() == packed(bad)
    assert written(folder) == known([good])


def test_row_of_each_form_is_read() -> None:
    """So the batches above are set aside for their faults."""
    fine: list[dict[str, Any]] = [
        {},
        {"answer": brief(*[(1.0, 2.0)] * 3)},
        {"answer": b"\4" + result() * 3 + bytes(3 * 24) + bytes(16)},
        {"orders": [1, None, 3]},
        {"alone": 1, "answer": brief(*[(1.0, 2.0)] * 2), "outcomes": b"", "known": (2**62, 5)},
        {"flags": REPLAYED, "quotas": [], "buckets": [], "answer": b""},
        {"at_ms": 2**62},
        {"at_ms": -(2**62)},
    ]
    for fields in fine:
        assert table([decode(packed(batch_of(replace(asked(), **fields))))]).num_rows == 2, fields


def test_broken_batches_never_stop_the_writer() -> None:
    """Random values in random places, and batches that are cut or have other bytes."""
    chance, met = random.Random(4), Counter[str]()
    good = packed(Node().batch(rows=12))
    for number in range(MUTATIONS):
        broken = _broken(good, chance)
        flush = Flush([StreamEntry(b"%d-0" % number, broken, 1)], "a")
        files = list(flush._files())
        ((_, rows, unread),) = flush.done
        assert sum(file.num_rows for _, _, file in files if isinstance(file, pa.Table)) == rows
        assert [file for _, _, file in files if isinstance(file, bytes)] == [broken] * (
            unread > 0 and broken != b""
        )
        met["unreadable" if unread else "read"] += 1
    assert min(met["read"], met["unreadable"]) > MUTATIONS / 20, met


def _broken(good: bytes, chance: random.Random) -> bytes:
    kind = chance.random()
    if kind < 0.1:
        return good[: chance.randrange(len(good))]
    if kind < 0.3:
        at = chance.randrange(len(good))
        return good[:at] + chance.randbytes(chance.randrange(1, 9)) + good[at + chance.randrange(9) :]
    content = msgspec.msgpack.decode(good)
    _mutate(content, chance)
    return packed(content)


def _mutate(content: Any, chance: random.Random) -> None:
    """Put something odd in some place, or leave it out, or twice."""
    while True:
        place = chance.choice(list(content) if isinstance(content, dict) else range(len(content)))
        inner = content[place]
        if isinstance(inner, list | dict) and inner and chance.random() < 0.9:
            content = inner
            continue
        how = chance.random()
        if how < 0.8 or isinstance(content, dict):
            content[place] = chance.choice(ODD)
        elif how < 0.9:
            del content[place]
        else:
            content.insert(place, inner)
        return
