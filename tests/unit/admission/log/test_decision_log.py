"""The node's side of the decision log: recorded rows, sent batches, and rows counted as lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest
from msgspec import msgpack, structs
from structlog.testing import capture_logs

from app.admission.answers import decided
from app.admission.log import decision_log as module
from app.admission.log.decision_log import DecisionLog
from app.admission.plan import Knowledge, PlannedAsk, plan_of
from app.decision_log.batch import (
    CHARGED,
    REFRESHED,
    SEEN,
    Batch,
    LoggedLimit,
    Row,
    SentBatch,
    Sibling,
    batch_id,
)
from app.decision_log.status import LogStatus
from app.domain.ask import Ask
from app.domain.decision import Decision, LimitedBy, Verdict
from app.domain.digest import digest, fingerprint
from app.domain.quota import PRODUCER_IDS_RATE, REQUEST_RATE, Quota
from app.store.port import Answer, Charge, Released, StoreError, Undone
from tests.unit.admission.fakes import charges_for, result, sent
from workers.decision_log.rows import decode, table

SECRET = b"s" * 32
IDS = Quota(PRODUCER_IDS_RATE, 5, "producer_ids", "deny")
RATE = Quota(REQUEST_RATE, 1000, "sampled_rate", "delay")
ASK = Ask({"requests": 2}, (7, -1, "x"), principal="alice", client_id="etl")
FATES = bytes([CHARGED, REFRESHED])
LIMITED = LimitedBy(REQUEST_RATE, "user=*", "user=alice", "too_large", 3.0)


@dataclass
class Stream:
    """A fake stream that accepts batches, is full, or is away, as the test sets it."""

    does: Callable[[], bool] = lambda: True
    taken: list[Batch] = field(default_factory=list)
    offered: list[bytes] = field(default_factory=list)
    was_offered: asyncio.Event = field(default_factory=asyncio.Event)
    nodes: tuple[Sibling, ...] = ()

    async def append(self, batch: bytes, rows: int, node: str, number: int) -> bool:
        assert batch_id(node, number) == msgpack.decode(batch, type=SentBatch).id
        self.offered.append(batch)
        self.was_offered.set()
        took = self.does()
        if took:
            self.taken.append(decode(batch))
            assert len(self.taken[-1].rows) == rows
        return took

    async def status(self) -> LogStatus:
        return LogStatus(5_000, 0, 0, 0, 0, 0, "", 0, self.nodes)

    @property
    def rows(self) -> list[Row]:
        return [row for batch in self.taken for row in batch.rows]


def log_to(stream: Stream, which: module.Which = "all", *, plain_ids: bool = False) -> DecisionLog:
    return DecisionLog(
        stream, which=which, node="n", secret=lambda: SECRET, now_ms=lambda: 5_000, plain_ids=plain_ids
    )


def charges(ask: Ask = ASK) -> list[Charge]:
    return charges_for(ask, IDS, RATE)


def verdict(charge: Charge, outcome: str = "admit") -> Verdict:
    quota = charge.quota
    named = (quota.key, charge.entity, charge.bucket, quota.limit, charge.enforcement, quota.shadow)
    return Verdict(*named, outcome, 0, 1.0, 2.0)  # type: ignore[arg-type]


def verdicts(ask: Ask = ASK) -> list[Verdict]:
    return [verdict(charge) for charge in charges(ask)]


def answer(id_outcomes: bytes = FATES, kept: bytes | None = None) -> Answer:
    return sent(Answer((result(correction=1),) * 2, kept, None, 4_000, 1_280, id_outcomes))


def planned_of(ask: Ask, decision: Decision, ask_charges: list[Charge] | None = None) -> PlannedAsk:
    ask_charges = charges(ask) if ask_charges is None else ask_charges
    return PlannedAsk(ask, ask_charges, plan_of(ask, ask_charges, SECRET), decision=decision)


def admitted(applied: int = 2, source: Any = "store") -> Decision:
    return Decision("admit", 0, True, applied, source, None)


def take(
    log: DecisionLog, outcome: str = "admit", found: Answer | None = None, source: str = "store"
) -> None:
    decision = Decision(outcome, 0, True, 2, source, LIMITED if outcome != "admit" else None)  # type: ignore[arg-type]
    failure = "budget" if source == "fallback" else None
    log.decided(planned_of(ASK, decision), found, verdicts(), failure)


def admit(log: DecisionLog, ask: Ask, times: int = 1) -> None:
    """Log an admitted ask as ``Admission`` does: without verdicts, but with the store's answer if any."""
    ask_charges = charges(ask)
    briefly = sent(
        Answer((result(),) * len(ask_charges), None, None, 4_000, 1_280), brief=not ask.producer_ids
    )
    planned = planned_of(ask, admitted(len(ask_charges), "store" if ask_charges else "local"), ask_charges)
    for _ in range(times):
        log.decided(planned, briefly if ask_charges else None, (), None)


