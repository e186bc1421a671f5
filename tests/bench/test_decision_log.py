"""What logging decisions costs a node: processor time compared with a decision without a log, and memory."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from collections.abc import Callable
from statistics import median
from time import process_time
from typing import Any

import pytest

from app.admission import decision_log as module
from app.admission.decision_log import DecisionLog
from app.admission.plain import PlainAsk, PlainAsks
from app.admission.plan import Matches, matches_of
from app.decision_log.status import LogStatus
from app.domain.ask import Ask
from app.domain.decision import Decision, Verdict
from app.domain.entity import ANY, Entity
from app.domain.ladder import MatchingRules, Quotas
from app.domain.quota import Quota
from app.store.port import Answer
from tests.bench.test_hot_path import ADMIT, SNAPSHOT, hot_route, microseconds
from tests.packed import packed

pytestmark = pytest.mark.bench

ROWS, AT_ONCE = 20_000, 500
EVERYONE, EVERY_PAIR = Entity.of(user=ANY), Entity.of(user=ANY, client_id=ANY)


class Stream:
    """Takes whatever comes."""

    def __init__(self) -> None:
        self.bytes = 0

    async def append(self, batch: bytes, rows: int, node: str, number: int) -> bool:
        del rows, node, number
        self.bytes += len(batch)
        return True

    async def status(self) -> LogStatus:
        raise AssertionError("nobody looks here")


class NoLog:
    """Takes nothing, in as much time as a call takes."""

    def admitted(self, planned: object, plain: object, packed: object) -> None: ...


NO_LOG: Any = NoLog()


def log_to(stream: Stream) -> DecisionLog:
    return DecisionLog(stream, which="all", node="n", secret=lambda: b"s" * 32, now_ms=lambda: 1)


def usual(n: int) -> Ask:
    return Ask({"requests": 1}, principal=f"user-{n % 100}", client_id="etl")


def long_names(n: int) -> Ask:
    """As long as the wire takes them, and never the same."""
    name = f"{n:08}".ljust(512, "\u00e9")
    return Ask({"requests": 1}, (n,), principal=name, client_id=name[1:], broker=name[2:], listener=name[3:])


def many_ids(n: int) -> Ask:
    return Ask({"requests": 1}, tuple(range(n * 100, n * 100 + 50)), principal=f"user-{n}")


def text_ids(n: int) -> Ask:
    return Ask({"requests": 1}, tuple(f"{n}-{i}".ljust(256, "x") for i in range(50)), principal=f"user-{n}")


QUOTAS = {
    "producer_ids_rate": {EVERYONE: Quota("producer_ids_rate", 100, "producer_ids", "deny")},
    "request_rate": {EVERY_PAIR: Quota("request_rate", 100, "sampled_rate", "delay")},
}


PLAIN_ASKS = {
    id(quotas): PlainAsks(Matches(quotas, MatchingRules(), most_bytes=0), b"s" * 32)
    for quotas in (QUOTAS, SNAPSHOT.quotas)
}


def take(
    log: DecisionLog,
    rows: int,
    made: Callable[[int], Ask] = usual,
    quotas: Quotas = SNAPSHOT.quotas,
    first: int = 0,
) -> None:
    """As many decisions as rows, each with objects of its own, as in real asks."""
    for n in range(first, first + rows):
        ask = made(n)
        its = matches_of(ask, quotas, MatchingRules())
        verdicts = []
        for found, _ in its:
            quota = found.quota
            named = (quota.key, found.entity, found.bucket, quota.limit, quota.enforcement, quota.shadow)
            verdicts.append(Verdict(*named, "admit", 0, 0.1, 99.0))
        answer = Answer((ADMIT,) * len(its), None, None, n, n, bytes(len(ask.producer_ids or ())))
        log.decided(ask, its, answer, Decision("admit", 0, True, 1, "store", None), verdicts, None)


def admit(
    log: DecisionLog,
    rows: int,
    made: Callable[[int], Ask] = usual,
    quotas: Quotas = SNAPSHOT.quotas,
    first: int = 0,
    kept: dict[object, PlainAsk] | None = None,
) -> None:
    """As many plain admissions as rows; equal asks are the same object if they are kept."""
    plain_asks = PLAIN_ASKS[id(quotas)]
    for n in range(first, first + rows):
        ask = made(n)
        key = (ask.principal, ask.producer_ids)
        plain = None if kept is None else kept.get(key)
        if plain is None:
            plain = plain_asks.of(ask)
            assert plain is not None
            if kept is not None:
                kept[key] = plain
        its = len(plain.planned.matches)
        outcomes = bytes(len(ask.producer_ids or ()))
        log.admitted(plain.planned, plain.quotas, packed(Answer((ADMIT,) * its, None, None, n, n, outcomes)))


def test_a_plain_admission_from_the_answer_to_the_batch():
    """It is appended as bytes, and a batch of them is packed at once."""
    whole = min(asyncio.run(microseconds(hot_route())) for _ in range(3))
    spent, size = [], 0
    for _ in range(5):
        stream, kept = Stream(), dict[object, PlainAsk]()
        log = log_to(stream)
        took = []
        for _ in range(ROWS // AT_ONCE):
            began = process_time()
            admit(log, AT_ONCE, kept=kept)
            asyncio.run(log._send())
            logged = process_time()
            admit(NO_LOG, AT_ONCE, kept=kept)
            took.append(2 * logged - began - process_time())
        spent.append(sum(took) / ROWS * 1e6)
        size = stream.bytes // ROWS
    print(f"a decision without a log, short of the store: {whole:.1f} us")
    print(f"a plain admission in the log: {median(spent):.2f} us, {size} bytes")
    print(f"that is {median(spent) / whole:.2f} of the decision")
    assert median(spent) < whole / 5


def test_a_row_from_the_decision_to_the_batch():
    """An answer waits only for the entry in memory; batches are put together between answers."""
    whole = min(asyncio.run(microseconds(hot_route())) for _ in range(3))
    took, packed, size = [], [], 0
    off = DecisionLog(Stream(), which="off", node="n", secret=bytes, now_ms=int)
    for _ in range(5):
        stream = Stream()
        log, spent = log_to(stream), [0.0, 0.0, 0.0]
        for _ in range(ROWS // AT_ONCE):
            began = process_time()
            take(log, AT_ONCE)
            taken = process_time()
            asyncio.run(log._send())
            sent = process_time()
            take(off, AT_ONCE)
            for place, seconds in enumerate((taken - began, sent - taken, process_time() - sent)):
                spent[place] += seconds
        taking, packing, making = (seconds / ROWS * 1e6 for seconds in spent)
        took.append(taking - making)
        packed.append(packing)
        size = stream.bytes // ROWS
    print(f"a decision without a log, short of the store: {whole:.1f} us")
    print(
        f"taking it down: {median(took):.2f} us; its part of a batch: {median(packed):.2f} us, {size} bytes"
    )
    print(f"together {(median(took) + median(packed)) / whole:.2f} of the decision")
    assert median(took) + median(packed) < whole


@pytest.mark.parametrize("add", [take, admit])
@pytest.mark.parametrize("made", [usual, long_names, many_ids, text_ids])
def test_waiting_rows_hold_no_more_memory_than_they_may(made: Callable[[int], Ask], add: Callable[..., None]):
    log = log_to(Stream())
    gc.collect()
    tracemalloc.start()
    rows = 0
    while not log.dropped:
        add(log, 100, made, QUOTAS, first=rows)
        rows += 100
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    mib = 1024 * 1024
    allowed = module.MAX_WAITING_BYTES
    print(f"{rows - log.dropped} rows wait in {held / mib:.0f} MiB; allowed {allowed / mib:.0f}")
    assert held < 1.25 * allowed
