"""The sieve of the rules on single rows: a row that it confirms has no finding by the rules themselves."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any, Final

import pyarrow as pa
import pytest

from app.domain.ask import Ask
from app.domain.decision import Verdict, combine
from app.domain.entity import Entity, spell
from app.domain.errors import EntityError
from app.domain.ladder import MatchingRules, applied_quotas
from app.domain.oracle import Oracle
from app.domain.quota import KEYS, Quota
from tests.jobs.logs import SECRET, OracleLog, Quotas, Row, asks, quotas
from tests.jobs.tampering import KINDS, Kind, traffic
from workers.decision_log.schema import SCHEMA, VERDICT
from workers.jobs.audit import row_rules
from workers.jobs.audit.bucket_findings import SCHEMA as FINDINGS
from workers.jobs.audit.contradictions import DecisionRow, VerdictRow, checking
from workers.jobs.audit.findings import CLOCK, CONTRADICTS
from workers.jobs.audit.row_rules import findings, suspects

FAULTS: Final = 600
MANY_FAULTS: Final = 40_000
SETTINGS: Final = [(by_store, sequential) for by_store in (True, False) for sequential in (False, True)]

NAMES: Final = ("a", "b", "", "*", "%2A", "a,b", "x;broker=1", "é", "\x00", "n" * 600, "User:a", "192.0.2.1")
ADDRESSES: Final = ("10.0.0.1", "2001:db8::7", "not:an:address", "::1", "host", "", "010.0.0.1")
SPELLINGS: Final = (
    *("user=*", "user=a", "user=b", "user=%2A", "user=", "client-id=*", "client-id=", "user=*,client-id=*"),
    *(
        "user=a,client-id=*",
        "client-id=*,user=*",
        "ip=*",
        "ip=10.0.0.1",
        "ip=2001:db8::7",
        "ip=2001:db8::/64",
    ),
    *(
        "ip=2001%3Adb8%3A%3A%2F64",
        "ip=2001%3Adb8%3A%3A%2F32",
        "ip=x%2F999",
        "ip=host",
        "broker=*",
        "broker=1",
    ),
    *("listener=*", "listener=CLIENT", "listener=CLIENT;broker=1", "listener=CLIENT;broker=2", "", ";"),
    *(
        "broker=1,listener=CLIENT",
        "broker=*,listener=*",
        "user=a;broker=1",
        "user=a;broker=1;broker=1",
        "what",
    ),
    *("user=192.0.2.1", "ip=192.0.2.1", "user=a\n", "user=somebody"),
)
INTEGERS: Final = (0, 1, 2, -1, 5, 1_000, 2**31 - 1, 2**31, 2**40, 2**63 - 1, -(2**63))
FLOATS: Final = (0.0, 1.0, -1.0, 1e-12, 1e18, float("nan"), float("inf"), float("-inf"))
WORDS: Final = (
    *(
        "decision",
        "late",
        "ids",
        "lease",
        "quota",
        "admit",
        "peek",
        "record",
        "refund",
        "store",
        "local",
        "fallback",
    ),
    *("delay", "throttle", "reject", "deny", "store_failure", "store_full", "capacity", "throttle_factor"),
    *("sampled_rate", "token_bucket", "producer_ids", "cluster", "broker", "what", "", *KEYS),
)


def quotas_of_all_forms() -> Quotas:
    """Quotas of default entities, own entities, pairs and brokers, so low that they refuse most asks."""
    made = quotas()
    byte_rate = made["producer_byte_rate"].pop(Entity.parse("user=*"))
    request_rate = made["request_rate"].pop(Entity.parse("user=*"))
    made["producer_byte_rate"] = {
        Entity.parse("user=*"): replace(byte_rate, limit=300, scope="broker"),
        Entity.parse("user=a,client-id=*"): replace(byte_rate, limit=200),
        Entity.parse("user=b"): replace(byte_rate, limit=100, enforcement="deny"),
    }
    made["request_rate"] = {
        Entity.parse("user=*,client-id=*"): replace(request_rate, limit=0.5, sample_ms=60_000),
        Entity.parse("client-id=etl"): replace(request_rate, limit=0.5),
        Entity.parse("ip=*"): replace(request_rate, limit=0.2),
        Entity.parse("ip=2001:db8::7"): replace(request_rate, limit=0.2),
    }
    made["max_connection_creation_rate"][Entity.parse("broker=*")] = replace(
        made["max_connection_creation_rate"][Entity.parse("listener=*")], scope="cluster"
    )
    return made


def refused_traffic(count: int) -> list[Row]:
    """Rows of asks with addresses and names of all forms, most of them delayed or refused."""
    log = OracleLog(Oracle(SECRET), quotas_of_all_forms())
    dice = random.Random(5)
    source = asks(5, ["a", "b", "User:é", "*"])
    for _ in range(count):
        log.now_ms += dice.choice((0, 1, 5, 40))
        log.order = max(log.now_ms * 128_000, log.order)
        ip = dice.choice((None, "10.0.0.1", "2001:db8::7", "2001:db8::8", "2001:db8:0:1::9"))
        log.ask(replace(next(source), ip=ip))
    return log.rows


def summed(rows: Sequence[Row]) -> list[Row]:
    """The same rows as the store decides them where request delays are added to byte delays."""
    changed = copy.deepcopy(list(rows))
    for row in changed:
        if row["source"] == "store" and row["verdicts"] and row["kind"] != "ids":
            names = [field.name for field in fields(Verdict)]
            said = [Verdict(**{n: each[n] for n in names if n in each}) for each in row["verdicts"]]
            row["decision"], row["throttle_ms"], by = combine(said, sequential=True)
            row["limited_by"] = by and {
                name: getattr(by, name) for name in ("quota", "entity", "bucket", "reason")
            }
    return changed


@pytest.fixture(scope="module")
def honest() -> dict[bool, list[Row]]:
    """Honest rows, by whether request delays are added to byte delays."""
    one = traffic(["one"])[1]["one"]
    fallbacks = [row for row in one if row["source"] == "fallback"]
    rows = [*one, *fallbacks * 20, *refused_traffic(400)]
    return {False: rows, True: summed(rows)}


def table(rows: Sequence[Row]) -> pa.RecordBatch:
    (batch,) = pa.Table.from_pylist(list(rows), schema=SCHEMA).combine_chunks().to_batches()
    return batch


class Faults:
    """Random changes of one value in a row."""

    def __init__(self, rows: Sequence[Row], seed: int) -> None:
        self.rows = rows
        self.dice = random.Random(seed)

    def changed(self) -> Row:
        """A copy of a row, with a fault."""
        row = copy.deepcopy(self.dice.choice(self.rows))
        if self.dice.random() < 0.05:
            return row | {"decision": "delay", "throttle_ms": 9}
        if row["verdicts"] and self.dice.random() < 0.1:  # by chance these are rare
            said = self.dice.choice(row["verdicts"])
            said |= (
                {"throttle_ms": 2**40} if not said["charged_ids"] else {"refreshed_ids": said["charged_ids"]}
            )
            return row
        for _ in range(self.dice.choice((1, 1, 1, 2))):
            verdicts = row["verdicts"]
            if verdicts and self.dice.random() < 0.6:
                self._change(self.dice.choice(verdicts), VERDICT, self._other_verdict())
            else:
                self._change(row, SCHEMA, self.dice.choice(self.rows))
        return row

    def _other_verdict(self) -> Row:
        return self.dice.choice([said for row in self.rows for said in row["verdicts"] or ()])

    def _change(self, of: Row | None, type_: Any, other: Row) -> None:
        if of is None:
            return
        checked = VerdictRow if type_ is VERDICT else DecisionRow
        name = self.dice.choice([each for each in checked._fields if each not in {"batch", "place"}])
        of[name] = self._value(of.get(name), type_.field(name).type, copy.deepcopy(other.get(name)))

    def _value(self, now: Any, type_: pa.DataType, other: Any) -> Any:
        """Another value, often one of the same column in another row."""
        dice = self.dice
        if dice.random() < 0.1:
            return None
        if dice.random() < 0.3:
            return other
        if pa.types.is_boolean(type_):
            return not now
        if pa.types.is_string(type_):
            return dice.choice((*NAMES, *ADDRESSES, *SPELLINGS, *WORDS))
        if pa.types.is_int32(type_):
            return dice.choice((0, 1, 2, -1, (now or 0) + 1))
        if pa.types.is_int64(type_):
            near = [
                min(max((now or 0) + by, -(2**63)), 2**63 - 1) for by in (1, -1, 7, 1_000, -1_001, 3_600_000)
            ]
            return dice.choice((*INTEGERS, *near))
        if pa.types.is_float64(type_):
            return dice.choice(
                (*FLOATS, (now or 0.0) * (1 + 1e-10), (now or 0.0) * (1 + 1e-8), (now or 0.0) + 1)
            )
        if pa.types.is_map(type_):
            return self._usage(list(dict(now or {}).items()))
        if pa.types.is_struct(type_):
            named = dict(now or {field.name: None for field in type_})
            field = dice.choice(list(type_))
            return named | {
                field.name: self._value(named[field.name], field.type, (other or named)[field.name])
            }
        items = list(now or ())
        return dice.choice(
            ([], items[1:], items + items[:1], items[::-1], [*items, None], items + (other or []))
        )

    def _usage(self, entries: list[tuple[str, float | None]]) -> list[tuple[str, float | None]]:
        dice = self.dice
        name = dice.choice([key.usage for key in KEYS.values()])
        more = (name, dice.choice((*FLOATS, None)))
        doubled: list[tuple[str, float | None]] = [(each, (amount or 1.0) * 2) for each, amount in entries]
        return dice.choice([entries[1:], [*entries, more], [more, *entries], doubled])


def other_callers(rows: Sequence[Row], count: int, seed: int) -> pa.RecordBatch:
    """Rows of one verdict each, with any caller, entity and scope; half have a fault in one of these."""
    dice = random.Random(seed)
    verdicts = [(row, said) for row in rows for said in row["verdicts"] or ()]
    made = []
    for _ in range(count):
        row, said = dice.choice(verdicts)
        names = {
            name: dice.choice((None, *NAMES)) for name in ("principal", "client_id", "broker", "listener")
        }
        caller: dict[str, Any] = names | {"ip": dice.choice((None, *ADDRESSES))}
        caller["cluster_action"] = dice.random() < 0.1
        own = [f"{type_}={spell(caller[name])}" for name, type_ in row_rules.CALLER.items() if caller[name]]
        scope = dice.choice(("cluster", "broker"))
        entities = dice.choices((*row_rules.DEFAULTS, *SPELLINGS, *own, *own), k=12)
        buckets = [(each, bucket_of(caller, said["quota"], each, scope, dice)) for each in entities]
        entity, bucket = next((each for each in buckets if each[1] is not None), (entities[0], ""))
        if dice.random() < 0.4:
            name = dice.choice(tuple(caller))
            caller[name] = dice.choice((None, *(ADDRESSES if name == "ip" else NAMES)))
        if dice.random() < 0.1:
            bucket = dice.choice(((bucket or "").partition(";")[0], *SPELLINGS))
        said = said | {"entity": entity, "scope": scope, "bucket": bucket}
        made.append(row | caller | {"cluster_action": bool(caller["cluster_action"]), "kind": "ids"})
        made[-1]["verdicts"] = [said]
    return table(made)


def bucket_of(caller: dict[str, Any], key: str, entity: str, scope: Any, dice: random.Random) -> str | None:
    """The bucket of a caller under a quota, None if it has none."""
    quota = Quota(key, 1, KEYS[key].algorithm, "deny", scope=scope)
    ask = Ask({KEYS[key].usage: 1}, (), **caller)
    rules = MatchingRules(ipv6_prefix=dice.choice((64, 48, 0)))
    try:
        found = applied_quotas(ask, {key: {Entity.parse(entity): quota}}, rules)
    except (EntityError, ValueError):
        return None
    return found[0].bucket if found else None


def today(rows: pa.RecordBatch, *, by_store: bool, sequential: bool) -> list[Any] | str:
    """The findings of the rules in rows; the name of the error if they cannot read one."""
    try:
        found = list(checking(by_store=by_store, sequential=sequential)([rows]))
    except (TypeError, AttributeError, KeyError, ValueError, OverflowError) as error:
        return type(error).__name__
    return [case for batch in found for case in batch.to_pylist()]


def missed(rows: pa.RecordBatch, *, by_store: bool, sequential: bool) -> list[Any] | str:
    """The findings in the rows that the sieve confirms."""
    suspected = suspects(rows, by_store=by_store, sequential=sequential).to_pylist()
    confirmed = sorted({*range(len(rows))} - set(suspected))
    return today(rows.take(pa.array(confirmed)), by_store=by_store, sequential=sequential)


def faulty(honest: dict[bool, list[Row]], count: int, seed: int, *, sequential: bool) -> pa.RecordBatch:
    """Rows with one fault each, among honest rows."""
    faults = Faults(honest[sequential], seed)
    return table([*honest[sequential], *(faults.changed() for _ in range(count))])


@pytest.mark.parametrize(("by_store", "sequential"), SETTINGS)
def test_no_honest_row_is_suspect(honest, by_store: bool, sequential: bool):
    rows = table(honest[sequential])
    assert len(suspects(rows, by_store=by_store, sequential=sequential)) == 0
    assert findings(rows, by_store=by_store, sequential=sequential).num_rows == 0


def test_rows_of_other_settings_are_suspect(honest):
    """The honest rows have sums of delays, or one of these settings would not be tested."""
    assert len(suspects(table(honest[True]), by_store=True, sequential=False)) > 20
    assert len(suspects(table(honest[False]), by_store=True, sequential=True)) > 20


@pytest.mark.parametrize(("by_store", "sequential"), SETTINGS)
def test_findings_are_those_of_the_rules(honest, by_store: bool, sequential: bool):
    settings = {"by_store": by_store, "sequential": sequential}
    rows = faulty(honest, FAULTS, 1, sequential=sequential)
    assert not missed(rows, **settings)
    readable = [p for p in range(len(rows)) if not isinstance(today(rows.slice(p, 1), **settings), str)]
    rows = rows.take(pa.array(readable))
    wanted = pa.Table.from_batches(checking(**settings)([rows]), FINDINGS)
    assert findings(rows, **settings).equals(wanted)
    assert wanted.num_rows > FAULTS / 3


@pytest.mark.prove
@pytest.mark.parametrize(("by_store", "sequential"), SETTINGS)
@pytest.mark.parametrize("seed", range(10))
def test_sieve_misses_none_of_many_faults(honest, by_store: bool, sequential: bool, seed: int):
    rows = faulty(honest, MANY_FAULTS // 10, 100 + seed, sequential=sequential)
    assert not missed(rows, by_store=by_store, sequential=sequential)


def test_combinations_are_numbered_anew_where_numbers_grow_too_large(honest, monkeypatch):
    rows = faulty(honest, FAULTS, 3, sequential=False)
    wanted = suspects(rows, by_store=True, sequential=False)
    monkeypatch.setattr(row_rules, "_LARGEST", 1_000)
    assert suspects(rows, by_store=True, sequential=False).equals(wanted)


@pytest.fixture(scope="module")
def parts() -> dict[str, list[Row]]:
    """The rows of honest traffic, and of the node that changes quotas."""
    return traffic(["one"])[1]


@pytest.mark.parametrize(
    ("count", "seed"), [(2_000, 1), *(pytest.param(20_000, n, marks=pytest.mark.prove) for n in range(2, 8))]
)
def test_buckets_of_all_callers_are_checked(honest, count: int, seed: int):
    rows = other_callers(honest[False], count, seed)
    settings = {"by_store": True, "sequential": False}
    assert not missed(rows, **settings)
    assert 0.2 * count < len(suspects(rows, **settings)) < 0.8 * count


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_findings_of_tampered_logs_are_those_of_the_rules(parts, kind: Kind):
    rows = table(kind.does(copy.deepcopy(parts[kind.of or "one"])))
    wanted = pa.Table.from_batches(checking(by_store=True, sequential=False)([rows]), FINDINGS)
    assert findings(rows, by_store=True, sequential=False).equals(wanted)
    assert wanted.num_rows or kind.named not in {CONTRADICTS, CLOCK}


@pytest.mark.parametrize(
    "rule", [*row_rules.ROW_RULES, *row_rules.VERDICT_RULES], ids=lambda rule: rule.__name__
)
def test_sieve_without_a_rule_misses_faults(honest, monkeypatch: pytest.MonkeyPatch, rule: Callable):
    for name in ("ROW_RULES", "VERDICT_RULES"):
        kept = tuple(each for each in getattr(row_rules, name) if each is not rule)
        monkeypatch.setattr(row_rules, name, kept)
    rows = faulty(honest, 4 * FAULTS, 1, sequential=False)
    assert missed(rows, by_store=True, sequential=False)


def test_rows_of_a_slice_and_of_a_table_are_read(honest):
    rows = faulty(honest, FAULTS, 2, sequential=False)
    settings = {"by_store": True, "sequential": False}
    whole = set(suspects(rows, **settings).to_pylist())
    parts = [rows.slice(first, 97) for first in range(0, len(rows), 97)]
    assert suspects(pa.Table.from_batches(parts), **settings).to_pylist() == sorted(whole)
    found = [97 * n + each for n, part in enumerate(parts) for each in suspects(part, **settings).to_pylist()]
    assert found == sorted(whole)
    assert len(suspects(rows.slice(0, 0), **settings)) == 0
    assert len(suspects(SCHEMA.empty_table(), **settings)) == 0
