"""Rows that wait to be sent take as much memory as the log assumes; rows beyond its bound are counted."""

from __future__ import annotations

import gc
import json
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from typing import Final

import pytest
from msgspec import structs

from app.admission.answers import verdicts_of
from app.admission.compiled import Tables
from app.admission.log import decision_log as module
from app.admission.log.decision_log import DecisionLog
from app.admission.plan import PlannedAsk, scaled
from app.domain.ask import Ask
from app.domain.decision import Decision, LimitedBy
from app.domain.ladder import MatchingRules
from app.store.port import Answer, ChargeResult, Undone
from tests.decision_log.saved import NODE_MS, SavedBatches, log_into
from tests.decision_log.test_asks import SNAPSHOT
from tests.packed import packed

ROWS: Final = 6_000
IDS: Final = 50
ADMITTED: Final = Decision("admit", 0, True, 1, "store", None)
ADMITS, DELAYS = ChargeResult("admit", None, 0, 0, 1.0, 2.0), ChargeResult("delay", None, 0, 9, 1.0, 2.0)

TABLES: Final = Tables(SNAPSHOT, MatchingRules())


def admitted(log: DecisionLog, number: int) -> None:
    """A new caller is admitted."""
    ask = Ask({"requests": 1}, None, f"user-{number}")
    planned = PlannedAsk(ask, TABLES.charges(ask), None, decision=ADMITTED)
    log.decided(planned, packed(Answer((ADMITS,), None, None, NODE_MS, number * 128), brief=True), (), None)


def scaled_by_a_factor(log: DecisionLog, number: int) -> None:
    """A quota that was scaled is compiled anew for each ask."""
    ask = Ask({"produce_bytes": 1}, None, "alice")
    planned = PlannedAsk(ask, scaled(ask, TABLES.charges(ask), 0.5), None, decision=ADMITTED)
    log.decided(planned, packed(Answer((ADMITS,), None, None, NODE_MS, number * 128), brief=True), (), None)


def delayed_with_ids(log: DecisionLog, number: int) -> None:
    """A new caller with many ids is delayed."""
    name = f"user-{number}"
    ask = Ask({"requests": 1}, tuple(range(number, number + IDS)), name)
    by = LimitedBy("request_rate", "user=*", f"user={name}")
    planned = PlannedAsk(ask, TABLES.charges(ask), None, decision=Decision("delay", 9, True, 2, "store", by))
    answer = packed(Answer((ADMITS, DELAYS), None, None, NODE_MS, number * 128, bytes(IDS)))
    log.decided(planned, answer, verdicts_of(planned, answer), None)


def refreshed(log: DecisionLog, number: int) -> None:
    """Ids of a new caller are refreshed, under a name as long as they may be."""
    ask = Ask({}, (number,), f"{number:05}" + "\u00e9" * 123)
    log.refreshed(PlannedAsk(ask, TABLES.charges(ask), None), Answer((), at_ms=NODE_MS, id_outcomes=b"\2"))


def taken_back(log: DecisionLog, number: int) -> None:
    """A charge of a new caller was taken back in one slot of a cluster."""
    ask = Ask({"requests": 1}, None, f"user-{number}")
    planned = PlannedAsk(ask, TABLES.charges(ask), None, decision=ADMITTED)
    undone = Undone(planned.charges[0].key, number * 128, NODE_MS, 1.0, 1.0, number * 128 + 1)
    answer = Answer((ADMITS,), at_ms=NODE_MS, order=number * 128, orders=(number * 128,), undone=(undone,))
    log.decided(planned, answer, (), None)


def changed(log: DecisionLog, number: int) -> None:
    log.changed("quota", f"user=user-{number}", None, {"request_rate": {"limit": number}}, who="admin")


KINDS: Final = (admitted, scaled_by_a_factor, delayed_with_ids, refreshed, taken_back, changed)


def memory_of(make: Callable[[], None]) -> int:
    """The bytes that something leaves behind in memory."""
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        make()
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return after - before


