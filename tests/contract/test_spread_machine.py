"""Decisions over a cluster agree with the oracle over random histories, also in batches and retried."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from app.admission.admission import Admission
from app.admission.buckets import Buckets
from app.admission.leases.leases import Settlement
from app.catalog.snapshot import Snapshot
from app.domain.ask import Ask
from app.domain.caller import ANYONE
from app.domain.decision import Decision
from app.domain.entity import Entity
from app.domain.ladder import applied_quotas
from app.domain.oracle import Oracle
from app.domain.quota import KEYS, Quota
from app.store.cluster import ClusterStore, plan_slots
from tests import clusters
from tests.charging import decisions_of, plan_for
from tests.clusters import Cluster
from tests.contract.clustered import Lapses
from tests.contract.histories import asks, entities_of, quotas
from tests.contract.machine import RULES, SECRET, Difference, explored, rare
from tests.report import say

pytestmark = pytest.mark.usefixtures("patient_connections")

MAX_IDS = 160
QUICK_STEPS, STEPS = 300, 60_000
MUST_MEET = (
    *(
        f"lease {what}"
        for what in ("of several slots", "cut", "refused", "settled on the way", "over", "lapsed")
    ),
    "several slots",
    "refused",
    "retry",
    "reset",
    "clock back",
    *(f"mode {mode}" for mode in ("record", "refund", "peek")),
)


class Taken(NamedTuple):
    """A lease: its names at the nodes and in the oracle."""

    ask: Ask
    name: str
    own: bytes
    granted: dict[str, float]


class SpreadMachine(RuleBasedStateMachine):
    """Sends every ask to the oracle and to a node on a cluster; their decisions must be equal."""

    url: str
    met: Counter[str]
    loop: asyncio.AbstractEventLoop
    cluster: Cluster
    nodes: dict[bool, Admission]
    lapses: Lapses
    in_force: ClassVar[dict[str, dict[Entity, Quota]]]
    """The quotas for the nodes, which outlive a history."""

    @initialize(sequential=st.booleans(), data=st.data())
    def begin(self, sequential: bool, data: Any) -> None:
        self.met["steps"] -= 1
        self.quotas: dict[str, dict[Entity, Quota]] = {}
        for node in self.cluster.primaries:
            node.call("FLUSHALL")
        self.now = 1_000_000
        self.names = itertools.count()
        self.epochs = itertools.count(1)
        self.asked: list[Ask] = []
        self.leases: list[Taken] = []
        self.oracle = Oracle(SECRET, max_ids=MAX_IDS, sequential=sequential)
        self.admission = self.nodes[sequential]
        for key in KEYS:
            places = entities_of(key)
            chosen = data.draw(st.lists(st.sampled_from(places), min_size=1, max_size=2, unique=True))
            self.quotas[key] = {entity: _lasting(data.draw(quotas(key, MAX_IDS))) for entity in chosen}

    @rule(ask=asks(), with_id=st.booleans())
    def ask(self, ask: Ask, with_id: bool) -> None:
        if with_id:
            ask = replace(ask, id=f"ask-{next(self.names)}")
            self.asked.append(ask)
        self._decide([ask])

    @rule(ask=asks(), times=st.integers(2, 6))
    def insist(self, ask: Ask, times: int) -> None:
        for _ in range(times):
            self._decide([ask])

    @rule(several=st.lists(asks(), min_size=2, max_size=5))
    def one_after_the_other(self, several: list[Ask]) -> None:
        for ask in several:
            self._decide([ask])

    @rule(key=st.sampled_from(list(KEYS)), amount=st.sampled_from((1, 2, 3)))
    def exhaust(self, key: str, amount: int) -> None:
        """Spend from buckets in several slots until one refuses."""
        whole = Ask({"connections": 1}, None, "a", "c", "10.0.0.1", "1", "L", deny=True, detail=True)
        for n in range(8):
            if key == "producer_ids_rate":
                self._decide([replace(whole, producer_ids=(f"new-{self.now}-{n}",))])
            else:
                usage = {"connections": 1, KEYS[key].usage: amount * KEYS[key].per_unit}
                self._decide([replace(whole, usage=usage)])

    @rule(data=st.data())
    def retry(self, data: Any) -> None:
        if self.asked:
            self._decide([data.draw(st.sampled_from(self.asked[-5:]))])
            self.met["retry"] += 1

    @rule(ms=st.sampled_from((0, 1, 100, 150, 499, 1_001, 2_200, 61_000)))
    def advance(self, ms: int) -> None:
        self.now += ms

    @rule(ms=st.sampled_from((1, 300, 90_000)), ask=asks())
    def fall_back(self, ms: int, ask: Ask) -> None:
        self._decide([ask])
        self.now -= ms
        self._decide([ask])
        self.met["clock back"] += 1

    @rule(data=st.data(), key=st.sampled_from(list(KEYS)))
    def change_limit(self, data: Any, key: str) -> None:
        entity = data.draw(st.sampled_from(sorted(self.quotas[key], key=str)))
        changed = replace(self.quotas[key][entity], limit=data.draw(quotas(key, MAX_IDS)).limit)
        self.quotas = {**self.quotas, key: {**self.quotas[key], entity: changed}}

    @rule(ask=asks())
    def reset(self, ask: Ask) -> None:
        type(self).in_force = self.quotas
        for applied in applied_quotas(ask, self.quotas, RULES):
            buckets = Buckets(self.admission.circuit, self.snapshot, RULES)
            name = buckets.parse(applied.bucket)
            self.loop.run_until_complete(buckets.reset(name, applied.quota.key))
            self.oracle.reset(applied, 0)
            self.met["reset"] += 1

    @rule(
        ask=asks(),
        lease_ms=st.sampled_from((1, 50, 200, 900, 3_000)),
        parts=st.lists(st.sampled_from((0.0, 0.5, 1.0)), max_size=2),
        ms=st.sampled_from((0, 0, 1, 60, 250, 1_000)),
        enough=st.booleans(),
        whole=st.sampled_from((0, 1, 1, 20, 20)),
    )
    def lease(self, ask: Ask, lease_ms: int, parts: list[float], ms: int, enough: bool, whole: int) -> None:
        """Settle up to two leases and take a new one, perhaps from buckets that have something to share."""
        self.now += ms
        usage = {"requests": 3 * whole, "connections": 2 * whole} if whole else ask.usage or {"requests": 3}
        if enough:
            for row in KEYS.values():
                if row.usage in usage:
                    changed = {
                        entity: replace(quota, limit=20, burst=33.0, shadow=quota.shadow and not whole)
                        for entity, quota in self.quotas[row.name].items()
                    }
                    self.quotas = {**self.quotas, row.name: changed}
        if whole:
            ask = Ask({}, None, "a", "c", "10.0.0.1", "1", "L")
        wish = replace(ask, usage=usage, producer_ids=None, mode="admit", deny=True, detail=False)
        wish = replace(wish, recheck=False, cluster_action=False, at_ms=self.now)
        settled = [(self.leases.pop(), part) for part in parts if self.leases]
        self._take(wish, lease_ms, settled)

    @rule(ask=asks(), ms=st.sampled_from((49, 50, 200, 900, 3_000)), deny=st.booleans())
    def lapse(self, ask: Ask, ms: int, deny: bool) -> None:
        """Let time pass, so that leases may lapse; then ask for the usage of the last one."""
        if self.leases:
            ask = replace(self.leases[-1].ask, detail=True, mode=ask.mode)
        self.now += ms
        ask = replace(ask, producer_ids=None, usage=ask.usage or {"requests": 1}, deny=deny)
        for _ in range(3):
            self._decide([ask])

    @invariant()
    def count_step(self) -> None:
        self.met["steps"] += 1

    @classmethod
    def snapshot(cls) -> Snapshot:
        """The quotas in force."""
        return Snapshot.of(cls.in_force)

    def _decide(self, asks: Sequence[Ask]) -> None:
        asks = [replace(ask, at_ms=self.now) for ask in asks]
        type(self).in_force = self.quotas
        self.oracle.lapsed = self.lapses.units = 0.0
        got = self.loop.run_until_complete(self._decided(asks))
        for ask, decision in zip(asks, got, strict=True):
            expected = self.oracle.decide(ask, self.quotas, RULES, self.now)
            if ask.mode == "refund" and ask.id is not None:
                expected = _as_known(expected, decision)
            if decision != expected:
                raise Difference(f"{ask}\ncluster: {decision}\noracle:  {expected}")
            self.met[f"mode {ask.mode}"] += 1
            self.met["refused"] += decision.decision in {"throttle", "reject"}
            self.met["several slots"] += self._slots(ask) > 1
        if all(ask.mode != "peek" for ask in asks):
            self._compare_lapsed(asks[0])

    def _take(self, wish: Ask, lease_ms: int, settled: list[tuple[Taken, float]]) -> None:
        """Take a lease and settle others; only then compare, as the node settles first."""
        if not any(wish.usage.values()):
            return
        type(self).in_force = self.quotas
        leases, name = self.admission.leases, next(self.names).to_bytes(16, "big")
        settlements = [
            Settlement(
                leases.named(taken.name, None), {field: part * of for field, of in taken.granted.items()}
            )
            for taken, part in settled
        ]
        self.oracle.lapsed = self.lapses.units = 0.0
        got = self.loop.run_until_complete(leases.take(wish, lease_ms, settlements, ANYONE))
        ok = [
            self.oracle.settle(
                replace(taken.ask, mode="record", usage=each.spent, at_ms=self.now),
                self.quotas,
                RULES,
                self.now,
                taken.own,
            )
            for (taken, _), each in zip(settled, settlements, strict=True)
        ]
        ask = replace(wish, mode="record", deny=False)
        expected = self.oracle.lease(ask, self.quotas, RULES, self.now, name, lease_ms)
        decision = replace(got.decision, charged=bool(got.name) and got.decision.applied > 0)
        if (decision, got.granted, got.settled) != (*expected, ok):
            raise Difference(f"{wish} {settled}\ncluster: {got}\noracle:  {expected} {ok}")
        self._compare_lapsed(wish)
        if got.name is not None and got.decision.applied:
            self.leases.append(Taken(wish, got.name, name, got.granted))
        spans = self._slots(wish) > 1
        self.met["lease of several slots"] += spans and got.name is not None
        self.met["lease cut"] += spans and got.name is not None and got.granted != wish.usage
        self.met["lease refused"] += spans and got.name is None
        self.met["lease settled on the way"] += spans and any(ok)
        self.met["lease over"] += not all(ok)

    def _compare_lapsed(self, ask: Ask) -> None:
        """Compare the units of lapsed leases that the node counted."""
        if not math.isclose(self.lapses.units, self.oracle.lapsed):
            lapsed = self.lapses.units, self.oracle.lapsed
            raise Difference(f"{ask}\nlapsed on the cluster: {lapsed[0]}, in the oracle: {lapsed[1]}")
        self.met["lease lapsed"] += self.lapses.units > 0

    async def _decided(self, asks: Sequence[Ask]) -> list[Any]:
        decisions = await decisions_of(self.admission, asks)
        if (working := self.admission._refresher._working) is not None:
            await asyncio.wait({working})
        return decisions

    def _slots(self, ask: Ask) -> int:
        plan = plan_for(ask, self.quotas, RULES, SECRET)
        return 0 if plan is None else len(set(plan_slots(plan)))


def _lasting(quota: Quota) -> Quota:
    """Remove the bound on debts, because a look that refuses forgives no debt."""
    return replace(quota, max_debt=math.inf)


def _as_known(expected: Decision, decision: Decision) -> Decision:
    """Remove numbers of other slots: the home slot keeps a refund's answer before they give back."""
    verdicts = zip(expected.quotas or (), decision.quotas or (), strict=True)
    return replace(
        expected,
        quotas=tuple(
            replace(own, observed=None, remaining=None) if got.observed is None else own
            for own, got in verdicts
        ),
    )


