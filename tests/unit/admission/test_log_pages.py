"""Plain admissions on their way into the decision log: each ask once, bounded, and counted where lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import pairwise

import pytest
from msgspec import msgpack
from structlog.testing import capture_logs

from app.admission import decision_log as module
from app.admission.decision_log import DecisionLog
from app.admission.plain import PlainAsk, PlainAsks
from app.admission.plan import Matches
from app.decision_log.batch import OLDEST, VERSION, Batch, Row, size_as_rows
from app.decision_log.status import LogStatus
from app.domain.ask import Ask
from app.domain.ladder import MatchingRules
from app.store.port import Answer, ChargeResult, PackedAnswer, StoreError
from tests.packed import packed
from tests.unit.admission.fakes import EVERYONE, IDS, RATE
from workers.decision_log.rows import decode, table

SECRET = b"s" * 32
QUOTAS = {quota.key: {EVERYONE: quota} for quota in (IDS, RATE)}
ADMIT = ChargeResult("admit", 0, None, 0, 1.0, 2.0, None, 0, 0.0)


class Stream:
    """A fake stream that accepts batches, is full, or is away, as the test sets it."""

    def __init__(self, does: Callable[[], bool] = lambda: True) -> None:
        self.taken: list[bytes] = []
        self.count: list[int] = []
        self._does = does

    async def append(self, batch: bytes, rows: int, node: str, number: int) -> bool:
        assert node
        assert number
        assert len(decode(batch).rows) == rows
        took = self._does()
        if took:
            self.taken.append(batch)
            self.count.append(rows)
        return took

    async def status(self) -> LogStatus:
        raise AssertionError("nobody looks here")

    @property
    def rows(self) -> list[Row]:
        return [row for batch in self.taken for row in decode(batch).rows]


def log_to(stream: Stream) -> DecisionLog:
    return DecisionLog(stream, which="all", node="n", secret=lambda: SECRET, now_ms=lambda: 5_000)


def ready(ask: Ask) -> PlainAsk:
    plain = PlainAsks(Matches(QUOTAS, MatchingRules()), SECRET).of(ask)
    assert plain is not None
    return plain


def admit(log: DecisionLog, plain: PlainAsk, times: int = 1) -> None:
    quotas = len(plain.planned.matches)
    ids = len(plain.planned.ask.producer_ids or ())
    answer = packed(Answer((ADMIT,) * quotas, None, None, 4_000, 1_280, bytes(ids)))
    for _ in range(times):
        log.admitted(plain.planned, plain.quotas, answer if quotas else None)


def change(log: DecisionLog, value: object = 1) -> None:
    log.changed("quota", "user=a", None, value)


async def test_equal_asks_are_in_a_batch_once() -> None:
    stream = Stream()
    log = log_to(stream)
    alice, bob = (ready(Ask({"requests": 1}, principal=name)) for name in ("alice" * 20, "bob"))
    admit(log, alice, 50)
    admit(log, bob, 2)
    await log._send()
    (batch,) = stream.taken
    assert batch.count(b"alice" * 20) == 2  # the principal and its bucket
    assert len(batch) < 6_000
    assert msgpack.decode(batch)[0] == VERSION
    assert [row.principal for row in stream.rows] == ["alice" * 20] * 50 + ["bob"] * 2
    assert len(decode(batch).quotas) == 2


async def test_batch_without_admissions_is_one_that_an_older_writer_reads() -> None:
    stream = Stream()
    log = log_to(stream)
    change(log)
    await log._send()
    batch = msgpack.decode(stream.taken[0], type=Batch)
    assert (batch.version, batch.admissions, len(batch.rows)) == (OLDEST, None, 1)


async def test_ask_without_quotas_has_the_nodes_time_and_no_order() -> None:
    stream = Stream()
    log = log_to(stream)
    admit(log, ready(Ask({"fetch_bytes": 1}, principal="alice")))
    await log._send()
    (row,) = stream.rows
    assert (row.at_ms, row.order, row.source, row.applied, row.verdicts) == (5_000, None, "local", 0, [])


async def test_rows_stay_in_order() -> None:
    stream = Stream()
    log = log_to(stream)
    alice, bob = (ready(Ask({"requests": 1}, principal=name)) for name in ("alice", "bob"))
    for _ in range(200):
        admit(log, alice)
        change(log)
        admit(log, bob, 2)
        change(log)
    await log._send()
    assert [row.principal for row in stream.rows] == ["alice", None, "bob", "bob", None] * 200
    assert len(stream.taken) > 1
    assert log._bytes == 0


LONGEST_ASK = 10 * 1024
"""Of those below, with the names of their buckets."""
LONG = "\u00e9" * 512
ASKS: dict[str, Callable[[int], Ask]] = {
    "equal": lambda _: Ask({"requests": 1}, principal="alice"),
    "equal and long": lambda _: Ask({"requests": 1}, (1,), LONG, LONG, None, LONG, LONG),
    "long": lambda n: Ask({"requests": 1}, (n,), f"{n}{LONG}"[:512], LONG, None, LONG, LONG),
    "many ids": lambda n: Ask({"requests": 1}, tuple(range(n, n + 1_000)), "alice"),
    "equal with many ids": lambda _: Ask({"requests": 1}, tuple(range(1_000)), "alice"),
    "nothing": lambda _: Ask(),
}


@pytest.mark.parametrize("which", ASKS)
async def test_batch_is_bounded_and_so_is_what_the_writer_makes_of_it(which: str) -> None:
    stream = Stream()
    log = log_to(stream)
    made: dict[object, PlainAsk] = {}
    for n in range(3_000 if which in {"equal", "nothing"} else 150):
        ask = ASKS[which](n)
        key = (ask.principal, ask.producer_ids)
        plain = made[key] = made.get(key) or ready(ask)
        admit(log, plain)
    await log._send()
    sizes = [len(batch) for batch in stream.taken]
    assert len(sizes) > 1
    assert max(sizes) < module.BATCH_BYTES + LONGEST_ASK
    for batch in stream.taken:
        as_rows = len(msgpack.encode(decode(batch).rows))
        assert as_rows < 2.5 * module.BATCH_BYTES + LONGEST_ASK
        assert as_rows < 2 * size_as_rows(batch)
    assert log.dropped == 0


async def test_rows_that_come_while_a_batch_is_sent_wait_until_the_next_time_unless_they_fill_a_page() -> (
    None
):
    come = [3, 3, 4_000]

    class Busy(Stream):
        async def append(self, batch: bytes, rows: int, node: str, number: int) -> bool:
            admit(log, alice, come.pop(0) if come else 0)
            return await super().append(batch, rows, node, number)

    stream = Busy()
    log = log_to(stream)
    alice = ready(Ask({"requests": 1}, principal="alice"))

    async def sent() -> list[int]:
        before = len(stream.taken)
        await log._send(begun_by=log._page.number)
        return [len(decode(batch).rows) for batch in stream.taken[before:]]

    admit(log, alice)
    assert [await sent(), await sent()] == [[1], [3]]
    three, *full = await sent()
    rest = await sent()
    assert (three, len(set(full)), sum(full) + sum(rest), len(rest)) == (3, 1, 4_000, 1)
    assert await sent() == []


async def test_waiting_admissions_are_bounded_in_bytes_and_the_rest_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    most = 1024 * 1024
    monkeypatch.setattr(module, "MAX_WAITING_BYTES", most)
    stream = Stream()
    log = log_to(stream)
    alice = ready(Ask({"requests": 1}, principal="alice"))
    admit(log, alice, 30_000)
    waiting = sum(page.count for page in log._waiting)
    assert log.dropped == 30_000 - waiting > 0
    assert sum(len(page.rows) for page in log._waiting) < log._bytes < most + module.BATCH_BYTES
    for n in range(1_000):  # nor do new asks find room
        admit(log, ready(Ask({"requests": 1}, principal=f"{n}")))
    assert sum(page.count for page in log._waiting) == waiting
    await log._send()
    admit(log, alice)
    await log._send()
    assert (log.dropped, log._bytes) == (31_000 - waiting, 0)
    kinds = [row.kind for row in stream.rows]
    assert kinds == ["dropped", *["decision"] * (waiting + 1)]


async def test_admissions_that_the_stream_has_no_room_for_are_counted() -> None:
    room = iter([False, True])
    stream = Stream(lambda: next(room))
    log = log_to(stream)
    alice = ready(Ask({"requests": 1}, principal="alice"))
    admit(log, alice, 20)
    change(log)
    await log._send()
    assert log.dropped == 21
    admit(log, alice)
    await log._send()
    assert [(row.kind, row.after) for row in stream.rows] == [("dropped", '{"rows": 21}'), ("decision", None)]
    assert stream.count == [2]


async def test_ask_that_cannot_be_packed_is_counted_and_others_are_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = Stream()
    log = log_to(stream)
    alice = ready(Ask({"requests": 1}, principal="alice"))
    with monkeypatch.context() as broken, capture_logs() as lines:
        broken.setattr(module, "logged_ask", lambda *_, **__: 1 / 0)
        admit(log, alice)
        await log._send()
    assert [line["event"] for line in lines if line["log_level"] == "error"] == [
        "decision log row could not be packed"
    ]
    admit(log, alice)
    change(log, object())
    await log._send()
    assert (log.dropped, log._bytes) == (2, 0)
    assert [row.kind for row in stream.rows] == ["dropped", "decision", "dropped"]


async def test_close_without_a_store_counts_admissions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CLOSE_WITHIN_S", 0.01)

    def away() -> bool:
        raise StoreError("connection")

    log = log_to(Stream(away))
    await log.open()
    admit(log, ready(Ask({"requests": 1}, principal="alice")), 2_000)
    await asyncio.sleep(0)
    await log.close()
    assert log.dropped == 2_000


async def test_batches_of_a_long_log_are_whole() -> None:
    stream = Stream()
    log = log_to(stream)
    people = [ready(Ask({"requests": 1}, principal=f"p{n}")) for n in range(700)]
    for plain in people * 3:
        admit(log, plain)
    await log._send()
    rows = table([decode(batch) for batch in stream.taken]).to_pylist()
    assert [row["principal"] for row in rows] == [f"p{n}" for n in range(700)] * 3
    assert {verdict["bucket"] for row in rows for verdict in row["verdicts"]} == {
        f"user=p{n}" for n in range(700)
    }
    numbers = [msgpack.decode(batch, type=Batch).id for batch in stream.taken]
    assert all(one < other for one, other in pairwise(numbers))


def test_answer_is_kept_as_it_came() -> None:
    """The order and the time are the store's, also if they are large."""
    stream = Stream()
    log = log_to(stream)
    alice = ready(Ask({"requests": 1}, principal="alice"))
    content = packed(Answer((ADMIT,))).packed
    log.admitted(alice.planned, alice.quotas, PackedAnswer(content, 2**52, 2**60))
    asyncio.run(log._send())
    (row,) = stream.rows
    assert (row.at_ms, row.order) == (2**52, 2**60)
