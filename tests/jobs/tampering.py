"""Kinds of tampering with a log, and the finding that an audit must report for each.

Each kind changes the rows of an honest log. docs/pipeline.md has the same table.
"""

from __future__ import annotations

import copy
import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

from app.domain.ask import Ask
from app.domain.entity import Entity
from app.domain.oracle import Oracle
from tests.jobs.logs import SECRET, START_MS, OracleLog, Row, asks
from workers.jobs.audit.findings import (
    ABSENT,
    ADDED,
    ALTERED,
    CLOCK,
    CONTRADICTS,
    DIFFERS,
    GAPS,
    LOST,
    MISSING,
    SAME_ORDER,
    STALE,
    TWICE,
    UNLIKELY,
    UNTOLD,
)

ROWS_OF_A_BATCH: Final = 20
APART_MS: Final = 300_000
"""The time between copies of the traffic; by then every bucket has expired."""
ASKS: Final = 100

Rows = list[Row]


@dataclass
class Traffic(OracleLog):
    """Honest traffic of one name after another, with everything that happens in a deployment.

    Attributes:
        changes: rows with changes of quotas, from a node of their own.
    """

    changes: Rows = field(default_factory=list)
    version: int = 0

    def ask(self, ask: Ask, **changed: Any) -> Any:
        """Decide an ask, with an order that follows from the time, as a real store gives."""
        self.order = max(self.now_ms * 128_000, self.order)
        return super().ask(ask, **changed)

    def set_quotas(self) -> None:
        """Log every quota as a change."""
        entities = {entity for by_entity in self.quotas.values() for entity in by_entity}
        for entity in sorted(entities, key=str):
            self.log_change(entity, None)

    def limit(self, key: str, entity: Entity, limit: float) -> None:
        """Change a limit, and log the change."""
        before = self._of(entity)
        self.quotas[key][entity] = replace(self.quotas[key][entity], limit=limit)
        self.log_change(entity, before)

    def log_change(self, entity: Entity, before: dict[str, Any] | None) -> None:
        self.version += 1
        change: dict[str, Any] = {"what": str(entity), "after": json.dumps(self._of(entity)), "who": "admin"}
        change |= {"before": None if before is None else json.dumps(before), "version": self.version}
        self.changes.append(self._empty() | {"kind": "quota", "change": change})

    def run_as(self, name: str) -> Rows:
        """The rows of one name: asks of every kind, fallbacks, a drill, a repeated answer and a reset."""
        began = len(self.rows)
        people = [f"{name}-a", f"{name}-b"]
        source = asks(hash_of(name), people)
        self.run(source, ASKS, (0, 5, 40, 120), hash_of(name))
        self.fall_back(Ask({"requests": 1}, (7, 8), people[0], detail=True), is_late=True)
        self.fall_back(Ask({"requests": 1}, (9,), people[0], detail=True), is_late=False)
        self.hold(Ask({"produce_bytes": 10}, None, people[1], detail=True))
        self.replay(people[0])
        self.reset(f"user={people[0]}")
        self.now_ms += 3_000
        for step in range(8):
            self.now_ms += 100
            ids = tuple(range(1_000 + step, 1_006 + step)) if step == 3 else (1_000,)
            self.ask(Ask({"requests": 1, "produce_bytes": 900}, ids, people[0], "etl", detail=True))
        for _ in range(3):
            self.now_ms += 10
            self.ask(Ask({"mutations": 2}, None, people[1], detail=True))
        self.now_ms += 3_000
        self.ask(Ask({"connections": 1}, None, people[1], None, None, "1", "CLIENT", detail=True))
        return self.rows[began:]

    def fall_back(self, ask: Ask, *, is_late: bool) -> None:
        """Log an ask that was answered without the store, and, if late, the store's decision too."""
        self.now_ms += 60
        self.ask(ask)
        late = self.rows.pop()
        verdicts = [
            said
            | {"outcome": "admit", "throttle_ms": 0, "reason": None, "observed": None, "remaining": None}
            | {"charged_ids": said["charged_ids"] and [], "refreshed_ids": said["refreshed_ids"] and []}
            for said in late["verdicts"]
        ]
        without = {"order": None, "source": "fallback", "failure": "budget", "charged": False}
        plain = {"decision": "admit", "throttle_ms": 0, "limited_by": None, "verdicts": verdicts}
        self.rows.append(late | without | plain)
        if is_late:
            self.rows.append(late | {"kind": "late"})

    def hold(self, ask: Ask) -> None:
        """Log a drill: for a moment the throttle factor is 0, and refuses an ask that produces."""
        for before, after in ((1.0, 0.0), (0.0, 1.0)):
            self.now_ms += 10
            said = {"what": "throttle_factor", "before": json.dumps(before), "after": json.dumps(after)}
            self.add(kind="factor", change=said | {"who": None, "version": None})
            if not after:
                by = {"quota": "throttle_factor", "entity": None, "bucket": None, "reason": None}
                self.now_ms += 5
                self.rows.append(
                    self._empty()
                    | {"kind": "decision", "principal": ask.principal, "mode": "admit", "source": "local"}
                    | {"usage": dict(ask.usage), "decision": "throttle", "throttle_ms": 1_000}
                    | {"limited_by": by, "verdicts": []}
                )

    def replay(self, principal: str) -> None:
        """Log an answer that is repeated to a retry."""
        self.now_ms += 5
        ask = Ask({"requests": 1}, None, principal, detail=True)
        self.ask(ask)
        self.now_ms += 5
        self.order = max(self.now_ms * 128_000, self.order)
        self.rows.append(
            copy.deepcopy(self.rows[-1])
            | {"order": self.order, "at_ms": self.now_ms, "replayed": True, "verdicts": []}
        )
        self.order += 128

    def reset(self, bucket: str) -> None:
        """Reset a bucket, and log it."""
        self.now_ms += 20
        self.order = max(self.now_ms * 128_000, self.order)
        mine = {key[0] for key in self.oracle.buckets if key[1] == bucket}
        said = {"what": bucket, "before": json.dumps({"quotas": sorted(map(str, mine))}), "after": None}
        self.add(kind="reset", order=self.order, change=said | {"who": "admin", "version": None})
        self.order += 128
        self.oracle.buckets = {key: each for key, each in self.oracle.buckets.items() if key[1] != bucket}

    def _of(self, entity: Entity) -> dict[str, Any]:
        return {
            key: {"limit": by_entity[entity].limit}
            for key, by_entity in self.quotas.items()
            if entity in by_entity
        }


