"""How many look-ups of known ids nodes answer without the store, under generated traffic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest

from app.admission.known_ids.memory import Id, KnownIds
from app.domain.ask import Ask
from app.domain.entity import Entity
from app.domain.ladder import AppliedQuota, MatchingRules, applied_quotas
from app.domain.oracle import IdsBucket, Oracle, key_of
from app.domain.usage import spreads_of
from app.store.keys import bucket_key
from tests.report import say
from workers.generate.quotas import quota
from workers.generate.traffic import Event, Traffic

SECRET = bytes(32)
EVENTS = 80_000
FIRST_MS = 1_800_000_000_000


class Deployment:
    """Nodes that share the oracle instead of a store. Their clock is the time of the traffic.

    Attributes:
        alone: look-ups of ids that a node answered without the store.
        asked: look-ups of ids that went to the store, which had them.
    """

    def __init__(self, nodes: int) -> None:
        self.nodes = [KnownIds() for _ in range(nodes)]
        self.alone = self.asked = 0
        self._oracle = Oracle(SECRET)
        self._oracle.birth = b"birth"
        self._quotas = {"producer_ids_rate": {Entity.parse("user=*"): quota("user=*", "producer_ids_rate")}}

    def ask(self, node: KnownIds, event: Event) -> None:
        """Make one request at one node, and the renewals that it causes."""
        now = FIRST_MS + event.at_ms
        ask = Ask({}, event.ids, event.principal)
        (applied,) = applied_quotas(ask, self._quotas, MatchingRules())
        key, layers = bucket_key(applied), applied.quota.layers
        ids = tuple(node.unknown(key, applied, event.ids, now))
        self.alone += len(event.ids) - len(ids)
        while renewals := node.renewals(50, now, lambda applied: applied):
            for renewal in renewals:
                self._oracle.renew(Ask({}, renewal.ids, event.principal), applied, 0, b"birth", now)
                open_ms = self._open_ms(applied, renewal.ids, event, now)
                node.renewed(renewal, "admit", open_ms, now)
        if not ids:
            return
        ask = replace(ask, producer_ids=ids)
        bucket = self._bucket(applied)
        for spread in spreads_of(ask, SECRET):
            self.asked += bucket is not None and bucket.state.find(spread, now, layers) is not None
        self._oracle.decide(ask, self._quotas, MatchingRules(), now)
        if open_ms := self._open_ms(applied, ids, event, now):
            node.learn(key, applied, event.principal or "", ids, now + open_ms, now)

    def _open_ms(self, applied: AppliedQuota, ids: Sequence[Id], event: Event, now: int) -> int:
        """How long the layer that holds some ids stays open, as the store answers."""
        bucket, spreads = self._bucket(applied), spreads_of(Ask({}, tuple(ids), event.principal), SECRET)
        return 0 if bucket is None else bucket.state.open_ms(spreads, now, applied.quota.layers)

    def _bucket(self, applied: AppliedQuota) -> IdsBucket | None:
        bucket = self._oracle.buckets.get(key_of(applied))
        assert bucket is None or isinstance(bucket, IdsBucket)
        return bucket


@pytest.mark.parametrize(
    ("nodes", "routing", "at_least"), [(1, "", 0.98), (3, "by principal", 0.98), (3, "at random", 0.9)]
)
def test_known_ids_are_looked_up_without_the_store(nodes: int, routing: str, at_least: float):
    deployment, chosen = Deployment(nodes), Random(1)
    for event in Traffic(seed=1, events=EVENTS).stream(lambda _, connects: not connects):
        place = chosen.randrange(nodes) if routing == "at random" else event.rank % nodes
        deployment.ask(deployment.nodes[place], event)
    share = deployment.alone / (deployment.alone + deployment.asked)
    say(
        f"{nodes} nodes {routing}: {deployment.alone:,} alone, {deployment.asked:,} by the store, {share:.4f}"
    )
    assert share >= at_least
