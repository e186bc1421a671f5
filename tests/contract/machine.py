"""A state machine that compares the store's script with the oracle over random histories."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import redis
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.errors import Flaky
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from msgspec.structs import replace as with_

from app.admission.admission import decision_by
from app.admission.answers import decided, verdict_when_full
from app.admission.compiled import Tables, charge_of
from app.admission.known_ids.local import renewal_plan
from app.admission.known_ids.memory import Renewal
from app.admission.plan import (
    PlannedAsk,
    granted_by,
    hold_plan,
    plan_of,
    restricted,
    settle_plan,
    with_spreads,
)
from app.catalog.snapshot import Snapshot, SnapshotChange
from app.domain.ask import Ask, Mode
from app.domain.binding import Binding
from app.domain.caller import ANYONE, Caller
from app.domain.decision import Decision, Verdict
from app.domain.entity import Entity
from app.domain.errors import OutOfBoundsError
from app.domain.ladder import AppliedQuota, MatchingRules, applied_quotas
from app.domain.oracle import Bucket, IdsBucket, Oracle, RateBucket, TokensBucket
from app.domain.producer_ids import ProducerIds
from app.domain.quota import KEYS, MAX_THROTTLE_MS, Algorithm, Quota
from app.domain.usage import ids_of
from app.store.encoding import answers_of
from app.store.keys import RESETS_KEY, bucket_key
from app.store.port import Answer, Charge, IdsResult, LeaseResult, Mark, Plan, UnitsResult
from app.store.redis import RedisStore
from app.store.script import CHECK_FULL_EVERY_MS, SCRIPT
from tests.contract.histories import ENTITIES, IDS, asks, entities_of, layers, quotas

SECRET = b"0123456789abcdef0123456789abcdef"
CALLERS = (
    ANYONE,
    ANYONE,
    ANYONE,
    Caller("one"),
    Caller("bound", bound_to=(Binding.parse("user=a"),)),
    Caller("also-bound", bound_to=(Binding.parse("user=b*"), Binding.parse("ip=10.0.0.1"))),
)
RULES = MatchingRules(inter_broker_listener="REPLICATION")

MUST_MEET = (
    *(f"{outcome} {key}" for key in KEYS for outcome in ("throttle", "reject")),
    "capacity",
    "growth",
    "layer death",
    "clock back by more than a window",
    "limit change",
    "policy change",
    "retry",
    "id with other content",
    "id of another caller",
    "out of bounds",
    "deny in a shared bucket",
    "refund",
    "shadow",
    *(f"full: {what}" for what in ("admitted", "throttled", "recorded", "an old bucket", "no new segment")),
    "forgiven by a charge",
    "forgiven by a refund",
    "forgiven at a refusal",
    "open layer reported",
    "renewal",
    "renewal of what was reset",
    "renewal of what another state had",
    *(f"lease {what}" for what in ("granted", "cut", "refused", "settled", "over", "of one too many")),
    "peek at a lease that is cut",
    "lapse at a charge",
    "lapse at a refusal",
    "wait beyond a lease's end",
)
"""The events that a run must meet at least ``AT_LEAST`` times to be valid."""
AT_LEAST = 50


def rare(met: Counter[str], events: Sequence[str] = MUST_MEET, at_least: int = AT_LEAST) -> dict[str, int]:
    """Return which events a run met too rarely, and how often."""
    return {name: met[name] for name in events if met[name] < at_least}


class Difference(AssertionError):
    """The store and the oracle disagree.

    Attributes:
        last: the last difference. Under the store's clock, the same steps may not show it again; Hypothesis
            then raises an error of its own.
    """

    last: ClassVar[Difference | None] = None

    def __init__(self, what: str) -> None:
        super().__init__(what)
        Difference.last = self


def checking_each_time(script: str) -> str:
    """A script that checks the store's memory in every call, because no step can wait for the next check."""
    looks = f"local CHECK_FULL_EVERY_MS = {CHECK_FULL_EVERY_MS}"
    assert script.count(looks) == 1
    return script.replace(looks, "local CHECK_FULL_EVERY_MS = 0")


