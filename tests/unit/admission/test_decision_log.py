"""The node's side of the decision log: what is recorded, what is sent, and what is counted as lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Final, get_type_hints

import pytest
from msgspec import msgpack, structs

from app.admission import decision_log as module
from app.admission.decision_log import DecisionLog
from app.admission.log_rows import DecisionEntry, Packing, size_of
from app.admission.plan import Match, matches_of
from app.decision_log.batch import CHARGED, REFRESHED, SEEN, Batch, LoggedLimit, Row, Sibling, batch_id
from app.decision_log.status import LogStatus
from app.domain.ask import Ask
from app.domain.decision import Decision, LimitedBy, Verdict
from app.domain.digest import digest, fingerprint
from app.domain.entity import ANY, Entity
from app.domain.ladder import MatchingRules
from app.domain.quota import PRODUCER_IDS_RATE, REQUEST_RATE, Quota
from app.store.port import Answer, ChargeResult, Released, StoreError, Undone

SECRET = b"s" * 32
EVERYONE = Entity.of(user=ANY)
QUOTAS = {
    PRODUCER_IDS_RATE: {EVERYONE: Quota(PRODUCER_IDS_RATE, 5, "producer_ids", "deny")},
    REQUEST_RATE: {EVERYONE: Quota(REQUEST_RATE, 1000, "sampled_rate", "delay")},
}
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
        assert batch_id(node, number) == msgpack.decode(batch, type=Batch).id
        self.offered.append(batch)
        self.was_offered.set()
        took = self.does()
        if took:
            self.taken.append(msgpack.decode(batch, type=Batch))
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


def matches() -> tuple[Match, ...]:
    return matches_of(ASK, QUOTAS, MatchingRules())


def verdict(match: Match, outcome: str = "admit") -> Verdict:
    found, quota = match.applied, match.applied.quota
    named = (quota.key, found.entity, found.bucket, quota.limit, quota.enforcement, quota.shadow)
    return Verdict(*named, outcome, 0, 1.0, 2.0)  # type: ignore[arg-type]


def answer(id_outcomes: bytes = FATES, kept: bytes | None = None) -> Answer:
    said = tuple(ChargeResult("admit", 0, None, 1, 1.0, 2.0, None, 0, 0.0) for _ in range(2))
    return Answer(said, kept, None, 4_000, 1_280, id_outcomes)


def take(
    log: DecisionLog, outcome: str = "admit", found: Answer | None = None, source: str = "store"
) -> None:
    decision = Decision(outcome, 0, True, 2, source, LIMITED if outcome != "admit" else None)  # type: ignore[arg-type]
    failure = "budget" if source == "fallback" else None
    log.decided(ASK, matches(), found, decision, [verdict(match) for match in matches()], failure)


async def test_charge_that_was_taken_back_has_rows_of_its_own_and_no_place_in_that_of_its_ask():
    stream = Stream()
    log = log_to(stream)
    ids, rate = matches()
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
    ids, rate = matches()
    lease = b"l" * 16, 500
    released = (Released(rate.key, 7.0, 512, 3_900, 640, 3_910), Released(ids.key, 3.0, 384, 3_950))
    found = structs.replace(answer(), order=700, orders=(384, 700), released=released)
    decision = Decision("admit", 0, True, 2, "store", None)
    log.leased("lease", ASK, matches(), found, decision, [verdict(match) for match in matches()], lease)
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


async def test_batch_has_each_quota_once():
    stream = Stream()
    log = log_to(stream)
    for _ in range(3):
        take(log, found=answer())
    await log._send()
    (batch,) = stream.taken
    assert (len(batch.rows), len(batch.quotas)) == (3, 2)


@pytest.mark.parametrize(
    ("which", "kinds"),
    [("all", ["decision"] * 4), ("denied", ["decision", "ids"]), ("off", [])],
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
    log.decided(ask, (), None, Decision("admit", 0, True, 0, "local", None), (), None)
    await log._send()
    assert stream.rows[0].at_ms == 0


async def test_changes_and_refreshes_are_logged():
    stream = Stream()
    log = log_to(stream, "denied")
    log.changed("quota", "user=a", None, {"request_rate": {"limit": 1}}, who="admin", version=3)
    log.changed("reset", "user=a", {"quotas": ["request_rate"]}, None, who="admin", order=256)
    log.refreshed(ASK, matches()[:1], answer(bytes([SEEN, REFRESHED])))
    log.refreshed(ASK, matches()[:1], answer(bytes(2)))
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
    for _ in range(module.ROWS_IN_BATCH + 1):
        take(log, found=answer())
    await log._send()
    assert log.dropped == module.ROWS_IN_BATCH
    assert [row.kind for row in stream.rows] == ["dropped", "decision"]


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


async def test_row_that_cannot_be_encoded_is_counted_and_logged_as_dropped():
    stream = Stream()
    log = log_to(stream)
    log.changed("quota", "user=a", None, object())  # not JSON
    await log._send()
    take(log, found=answer())
    log.changed("quota", "user=a", None, object())
    await log._send()
    assert (log.dropped, log._bytes) == (2, 0)
    assert [(row.kind, row.after) for row in stream.rows] == [
        ("dropped", '{"rows": 1}'),
        ("decision", None),
        ("dropped", '{"rows": 1}'),
    ]
    assert [batch.id[-1] for batch in stream.taken] == ["1", "2", "3"]


async def test_dropped_rows_are_logged_once_there_is_room_and_counted_once():
    room = iter([False, False, True])
    stream = Stream(lambda: next(room))
    log = log_to(stream)
    for _ in range(3):
        take(log, found=answer())
        await log._send()
    assert log.dropped == 2
    dropped, decision = stream.rows
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
    quotas = {key: {EVERYONE: its[EVERYONE]} for key, its in QUOTAS.items()}
    for n in range(400):
        ask = Ask({"requests": 1}, (n,), principal=f"{n:03}" + "\u00e9" * 500, client_id="c" * 512)
        its = matches_of(ask, quotas, MatchingRules())
        said = answer(bytes([CHARGED]))
        decision = Decision("admit", 0, True, 2, "store", None)
        log.decided(ask, its, said, decision, [verdict(match) for match in its], None)
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
    log.decided(long, (), None, Decision("admit", 0, True, 0, "local", None), (), None)
    take(log, found=answer())
    await log._send()
    assert [len(batch.rows) for batch in stream.taken] == [2, 1]


async def test_waiting_rows_are_bounded_in_bytes_and_the_rest_is_counted(monkeypatch: pytest.MonkeyPatch):
    stream = Stream()
    log = log_to(stream)
    take(log, found=answer())
    monkeypatch.setattr(module, "MAX_WAITING_BYTES", 10 * log._bytes)
    for _ in range(11):
        take(log, found=answer())
    assert log.dropped == 2
    await log._send()
    take(log, found=answer())
    await log._send()
    assert log.dropped == 2
    assert [row.kind for row in stream.rows] == ["dropped", *["decision"] * 11]


TEXTS = [name for name, type_ in get_type_hints(Ask).items() if type_ == Final[str | None] and name != "ip"]
"""The texts of an ask, except the address, which is short."""


@pytest.mark.parametrize("name", TEXTS)
def test_size_of_a_waiting_row_counts_each_text_of_the_ask_that_the_row_has(name: str):
    def waiting(text: str) -> DecisionEntry:
        given: dict[str, Any] = {name: text}
        decision = Decision("admit", 0, True, 0, "local", None)
        return DecisionEntry("decision", 0, replace(ASK, **given), (), None, decision, (), None)

    text = "t" * 500
    packing = Packing(SECRET, plain_ids=False)
    packing.add(waiting(text))
    if text.encode() in packing.batch("n", 1, 0):
        growth = size_of(waiting(text)) - size_of(waiting(""))
        assert growth >= len(text), f"size_of in app/admission/log_rows.py leaves out {name}"


async def test_late_answer_is_a_row_of_its_own_or_only_ids_when_admissions_are_not_logged():
    decision = Decision("throttle", 30, False, 2, "store", LIMITED)
    kinds: dict[module.Which, list[str]] = {"all": ["late", "late"], "denied": ["ids"], "off": []}
    for which, expected in kinds.items():
        stream = Stream()
        log = log_to(stream, which)
        for id_outcomes in (FATES, bytes(2)):
            log.late(ASK, matches(), answer(id_outcomes), decision, [verdict(match) for match in matches()])
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
    log.late(peek, (), answer(b""), decision, ())
    assert not log._waiting


async def test_shadow_refusal_is_logged_even_when_admissions_are_not():
    stream = Stream()
    log = log_to(stream, "denied")
    its = matches()
    shown = [verdict(its[0]), replace(verdict(its[1], "throttle"), shadow=True)]
    log.decided(ASK, its, answer(bytes(2)), Decision("admit", 0, True, 2, "store", None), shown, None)
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


async def test_close_without_a_store_counts_lost_rows(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "CLOSE_WITHIN_S", 0.01)

    def away() -> bool:
        raise StoreError("connection")

    log = log_to(Stream(away))
    await log.open()
    take(log, found=answer())
    await log.close()
    assert log.dropped == 1
