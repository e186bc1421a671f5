"""Writes a decision log of any size, decided as nodes would decide, straight to Parquet, and its truth.

Several programs share the work. Each decides the asks of its part of the principals like a node, and one of
them also decides the connections. The folders appear at the end, complete.
"""

from __future__ import annotations

import gc
import itertools
import json
import signal
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any, Final

import pyarrow.parquet as pq

from app.decision_log.batch import OLDEST, Batch, LoggedQuota, Row, batch_id
from app.domain.digest import fingerprint
from workers.decision_log.rows import table
from workers.decision_log.schema import HOUR_MS, SCHEMA, partition, with_secrets
from workers.generate import quotas
from workers.generate.aside import written_aside
from workers.generate.judge import Judge
from workers.generate.traffic import Event, Traffic
from workers.generate.truth import Truth, Use, write_totals

ROWS_OF_A_BATCH: Final = 100
BATCHES_AT_ONCE: Final = 200
ORDER_OF_A_CALL: Final = 128
"""The growth of the order in a microsecond, as in the store's order."""

POLL_EVERY_S: Final = 0.2
WHO: Final = "quotagate generate"


@dataclass(frozen=True, slots=True)
class Order:
    """The log to write.

    Attributes:
        start_ms: when the traffic begins.
        secret: hashes the ids.
        programs: the number of programs that share the work.
    """

    traffic: Traffic
    start_ms: int
    secret: bytes
    programs: int


class WriteFailedError(Exception):
    """The log could not be written; the text says why."""


def write_log(
    order: Order, log: Path, truth: Path, progress: Callable[[int], None] = lambda _done: None
) -> dict[str, Any]:
    """Write the log and its truth into two new folders, and return the totals.

    Raises:
        WriteFailedError: the log could not be written; nothing is left behind.
    """
    parameters = {
        "seed": order.traffic.seed,
        "events": order.traffic.events,
        "from_ms": order.start_ms,
        "to_ms": order.start_ms + order.traffic.length_ms,
        "quotas": quotas.DEFINITIONS,
    }
    try:
        with written_aside(log, truth) as (rows, uses):
            sums = _write_all(order, rows, uses, progress)
            _write_quotas(order, rows)
            return write_totals(uses, parameters, sums)
    except OSError as error:
        raise WriteFailedError(str(error)) from None


def _write_all(order: Order, log: Path, truth: Path, progress: Callable[[int], None]) -> list[Any]:
    """Have each program write its part; return the sums of each."""
    context = get_context("spawn")
    done, trouble = context.Array("Q", order.programs), context.SimpleQueue()
    parts = [
        context.Process(
            target=_write_part, args=(order, part, str(log), str(truth), done, trouble), daemon=True
        )
        for part in range(order.programs)
    ]
    for program in parts:
        program.start()
    try:
        while any(program.is_alive() for program in parts):
            for program in parts:
                program.join(POLL_EVERY_S / len(parts))
            progress(sum(done[:]))
            if any(program.exitcode for program in parts):
                break
        if codes := [program.exitcode for program in parts if program.exitcode]:
            why = f"a program that writes it ended with {codes[0]}" if trouble.empty() else trouble.get()
            raise WriteFailedError(why)
    finally:
        for program in parts:
            program.kill()
            program.join()
    sums = []
    for part in range(order.programs):
        kept = truth / f"sums-{part}.json"
        sums.append(json.loads(kept.read_text(encoding="utf-8")))
        kept.unlink()
    return sums


def _write_part(order: Order, part: int, log: str, truth: str, done: Any, trouble: Any) -> None:
    """Write one program's part. It ignores Ctrl-C, which its parent obeys, and ends when the parent does.

    Args:
        done: receives the number of rows written.
        trouble: receives the reason for a failure.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.disable()  # rows make no cycles, and there are many of them
    starter = parent_process()

    def count(rows: int) -> None:
        done[part] = rows
        if starter is not None and not starter.is_alive():
            raise SystemExit(1)

    try:
        sums = _Share(order, part, Path(log), Path(truth)).write(count)
        (Path(truth) / f"sums-{part}.json").write_text(json.dumps(sums), encoding="utf-8")
    except OSError as error:
        trouble.put(str(error))
        raise SystemExit(1) from None


class _Share:
    """The rows and the truth of one program's principals."""

    def __init__(self, order: Order, part: int, log: Path, truth: Path) -> None:
        self._order = order
        self._part = part
        self._log = log
        self._node = f"generated-{part}"
        self._judge = Judge(order.secret)
        self._truth = Truth(truth / f"uses-{part}.parquet")
        self._numbers = itertools.count()

    def write(self, done: Callable[[int], None]) -> dict[str, dict[str, int]]:
        """Write all events of this program's share, and return the sums."""
        rows = 0
        schema = with_secrets(SCHEMA, [fingerprint(self._order.secret)])
        events = self._order.traffic.stream(self._is_mine)
        for hour_ms, hour_events in itertools.groupby(events, self._hour_ms):
            folder = self._log / partition(hour_ms)
            folder.mkdir(parents=True, exist_ok=True)
            batches = self._batches(hour_events)
            with pq.ParquetWriter(folder / f"{self._node}.parquet", schema, compression="zstd") as writer:
                while some := list(itertools.islice(batches, BATCHES_AT_ONCE)):
                    writer.write_table(table(some))
                    rows += sum(len(batch.rows) for batch in some)
                    done(rows)
        self._truth.close()
        return {name: dict(counts) for name, counts in self._truth.sums.items()}

    def _is_mine(self, rank: int, connects: bool) -> bool:
        if connects:
            return self._part == self._order.programs - 1  # all principals share a listener's bucket
        return rank % self._order.programs == self._part

    def _hour_ms(self, event: Event) -> int:
        return (self._order.start_ms + event.at_ms) // HOUR_MS * HOUR_MS

    def _batches(self, events: Iterator[Event]) -> Iterator[Batch]:
        while some := list(itertools.islice(events, ROWS_OF_A_BATCH)):
            places: dict[LoggedQuota, int] = {}
            rows = [self._row(event, places) for event in some]
            name = batch_id(self._node, next(self._numbers))
            yield Batch(OLDEST, name, self._node, rows[-1].at_ms, list(places), rows)

    def _row(self, event: Event, places: dict[LoggedQuota, int]) -> Row:
        now_ms = self._order.start_ms + event.at_ms
        since_us = int(event.number * 1_000_000 / self._order.traffic.rate)
        order = (self._order.start_ms * 1000 + since_us) * ORDER_OF_A_CALL
        row, new = self._judge.decide(event, order, now_ms, places)
        digests = struct.unpack(f">{len(new)}q", row.ids)
        principal, decision = event.principal or "", str(row.decision)
        uses = [
            Use(event.number, now_ms, principal, id_, digest, cause, is_new, is_new and row.charged, decision)
            for id_, digest, cause, is_new in zip(event.ids, digests, event.causes, new, strict=True)
        ]
        self._truth.asked(principal, decision, uses)
        return row


def _write_quotas(order: Order, log: Path) -> None:
    """Write the changes that set the quotas, as rows before the first ask."""
    rows = [
        Row("quota", order.start_ms, what=entity, after=json.dumps(definitions), who=WHO, version=version)
        for version, (entity, definitions) in enumerate(quotas.DEFINITIONS.items(), 1)
    ]
    batch = Batch(
        version=OLDEST,
        id=batch_id("generated-quotas", 0),
        node="generated-0",
        sent_ms=order.start_ms,
        quotas=[],
        rows=rows,
    )
    path = log / partition(order.start_ms) / "generated-quotas.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table([batch]), path, compression="zstd")
