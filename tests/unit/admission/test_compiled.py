"""Tables and compiled quotas: they charge as the readable rule does, and follow the changes of quotas."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from time import thread_time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.admission import compiled
from app.admission.compiled import MANNERS, Tables, charge_of, compiled_again, manner_of
from app.admission.plan import plan_of, with_spreads
from app.catalog.snapshot import ChangedSnapshot, Snapshot, SnapshotChange
from app.domain.ask import AMOUNTS, COUNTS, MODES, Ask
from app.domain.decision import BYTE_RATES, REQUEST_RATES
from app.domain.entity import ANY, Entity, Name
from app.domain.ladder import AppliedQuota, MatchingRules, applied_quotas
from app.domain.quota import CONNECTION_CREATION_RATE, KEYS, Quota
from app.domain.usage import enforcement_of, spreads_of, usage_of
from app.store.compiled_quota import ALGORITHMS, parameters
from app.store.encoding import encode_plans
from app.store.keys import bucket_key
from app.store.port import Charge, Plan
from tests.planted import planted
from tests.slowness import slowness
from tests.unit.admission.fakes import EVERYONE

SECRET = b"s" * 32
TEXTS = ("a", "b", "user", "*", "a,b", "%000", "~owner", "~bucket", "ü" * 30, "x" * 118, "x" * 130, "%s", "")
NAMES = tuple(text for text in TEXTS if text)
IPS = ("10.0.0.7", "10.0.0.8", "2001:db8::1", "2001:db8::2", "2001:db8:0:1::", "::1")
USAGE = COUNTS + AMOUNTS


def some_name(random: Random, among: Sequence[str] = NAMES) -> str:
    """A name; two of them are likely, so that quotas meet asks."""
    return random.choice(among[:2] if random.random() < 0.5 else among)


FIELDS: dict[str, Callable[[Random], object]] = {
    "usage": lambda random: {
        field: random.choice((0.0, 1.0, 2.5)) for field in random.sample(USAGE, random.randint(0, 3))
    },
    "producer_ids": lambda random: random.choice((None, (), (7, -1, "seven"))),
    "principal": lambda random: random.choice((None, some_name(random), some_name(random))),
    "client_id": lambda random: random.choice((None, some_name(random, TEXTS), some_name(random, TEXTS))),
    "ip": lambda random: random.choice((None, *IPS)),
    "broker": lambda random: random.choice((None, some_name(random), some_name(random))),
    "listener": lambda random: random.choice((None, some_name(random), some_name(random))),
    "mode": lambda random: random.choice(MODES),
    "deny": lambda random: random.random() < 0.5,
    "recheck": lambda random: random.random() < 0.2,
    "cluster_action": lambda random: random.random() < 0.2,
}


def some_asks(random: Random, between: str | None = None) -> list[Ask]:
    """Some asks, each of which differs a little from the one before; some on the listener between brokers."""
    fields: dict[str, Any] = {name: make(random) for name, make in FIELDS.items()}
    asks = []
    for _ in range(6):
        asks.append(Ask(**fields))
        for name in random.sample([*FIELDS], random.randint(1, 2)):
            fields[name] = FIELDS[name](random)
            if name == "listener" and between and random.random() < 0.5:
                fields[name] = between
    return asks


def some_changes(random: Random) -> list[SnapshotChange]:
    """Quotas on defaults and names, of few keys, so that they meet the asks; and removals of some."""
    made: list[SnapshotChange] = []
    for key in random.sample([*KEYS.values()], random.randint(1, 3)):
        for types in random.choices(key.entities, k=random.randint(1, 5)):
            is_pair = types == ("broker", "listener")  # such a pair has no default
            named: list[tuple[str, Name]] = []
            for type_ in types:
                name = some_name(random, IPS if type_ == "ip" else NAMES)
                named.append((type_, ANY if not is_pair and random.random() < 0.5 else name))
            quota = Quota(
                key.name,
                random.choice((0, 5, 0.1)),
                key.algorithm,
                random.choice(("deny", "delay")),
                shadow=random.random() < 0.5,
                scope=random.choice(("cluster", "broker")),
                on_store_failure=random.choice(("admit", "throttle")),
                epoch=random.randint(0, 2),
            )
            made.append((key.name, Entity(tuple(named)), quota))
    return made + [(key, entity, None) for key, entity, _ in made if random.random() < 0.1]


def some_rules(random: Random) -> MatchingRules:
    return MatchingRules(random.choice((None, some_name(random))), random.choice((1, 48, 64, 128)))


def readable(changed: Sequence[SnapshotChange]) -> dict[str, dict[Entity, Quota]]:
    """The quotas after these changes."""
    quotas: dict[str, dict[Entity, Quota]] = {}
    for key, entity, quota in changed:
        by_entity = quotas.setdefault(key, {})
        if quota is None:
            by_entity.pop(entity, None)
        else:
            by_entity[entity] = quota
    return quotas


def compare(random: Random, make: Callable[[Snapshot, MatchingRules], Any], met: Counter[str]) -> None:
    """Compare the charges of some asks by tables with their charges by the rule.

    Args:
        met: counts the compared kinds of charges.

    Raises:
        AssertionError: the charges differ.
    """
    changed, rules = some_changes(random), some_rules(random)
    half = len(changed) // 2
    snapshot = Snapshot().apply(1, changed[:half]).apply(2, changed[half:])
    quotas, tables = readable(changed), make(snapshot, rules)
    for ask in some_asks(random, rules.inter_broker_listener):
        applied = applied_quotas(ask, quotas, rules)
        charges = tables.charges(ask)
        assert charges == [charge_of(each, ask) for each in applied]
        for charge, each in zip(charges, applied, strict=True):
            assert charge.quota is each.quota
            assert charge.applied == each
            met["charges"] += 1
            met["named"] += "*" not in each.entity
            met["networks"] += "%2F" in each.bucket
            met["hashed"] += b"#" in charge.key
            met["pairs"] += each.owner != each.bucket.partition(";")[0]
            met["at brokers"] += ";" in each.bucket


def compare_many(make: Callable[[Snapshot, MatchingRules], Any], times: int) -> Counter[str]:
    met: Counter[str] = Counter()
    for seed in range(times):
        compare(Random(seed), make, met)
    return met


@settings(deadline=None)
@given(st.randoms(use_true_random=False))
def test_tables_charge_what_the_readable_rule_says(random: Random) -> None:
    compare(random, Tables, Counter())


def test_all_kinds_of_buckets_are_compared() -> None:
    met = compare_many(Tables, 1_000)
    for kind in ("named", "networks", "hashed", "pairs", "at brokers"):
        assert met[kind] > 100, met


FAULTS = {
    "no look-up before the defaults": (
        "            yield LadderRung(found.get,",
        "            LadderRung(found.get,",
    ),
    "a name that is not spelled": ("text if is_unreserved(text) else spell(text)", "text"),
    "a long name in full": ("if len(bucket) > LONGEST_NAME:", "if len(bucket) > 2 * LONGEST_NAME:"),
    "the address for its network": ("NETWORK if kind == ADDRESS and is_ipv6 else kind)", "kind)"),
    "the bucket for its owner": ("texts[USER] if kind == PAIR else bucket", "bucket"),
    "the names of a pair mixed up": ("(names[name], names[other])", "(names[other], names[name])"),
    "deny left out": ("manner = DENY if ask.deny else 0", "manner = 0"),
    "the mode left out": ("        manner |= RECORDS", "        pass"),
    "the second ask for a connection left out": (
        "return manner | RECHECK if ask.recheck else manner",
        "return manner",
    ),
    "a name left out": ("            principal is None,\n", "            None,\n"),
    "cluster action left out": ("            ask.cluster_action,\n", "            None,\n"),
    "ids left out": ("            ask.producer_ids is None,\n", "            None,\n"),
    "usage left out": ("            frozenset(usage),\n", "            None,\n"),
    "the listener between brokers left out": ("listener and listener == self._between,", "listener is None,"),
    "kinds of addresses mixed up": ('ip and ":" in ip,', "ip is None,"),
    "the bucket of all brokers": ("if form.is_by_broker and broker", "if False and broker"),
    "a broker named twice": ("and kind not in _OF_BROKERS:", "and True:"),
    "a part for a whole unit": (
        "usage[form.field] / form.per_unit\n            charges",
        "usage[form.field]\n            charges",
    ),
    "a removed quota": ("if not found:\n", "if found is None:\n"),
}
"""Faults in tables: the right text, and the wrong one."""


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_found(fault: str) -> None:
    faulty = planted(compiled, *FAULTS[fault])
    with pytest.raises((AssertionError, KeyError)):
        compare_many(faulty["Tables"], 3_000)


# The bytes of a compiled quota

QUOTA = struct.Struct("<BBHdddddd")


def argument_of(ask: Ask, applied: AppliedQuota, spreads: Sequence[bytes]) -> bytes:
    """The argument for a quota of an ask, as ``lua/call.lua`` documents it."""
    quota = applied.quota
    flags = (
        enforcement_of(ask, quota) == "deny",
        quota.shadow,
        quota.key == CONNECTION_CREATION_RATE,
        ask.recheck,
        quota.key in BYTE_RATES,
        quota.key in REQUEST_RATES,
        quota.on_store_failure == "throttle" and ask.mode != "record",
    )
    ids = b"".join(spreads) if quota.algorithm == "producer_ids" else b""
    return (
        QUOTA.pack(
            ALGORITHMS[quota.algorithm],
            sum(flag << bit for bit, flag in enumerate(flags)),
            len(ids) // 32,
            quota.limit,
            usage_of(ask, quota),
            *parameters(quota),
            quota.longest_delay_ms,
        )
        + ids
    )


def compare_bytes(random: Random) -> int:
    """Compare the keys and arguments of some asks with the rule; return the number of compared quotas."""
    changed, rules = some_changes(random), some_rules(random)
    tables, compared = Tables(Snapshot().apply(1, changed), rules), 0
    for ask in some_asks(random):
        charges = tables.charges(ask)
        applied = applied_quotas(ask, readable(changed), rules)
        plan = plan_of(ask, with_spreads(ask, charges, SECRET), SECRET)
        if plan is None:
            assert not applied
            continue
        keys, (argument,) = encode_plans([plan])
        assert keys == [bucket_key(each) for each in applied]
        spreads = spreads_of(ask, SECRET)
        said = b"".join(argument_of(ask, each, spreads) for each in applied)
        assert argument == struct.pack("<BBdH", MODES.index(ask.mode), len(applied), 0, 0) + said
        assert plan.ids == (len(spreads) if ask.producer_ids and charges[0].compiled.counts_ids else 0)
        compared += len(applied)
    return compared


@settings(deadline=None)
@given(st.randoms(use_true_random=False))
def test_keys_and_argument_are_those_of_the_readable_rule(random: Random) -> None:
    compare_bytes(random)


def test_many_keys_and_arguments_are_those_of_the_readable_rule() -> None:
    assert sum(compare_bytes(Random(seed)) for seed in range(1_000)) > 1_000


def test_quota_compiled_again_keeps_its_bucket() -> None:
    ask = Ask({"requests": 2}, principal="alice", deny=True)
    (charge,) = Tables(Snapshot.of({"request_rate": {EVERYONE: RATE}}), MatchingRules()).charges(ask)
    half = replace(RATE, limit=2.5, epoch=7)
    again = compiled_again(charge, half, manner_of(ask))
    assert (again.quota, again.entity, again.enforcement) == (half, "user=*", "deny")
    assert (again.owner, again.bucket, again.key, again.usage) == ("user=alice", "user=alice", charge.key, 2)
    _, (argument,) = encode_plans([Plan("admit", (again,))])
    assert argument[12:] == argument_of(ask, again.applied, ())


# The lifetime of compiled quotas

RATE = Quota("request_rate", 5, "sampled_rate", "delay")


def by_name(users: int) -> dict[str, dict[Entity, Quota]]:
    return {"request_rate": {Entity.of(user=f"user-{n}"): replace(RATE, limit=n + 1) for n in range(users)}}


def test_quota_is_compiled_once_for_each_manner_of_asks_however_many_callers_it_has() -> None:
    tables = Tables(Snapshot.of({"request_rate": {EVERYONE: RATE}}), MatchingRules())

    def compiled_for(manner: int) -> set[int]:
        ask = Ask({"requests": 1}, deny=bool(manner & 1), recheck=bool(manner & 4))
        ask = replace(ask, mode="record" if manner & 2 else "admit")
        return {id(tables.charges(replace(ask, principal=f"{n}"))[0].compiled) for n in range(100)}

    found = [compiled_for(manner) for manner in range(MANNERS)]
    assert [len(each) for each in found] == [1] * MANNERS
    assert len(set.union(*found)) == MANNERS


def test_tables_know_kinds_of_asks_and_no_caller() -> None:
    tables = Tables(Snapshot.of({**by_name(1_000)}), MatchingRules())
    for n in range(2_000):
        tables.charges(Ask({"requests": n}, (n,), f"user-{n}", f"{n}", f"10.0.{n % 250}.1", id=f"{n}"))
    assert len(tables._ladders) == 1


def test_snapshot_follows_a_change_and_keeps_what_is_compiled_of_all_other_quotas() -> None:
    quotas = {**by_name(3), "controller_mutation_rate": {EVERYONE: TOKENS}}
    snapshot = Snapshot.of(quotas)
    ask = [Ask({"requests": 1, "mutations": 1}, principal=f"user-{n}") for n in range(3)]
    before = [Tables(snapshot, MatchingRules()).charges(each) for each in ask]
    new = replace(RATE, limit=99)
    changed = snapshot.apply(
        2, [("request_rate", Entity.of(user="user-0"), None), ("request_rate", Entity.of(user="user-1"), new)]
    )
    first, second, third = (Tables(changed, MatchingRules()).charges(each) for each in ask)
    assert [charge.quota.key for charge in first] == ["controller_mutation_rate"]
    assert second[0].quota is new
    assert third[0].compiled is before[2][0].compiled
    assert {id(each[-1].compiled) for each in (first, second, third)} == {id(before[0][1].compiled)}
    assert Tables(snapshot, MatchingRules()).charges(ask[0]) == before[0], "a snapshot does not change"


def test_snapshot_without_changes_has_the_same_tables() -> None:
    snapshot = Snapshot.of(by_name(3))
    assert snapshot.apply(9, ()).rungs is snapshot.rungs


TOKENS = Quota("controller_mutation_rate", 5, "token_bucket", "deny", burst=55)
STEP_MS = 10.0
"""How long a step of the event loop may take."""
TRIES = 15
"""A shared processor takes up to three times as long at times: the bound must hold in one of these tries."""


@pytest.fixture(scope="module")
def large() -> Snapshot:
    return Snapshot.of(by_name(100_000))


def fastest_ms(work: Callable[[], object]) -> float:
    """The shortest of some tries, on a processor whose ``slowness`` is 1."""
    took, slow = [], []
    for _ in range(TRIES):
        slow.append(slowness())
        began = thread_time()
        work()
        took.append((thread_time() - began) * 1_000)
    return min(took) / min(slow)


def test_change_of_a_snapshot_of_100_000_quotas_takes_some_milliseconds(large: Snapshot) -> None:
    """Includes the first ask after the change, whose tables reuse parts of the snapshot."""
    changes = [("request_rate", Entity.of(user="user-0"), replace(RATE, limit=7))]

    def change() -> list[Charge]:
        return Tables(large.apply(2, changes), MatchingRules()).charges(
            Ask({"requests": 1}, principal="user-0")
        )

    assert change()[0].quota.limit == 7
    took_ms = fastest_ms(change)
    assert took_ms < STEP_MS, f"{took_ms:.1f} ms"


def test_many_changes_of_a_snapshot_can_be_taken_in_steps(large: Snapshot) -> None:
    """Such as the changes of a replaced file; only the first of them copies the content of the snapshot."""
    quota = replace(RATE, limit=7)
    changed = ChangedSnapshot(large)
    changed.take(("request_rate", Entity.of(user="user-0"), quota))
    part = [Entity.of(user=f"user-{n}") for n in range(500)]

    def step() -> None:
        for entity in part:
            changed.take(("request_rate", entity, quota))

    took_ms = fastest_ms(step)
    assert took_ms < STEP_MS, f"{took_ms:.1f} ms"
    assert changed.snapshot(3).rungs["request_rate", "user"]["user-499"].quota is quota
    assert fastest_ms(lambda: changed.snapshot(3)) < STEP_MS