@pytest.mark.parametrize("kind", KINDS)
def test_waiting_rows_take_the_memory_that_the_log_reckons_with(
    kind: Callable[[DecisionLog, int], None],
) -> None:
    log = log_into(SavedBatches())
    kind(log, ROWS)  # quotas are compiled once

    def wait() -> None:
        for number in range(ROWS):
            kind(log, number)

    used = memory_of(wait)
    assert log.dropped == 0
    assert 0.6 < used / log._bytes < 1.2


class AwayStream(SavedBatches):
    """Takes no batch until it is back."""

    def __init__(self) -> None:
        super().__init__()
        self.is_away = True

    async def append(self, batch: bytes, rows: int, node: str, number: int) -> bool:
        return not self.is_away and await super().append(batch, rows, node, number)


async def test_rows_beyond_the_bound_are_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of every kind: none is lost without being counted in a row of the log."""
    most = 300_000
    monkeypatch.setattr(module, "MAX_WAITING_BYTES", most)
    stream = SavedBatches()
    log = log_into(stream)
    for kind in KINDS:
        kind(log, ROWS)

    def wait() -> None:
        for number in range(1_000):
            for kind in KINDS:
                kind(log, number)

    used = memory_of(wait)
    assert log.dropped > 3_000
    assert log._bytes < most + 10_000
    assert used < 1.2 * most + 10_000
    before = log.dropped
    await log._send()
    rows = stream.rows()
    said = [json.loads(row["change"]["after"])["rows"] for row in rows if row["kind"] == "dropped"]
    assert (said, log.dropped, log._bytes) == ([before], before, 0)
    added = 1_001 * (len(KINDS) + 2)  # a charge that was taken back has two rows of its own
    assert len(rows) - 1 + before == added
    admitted(log, 1)
    await log._send()
    assert len(stream.rows()) == len(rows) + 1, "there is room again"


async def test_batch_without_room_in_the_store_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BATCH_BYTES", 1_000)
    stream = AwayStream()
    log = log_into(stream)
    for number in range(100):
        admitted(log, number)
    await log._send()
    assert (log.dropped, log._bytes, stream.batches) == (100, 0, [])
    stream.is_away = False
    admitted(log, 100)
    await log._send()
    dropped, row = sorted(stream.rows(), key=lambda row: row["kind"], reverse=True)
    assert json.loads(dropped["change"]["after"]) == {"rows": 100}
    assert row["principal"] == "user-100"


def test_row_that_cannot_be_packed_leaves_the_page_as_it_was() -> None:
    log = log_into(SavedBatches())
    admitted(log, 1)
    page = log._waiting[-1]
    size = page.size
    ask = Ask({"requests": 1}, None, "alice")
    planned = PlannedAsk(ask, (), None, decision=replace(ADMITTED, throttle_ms=2**70))
    log.decided(planned, None, (), None)
    assert (log.dropped, page.size, len(page)) == (1, size, 1)
    admitted(log, 2)
    assert len(page) == 2


async def test_correction_in_an_earlier_try_of_an_ask_is_in_its_row() -> None:
    """A bucket moves back with the clock in the first try that finds it; later tries correct nothing."""
    stream = SavedBatches()
    log = log_into(stream)
    ask = Ask({"requests": 1}, None, "bob")
    planned = PlannedAsk(ask, TABLES.charges(ask), None, decision=ADMITTED)
    first = packed(Answer((structs.replace(DELAYS, correction=2),), None, None, NODE_MS, 128))
    again = packed(Answer((ADMITS,), None, None, NODE_MS, 256))
    log.decided(planned, structs.replace(again, earlier=first), (), None)
    await log._send()
    (row,) = stream.rows()
    (verdict,) = row["verdicts"]
    assert (verdict["outcome"], verdict["correction"], verdict["observed"]) == ("admit", 2, 1.0)
    assert row["order"] == 256