def change(log: DecisionLog, value: object = 1) -> None:
    log.changed("quota", "user=a", None, value)


ALICE, BOB = (Ask({"requests": 1}, principal=name) for name in ("alice", "bob"))


async def test_charge_that_was_taken_back_has_rows_of_its_own_and_no_place_in_that_of_its_ask():
    stream = Stream()
    log = log_to(stream)
    ids, rate = charges()
    undone = (Undone(rate.key, 512, 3_900, 2.0, 1.5, 640),)
    found = structs.replace(answer(), order=512, orders=(384, 512), undone=undone)
    take(log, "throttle", found)
    await log._send()
    gone, back, row = stream.rows
    assert [(each.kind, each.at_ms, each.order) for each in (gone, back)] == [
        ("undone", 3_900, 512),
        ("undo", 3_900, 640),
    ]
    assert [each.verdicts[0].usage for each in (gone, back)] == [2.0, 1.5]
    assert [each.verdicts[0].bucket_order for each in (gone, back)] == [512, 640]
    assert (row.order, [each.bucket_order for each in row.verdicts]) == (384, [384, None])
    assert ids.key != rate.key


async def test_part_of_a_lease_that_was_released_has_rows_of_its_own():
    stream = Stream()
    log = log_to(stream)
    ids, rate = charges()
    lease = b"l" * 16, 500
    released = (Released(rate.key, 7.0, 512, 3_900, 640, 3_910), Released(ids.key, 3.0, 384, 3_950))
    found = structs.replace(answer(), order=700, orders=(384, 700), released=released)
    log.leased("lease", planned_of(ASK, admitted()), found, verdicts(), lease)
    await log._send()
    held, freed, left, row = stream.rows
    assert [(each.kind, each.at_ms, each.order) for each in (held, freed, left)] == [
        ("lease", 3_900, 512),
        ("settlement", 3_910, 640),
        ("lease", 3_950, 384),
    ]
    assert {each.what for each in stream.rows} == {lease[0].hex()}
    assert [each.verdicts[0].usage for each in (held, freed, left)] == [7.0, 0.0, 3.0]
    assert (row.order, [each.bucket_order for each in row.verdicts]) == (700, [None, 700])


async def test_decision_is_a_row_with_everything_that_made_it():
    stream = Stream()
    log = log_to(stream, plain_ids=True)
    take(log, "delay", answer())
    await log._send()
    (row,), (batch,) = stream.rows, stream.taken
    assert (row.kind, row.at_ms, row.order, row.principal, row.client_id) == (
        *("decision", 4_000, 1_280),
        *("alice", "etl"),
    )
    assert (row.decision, row.charged, row.source, row.failure) == ("delay", True, "store", None)
    assert row.limited_by == LoggedLimit(REQUEST_RATE, "user=*", "user=alice", "too_large")
    assert row.usage == {"requests": 2}
    assert row.ids == digest(SECRET, "alice", 7) + digest(SECRET, "alice", "x")
    assert row.plain_ids == ["7", "x"]
    ids, rate = row.verdicts
    assert (batch.quotas[ids.quota].quota, ids.usage, ids.ids) == (PRODUCER_IDS_RATE, 2, FATES)
    assert (batch.quotas[rate.quota].bucket, rate.usage, rate.ids) == ("user=alice", 2, b"")
    assert (rate.observed, rate.remaining, rate.correction) == (1.0, 2.0, 1)
    assert (batch.id, batch.node, batch.sent_ms) == ("n-000000000001", "n", 5_000)
    assert batch.secret == fingerprint(SECRET)


