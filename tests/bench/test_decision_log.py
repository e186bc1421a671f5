"""The memory of a node that logs decisions. The benchmark's rows with `log all` have the time."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable

import pytest

from app.admission.compiled import Tables
from app.admission.log import decision_log as module
from app.admission.log.decision_log import DecisionLog
from app.admission.plan import PlannedAsk
from app.catalog.snapshot import Snapshot
from app.decision_log.status import LogStatus
from app.domain.ask import Ask
from app.domain.decision import Decision, Outcome
from app.domain.entity import ANY, Entity
from app.domain.ladder import MatchingRules
from app.domain.quota import Quota
from app.store.encoding import decode_answer, packed_results
from app.store.port import ChargeResult

pytestmark = pytest.mark.bench

EVERYONE, EVERY_PAIR = Entity.of(user=ANY), Entity.of(user=ANY, client_id=ANY)


class Stream:
    """Takes every batch."""

    def __init__(self) -> None:
        self.bytes = 0

    async def append(self, batch: bytes, rows: int, node: str, number: int) -> bool:
        del rows, node, number
        self.bytes += len(batch)
        return True

    async def status(self) -> LogStatus:
        raise AssertionError("nobody looks here")


def log_to(stream: Stream) -> DecisionLog:
    return DecisionLog(stream, which="all", node="n", secret=lambda: b"s" * 32, now_ms=lambda: 1)


def usual(n: int) -> Ask:
    return Ask({"requests": 1}, principal=f"user-{n % 100}", client_id="etl")


def long_names(n: int) -> Ask:
    """Names of the greatest length that the wire accepts, different in each ask."""
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


TABLES = Tables(Snapshot.of(QUOTAS), MatchingRules())


@pytest.mark.parametrize("outcome", ["admit", "throttle"])
@pytest.mark.parametrize("made", [usual, long_names, many_ids, text_ids])
def test_waiting_rows_hold_no_more_memory_than_they_may(made: Callable[[int], Ask], outcome: Outcome):
    log = log_to(Stream())
    gc.collect()
    tracemalloc.start()
    rows = 0
    while not log.dropped:
        ask = made(rows)
        charges = TABLES.charges(ask)
        decision = Decision(outcome, 0, outcome == "admit", len(charges), "store", None)
        results = [ChargeResult(outcome, observed=0.1, remaining=99.0)] * len(charges)
        answer = decode_answer(packed_results(results), None, rows, rows, bytes(len(ask.producer_ids or ())))
        log.decided(PlannedAsk(ask, charges, None, decision=decision), answer, (), None)
        rows += 1
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    mib = 1024 * 1024
    allowed = module.MAX_WAITING_BYTES
    print(f"{rows - log.dropped} rows wait in {held / mib:.0f} MiB; allowed {allowed / mib:.0f}")
    assert held < 1.25 * allowed
