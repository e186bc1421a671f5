"""Writes a decision log of any size, decided as nodes would decide, straight to Parquet, and its truth.

Several programs share the work. Each decides the asks of its part of the principals, as their node would, and
one of them also decides the connections. The folders appear at the end, complete.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from app.decision_log.batch import VERSION, Batch, Row, batch_id
from app.domain.digest import fingerprint
from workers.decision_log.fingerprints import with_secrets
from workers.decision_log.rows import table
from workers.decision_log.schema import HOUR_MS, SCHEMA, partition
from workers.generate import quotas
from workers.generate.aside import written_aside
from workers.generate.columns import Columns
from workers.generate.judge import EventOutcome, Judge
from workers.generate.traffic import Event, Traffic
from workers.generate.truth import Truth, write_totals

ROWS_AT_ONCE: Final = 50_000
ROWS_OF_A_BATCH: Final = 100
EVENTS_OF_A_CALL: Final = 16
ORDER_OF_A_CALL: Final = 128
"""By how much the order grows from one call of the script to the next."""

LOOK_EVERY_S: Final = 0.2
WHO: Final = "quotagate generate"


@dataclass(frozen=True, slots=True)
class Order:
    """What to write.

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
                program.join(LOOK_EVERY_S / len(parts))
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
        self._columns = Columns(f"generated-{part}")
        self._judge = Judge(self._columns, order.secret)
        self._truth = Truth(truth / f"uses-{part}.parquet")
        self._files = _Files(log, self._columns.node, order.secret)
        self._rows = 0
        self._batch = self._place = 0

    def write(self, done: Callable[[int], None]) -> dict[str, dict[str, int]]:
        """Write all events of this program's share, and return the sums."""
        hour = 0
        for event in self._order.traffic.stream(self._is_mine):
            now_ms = self._order.start_ms + event.at_ms
            if now_ms // HOUR_MS != hour or len(self._columns) >= ROWS_AT_ONCE:
                self._flush(hour)
                done(self._rows)
                hour = now_ms // HOUR_MS
            self._log(event, now_ms)
        self._flush(hour)
        self._files.close()
        self._truth.close()
        done(self._rows)
        return {name: dict(counts) for name, counts in self._truth.sums.items()}

    def _is_mine(self, rank: int, connects: bool) -> bool:
        if connects:
            return self._part == self._order.programs - 1  # all principals share a listener's bucket
        return rank % self._order.programs == self._part

    def _log(self, event: Event, now_ms: int) -> None:
        columns = self._columns
        if self._place == ROWS_OF_A_BATCH:
            self._end_batch()
        columns.batch.append(self._batch)
        columns.place.append(self._place)
        self._place += 1
        call, within = divmod(event.number, EVENTS_OF_A_CALL)
        columns.order.append((call + 1) * ORDER_OF_A_CALL + within)
        self._rows += 1
        self._note(event, now_ms, self._judge.decide(event, now_ms))

    def _note(self, event: Event, now_ms: int, outcome: EventOutcome) -> None:
        principal = event.principal or ""
        self._truth.asked(
            principal, outcome.decision, len(event.ids), len(outcome.unseen), len(outcome.charged)
        )
        for each, digest, cause in zip(event.ids, outcome.digests, event.causes, strict=True):
            self._truth.used(
                event.number,
                now_ms,
                principal,
                each,
                digest,
                cause,
                outcome.decision,
                new=digest in outcome.unseen,
                charged=digest in outcome.charged,
            )

    def _end_batch(self) -> None:
        self._columns.batch_rows.extend([self._place] * self._place)
        self._batch, self._place = self._batch + 1, 0

    def _flush(self, hour: int) -> None:
        if self._columns:
            self._end_batch()
            self._files.write(hour, self._columns.taken())
            self._truth.flush()


class _Files:
    """One Parquet file per hour, in the folder of its hour."""

    def __init__(self, log: Path, node: str, secret: bytes) -> None:
        self._log = log
        self._node = node
        self._schema = with_secrets(SCHEMA, [fingerprint(secret)])
        self._hour = 0
        self._writer: pq.ParquetWriter | None = None

    def write(self, hour: int, rows: pa.RecordBatch) -> None:
        """Write rows of one hour, counted from 1970. Hours must not decrease from call to call."""
        if self._writer is None or hour != self._hour:
            self.close()
            self._hour = hour
            folder = self._log / partition(hour * HOUR_MS)
            folder.mkdir(parents=True, exist_ok=True)
            self._writer = pq.ParquetWriter(
                folder / f"{self._node}.parquet", self._schema, compression="zstd"
            )
        self._writer.write_batch(rows)

    def close(self) -> None:
        """Finish the file of the last hour."""
        if self._writer is not None:
            self._writer.close()


def _write_quotas(order: Order, log: Path) -> None:
    """Write the changes that set the quotas, as rows before the first ask."""
    rows = [
        Row("quota", order.start_ms, what=entity, after=json.dumps(definitions), who=WHO, version=version)
        for version, (entity, definitions) in enumerate(quotas.DEFINITIONS.items(), 1)
    ]
    batch = Batch(
        version=VERSION,
        id=batch_id("generated-quotas", 0),
        node="generated-0",
        sent_ms=order.start_ms,
        quotas=[],
        rows=rows,
    )
    path = log / partition(order.start_ms) / "generated-quotas.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table([batch]), path, compression="zstd")
