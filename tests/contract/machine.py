"""A state machine that holds the store's script to the oracle over random histories, and counts them."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import redis
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from app.admission.plan import decided, matches_of, plan_of
from app.domain.ask import Ask
from app.domain.decision import Decision
from app.domain.entity import ANY, Entity
from app.domain.ladder import Rules
from app.domain.oracle import IdsBucket, Oracle
from app.domain.quota import KEYS, LAYER_POLICIES, Layers, Quota
from app.store.port import Plan
from app.store.redis import RedisStore
from app.store.script import SCRIPT

SECRET = b"0123456789abcdef0123456789abcdef"
RULES = Rules(inter_broker_listener="REPLICATION")
ENTITIES = {
    "user": [Entity.of(user="a"), Entity.of(user=ANY)],
    "client": [
        Entity.of(client_id=ANY),
        Entity.of(user=ANY, client_id=ANY),
        Entity.of(user="a", client_id="c"),
    ],
    "ip": [Entity.of(ip="10.0.0.1"), Entity.of(ip=ANY)],
    "listener": [
        Entity.of(broker="1"),
        Entity.of(broker=ANY),
        Entity.of(listener=ANY),
        Entity.of(listener="L"),
        Entity.of(broker="1", listener="L"),
    ],
}
IDS = [*range(100, 400), *(f"p{n}" for n in range(60))]
AMOUNTS = (1, 1, 1, 2, 3, 0, 5, 12, 60)
FRACTIONS = (0.5, 2.25, 0.1, 7.3)

MUST_MEET = (
    *(f"{outcome} {key}" for key in KEYS for outcome in ("throttle", "reject")),
    "capacity",
    "growth",
    "layer death",
    "clock back by more than a window",
    "limit change",
    "policy change",
    "retry",
    "refund",
    "shadow",
)
"""What a run must have met at least ``AT_LEAST`` times to count as one."""
AT_LEAST = 50


class Difference(AssertionError):
    """The store and the oracle disagree."""


def entities_of(key: str) -> list[Entity]:
    """Entities that a key may be set on, among those the machine asks with."""
    row = KEYS[key]
    kinds = {"ip": "ip", "broker": "listener", "user": "user"}
    found = [e for types in row.entities for e in ENTITIES.get(kinds.get(types[0], ""), [])]
    if ("client-id",) in row.entities:
        found += ENTITIES["client"]
    return list(dict.fromkeys(found))


@st.composite
def quotas(draw: st.DrawFn, key: str, max_ids: int) -> Quota:
    """A quota of a key with short windows and small limits, so that everything happens often."""
    row = KEYS[key]
    shadow = draw(st.sampled_from((False,) * 7 + (True,)))
    scope = draw(st.sampled_from(("cluster", "cluster", "broker")))
    if row.algorithm == "producer_ids":
        limit = min(draw(st.sampled_from((1, 3, 8, 20, 8, 20, 60, 0))), max_ids // 2)
        window = draw(st.sampled_from((1_000, 4_000)))
        return Quota(
            key, limit, "producer_ids", "deny", shadow, scope, window_ms=window, layers=draw(layers(window))
        )
    algorithm = draw(st.sampled_from((row.algorithm, row.algorithm, "sampled_rate", "token_bucket")))
    limit = draw(st.sampled_from((2, 5, 1, 20, 9, 0) if row.integer_limit else (2, 5, 0.7, 20, 9, 0)))
    samples, sample_ms = draw(st.sampled_from(((3, 200), (11, 100), (2, 500), (1, 300))))
    burst = draw(st.sampled_from((samples * sample_ms / 1000 * limit, 7.5)))
    enforcement = draw(st.sampled_from(("deny", "delay", row.enforcement)))
    return Quota(
        key, limit, algorithm, enforcement, shadow, scope, samples=samples, sample_ms=sample_ms, burst=burst
    )


def layers(window_ms: int) -> st.SearchStrategy[Layers]:
    """Any layer policy."""
    named = [Layers.named(policy, window_ms) for policy in LAYER_POLICIES]
    return st.sampled_from([*named, Layers(150, 600), Layers(400, 500)])


@st.composite
def asks(draw: st.DrawFn) -> Ask:
    """An ask for one usage, rarely for two; ids come in handfuls, and in floods when they are recorded."""
    mode = draw(st.sampled_from(("admit", "admit", "admit", "admit", "record", "peek", "refund")))
    key = draw(st.sampled_from(list(KEYS)))
    fields = {KEYS[key].usage}
    if draw(st.integers(0, 4)) == 0:
        fields.add(KEYS[draw(st.sampled_from(list(KEYS)))].usage)
    usage: dict[str, float] = {}
    ids: tuple[int | str, ...] | None = None
    for field in sorted(fields):
        if field == "producer_ids":
            first = draw(st.integers(0, len(IDS) - 1))
            many = draw(st.sampled_from((1, 1, 2, 5, 9, 30) if mode == "admit" else (1, 3, 40, 60)))
            ids = None if mode == "refund" else tuple((IDS[first:] + IDS)[:many])
        else:
            whole = field in ("requests", "connections", "mutations")
            usage[field] = draw(st.sampled_from(AMOUNTS if whole else AMOUNTS + FRACTIONS))
    return Ask(
        usage=usage or {"requests": 1} if ids is None else usage,
        producer_ids=ids,
        principal=draw(st.sampled_from(("a", "b"))),
        client_id=draw(st.sampled_from(("c", None, ""))),
        ip=draw(st.sampled_from(("10.0.0.1", "2001:db8::1", "2001:db8::2"))),
        broker=draw(st.sampled_from(("1", "2", None))),
        listener=draw(st.sampled_from(("L", "REPLICATION"))),
        mode=mode,
        deny=draw(st.sampled_from((False, False, True))),
        recheck=draw(st.sampled_from((False, False, True))),
        detail=True,
        cluster_action=draw(st.integers(0, 19)) == 0,
    )


class Machine(RuleBasedStateMachine):
    """Every ask goes to the oracle and to the store; whatever they say must be the same."""

    url: str
    script: str = SCRIPT
    met: Counter[str]
    loop: asyncio.AbstractEventLoop

    def __init__(self) -> None:
        super().__init__()
        self.redis = redis.Redis.from_url(self.url)
        self.redis.flushall()
        self.now = 1_000_000
        self.names = itertools.count()
        self.epochs = itertools.count(1)
        self.asked: list[Ask] = []

    @initialize(
        max_ids=st.sampled_from((40, 160)),
        sequential=st.booleans(),
        data=st.data(),
    )
    def begin(self, max_ids: int, sequential: bool, data: Any) -> None:
        self.sequential, self.max_ids = sequential, max_ids
        self.oracle = Oracle(SECRET, max_ids=max_ids, sequential=sequential)
        options: dict[str, Any] = {"sequential": sequential, "max_ids": max_ids, "script": self.script}
        self.store = RedisStore(self.url, caller_clock=True, **options)
        self.timed = RedisStore(self.url, **options)
        self.quotas: dict[str, dict[Entity, Quota]] = {}
        for key in KEYS:
            places = entities_of(key)
            chosen = data.draw(st.lists(st.sampled_from(places), min_size=1, max_size=2, unique=True))
            self.quotas[key] = {entity: data.draw(quotas(key, self.max_ids)) for entity in chosen}

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.loop.run_until_complete(self.store.close())
            self.loop.run_until_complete(self.timed.close())
        self.redis.close()

    @rule(ask=asks(), with_id=st.integers(0, 2))
    def ask(self, ask: Ask, with_id: int) -> None:
        if with_id == 0:
            ask = replace(ask, id=f"ask-{next(self.names)}")
            self.asked.append(ask)
        self._decide([ask])

    @rule(several=st.lists(asks(), min_size=2, max_size=6))
    def batch(self, several: list[Ask]) -> None:
        self._decide(several)

    @rule(ask=asks(), times=st.integers(2, 8))
    def insist(self, ask: Ask, times: int) -> None:
        """The same ask again and again, the last ones beyond the limit."""
        self._decide([ask] * times)

    @rule(key=st.sampled_from(list(KEYS)), amount=st.sampled_from((1, 1, 2, 3)), recheck=st.booleans())
    def exhaust(self, key: str, amount: int, recheck: bool) -> None:
        """One key's bucket, under deny, until it refuses."""
        field = KEYS[key].usage
        asks = []
        for n in range(15):
            ids = (f"new-{self.now}-{n}",) if field == "producer_ids" else None
            usage = {} if ids else {field: amount * KEYS[key].per_unit}
            asks.append(
                Ask(
                    usage,
                    ids,
                    "a",
                    "c",
                    "10.0.0.1",
                    "1",
                    "L",
                    deny=True,
                    detail=True,
                    recheck=recheck and n == 14,
                )
            )
        self._decide(asks)

    @rule(first=st.integers(0, len(IDS) - 1), many=st.sampled_from((35, 50, 70)))
    def flood(self, first: int, many: int) -> None:
        """More ids than a segment holds, or than may be remembered; then one more, and one of them again."""
        ids = tuple((IDS[first:] + IDS)[:many])
        asks = [
            Ask({}, given, "a", mode=mode, detail=True)
            for given, mode in (
                (ids, "record"),
                ((f"late-{self.now}",), "admit"),
                (ids[:3], "admit"),
            )
        ]
        self._decide(asks)

    @rule(first=st.integers(0, len(IDS) - 9), times=st.integers(3, 6))
    def march(self, first: int, times: int) -> None:
        """Some ids stay in use for several layers, and others that came with them do not."""
        ids = tuple(IDS[first : first + 8])
        ask = Ask({}, ids, "a", mode="record", detail=True)
        self._decide([ask])
        for _ in range(times):
            self.now += self.quotas["producer_ids_rate"][self._ids_entity()].layers.interval_ms
            self._decide([replace(ask, producer_ids=ids[:2])])
        self._decide([replace(ask, producer_ids=ids[4:], mode="peek"), replace(ask, mode="admit")])

    def _ids_entity(self) -> Entity:
        entities = self.quotas["producer_ids_rate"]
        return ENTITIES["user"][0] if ENTITIES["user"][0] in entities else ENTITIES["user"][1]

    @rule(data=st.data(), other=asks())
    def retry(self, data: Any, other: Ask) -> None:
        """A retry says what it likes, and is answered as before."""
        if self.asked:
            before = data.draw(st.sampled_from(self.asked))
            mode = "admit" if other.mode == "refund" else other.mode
            self._decide([replace(other, id=before.id, principal=before.principal, mode=mode)])

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
        """The clock is set back, as after a failover to a host with a wrong one; then somebody asks."""
        self._decide([ask])
        self.now -= ms
        self._decide([ask])

    @rule(data=st.data(), key=st.sampled_from(list(KEYS)))
    def change_limit(self, data: Any, key: str) -> None:
        entity = data.draw(st.sampled_from(sorted(self.quotas[key], key=str)))
        quota = self.quotas[key][entity]
        self.quotas[key][entity] = replace(quota, limit=data.draw(quotas(key, self.max_ids)).limit)
        self.met["limit change"] += quota != self.quotas[key][entity]

    @rule(data=st.data())
    def change_policy(self, data: Any) -> None:
        (key, entities) = ("producer_ids_rate", self.quotas["producer_ids_rate"])
        entity = data.draw(st.sampled_from(sorted(entities, key=str)))
        quota = entities[entity]
        window = data.draw(st.sampled_from((1_000, 4_000)))
        self.quotas[key][entity] = replace(quota, window_ms=window, layers=data.draw(layers(window)))
        self.met["policy change"] += quota != self.quotas[key][entity]

    @rule(data=st.data(), key=st.sampled_from(list(KEYS)))
    def change_quota(self, data: Any, key: str) -> None:
        """Another quota in its place; what empties a bucket gives it a new epoch, as the catalog does."""
        entity = data.draw(st.sampled_from(entities_of(key)))
        before = self.quotas[key].get(entity)
        quota = data.draw(quotas(key, self.max_ids))
        if before is not None:
            emptied = before.identity != quota.identity
            quota = replace(quota, epoch=next(self.epochs) if emptied else before.epoch)
        self.quotas[key][entity] = quota

    @rule(at_ms=st.sampled_from((0, 5, 10**9, 10**13)), usage=st.sampled_from(("mutations", "producer_ids")))
    def by_the_stores_clock(self, at_ms: int, usage: str) -> None:
        """Under the store's clock, what a caller says of the time means nothing."""
        ids = (1, 2, at_ms) if usage == "producer_ids" else None
        spent = {} if ids else {usage: 1}
        ask = Ask(principal="z", usage=spent, producer_ids=ids, detail=True, at_ms=at_ms)
        self._decide([ask], timed=True)

    def _decide(self, asks: Sequence[Ask], *, timed: bool = False) -> None:
        store = self.timed if timed else self.store
        if not timed:
            asks = [replace(ask, at_ms=self.now) for ask in asks]
        plans = [plan_of(ask, matches_of(ask, self.quotas, RULES), SECRET) for ask in asks]
        wanted = [plan for plan in plans if plan is not None]
        before = self._server_time()
        answers = iter(self.loop.run_until_complete(store.decide(wanted)) if wanted else [])
        after = self._server_time()
        now = store.now_ms if timed and wanted else self.now
        if timed and wanted and not before <= now <= after:
            raise Difference(f"decided at {now}, not by the store's clock, {before} to {after}")
        last: dict[bytes, tuple[int, int]] = {}
        for ask, plan in zip(asks, plans, strict=True):
            kept_before = self._kept(ask, now)
            segments = self._segments()
            live = self._live(plan, now)
            expected = self.oracle.decide(ask, self.quotas, RULES, now)
            answer = None if plan is None else next(answers)
            got, _ = decided(ask, plan, answer, sequential=self.sequential)
            if got != expected:
                raise Difference(f"{ask}\nstore:  {got}\noracle: {expected}")
            self._count(ask, expected, kept=kept_before)
            self.met["growth"] += self._segments() > segments > 0
            self.met["layer death"] += self._live(plan, now) < live or self._dead_layers(plan, now)
            if plan is not None and answer is not None and answer.kept is None and ask.mode != "peek":
                for key, bucket, said in self._ids(plan, answer.said):
                    last[key] = (
                        said,
                        bucket.state.remembered(max(now, bucket.newest_ms or 0), self._layers_of(plan)),
                    )
                    if last[key][0] != last[key][1]:
                        raise Difference(f"{ask}\nremembered: {last[key]}")
            self.met["clock back by more than a window"] += (
                answer is not None and answer.kept is None and any(s.correction == 2 for s in answer.said)
            )
        self._check_expiry(wanted)

    def _check_expiry(self, plans: Sequence[Plan]) -> None:
        for plan in plans:
            for charge in plan.charges:
                if self.redis.pttl(charge.key) == -1:
                    raise Difference(f"no expiry on {charge.key!r}")

    def _ids(self, plan: Plan, said: Sequence[Any]) -> Iterator[tuple[bytes, IdsBucket, int]]:
        for charge, one in zip(plan.charges, said, strict=True):
            bucket = self._bucket(charge.applied)
            if isinstance(bucket, IdsBucket):
                yield charge.key, bucket, one.remembered

    def _bucket(self, found: Any) -> Any:
        quota = found.quota
        return self.oracle.buckets.get((quota.key, found.bucket, quota.identity, quota.epoch))

    @staticmethod
    def _layers_of(plan: Plan) -> Layers:
        return next(
            c.applied.quota.layers for c in plan.charges if c.applied.quota.algorithm == "producer_ids"
        )

    def _segments(self) -> int:
        return max(
            (len(b.state.segments) for b in self.oracle.buckets.values() if isinstance(b, IdsBucket)),
            default=0,
        )

    def _live(self, plan: Plan | None, now: int) -> int:
        for charge in plan.charges if plan else ():
            bucket = self._bucket(charge.applied)
            if isinstance(bucket, IdsBucket):
                return len(bucket.state.live_layers(now, charge.applied.quota.layers))
        return 0

    def _dead_layers(self, plan: Plan | None, now: int) -> bool:
        for charge in plan.charges if plan else ():
            bucket = self._bucket(charge.applied)
            if isinstance(bucket, IdsBucket):
                return len(bucket.state.layers) > len(
                    bucket.state.live_layers(now, charge.applied.quota.layers)
                )
        return False

    def _kept(self, ask: Ask, now: int) -> bool:
        kept = self.oracle.answers.get((ask.principal, ask.id or ""))
        return ask.mode != "peek" and ask.id is not None and kept is not None and now - kept[1] < 60_000

    def _server_time(self) -> int:
        seconds, micros = self.redis.time()  # type: ignore[misc]
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
            self.met["capacity"] += decision.limited_by.reason == "capacity"


def run(url: str, *, examples: int, steps: int, script: str = SCRIPT, shrink: bool = True) -> Counter[str]:
    """Run the machine against a store; what it met, and how often.

    Raises:
        Difference: the store and the oracle disagreed.
    """
    loop = asyncio.new_event_loop()
    met: Counter[str] = Counter()

    class Run(Machine):
        pass

    Run.url, Run.script, Run.met, Run.loop = url, script, met, loop
    phases = [Phase.generate, Phase.shrink] if shrink else [Phase.generate]
    try:
        run_state_machine_as_test(
            _counting(Run, met),
            settings=settings(
                max_examples=examples,
                stateful_step_count=steps,
                deadline=None,
                database=None,
                phases=phases,
                print_blob=False,
                suppress_health_check=list(HealthCheck),
            ),
        )
    finally:
        loop.close()
    return met


def _counting(machine: type[Machine], met: Counter[str]) -> type[Machine]:
    """Count every step that Hypothesis takes."""

    def check_invariants(self: Machine, *arguments: Any, **keywords: Any) -> None:
        met["steps"] += 1
        RuleBasedStateMachine.check_invariants(self, *arguments, **keywords)

    machine.check_invariants = check_invariants  # type: ignore[method-assign]
    return machine