class Machine(RuleBasedStateMachine):
    """Sends every ask to the oracle and to the store; their answers must be equal."""

    url: str
    script: str = SCRIPT
    met: Counter[str]
    loop: asyncio.AbstractEventLoop

    def __init__(self) -> None:
        super().__init__()
        self.redis = redis.Redis.from_url(self.url)
        self.redis.flushall()
        self._fill(full=False)
        self.now = 1_000_000
        self.names = itertools.count()
        self.epochs = itertools.count(1)
        self.asked: list[tuple[Ask, Caller]] = []
        self.leases: list[tuple[Ask, bytes, dict[str, float]]] = []

    @initialize(
        max_ids=st.sampled_from((40, 160)),
        sequential=st.booleans(),
        data=st.data(),
    )
    def begin(self, max_ids: int, sequential: bool, data: Any) -> None:
        self.met["steps"] -= 1  # the invariant that counts steps also runs before the first one
        self.sequential, self.max_ids = sequential, max_ids
        self.oracle = Oracle(SECRET, max_ids=max_ids, sequential=sequential, when_full=when_full)
        script = checking_each_time(self.script)
        options: dict[str, Any] = {"sequential": sequential, "max_ids": max_ids, "script": script}
        self.stores = {
            (timed, brief): RedisStore(self.url, caller_clock=not timed, brief=brief, **options)
            for timed in (False, True)
            for brief in (False, True)
        }
        for store in self.stores.values():
            self.loop.run_until_complete(store.connect())
        self.store = self.stores[False, False]
        self.loop.run_until_complete(self.stores[True, False].examine())  # a full store takes no library
        self.snapshot = Snapshot()
        """The quotas of ``tables``; it follows their changes, like the snapshot of a node."""
        self.quotas: dict[str, dict[Entity, Quota]] = {}
        for key in KEYS:
            places = entities_of(key)
            chosen = data.draw(st.lists(st.sampled_from(places), min_size=1, max_size=2, unique=True))
            self.quotas[key] = {entity: data.draw(quotas(key, self.max_ids)) for entity in chosen}

    def teardown(self) -> None:
        self._fill(full=False)
        if hasattr(self, "store"):
            for store in self.stores.values():
                self.loop.run_until_complete(store.close())
        self.redis.close()

    @rule(ask=asks(), with_id=st.integers(0, 2), caller=st.sampled_from(CALLERS))
    def ask(self, ask: Ask, with_id: int, caller: Caller) -> None:
        if with_id == 0:
            ask = replace(ask, id=f"ask-{next(self.names)}")
            self.asked.append((ask, caller))
            self._decide([ask, replace(ask, detail=False)], caller)
        else:
            self._decide([ask], caller)

    @rule(several=st.lists(asks(), min_size=2, max_size=6), caller=st.sampled_from(CALLERS))
    def batch(self, several: list[Ask], caller: Caller) -> None:
        self._decide(several, caller)

    @rule(ask=asks(), times=st.integers(2, 8), caller=st.sampled_from(CALLERS))
    def insist(self, ask: Ask, times: int, caller: Caller) -> None:
        """Repeat the same ask, often beyond the limit."""
        self._decide([ask] * times, caller)

    @rule(
        key=st.sampled_from(list(KEYS)),
        amount=st.sampled_from((1, 1, 2, 3)),
        recheck=st.booleans(),
        limit=st.sampled_from((None, 3, 8)),
    )
    def exhaust(self, key: str, amount: int, recheck: bool, limit: int | None) -> None:
        """Charge the buckets of one key under deny until they refuse; `limit` ends shadow mode."""
        if limit is not None:
            for entity, quota in list(self.quotas[key].items()):
                self._set(key, entity, replace(quota, limit=limit, burst=limit * 2.0, shadow=False))
        whole = Ask({}, None, "a", "c", "10.0.0.1", "1", "L", deny=True, detail=True)
        asks = []
        for n in range(15):
            if key == "producer_ids_rate":
                asks.append(replace(whole, producer_ids=(f"new-{self.now}-{n}",)))
            else:
                usage = {KEYS[key].usage: amount * KEYS[key].per_unit}
                asks.append(replace(whole, usage=usage, recheck=recheck and n == 14))
        self._decide(asks)

    @rule(
        key=st.sampled_from([key for key in KEYS if key != "producer_ids_rate"]),
        then=st.sampled_from(("admit", "admit", "refund")),
        units=st.sampled_from((3, 3, 0)),
        deny=st.booleans(),
    )
    def owe(self, key: str, then: Mode, units: int, deny: bool) -> None:
        """Make a debt as deep as allowed, then lower the limit, which ends part of the debt.

        An ask for nothing is admitted nevertheless.
        """
        row, whole = KEYS[key], Ask({}, None, "a", "c", "10.0.0.1", "1", "L", detail=True)
        spending = replace(whole, usage={row.usage: 60 * row.per_unit}, mode="record")
        for limit in (8, 2):
            for entity, quota in list(self.quotas[key].items()):
                lower = replace(quota, limit=limit, burst=9.0, max_debt=limit * 2.0, algorithm="token_bucket")
                self._set(key, entity, replace(lower, shadow=False))
            self._decide([spending])
            spending = replace(spending, usage={row.usage: units * row.per_unit}, mode=then, deny=deny)

    @rule(
        ask=asks(),
        many=st.sampled_from((1, 1, 2, 3)),
        lease_ms=st.sampled_from((1, 50, 200, 900, 3_000, 10_000)),
        caller=st.sampled_from(CALLERS),
        enough=st.booleans(),
    )
    def lease(self, ask: Ask, many: int, lease_ms: int, caller: Caller, enough: bool) -> None:
        """Take leases, perhaps with limits high enough that buckets have something to share."""
        if enough:
            for key in ask.usage:
                row = next(row for row in KEYS.values() if row.usage == key)
                for entity, quota in list(self.quotas[row.name].items()):
                    self._set(row.name, entity, replace(quota, limit=20, burst=33.0, shadow=False))
        self._lease(ask, lease_ms, caller, many)
        if not enough:
            self._decide([replace(ask, mode="admit", deny=True)])

    @rule(lease_ms=st.sampled_from((900, 3_000)))
    def lease_to_many(self, lease_ms: int) -> None:
        """Take as many leases as a bucket may have, and one more."""
        ask = Ask({"fetch_bytes": 1.5}, None, "b", "c", "10.0.0.1", "1", "L", detail=True)
        for entity, quota in list(self.quotas["consumer_byte_rate"].items()):
            self._set("consumer_byte_rate", entity, replace(quota, limit=1_000, burst=900.0, shadow=False))
        self._lease(ask, lease_ms, ANYONE, 66)

    @rule(
        lease_ms=st.sampled_from((200, 900, 3_000)),
        part=st.sampled_from((0.0, 0.5)),
        algorithm=st.sampled_from(("sampled_rate", "token_bucket", "token_bucket")),
    )
    def settle_at_once(self, lease_ms: int, part: float, algorithm: Algorithm) -> None:
        """Take a lease from buckets with room for it, ask for too much, and give back the unspent units."""
        ask = Ask({"mutations": 10}, None, "b", "c", "10.0.0.1", "1", "L", detail=True)
        for entity, quota in list(self.quotas["controller_mutation_rate"].items()):
            roomy = replace(quota, algorithm=algorithm, limit=20, burst=33.0, shadow=False)
            self._set("controller_mutation_rate", entity, roomy)
        before = len(self.leases)
        self._lease(ask, lease_ms, ANYONE)
        self._decide([replace(ask, usage={"mutations": 30}, deny=True)])
        for taken, lease, granted in self.leases[before:]:
            self._settle(taken, lease, {field: part * amount for field, amount in granted.items()})
        self._decide([replace(ask, usage={"mutations": 1}, mode="peek")])

    @rule(data=st.data(), part=st.sampled_from((0.0, 0.5, 1.0)), ms=st.sampled_from((0, 0, 1, 200, 950)))
    def settle(self, data: Any, part: float, ms: int) -> None:
        self.now += ms
        if self.leases:
            ask, lease, granted = data.draw(st.sampled_from(self.leases[-6:]))
            self._settle(ask, lease, {field: part * amount for field, amount in granted.items()})

    @rule(
        ask=asks(),
        ms=st.sampled_from((50, 199, 200, 900, 3_000)),
        later_ms=st.sampled_from((0, 0, 150, 900)),
        deny=st.sampled_from((False, True, True)),
    )
    def lapse(self, ask: Ask, ms: int, later_ms: int, deny: bool) -> None:
        """Let a lease lapse; ask during and after it, also beyond the limit."""
        self._lease(ask, ms, ANYONE)
        ask = replace(ask, producer_ids=None, usage=ask.usage or {"requests": 1}, deny=deny, mode="admit")
        self._decide([ask] * 4)
        self.now += ms + later_ms
        self._decide([replace(ask, mode="peek"), ask, replace(ask, mode="refund"), ask])

    @rule(ask=asks(), ms=st.sampled_from((900, 3_000)))
    def leave_a_lease_behind(self, ask: Ask, ms: int) -> None:
        """Set the clock back by more than a window while a lease is held, and ask until it is over."""
        ask = replace(ask, producer_ids=None, usage=ask.usage or {"requests": 1}, mode="admit")
        self._lease(ask, ms, ANYONE)
        self.now -= 90_000
        self._decide([ask])
        self.now += ms
        self._decide([ask, replace(ask, mode="peek")])

    @rule(first=st.integers(0, len(IDS) - 1), many=st.sampled_from((35, 50, 70)))
    def flood(self, first: int, many: int) -> None:
        """Send more ids than a segment or the cap holds, then a new one, then one of them again."""
        ids = tuple((IDS[first:] + IDS)[:many])
        flood = Ask({}, ids, "a", mode="record", detail=True)
        late = replace(flood, producer_ids=(f"late-{self.now}",), mode="admit")
        self._decide([flood, late, replace(late, producer_ids=ids[:3])])

    @rule(first=st.integers(0, len(IDS) - 9))
    def flood_in_shadow(self, first: int) -> None:
        """Use more ids than a quota in shadow mode allows: it would refuse them, but remembers them."""
        before = self.quotas["producer_ids_rate"]
        shadow = {entity: replace(quota, limit=3, shadow=True) for entity, quota in before.items()}
        self.quotas["producer_ids_rate"] = shadow
        ask = Ask({}, tuple(IDS[first : first + 9]), "a", detail=True)
        self._decide([ask, replace(ask, mode="peek")])
        self.quotas["producer_ids_rate"] = before

    @rule(first=st.integers(0, len(IDS) - 9), times=st.integers(3, 6))
    def march(self, first: int, times: int) -> None:
        """Keep some ids in use over several layers, but not the others that came with them."""
        ids = tuple(IDS[first : first + 8])
        ask = Ask({}, ids, "a", mode="record", detail=True)
        self._decide([ask])
        for _ in range(times):
            self.now += self.quotas["producer_ids_rate"][self._ids_entity()].layers.interval_ms
            self._decide([replace(ask, producer_ids=ids[:2])])
        self._decide([replace(ask, producer_ids=ids[4:], mode="peek"), replace(ask, mode="admit")])

    @rule(full=st.sampled_from((True, False, False)), several=st.lists(asks(), min_size=1, max_size=4))
    def fill(self, full: bool, several: list[Ask]) -> None:
        """Fill the store, or give it room again; then send asks, some of them from a new principal."""
        self._fill(full=full)
        name = f"n{next(self.names)}"
        newcomer = Ask({"requests": 1}, (1, 2), name, "c", "10.0.0.9", "1", "L", detail=True)
        self._decide([*several, newcomer, replace(newcomer, mode="record"), newcomer])

    @rule(several=st.lists(asks(), min_size=2, max_size=6))
    def be_full_for_a_while(self, several: list[Ask]) -> None:
        """Send the same asks before the store is full, while it is full, and when it has room again."""
        self._decide(several)
        self._fill(full=True)
        self._decide(several)
        self.flood(first=self.now % len(IDS), many=50)
        retried = replace(several[0], id=f"ask-{next(self.names)}", mode="record")
        self._decide([retried, retried])
        self._fill(full=False)
        self._decide(several)

    @rule(data=st.data())
    def refuse_newcomers(self, data: Any) -> None:
        """A new principal whose own quota throttles in a full store does not charge the address it shares."""
        for entity, policy in ((ENTITIES["user"][1], "throttle"), (ENTITIES["ip"][1], "admit")):
            quota = replace(data.draw(quotas("request_rate", self.max_ids)), shadow=False)
            self._set("request_rate", entity, replace(quota, on_store_failure=policy))
        ask = Ask({"requests": 1}, None, f"n{next(self.names)}", None, "10.0.0.7", "1", detail=True)
        self._fill(full=False)
        self._decide([ask])
        self._fill(full=True)
        self._decide([replace(ask, principal=f"n{next(self.names)}"), ask])
        self._fill(full=False)
        self._decide([ask])

    @rule(first=st.integers(0, len(IDS) - 61))
    def crowd(self, first: int) -> None:
        """Use ids of two layers again while the store is full; one segment cannot hold them in one layer."""
        everybody = self.quotas["producer_ids_rate"].get(ENTITIES["user"][1])
        if everybody is None:
            return
        ask = Ask({}, tuple(IDS[first : first + 30]), f"n{next(self.names)}", mode="record", detail=True)
        self._fill(full=False)
        self._decide([ask])
        self.now += everybody.layers.interval_ms
        self._decide([replace(ask, producer_ids=tuple(IDS[first + 30 : first + 60]))])
        self._fill(full=True)
        self._decide([ask, replace(ask, mode="peek"), replace(ask, mode="admit")])
        self._fill(full=False)
        self._decide([ask])

    def _fill(self, *, full: bool) -> None:
        """Make the store full by a memory limit of 1 byte; without a limit it has room again."""
        self.redis.config_set("maxmemory", "1" if full else "0")
        if hasattr(self, "oracle"):
            self.oracle.full = full

    def _ids_entity(self) -> Entity:
        entities = self.quotas["producer_ids_rate"]
        return ENTITIES["user"][0] if ENTITIES["user"][0] in entities else ENTITIES["user"][1]

    @rule(data=st.data(), other=asks(), first=st.sampled_from(CALLERS), caller=st.sampled_from(CALLERS))
    def retry(self, data: Any, other: Ask, first: Caller, caller: Caller) -> None:
        """Repeat an ask, then send its id with other content, then the same ask by another caller."""
        if not self.asked:
            self.ask(ask=other, with_id=0, caller=first)
        before, by = data.draw(st.sampled_from(self.asked[-5:]))
        mode = "admit" if other.mode == "refund" else other.mode
        changed = replace(other, id=before.id, principal=before.principal, mode=mode)
        self._decide([before, changed], by)
        self._decide([before], caller)
        self.met["id with other content"] += changed != before
        self.met["id of another caller"] += caller.key != by.key

    @rule(ms=st.sampled_from((0, 1, 7, 99, 100, 101, 150, 199, 200, 334, 499, 500, 501, 1_000, 1_001)))
    def advance(self, ms: int) -> None:
        self.now += ms

    @rule(ms=st.sampled_from((1_334, 2_200, 4_000, 6_001, 61_000)))
    def advance_far(self, ms: int) -> None:
        self.now += ms

    @rule(ms=st.sampled_from((1, 50, 300, 700)))
    def slip(self, ms: int) -> None:
        self.now -= ms

    @rule(ms=st.sampled_from((5_000, 90_000)), ask=asks())
    def fall_back(self, ms: int, ask: Ask) -> None:
        """Set the clock back, as in a failover to a host with a wrong clock; then ask."""
        self._decide([ask])
        self.now -= ms
        self._decide([ask])

    @rule(data=st.data(), key=st.sampled_from(list(KEYS)))
    def change_limit(self, data: Any, key: str) -> None:
        entity = data.draw(st.sampled_from(sorted(self.quotas[key], key=str)))
        quota = self.quotas[key][entity]
        other = data.draw(quotas(key, self.max_ids))
        self.quotas[key][entity] = replace(quota, limit=other.limit, max_debt=other.max_debt)
        self.met["limit change"] += quota != self.quotas[key][entity]

    @rule(data=st.data())
    def change_policy(self, data: Any) -> None:
        (key, entities) = ("producer_ids_rate", self.quotas["producer_ids_rate"])
        entity = data.draw(st.sampled_from(sorted(entities, key=str)))
        quota = entities[entity]
        window = data.draw(st.sampled_from((1_000, 4_000)))
        self.quotas[key][entity] = replace(quota, window_ms=window, layers=data.draw(layers(window)))
        self.met["policy change"] += quota != self.quotas[key][entity]

    @rule(
        ask=asks(),
        many=st.sampled_from((1, 3, 40)),
        first=st.integers(0, len(IDS) - 1),
        what=st.sampled_from(
            (
                *("know", "reset", "reset", "reset and know"),
                *("lose", "lose and know", "lose, others know", "full", "full"),
            )
        ),
    )
    def renew(self, ask: Ask, many: int, first: int, what: str) -> None:
        """Renew ids that a node knows, perhaps after the store lost its state or the bucket was reset."""
        ids = tuple((IDS[first:] + IDS)[:many])
        ask = replace(ask, producer_ids=ids, usage={}, mode="record")
        self._decide([ask])
        known = self._mark()
        if "lose" in what:
            self.redis.flushall()
            self.oracle.lose()
        if "reset" in what:
            self._reset(ask)
        if "know" in what:
            mark = self._mark()
            known = known if "others" in what else mark
        if what == "full":
            self._fill(full=True)
        self._renew(ask, known)
        self._fill(full=False)
        self._decide([replace(ask, mode="admit")])

    @rule(
        principal=st.sampled_from(("a", "b")),
        first=st.integers(0, len(IDS) - 80),
        before=st.sampled_from((1, 20)),
    )
    def grow_in_a_full_store(self, principal: str, first: int, before: int) -> None:
        """Ask for ids and renew ids beyond the room of an old bucket, which cannot grow in a full store."""
        ask = Ask({}, tuple(IDS[first : first + before]), principal, mode="record", detail=True)
        self._fill(full=False)
        self._decide([ask])
        known = self._mark()
        self._fill(full=True)
        self._decide([replace(ask, producer_ids=tuple(IDS[first : first + 17]), mode="admit")])
        self._renew(replace(ask, producer_ids=tuple(IDS[first : first + 80])), known)
        self._fill(full=False)
        self._decide([replace(ask, mode="admit")])

    def _mark(self) -> Mark:
        mark = self.loop.run_until_complete(self.store.mark())
        self.oracle.birth = mark.birth
        return mark

    def _last_reset(self) -> int:
        return int(self.redis.get(RESETS_KEY) or 0)

    def _reset(self, ask: Ask) -> None:
        """Reset the bucket of an ask's ids."""
        for applied in self._ids_quotas(ask):
            key = bucket_key(applied)
            self.loop.run_until_complete(self.store.forget([key], {key: 60_000}))
            self.oracle.reset(applied, self._last_reset())

    def _ids_quotas(self, ask: Ask) -> list[AppliedQuota]:
        return applied_quotas(replace(ask, usage={}), self.quotas, RULES)

    def _renew(self, ask: Ask, known: Mark) -> None:
        ask = replace(ask, at_ms=self.now)
        for applied in self._ids_quotas(ask):
            renewal = Renewal(
                bucket_key(applied), applied, ask.principal or "", known.resets, ids_of(ask), generation=0
            )
            plan = with_(renewal_plan(renewal, known.birth, SECRET), at_ms=ask.at_ms)
            (answer,) = self.loop.run_until_complete(self.store.decide([plan]))
            self.met["renewal"] += 1
            expected = self.oracle.renew(ask, applied, known.resets, known.birth, self.now)
            (result,) = answer.results
            assert isinstance(result, IdsResult)
            if result.outcome != expected:
                raise Difference(f"{ask}\nrenewal: {answer}\noracle: {expected}")
            self.met["renewal of what was reset"] += expected == "reject"
            self.met["renewal of what another state had"] += expected == "throttle"
            bucket = self._bucket(plan.charges[0])
            assert isinstance(bucket, IdsBucket)
            remembered = bucket.state.remembered(max(self.now, bucket.newest_ms or 0), applied.quota.layers)
            if result.remembered != remembered:
                raise Difference(f"{ask}\nrenewal: {answer}\noracle remembers {remembered}")
            if expected == "admit":
                at = max(self.now, bucket.newest_ms or 0)
                self._compare_open(ask, plan.charges[0], result, bucket.state, at)
            self._compare_expiry([charge.key for charge in plan.charges])

    @rule(data=st.data(), key=st.sampled_from(list(KEYS)))
    def change_quota(self, data: Any, key: str) -> None:
        """Change a quota, or add one."""
        entity = data.draw(st.sampled_from(entities_of(key)))
        self._set(key, entity, data.draw(quotas(key, self.max_ids)))

    def _set(self, key: str, entity: Entity, quota: Quota) -> None:
        """Set a quota; a change that resets its bucket gives it a new epoch, as in the catalog."""
        before = self.quotas[key].get(entity)
        if before is not None:
            emptied = before.identity != quota.identity
            quota = replace(quota, epoch=next(self.epochs) if emptied else before.epoch)
        self.quotas[key][entity] = quota

    @rule(at_ms=st.sampled_from((0, 5, 10**9, 10**13)), usage=st.sampled_from(("mutations", "producer_ids")))
    def by_the_stores_clock(self, at_ms: int, usage: str) -> None:
        """Under the store's clock, a caller's ``at_ms`` is ignored."""
        ids = (1, 2, at_ms) if usage == "producer_ids" else None
        spent = {} if ids else {usage: 1}
        ask = Ask(principal="z", usage=spent, producer_ids=ids, detail=True, at_ms=at_ms)
        self._decide([ask], timed=True)

    @invariant()
    def count_step(self) -> None:
        self.met["steps"] += 1

    def _decide(self, asks: Sequence[Ask], caller: Caller = ANYONE, *, timed: bool = False) -> None:
        """Decide asks in one call of the store and one by one in the oracle, and compare."""
        if not timed:
            asks = [replace(ask, at_ms=self.now) for ask in asks]
        try:
            planned = [self._planned(ask, caller, place) for place, ask in enumerate(asks)]
        except OutOfBoundsError as refused:
            self._compare_refusal(asks[refused.place], caller, refused)
            return
        wanted = [each.plan for each in planned if each.plan is not None]
        if not wanted:
            return
        store = self.stores[timed, self.met["steps"] % 2 == 0]
        before = self._server_time() if timed else 0
        came: list[Answer] = []
        while len(came) < len(wanted):
            more = self.loop.run_until_complete(answers_of(store, wanted[len(came) :]))
            self.met["in pieces"] += len(more) < len(wanted) - len(came)
            came += more
        answers = iter(came)
        now = store.now_ms if timed else self.now
        if timed and not before <= now <= self._server_time():
            raise Difference(f"decided at {now}, not by the store's clock")
        for each in planned:
            if each.plan is not None:
                self._compare(each, caller, next(answers), now)
        self._compare_expiry(charge.key for plan in wanted for charge in plan.charges)

    def _compare_expiry(self, keys: Iterable[bytes]) -> None:
        """Check that every written key has an expiry. One round trip asks for all keys."""
        touched = list(dict.fromkeys(keys))
        with self.redis.pipeline(transaction=False) as asked:
            for key in touched:
                asked.pttl(key)
            for key, left_ms in zip(touched, asked.execute(), strict=True):
                if left_ms == -1:
                    raise Difference(f"no expiry on {key!r}")

    def _lease(self, ask: Ask, lease_ms: int, caller: Caller, many: int = 1) -> None:
        """Ask for some leases in one call, and compare the grants."""
        usage = ask.usage or {"requests": 3}
        ask = replace(ask, usage=usage, producer_ids=None, mode="record", at_ms=self.now, detail=False)
        ask = replace(ask, deny=False, recheck=False, cluster_action=False)
        try:
            restricted(ask, self._charges(ask), caller.bound_to)
        except OutOfBoundsError as refused:
            self._compare_refusal(ask, caller, refused)
            return
        wish = replace(ask, mode="admit", deny=True)
        charges = self._charges(wish)
        if not charges:
            return
        leases = [next(self.names).to_bytes(16, "big") for _ in range(many)]
        plans = [hold_plan(wish, charges, lease, lease_ms) for lease in leases]
        answers: list[Answer] = []
        self._would_grant(ask, plans[0], caller)
        while len(answers) < many:
            answers += self.loop.run_until_complete(self.store.decide(plans[len(answers) :]))
        for lease, plan, answer in zip(leases, plans, answers, strict=True):
            self.oracle.lapsed = 0.0
            expected = self.oracle.lease(ask, self.quotas, RULES, self.now, lease, lease_ms, caller)
            got, _ = decided(PlannedAsk(wish, charges, plan), answer, sequential=False)
            grants = got.decision == "admit" and got.source == "store"
            granted = granted_by(wish, plan, answer) if grants else {}
            got = replace(got, charged=grants)
            if (got, granted) != expected:
                raise Difference(f"{ask} {lease!r}\nstore:  {got} {granted}\noracle: {expected}")
            self._compare_lapsed(ask, answer)
            if granted:
                self.leases.append((ask, lease, granted))
            too_many = got.limited_by is not None and got.limited_by.reason == "capacity"
            self.met["lease granted"] += grants
            self.met["lease cut"] += grants and granted != ask.usage
            self.met["lease refused"] += got.decision == "throttle"
            self.met["lease of one too many"] += too_many
        self._compare_expiry(charge.key for charge in plans[0].charges)

    def _would_grant(self, ask: Ask, plan: Plan, caller: Caller) -> None:
        """Compare the grant of each bucket in a look; the next lease shows that the look changed nothing."""
        expected = self.oracle.peek_hold(ask, self.quotas, RULES, self.now, caller)
        (answer,) = self.loop.run_until_complete(self.store.decide([with_(plan, mode="peek_hold")]))
        got = tuple(result.granted for result in answer.results if isinstance(result, LeaseResult))
        if got != expected:
            raise Difference(f"{ask}\nthe store would grant {got}, the oracle {expected}")
        self.met["peek at a lease"] += 1
        self.met["peek at a lease that is cut"] += min(got) not in {0, max(got)}

    def _settle(self, ask: Ask, lease: bytes, spent: dict[str, float]) -> None:
        ask = replace(ask, usage=spent, at_ms=self.now)
        charges = self._charges(ask)
        self.oracle.lapsed = 0.0
        expected = self.oracle.settle(ask, self.quotas, RULES, self.now, lease)
        if not charges:
            return
        plan = settle_plan(ask, charges, lease)
        (answer,) = self.loop.run_until_complete(self.store.decide([plan]))
        settled = any(result.outcome == "admit" for result in answer.results)
        if settled != expected:
            raise Difference(f"{ask} {lease!r}\nstore settled: {settled}\noracle: {expected}")
        self._compare_lapsed(ask, answer)
        self._compare_expiry(charge.key for charge in plan.charges)
        self.met["lease settled"] += settled
        self.met["lease over"] += not settled

    def _compare_lapsed(self, ask: Ask, answer: Answer) -> None:
        """Compare the units of lapsed leases in the answer."""
        lapsed = sum(result.lapsed for result in answer.results if isinstance(result, UnitsResult))
        if lapsed != self.oracle.lapsed:
            raise Difference(f"{ask}\nlapsed in the store: {lapsed}, in the oracle: {self.oracle.lapsed}")

    def _planned(self, ask: Ask, caller: Caller, place: int) -> PlannedAsk:
        charges = restricted(ask, self._charges(ask), caller.bound_to, place)
        charges = with_spreads(ask, charges, SECRET)
        return PlannedAsk(ask, charges, plan_of(ask, charges, SECRET, caller.key))

    def _charges(self, ask: Ask) -> list[Charge]:
        """The charges of an ask by the tables, which must equal those by the rule."""
        if self.quotas != self.snapshot.quotas:
            self.snapshot = self.snapshot.apply(self.snapshot.version + 1, self._changes())
            self.tables = Tables(self.snapshot, RULES)
        charges = self.tables.charges(ask)
        by_rule = [charge_of(applied, ask) for applied in applied_quotas(ask, self.quotas, RULES)]
        if charges != by_rule:
            raise Difference(f"{ask}\nby tables: {charges}\nby rule:   {by_rule}")
        return charges

    def _changes(self) -> Iterator[SnapshotChange]:
        """The changes since the snapshot."""
        for key in KEYS:
            now, before = self.quotas.get(key, {}), self.snapshot.quotas.get(key, {})
            for entity in now.keys() | before.keys():
                if now.get(entity) != before.get(entity):
                    yield key, entity, now.get(entity)

    def _compare_refusal(self, ask: Ask, caller: Caller, refused: OutOfBoundsError) -> None:
        try:
            decision = self.oracle.decide(ask, self.quotas, RULES, self.now, caller)
        except OutOfBoundsError as expected:
            self.met["out of bounds"] += 1
            if (expected.bucket, expected.field) == (refused.bucket, refused.field):
                return
            raise Difference(f"{ask}\nrefused: {refused}\noracle:  {expected}") from None
        raise Difference(f"{ask}\nrefused: {refused}\noracle:  {decision}")

    def _compare(self, planned: PlannedAsk, caller: Caller, answer: Answer, now: int) -> None:
        ask, kept = planned.ask, answer.kept is not None
        self.oracle.lapsed = 0.0
        segments, live = self._segments(), sum(len(live) for _, live in self._filters(planned, now))
        expected = self.oracle.decide(ask, self.quotas, RULES, now, caller)
        got, _ = decision_by(planned, answer, sequential=self.sequential)
        if got != expected:
            raise Difference(f"{ask}\nstore:  {got}\noracle: {expected}")
        if not kept:
            brief = with_(planned, ask=replace(ask, detail=False))
            got_briefly, _ = decision_by(brief, answer, sequential=self.sequential)
            if got_briefly != replace(expected, quotas=None):
                raise Difference(f"{ask}\nstore:  {got_briefly} without detail\noracle: {expected}")
        held = got.decision in ("delay", "throttle")
        if not held <= got.throttle_ms <= held * MAX_THROTTLE_MS:
            raise Difference(f"{ask}\nno throttle time: {got}")
        self.met["growth"] += self._segments() > segments > 0
        after = list(self._filters(planned, now))
        died = any(len(state.layers) > len(live_layers) for state, live_layers in after)
        self.met["layer death"] += died or sum(len(live_layers) for _, live_layers in after) < live
        self._count(ask, expected, kept=kept)
        strict = (charge for charge in planned.charges if self._is_made_deny(charge, ask))
        self.met["deny in a shared bucket"] += not kept and any(strict)
        if not kept:
            self._check_hidden(planned, answer, expected, now)

    def _check_hidden(self, planned: PlannedAsk, answer: Answer, expected: Decision, now: int) -> None:
        """Compare hidden state: forgiven debts, remembered ids, live layers, clocks, leases."""
        ask = planned.ask
        self._compare_lapsed(ask, answer)
        refused = expected.decision in ("throttle", "reject")
        if self.oracle.lapsed:
            self.met[f"lapse at a {'refusal' if refused else 'charge'}"] += 1
        self.met["clock back by more than a window"] += any(
            result.correction == 2 for result in answer.results
        )
        for charge, result in zip(planned.charges, answer.results, strict=True):
            bucket = self._bucket(charge)
            if isinstance(bucket, RateBucket | TokensBucket) and bucket.holds and result.throttle_ms:
                ends_ms = bucket.holds[0].ends_ms
                self.met["wait beyond a lease's end"] += refused and now + result.throttle_ms > ends_ms
            if result.reason == "store_full":
                continue
            if isinstance(bucket, TokensBucket) and ask.mode != "peek":
                assert isinstance(result, UnitsResult)
                if result.forgiven != bucket.forgiven:
                    raise Difference(f"{ask}\nstore forgave {result.forgiven}, oracle {bucket.forgiven}")
                self._count_forgiven(ask, expected, result)
            if isinstance(bucket, IdsBucket) and ask.mode != "peek":
                assert isinstance(result, IdsResult)
                at = max(now, bucket.newest_ms or 0)
                remembered = bucket.state.remembered(at, charge.quota.layers)
                if result.remembered != remembered:
                    raise Difference(f"{ask}\nstore remembers {result.remembered}, oracle {remembered}")
                live = bucket.state.live_layers(at, charge.quota.layers)
                if result.layers != len(live):
                    raise Difference(f"{ask}\nstore has {result.layers} live layers, oracle {live}")
                self._compare_open(ask, charge, result, bucket.state, at)
                if not charge.quota.shadow:
                    self._compare_unseen(ask, charge, result, bucket.state, at)
                if result.fill != bucket.state.fill():
                    raise Difference(f"{ask}\nstore is filled {result.fill}, oracle {bucket.state.fill()}")

    def _compare_open(self, ask: Ask, charge: Charge, result: IdsResult, state: ProducerIds, at: int) -> None:
        """Compare the reported time until the open layer closes, if it holds all ids of the ask."""
        spreads = [charge.spreads[i : i + 32] for i in range(0, len(charge.spreads), 32)]
        expected = state.open_ms(spreads, at, charge.quota.layers)
        self.met["open layer reported"] += result.open_ms > 0
        self.met["open layer not reported"] += result.open_ms == 0 < expected
        # not reported if an id became seen by chance, through another id of the ask
        if result.open_ms not in ({0, expected} if result.outcome != "reject" else {0}):
            raise Difference(f"{ask}\nstore says open for {result.open_ms}, oracle {expected}")

    def _compare_unseen(
        self, ask: Ask, charge: Charge, result: IdsResult, state: ProducerIds, at: int
    ) -> None:
        """Compare the number of new ids in the answer to a throttled ask."""
        spreads = [charge.spreads[i : i + 32] for i in range(0, len(charge.spreads), 32)]
        layers = charge.quota.layers
        expected = sum(state.find(spread, at, layers) is None for spread in spreads)
        is_throttled = result.outcome == "throttle"
        self.met["unseen ids reported"] += result.unseen > 1
        # an id that became seen by chance, through a refreshed id, was unseen before
        if not (max(expected, 1) <= result.unseen <= len(spreads) if is_throttled else result.unseen == 0):
            raise Difference(f"{ask}\nstore says {result.unseen} are unseen, oracle {expected}")

    def _count_forgiven(self, ask: Ask, decision: Decision, result: UnitsResult) -> None:
        refused = decision.decision in ("throttle", "reject")
        by = "by a refund" if ask.mode == "refund" else "at a refusal" if refused else "by a charge"
        self.met[f"forgiven {by}"] += result.forgiven > 0

    def _is_made_deny(self, charge: Charge, ask: Ask) -> bool:
        """Whether a charge is decided under deny although neither its quota nor the ask says so."""
        quota = self.quotas[charge.quota.key][Entity.parse(charge.entity)]
        return charge.enforcement == "deny" and quota.enforcement == "delay" and not ask.deny

    def _bucket(self, charge: Charge) -> Bucket | None:
        quota = charge.quota
        return self.oracle.buckets.get((quota.key, charge.bucket, quota.identity, quota.epoch))

    def _filters(self, planned: PlannedAsk, now: int) -> Iterator[tuple[ProducerIds, list[int]]]:
        """The filters that an ask touches, with their live layers."""
        for charge in planned.charges:
            bucket = self._bucket(charge)
            if isinstance(bucket, IdsBucket):
                yield bucket.state, bucket.state.live_layers(now, charge.quota.layers)

    def _segments(self) -> int:
        filters = [b.state for b in self.oracle.buckets.values() if isinstance(b, IdsBucket)]
        return max((len(state.segments) for state in filters), default=0)

    def _server_time(self) -> int:
        seconds, micros = self.redis.time()
        return seconds * 1000 + micros // 1000

    def _count(self, ask: Ask, decision: Decision, *, kept: bool) -> None:
        self.met["decisions"] += 1
        self.met["retry"] += kept
        if kept:
            return
        self.met["refund"] += ask.mode == "refund" and decision.applied > 0
        self.met["shadow"] += any(v.shadow for v in decision.quotas or ())
        self.met[f"mode {ask.mode}"] += 1
        if decision.limited_by is not None:
            self.met[f"{decision.decision} {decision.limited_by.quota}"] += 1
            self.met["capacity"] += decision.limited_by.reason == "capacity" and not self.oracle.full
        if self.oracle.full:
            self._count_full(ask, decision)

    def _count_full(self, ask: Ask, decision: Decision) -> None:
        why = decision.limited_by.reason if decision.limited_by else None
        self.met["full: admitted"] += decision.source == "fallback" and decision.decision == "admit"
        self.met["full: throttled"] += why == "store_full" and decision.decision == "throttle"
        self.met["full: recorded"] += why == "store_full" and ask.mode == "record"
        self.met["full: an old bucket"] += decision.source == "store" and decision.charged
        self.met["full: no new segment"] += why == "capacity"