def traffic(names: Sequence[str]) -> tuple[Traffic, dict[str, Rows]]:
    """The rows of honest traffic for each name, and of the node that changes quotas (``admin``)."""
    made = Traffic(Oracle(SECRET))
    made.now_ms = START_MS - 60_000
    made.set_quotas()
    parts: dict[str, Rows] = {}
    for number, name in enumerate(names):
        made.now_ms = START_MS + number * APART_MS
        parts[name] = left_by(made.run_as(name), (f"{name}-1", f"{name}-2"))
    made.now_ms += APART_MS
    made.limit("producer_byte_rate", Entity.parse("user=*"), 30_000)
    made.now_ms += 5_000
    parts["last"] = left_by(made.run_as("last"), ("last-1", "last-2"))
    parts["admin"] = left_by(made.changes, ("admin",))
    return made, parts


def left_by(rows: Rows, nodes: Sequence[str]) -> Rows:
    """Put rows into batches, which the nodes write in turn, naming each other's last batch."""
    numbers = dict.fromkeys(nodes, 0)
    left: dict[str, tuple[int, int]] = {}
    for turn, first in enumerate(range(0, len(rows), ROWS_OF_A_BATCH)):
        mine = rows[first : first + ROWS_OF_A_BATCH]
        node = nodes[turn % len(nodes)]
        numbers[node] += 1
        siblings = [{"node": other, "number": left[other][0], "at_ms": left[other][1]} for other in left]
        for place, row in enumerate(mine):
            row |= {"batch": f"{node}-{numbers[node]:012d}", "place": place, "node": node}
            row |= {"batch_rows": len(mine)}
            row["siblings"] = [one for one in siblings if one["node"] != node] if place == 0 else None
        left[node] = (numbers[node], mine[-1]["at_ms"])
    return rows


def hash_of(name: str) -> int:
    """A number for a name, the same in every program."""
    return zlib.crc32(name.encode()) % 100_003


class Kind(NamedTuple):
    """One kind of tampering.

    Attributes:
        does: changes the rows, and returns the rows that are left.
        named: the finding that the audit must report.
        of: the name whose rows are changed; by default the traffic's own.
    """

    name: str
    does: Callable[[Rows], Rows]
    named: str
    of: str = ""


def first(rows: Rows, wanted: Callable[[Row], Any], at: int = 0) -> Row:
    """The first matching decision, from a given row on."""
    return next(row for row in rows[at:] if row["kind"] == "decision" and wanted(row))


def charged(row: Row) -> bool:
    """Whether the store charged buckets for a row."""
    return bool(
        row["charged"] and row["order"] and not row["replayed"] and row["mode"] == "admit" and row["verdicts"]
    )


def verdict(row: Row, key: str) -> Row | None:
    """The row's verdict of a quota key."""
    found = (said for said in row["verdicts"] or () if said["quota"] == key and not said["shadow"])
    return next(found, None)


def bytes_of(row: Row) -> Row | None:
    """The verdict by which a row charged a principal's byte rate."""
    said = verdict(row, "producer_byte_rate")
    return said if charged(row) and said and said["usage"] > 800 else None