async def test_batch_names_the_other_nodes_of_the_heartbeat():
    stream = Stream(nodes=(Sibling("m", 7, 4_900), Sibling("n", 3, 4_999)))
    log = log_to(stream)
    take(log, found=answer())
    await log._send()
    log.log_status = await stream.status()
    take(log, found=answer())
    await log._send()
    assert [batch.siblings for batch in stream.taken] == [[], [("m", 7, 4_900)]]


@pytest.mark.parametrize(
    ("which", "kinds"),
    [("all", ["decision"] * 4), ("denied", ["decision", "ids", "decision"]), ("off", [])],
)
async def test_logged_rows_depend_on_the_setting(which: module.Which, kinds: list[str]):
    stream = Stream()
    log = log_to(stream, which)
    take(log, "throttle", answer(bytes(2)))
    take(log, found=answer(bytes([SEEN, CHARGED])))
    take(log, found=answer(bytes(2)))
    take(log, found=None, source="fallback")
    await log._send()
    assert [row.kind for row in stream.rows] == kinds
    if which == "denied":
        row = stream.rows[1]
        assert row.ids == digest(SECRET, "alice", "x")  # the charged id, not the seen one
        assert (row.verdicts[0].ids, row.decision, row.order) == (bytes([CHARGED]), None, 1_280)


async def test_plain_ids_are_logged_only_if_set():
    stream = Stream()
    log = log_to(stream)
    take(log, found=answer())
    await log._send()
    assert stream.rows[0].plain_ids is None


async def test_kept_answer_has_no_verdicts_and_fallback_has_no_order():
    stream = Stream()
    log = log_to(stream)
    take(log, found=answer(b"", kept=b"context"))
    take(log, found=None, source="fallback")
    await log._send()
    replayed, fallback = stream.rows
    assert (replayed.replayed, replayed.verdicts) == (True, [])
    assert (fallback.order, fallback.at_ms, fallback.failure) == (None, 5_000, "budget")


async def test_row_has_the_callers_time_under_the_callers_clock():
    stream = Stream()
    log = log_to(stream)
    ask = Ask({"requests": 1}, principal="a", at_ms=0)
    log.decided(planned_of(ask, admitted(0, "local"), []), None, (), None)
    await log._send()
    assert stream.rows[0].at_ms == 0


async def test_changes_and_refreshes_are_logged():
    stream = Stream()
    log = log_to(stream, "denied")
    log.changed("quota", "user=a", None, {"request_rate": {"limit": 1}}, who="admin", version=3)
    log.changed("reset", "user=a", {"quotas": ["request_rate"]}, None, who="admin", order=256)
    planned = planned_of(ASK, admitted(), charges()[:1])
    log.refreshed(planned, answer(bytes([SEEN, REFRESHED])))
    log.refreshed(planned, answer(bytes(2)))
    await log._send()
    quota, reset, refreshed = stream.rows
    assert (quota.kind, quota.what, quota.before, quota.after, quota.who, quota.version) == (
        *("quota", "user=a", None, '{"request_rate": {"limit": 1}}'),
        *("admin", 3),
    )
    assert (reset.kind, reset.order) == ("reset", 256)
    assert (refreshed.kind, refreshed.verdicts[0].ids) == ("ids", bytes([REFRESHED]))


