"""The log of one node: its batches, the rows that the writer makes of them, and their expected columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import chain
from typing import Any, Final

from app.admission.log.decision_log import DecisionLog, Which
from app.decision_log.status import LogStatus
from app.domain.ask import Ask
from app.domain.decision import Decision, Verdict
from app.domain.digest import digest
from app.domain.usage import ids_of, usage_of
from app.store.port import Charge
from workers.decision_log import rows as writer

SECRET: Final = b"s" * 32
NODE_MS: Final = 1_763_719_200_000
"""The time by the node's clock: 2025-11-21, 10:00 UTC."""

Json = dict[str, Any]


class SavedBatches:
    """The stream of a test: it takes every batch."""

    def __init__(self) -> None:
        self.batches: list[bytes] = []

    async def append(self, batch: bytes, rows: int, node: str, number: int) -> bool:
        assert len(writer.decode(batch).rows) == rows, (node, number)
        self.batches.append(batch)
        return True

    async def status(self) -> LogStatus:
        return LogStatus(NODE_MS, 0, 0, 0, 0, 0, "", 0, ())

    def rows(self) -> list[Json]:
        """The rows that the writer makes, in order, without the columns that name batches."""
        decoded = [writer.decode(batch) for batch in self.batches]
        found: list[Json] = writer.table(decoded).to_pylist()
        places = [row.pop("place") for row in found]
        assert places == list(chain.from_iterable(range(len(batch.rows)) for batch in decoded))
        for row in found:
            del row["batch"], row["batch_rows"], row["siblings"], row["node"]
        return found


def log_into(stream: SavedBatches, which: Which = "all", *, plain_ids: bool = False) -> DecisionLog:
    """A log that sends its batches there."""
    return DecisionLog(
        stream, which=which, node="n", secret=lambda: SECRET, now_ms=lambda: NODE_MS, plain_ids=plain_ids
    )


async def rows_in(log: DecisionLog, stream: SavedBatches) -> list[Json]:
    """All rows of a log, once nothing waits any more; none was dropped."""
    await log._send()
    assert (log.dropped, log._bytes) == (0, 0)
    return stream.rows()


def asked(ask: Ask, *, plain_ids: bool = False) -> Json:
    """The columns of a row that describe the ask."""
    ids = [
        int.from_bytes(digest(SECRET, ask.principal or "", each), "big", signed=True) for each in ids_of(ask)
    ]
    return {
        **{name: getattr(ask, name) for name in ("principal", "client_id", "ip", "broker", "listener")},
        **{name: getattr(ask, name) for name in ("mode", "deny", "recheck", "cluster_action")},
        "usage": list(ask.usage.items()),
        "ids": ids or None,
        "plain_ids": [str(each) for each in ids_of(ask)] if ids and plain_ids else None,
    }


def decided_so(decision: Decision) -> Json:
    """The columns of a row that describe the decision."""
    by = decision.limited_by
    names = ("quota", "entity", "bucket", "reason")
    return {
        **{
            name: getattr(decision, name)
            for name in ("decision", "throttle_ms", "charged", "applied", "source")
        },
        "limited_by": None if by is None else {name: getattr(by, name) for name in names},
    }


_OF_VERDICT: Final = (
    *("quota", "entity", "bucket", "limit", "enforcement", "shadow"),
    *("outcome", "throttle_ms", "observed", "remaining", "reason"),
)


def shown(verdicts: Sequence[Verdict] | None) -> list[Json]:
    """The columns of a row's verdicts that a decision with detail shows."""
    return [{name: asdict(verdict)[name] for name in _OF_VERDICT} for verdict in verdicts or ()]


def spent(ask: Ask, charges: Sequence[Charge]) -> list[float]:
    """The usage in each verdict."""
    return [usage_of(ask, charge.quota) for charge in charges]


def verdicts_in(row: Json) -> list[Json]:
    """The columns of a row's verdicts that a decision with detail shows too."""
    return [{name: verdict[name] for name in _OF_VERDICT} for verdict in row["verdicts"]]


def of_verdicts(row: Json, name: str) -> list[Any]:
    """One column of a row's verdicts."""
    return [verdict[name] for verdict in row["verdicts"]]