def changes(wanted: Callable[[Row], Any], change: Callable[[Row], Any]) -> Callable[[Rows], Rows]:
    """Change the first matching row."""

    def does(rows: Rows) -> Rows:
        change(first(rows, wanted, 20))
        return rows

    return does


def without(wanted: Callable[[Row], Any]) -> Callable[[Rows], Rows]:
    """Remove matching rows."""
    return lambda rows: [row for row in rows if not wanted(row)]


def use(row: Row, more: float) -> None:
    """Change the usage of a row, in its ask and in its verdict."""
    said = bytes_of(row)
    assert said is not None
    said["usage"] += more
    row["usage"] = dict(row["usage"]) | {"produce_bytes": said["usage"]}


def add_to(rows: Rows, row: Row) -> Rows:
    """Add a row at the end of the first batch."""
    batch = rows[0]["batch"]
    return [
        *rows,
        row | {"batch": batch, "place": rows[0]["batch_rows"], "batch_rows": rows[0]["batch_rows"]},
    ]


def repeat_with_other_decision(rows: Rows) -> Rows:
    row = first(rows, lambda row: row["decision"] == "throttle")
    return [*rows, copy.deepcopy(row) | {"decision": "admit", "throttle_ms": 0}]


def overwrite(rows: Rows) -> Rows:
    """Replace a row by a copy of another one."""
    one = first(rows, bytes_of, 20)
    other = first(
        rows, lambda row: bytes_of(row) and row["principal"] == one["principal"] and row is not one, 30
    )
    kept = {name: other[name] for name in ("batch", "place", "node", "batch_rows", "siblings")}
    other.clear()
    other.update(copy.deepcopy(one) | kept)
    return rows


def shift(rows: Rows) -> Rows:
    """Shift the times of a node's rows by an hour."""
    for row in rows:
        if row["node"] == rows[0]["node"] and row["kind"] == "decision":
            row["at_ms"] += 3_600_000
    return rows


def last_batch_of(rows: Rows) -> str:
    """The last batch of a node that was not the last to write: other nodes name it."""
    node = next(row["node"] for row in reversed(rows) if row["node"] != rows[-1]["node"])
    found: str = max(row["batch"] for row in rows if row["node"] == node)
    return found


def forget_ids(rows: Rows) -> Rows:
    """Log charged ids as seen, and adjust the numbers of the bucket."""
    row = first(
        rows, lambda row: len((verdict(row, "producer_ids_rate") or {}).get("charged_ids") or ()) >= 5
    )
    for each in rows[rows.index(row) :]:
        said = verdict(each, "producer_ids_rate")
        if said and each["principal"] == row["principal"] and said["observed"] is not None:
            gone = len(verdict(row, "producer_ids_rate")["charged_ids"])  # type: ignore[index]
            said["observed"] -= gone
            said["remaining"] += gone
        if each["kind"] == "reset":
            break
    verdict(row, "producer_ids_rate")["charged_ids"] = []  # type: ignore[index]
    return rows


def _set(**columns: Any) -> Callable[[Row], None]:
    return lambda row: row.update(columns)


def _said(key: str, **fields: Any) -> Callable[[Row], None]:
    def change(row: Row) -> None:
        said = verdict(row, key)
        assert said is not None
        said.update(fields)

    return change


def _longer(row: Row) -> None:
    for said in row["verdicts"]:
        if said["throttle_ms"] == row["throttle_ms"]:
            said["throttle_ms"] += 7
    row["throttle_ms"] += 7


def _less(row: Row) -> None:
    said = bytes_of(row)
    assert said is not None
    said["observed"] *= 0.5


def _swap_orders(rows: Rows) -> Rows:
    one, other = first(rows, charged), first(rows, charged, 80)
    one["order"], other["order"] = other["order"], one["order"]
    return rows


def _raise_limit(rows: Rows) -> Rows:
    for row in rows:
        if row["order"] and (said := verdict(row, "producer_byte_rate")):
            said["limit"] *= 2
    return rows


def _other_limit(rows: Rows) -> Rows:
    rows[-1]["change"]["after"] = rows[-1]["change"]["after"].replace("30000", "90000")
    return rows


def _without_one(rows: Rows, wanted: Callable[[Row], Any]) -> Rows:
    found = first(rows, wanted)
    return [row for row in rows if row is not found]


def _without_last(rows: Rows) -> Rows:
    return [
        row for row in rows if (row["batch"], row["place"]) != (rows[0]["batch"], rows[0]["batch_rows"] - 1)
    ]


def _without_batch(rows: Rows, batch: str) -> Rows:
    return [row for row in rows if row["batch"] != batch]


def _a_reset(rows: Rows) -> Row:
    return copy.deepcopy(next(row for row in rows if row["kind"] == "reset"))