async def test_rows_without_room_in_the_store_are_counted_and_others_are_sent():
    room = iter([False, True])
    stream = Stream(lambda: next(room))
    log = log_to(stream)
    while len(log._waiting) < 2:
        take(log, found=answer())
    rows = len(log._waiting[0])
    await log._send()
    assert log.dropped == rows
    assert [(row.kind, row.after) for row in stream.rows] == [
        ("decision", None),
        ("dropped", f'{{"rows": {rows}}}'),
    ]


async def test_same_batch_is_sent_until_the_store_takes_it(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(module, "SEND_EVERY_S", 0)
    tries = iter([StoreError("connection"), StoreError("timeout")])

    def does() -> bool:
        for error in tries:
            raise error
        return True

    stream = Stream(does)
    log = log_to(stream)
    take(log, found=answer())
    await log._send()
    assert len(stream.offered) == 3
    assert len(set(stream.offered)) == 1
    assert (log.dropped, len(stream.rows)) == (0, 1)


async def test_row_that_cannot_be_packed_is_counted_and_logged_as_dropped():
    stream = Stream()
    log = log_to(stream)
    with capture_logs() as lines:
        change(log, object())  # not JSON
        await log._send()
        take(log, found=answer())
        change(log, object())
        await log._send()
    assert [line["event"] for line in lines if line["log_level"] == "error"] == [
        *["decision log row could not be packed"] * 2
    ]
    assert (log.dropped, log._bytes) == (2, 0)
    assert [(row.kind, row.what, row.after) for row in stream.rows] == [
        ("dropped", "they could not be packed", '{"rows": 1}'),
        ("decision", None, None),
        ("dropped", "they could not be packed", '{"rows": 1}'),
    ]
    assert [batch.id[-1] for batch in stream.taken] == ["1", "2"]


async def test_batch_that_would_have_no_row_is_not_sent(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "BATCH_BYTES", 1)
    stream = Stream()
    log = log_to(stream)
    take(log, found=answer())
    change(log, object())
    await log._send()
    assert [len(batch.rows) for batch in stream.taken] == [2]


async def test_dropped_rows_are_logged_once_there_is_room_and_counted_once():
    room = iter([False, False, True])
    stream = Stream(lambda: next(room))
    log = log_to(stream)
    for _ in range(3):
        take(log, found=answer())
        await log._send()
    assert log.dropped == 2
    decision, dropped = stream.rows
    assert (dropped.kind, dropped.what, dropped.after, dropped.at_ms) == (
        *("dropped", "the stream is full, as nobody reads it"),
        *('{"rows": 2}', 5_000),
    )
    assert (decision.kind, stream.taken[0].id) == ("decision", "n-000000000003"), (
        "the numbers of dropped batches are missing"
    )


async def test_batch_is_bounded_by_its_real_size(monkeypatch: pytest.MonkeyPatch):
    stream = Stream()
    log = log_to(stream)
    for n in range(400):
        ask = Ask({"requests": 1}, (n,), principal=f"{n:03}" + "\u00e9" * 500, client_id="c" * 512)
        log.decided(planned_of(ask, admitted()), answer(bytes([CHARGED])), (), None)
    await log._send()
    sizes = [len(batch) for batch in stream.offered]
    longest_row = 8 * 1024
    assert len(sizes) > 5
    assert max(sizes) < module.BATCH_BYTES + longest_row
    assert min(sizes[:-1]) >= module.BATCH_BYTES
    assert len(stream.rows) == 400


async def test_long_row_ends_its_batch(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "BATCH_BYTES", 1_000)
    stream = Stream()
    log = log_to(stream)
    take(log, found=answer())
    long = Ask({"requests": 1}, tuple(range(1_000)), principal="alice")
    log.decided(planned_of(long, admitted(0, "local"), []), None, (), None)
    take(log, found=answer())
    await log._send()
    assert [len(batch.rows) for batch in stream.taken] == [2, 1]


async def test_waiting_rows_are_bounded_in_bytes_and_the_rest_is_counted(monkeypatch: pytest.MonkeyPatch):
    most = 256 * 1024
    monkeypatch.setattr(module, "MAX_WAITING_BYTES", most)
    stream = Stream()
    log = log_to(stream)
    admit(log, ALICE, 3_000)
    waiting = sum(map(len, log._waiting))
    assert log.dropped == 3_000 - waiting > 0
    assert sum(page.size for page in log._waiting) < log._bytes < most + 1_000
    for n in range(100):  # nor do rows of any other kind find room
        admit(log, replace(ALICE, principal=f"{n}"))
        take(log, "throttle", answer())
        change(log)
    assert sum(map(len, log._waiting)) == waiting
    await log._send()
    assert (log.dropped, log._bytes) == (3_300 - waiting, 0)
    admit(log, ALICE)
    await log._send()
    assert [row.kind for row in stream.rows if row.kind != "decision"] == ["dropped"]
    assert len(stream.rows) == waiting + 2


async def test_rows_stay_in_order_over_batches():
    stream = Stream()
    log = log_to(stream)
    for _ in range(300):
        admit(log, ALICE)
        change(log)
        admit(log, BOB, 2)
        take(log, "throttle", answer())
    await log._send()
    said = [row.decision or row.kind for row in stream.rows]
    assert said == ["admit", "quota", "admit", "admit", "throttle"] * 300
    assert [row.principal for row in stream.rows] == ["alice", None, "bob", "bob", "alice"] * 300
    assert len(stream.taken) > 1
    assert log._bytes == 0


async def test_batches_of_a_long_log_are_whole():
    stream = Stream()
    log = log_to(stream)
    people = [replace(ALICE, principal=f"p{n}") for n in range(700)]
    for ask in people * 2:
        admit(log, ask)
    await log._send()
    rows = table(stream.taken).to_pylist()
    assert [row["principal"] for row in rows] == [f"p{n}" for n in range(700)] * 2
    assert {each["bucket"] for row in rows for each in row["verdicts"]} == {f"user=p{n}" for n in range(700)}
    assert all(one.id < other.id for one, other in pairwise(stream.taken))


async def test_rows_that_come_while_a_batch_is_sent_wait_until_the_next_time_unless_they_fill_a_page():
    come = [3, 3, 4_000]

    class Busy(Stream):
        async def append(self, batch: bytes, rows: int, node: str, number: int) -> bool:
            admit(log, ALICE, come.pop(0) if come else 0)
            return await super().append(batch, rows, node, number)

    stream = Busy()
    log = log_to(stream)

    async def rows_sent() -> list[int]:
        before = len(stream.taken)
        await log._send(only_full=True)
        return [len(batch.rows) for batch in stream.taken[before:]]

    admit(log, ALICE)
    assert [await rows_sent(), await rows_sent()] == [[1], [3]]
    three, *full = await rows_sent()
    rest = await rows_sent()
    assert (three, len(set(full)), sum(full) + sum(rest), len(rest)) == (3, 1, 4_000, 1)
    assert await rows_sent() == []


async def test_answer_of_the_node_alone_has_the_stores_time_as_the_node_knew_it():
    stream = Stream()
    log = log_to(stream)
    ask = Ask({}, (7,), principal="alice")
    known = PlannedAsk(ask, charges_for(ask, IDS), None, known=Knowledge(4_321, 9_000, 2))
    known.decision = admitted(1, "local")
    log.decided(known, None, (), None)
    log.decided(planned_of(ALICE, admitted(0, "local"), []), None, (), None)
    await log._send()
    assert [(row.at_ms, row.order, row.source) for row in stream.rows] == [
        (4_321, None, "local"),
        (5_000, None, "local"),
    ]


async def test_answer_that_came_after_other_tries_has_rows_of_what_these_wrote():
    stream = Stream()
    log = log_to(stream, "denied")
    _, rate = charges()
    tried = structs.replace(answer(), order=900, at_ms=3_800)
    undone = (Undone(rate.key, 800, 3_700, 2.0),)
    found = structs.replace(answer(bytes(2)), orders=(1_280, 1_270), undone=undone, earlier=tried)
    take(log, "throttle", found)
    await log._send()
    assert [(row.kind, row.order, row.at_ms) for row in stream.rows] == [
        *(("undone", 800, 3_700), ("ids", 900, 3_800), ("decision", 1_280, 4_000))
    ]


async def test_lapsed_lease_and_written_ids_are_logged_whatever_else_is():
    stream = Stream()
    log = log_to(stream, "denied")
    ids, rate = charges()
    log.lapsed(ASK, rate, 3.5, answer())
    log.renewed(planned_of(ASK, admitted(), [ids]), answer(bytes([REFRESHED] * 2)))
    log.renewed(planned_of(ASK, admitted(), [ids]), answer(bytes(2)))
    await log._send()
    lapse, renewal = stream.rows
    assert (lapse.kind, lapse.what, lapse.order, lapse.at_ms) == ("lapse", "user=alice", 1_280, 4_000)
    assert lapse.after == '{"quota": "request_rate", "units": 3.5}'
    assert (renewal.kind, len(renewal.ids)) == ("renewal", 16)


async def test_late_answer_is_a_row_of_its_own_or_only_ids_when_admissions_are_not_logged():
    decision = Decision("throttle", 30, False, 2, "store", LIMITED)
    kinds: dict[module.Which, list[str]] = {"all": ["late", "late"], "denied": ["ids"], "off": []}
    for which, expected in kinds.items():
        stream = Stream()
        log = log_to(stream, which)
        for id_outcomes in (FATES, bytes(2)):
            log.late(planned_of(ASK, decision), answer(id_outcomes), verdicts())
        await log._send()
        assert [row.kind for row in stream.rows] == expected, which
        if which == "all":
            row = stream.rows[0]
            assert (row.order, row.at_ms, row.decision, row.verdicts[0].ids) == (
                *(1_280, 4_000),
                *("throttle", FATES),
            )
    peek = Ask({"requests": 1}, principal="a", mode="peek")
    log = log_to(stream)
    log.late(planned_of(peek, decision, []), answer(b""), ())
    assert not log._waiting


async def test_shadow_refusal_is_logged_even_when_admissions_are_not():
    stream = Stream()
    log = log_to(stream, "denied")
    planned = planned_of(ASK, admitted(), charges_for(ASK, IDS, replace(RATE, shadow=True)))
    throttled = sent(Answer((result(), result("throttle", throttle_ms=9)), None, None, 4_000, 1_280))
    planned.decision, shown = decided(planned, throttled, sequential=False)
    log.decided(planned, throttled, shown, None)
    planned.decision, shown = decided(planned, answer(bytes(2)), sequential=False)
    log.decided(planned, answer(bytes(2)), shown, None)
    await log._send()
    (row,) = stream.rows
    assert (row.kind, row.decision, row.verdicts[1].outcome) == ("decision", "admit", "throttle")


async def test_close_sends_the_current_batch_and_then_waiting_rows(monkeypatch: pytest.MonkeyPatch):
    away = True

    def does() -> bool:
        if away:
            raise StoreError("connection")
        return True

    stream = Stream(does)
    log = log_to(stream)
    await log.open()
    take(log, found=answer())
    await stream.was_offered.wait()
    take(log, found=answer())
    away = False
    await log.close()
    assert [batch.id[-1] for batch in stream.taken] == ["1", "2"]
    assert log.dropped == 0


@pytest.mark.parametrize("rows", [1, 2_000])
async def test_close_without_a_store_counts_lost_rows(monkeypatch: pytest.MonkeyPatch, rows: int):
    monkeypatch.setattr(module, "CLOSE_WITHIN_S", 0.01)

    def away() -> bool:
        raise StoreError("connection")

    log = log_to(Stream(away))
    await log.open()
    admit(log, ALICE, rows)
    await asyncio.sleep(0)
    await log.close()
    assert log.dropped == rows