def when_full(ask: Ask, applied: AppliedQuota) -> Verdict:
    """The verdict of a quota when the store has no room for its new bucket."""
    return verdict_when_full(ask, charge_of(applied, ask))


def run(
    url: str,
    *,
    examples: int,
    steps: int,
    script: str = SCRIPT,
    shrink: bool = True,
    only: Collection[str] = (),
    machine: type[Machine] = Machine,
) -> Counter[str]:
    """Run a machine with a script against a store, and return which events it met how often.

    Args:
        only: the names of the rules to choose from, if not all.

    Raises:
        Difference: the store and the oracle disagreed.
    """
    one = type("Run", (machine,), {"script": script})
    return explored(one, url, examples=examples, steps=steps, shrink=shrink, only=only)


def explored(
    machine: type[Any],
    url: str,
    *,
    examples: int,
    steps: int,
    shrink: bool,
    only: Collection[str] = (),
    opened: Callable[[asyncio.AbstractEventLoop], None] = lambda _loop: None,
    closed: Callable[[asyncio.AbstractEventLoop], None] = lambda _loop: None,
) -> Counter[str]:
    """Run a given machine against a store, and return which events it met how often.

    Args:
        only: the names of the rules to choose from, if not all; the initial rules always run.
        opened, closed: called with the loop before and after all histories.

    Raises:
        Difference: the store and the oracle disagreed.
    """
    if only:
        state = machine.setup_state()
        assert set(only) <= {each.function.__name__ for each in state.rules}
        state.rules[:] = [each for each in state.rules if each.function.__name__ in only]
    loop, met = asyncio.new_event_loop(), Counter[str]()
    Difference.last = None
    machine.url, machine.met, machine.loop = url, met, loop
    phases = [Phase.generate, Phase.shrink] if shrink else [Phase.generate]
    try:
        opened(loop)
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=examples,
                stateful_step_count=steps,
                deadline=None,
                derandomize=False,  # under CI Hypothesis would derandomize, and every run would be the same
                database=None,
                phases=phases,
                print_blob=False,
                suppress_health_check=list(HealthCheck),
            ),
        )
    except Flaky as flaky:
        if Difference.last is None:
            raise
        raise Difference.last from flaky
    finally:
        closed(loop)
        loop.close()
    return met