def _refused(row: Row) -> bool:
    said: tuple[Any, ...] = (row["decision"], row["source"], row["mode"])
    return said == ("throttle", "store", "admit")


def _of_ids(row: Row) -> Any:
    return charged(row) and (verdict(row, "producer_ids_rate") or {}).get("charged_ids")


KINDS: Final[tuple[Kind, ...]] = (
    Kind("a refusal is taken out", lambda rows: _without_one(rows, _refused), GAPS),
    Kind("the last row of a batch is taken out", _without_last, GAPS),
    Kind(
        "a change of quotas, a drill or a reset is taken out",
        without(lambda row: row["kind"] == "reset"),
        GAPS,
    ),
    Kind("a batch is taken out", lambda rows: _without_batch(rows, rows[45]["batch"]), MISSING),
    Kind(
        "a node's last batch is taken out",
        lambda rows: _without_batch(rows, last_batch_of(rows)),
        MISSING,
    ),
    Kind("a whole node is taken out", without(lambda row: row["node"].endswith("-2")), ABSENT),
    Kind("a row is put in", lambda rows: add_to(rows, copy.deepcopy(first(rows, charged))), ADDED),
    Kind("a reset that never was is put in", lambda rows: add_to(rows, _a_reset(rows)), ADDED),
    Kind("a row is there twice, with another decision", repeat_with_other_decision, TWICE),
    Kind("a row takes the place of another", overwrite, SAME_ORDER),
    Kind(
        "`applied` is another number",
        changes(charged, lambda row: row.update(applied=row["applied"] + 1)),
        CONTRADICTS,
    ),
    Kind("a verdict is taken out", changes(charged, lambda row: row["verdicts"].pop()), CONTRADICTS),
    Kind("`charged` is denied", changes(charged, _set(charged=False)), CONTRADICTS),
    Kind(
        "the bucket is another's",
        changes(bytes_of, _said("producer_byte_rate", bucket="user=somebody")),
        CONTRADICTS,
    ),
    Kind("the principal is another", changes(bytes_of, _set(principal="somebody")), CONTRADICTS),
    Kind(
        "the entity is another's",
        changes(bytes_of, _said("producer_byte_rate", entity="user=somebody")),
        CONTRADICTS,
    ),
    Kind(
        "the broker is another",
        changes(
            lambda row: (
                charged(row) and row["broker"] == "1" and verdict(row, "max_connection_creation_rate")
            ),
            _set(broker="9"),
        ),
        CONTRADICTS,
    ),
    Kind(
        "a verdict's usage is lowered",
        changes(bytes_of, _said("producer_byte_rate", usage=1.0)),
        CONTRADICTS,
    ),
    Kind("a row's usage is raised throughout", changes(bytes_of, lambda row: use(row, 5_000)), ALTERED),
    Kind("a row's usage is lowered throughout", changes(bytes_of, lambda row: use(row, -500)), UNTOLD),
    Kind("a refusal is logged as recorded", changes(_refused, _set(mode="record")), CONTRADICTS),
    Kind("a charge is logged as a peek", changes(charged, _set(mode="peek")), CONTRADICTS),
    Kind(
        "a refusal is logged as a repeated answer",
        changes(_refused, _set(replayed=True, verdicts=[])),
        CONTRADICTS,
    ),
    Kind(
        "a charge is logged as a repeated answer",
        changes(bytes_of, _set(replayed=True, verdicts=[])),
        UNTOLD,
    ),
    Kind(
        "a refusal is logged as admitted",
        changes(_refused, _set(decision="admit", throttle_ms=0, limited_by=None)),
        DIFFERS,
    ),
    Kind("a wait is longer, in the verdict too", changes(_refused, _longer), DIFFERS),
    Kind(
        "another quota is blamed",
        changes(_refused, lambda row: row["limited_by"].update(entity="user=somebody")),
        DIFFERS,
    ),
    Kind("the limit is another", _raise_limit, STALE),
    Kind("a change of quotas says another limit", _other_limit, STALE, "admin"),
    Kind(
        "the place in the store's order is taken away",
        changes(charged, _set(order=None)),
        CONTRADICTS,
    ),
    Kind("two rows change places in the store's order", _swap_orders, CLOCK),
    Kind("a node's clock is shifted", shift, CLOCK),
    Kind("a bucket is logged with less content", changes(bytes_of, _less), LOST),
    Kind("charged ids are logged as seen, with matching counts", forget_ids, UNLIKELY),
    Kind(
        "ids are charged that nobody asked for",
        changes(_of_ids, _said("producer_ids_rate", charged_ids=[1])),
        CONTRADICTS,
    ),
    Kind(
        "a late charge is taken out",
        lambda rows: [row for row in rows if row["kind"] != "late"],
        GAPS,
    ),
)