def run(cluster: Cluster, examples: int, steps: int) -> Counter[str]:
    """Run the machine, and return which events it met how often.

    Raises:
        Difference: a node and the oracle disagreed.
    """

    class Run(SpreadMachine):
        pass

    Run.cluster, Run.nodes, Run.lapses = cluster, {}, Lapses()

    def opened(loop: asyncio.AbstractEventLoop) -> None:
        for sequential in (False, True):
            Run.nodes[sequential] = loop.run_until_complete(_open(cluster, Run, sequential=sequential))

    def closed(loop: asyncio.AbstractEventLoop) -> None:
        for node in Run.nodes.values():
            loop.run_until_complete(node.close())

    return explored(
        Run, cluster.url, examples=examples, steps=steps, shrink=False, opened=opened, closed=closed
    )


async def _open(cluster: Cluster, machine: type[SpreadMachine], *, sequential: bool) -> Admission:
    store = ClusterStore(cluster.url, caller_clock=True, sequential=sequential, logged=True, max_ids=MAX_IDS)
    admission = Admission(
        store,
        machine.snapshot,
        rules=RULES,
        secret=lambda: SECRET,
        sequential=sequential,
        budget_s=30.0,
        metrics=machine.lapses,
    )
    await admission.open()
    return admission


@pytest.mark.parametrize("steps", [QUICK_STEPS, pytest.param(STEPS, marks=pytest.mark.prove)])
@pytest.mark.timeout(3600)
def test_cluster_and_oracle_agree(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    clusters.scan_calls(monkeypatch)
    met: Counter[str] = Counter()
    with clusters.running(replicas=False) as cluster:
        while met["steps"] < steps:
            met += run(cluster, 10, 30)
    say(f"{met['steps']:,} steps, {met['several slots']:,} asks of several slots, no difference")
    if steps == STEPS:
        assert rare(met, MUST_MEET) == {}
