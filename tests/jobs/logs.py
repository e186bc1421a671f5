"""Small decision logs: random asks, decided by the domain's oracle, in files as the writer makes them."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from app.domain.ask import Ask
from app.domain.decision import Decision, Verdict
from app.domain.digest import digest
from app.domain.entity import Entity
from app.domain.ladder import AppliedQuota, MatchingRules, applied_quotas
from app.domain.oracle import IdsBucket, Oracle, corrected_now
from app.domain.quota import Layers, Quota
from app.domain.usage import enforcement_of, ids_of, spreads_of, usage_of
from workers.decision_log.schema import SCHEMA, partition

SECRET = b"0123456789abcdef0123456789abcdef"
START_MS = 1_795_255_200_000  # 2026-11-21T10:00:00Z
ROWS_OF_A_BATCH = 100

Quotas = dict[str, dict[Entity, Quota]]
Row = dict[str, Any]


def quotas(ids_window_ms: int = 60_000) -> Quotas:
    """Quotas of every key and every algorithm, so low that each of them refuses some asks."""
    user, client, pair = (
        Entity.parse("user=*"),
        Entity.parse("client-id=*"),
        Entity.parse("user=*,client-id=*"),
    )
    layers = Layers.named("layered", ids_window_ms)
    rate = {"algorithm": "sampled_rate", "enforcement": "delay"}
    return {
        "producer_ids_rate": {
            user: Quota(
                "producer_ids_rate", 40, "producer_ids", "deny", window_ms=ids_window_ms, layers=layers
            )
        },
        "request_rate": {
            user: Quota("request_rate", 5, **rate),  # type: ignore[arg-type]
            Entity.parse("ip=*"): Quota("request_rate", 20, **rate, shadow=True),  # type: ignore[arg-type]
        },
        "request_percentage": {pair: Quota("request_percentage", 30, **rate)},  # type: ignore[arg-type]
        "producer_byte_rate": {user: Quota("producer_byte_rate", 20_000, **rate)},  # type: ignore[arg-type]
        "consumer_byte_rate": {client: Quota("consumer_byte_rate", 30_000, "sampled_rate", "deny")},
        "controller_mutation_rate": {
            user: Quota("controller_mutation_rate", 2.5, "token_bucket", "deny", burst=20, max_debt=5.0)
        },
        "connection_creation_rate": {
            Entity.parse("ip=*"): Quota("connection_creation_rate", 3, "sampled_rate", "deny")
        },
        "max_connection_creation_rate": {
            Entity.parse("listener=*"): Quota(
                "max_connection_creation_rate", 8, "sampled_rate", "delay", scope="broker"
            )
        },
    }


def asks(seed: int, principals: Sequence[str]) -> Iterator[Ask]:
    """An endless series of asks: the first principals ask most, and ids are used again for a while."""
    dice = random.Random(seed)
    weights = [1 / (place + 1) for place in range(len(principals))]
    in_use: dict[str, list[int]] = {each: [] for each in principals}
    number = 0
    while True:
        principal = dice.choices(principals, weights)[0]
        mode = dice.choices(("admit", "record", "peek", "refund"), (90, 4, 4, 2))[0]
        usage: dict[str, float] = {}
        for name, most in (("requests", 3), ("produce_bytes", 20_000), ("request_time_ms", 400)):
            if dice.random() < 0.5:
                usage[name] = dice.randint(0, most)
        if dice.random() < 0.2:
            usage["fetch_bytes"] = dice.choice((0, 1_000, 60_000, 500_000))
        if dice.random() < 0.2:
            usage["mutations"] = dice.choice((0, 1, 4, 25))
        if dice.random() < 0.2:
            usage["connections"] = 1
        ids: tuple[int, ...] | None = None
        if mode != "refund" and dice.random() < 0.6:
            mine = in_use[principal]
            fresh = [number * 10 + each for each in range(dice.choice((0, 1, 1, 1, 2, 5, 45)))]
            ids = tuple(dict.fromkeys([*fresh[:50], *dice.sample(mine, min(len(mine), 2)), -1]))
            mine.extend(fresh[:3])
            del mine[:-30]
        number += 1
        yield Ask(
            usage,
            ids,
            principal if dice.random() < 0.95 else None,
            dice.choice(("etl", "app", "", None)),
            f"10.0.0.{dice.randint(1, 4)}" if dice.random() < 0.6 else None,
            dice.choice(("1", "2", None)),
            dice.choice(("CLIENT", None)),
            mode,  # type: ignore[arg-type]
            deny=dice.random() < 0.05,
            recheck=dice.random() < 0.2,
            detail=True,
        )


@dataclass
class OracleLog:
    """A log of the decisions of an oracle.

    Attributes:
        order: the order of the next ask; a call has several asks.
    """

    oracle: Oracle
    quotas: Quotas = field(default_factory=quotas)
    now_ms: int = START_MS
    rows: list[Row] = field(default_factory=list)
    order: int = 128
    batch: int = 0

    def ask(self, ask: Ask, **changed: Any) -> Decision:
        """Decide an ask and log its row; ``changed`` are columns to replace."""
        found = applied_quotas(ask, self.quotas, MatchingRules())
        if ask.principal is None and ask.producer_ids is not None:
            ask = replace(ask, producer_ids=None)
            found = applied_quotas(ask, self.quotas, MatchingRules())
        before = self._before(ask, found)
        decision = self.oracle.decide(ask, self.quotas, MatchingRules(), self.now_ms)
        assert decision.quotas is not None
        pairs = zip(found, decision.quotas, before, strict=True)
        row = self._row(ask, decision) | {"verdicts": [self._verdict(ask, decision, *each) for each in pairs]}
        if decision.source == "local":
            row |= {"order": None}
        self.rows.append(row | changed)
        self.order += 1 if self.order % 128 < 15 else 128 - self.order % 128
        return decision

    def charge_in_vain(self, ask: Ask) -> Callable[[], None]:
        """Charge an ask that another slot of a cluster refuses; return a function that undoes the charges."""
        applied = applied_quotas(ask, self.quotas, MatchingRules())
        decision = self.oracle.decide(ask, self.quotas, MatchingRules(), self.now_ms)
        assert decision.charged
        stamps = [self.oracle.stamp(each, self.now_ms) for each in applied]
        for found, stamp in zip(applied, stamps, strict=True):
            self._add_undone("undone", ask, found, int(stamp.at_ms), stamp.taken)

        def undo() -> None:
            for found, stamp in zip(applied, stamps, strict=True):
                given = self.oracle.undo(found, stamp, self.now_ms)
                self._add_undone("undo", ask, found, int(stamp.at_ms), given)

        return undo

    def _add_undone(self, kind: str, ask: Ask, found: AppliedQuota, at_ms: int, units: float) -> None:
        said = Verdict(
            found.quota.key,
            found.entity,
            found.bucket,
            0.0,
            "deny",
            shadow=False,
            outcome="admit",
            throttle_ms=0,
        )
        verdict = self._verdict(
            ask, Decision("admit", 0, True, 1, "store", None), found, said, (0, set(), set())
        )
        verdict |= {"usage": units, "bucket_order": self.order}
        named = {"principal": ask.principal, "mode": ask.mode, "source": "store", "replayed": False}
        self.add(kind=kind, at_ms=at_ms, order=self.order, verdicts=[verdict], **named)
        self.order += 128 - self.order % 128

    def run(self, asks: Iterator[Ask], count: int, gap_ms: Sequence[int], seed: int = 0) -> None:
        """Decide a number of asks with gaps between them; a gap below 0 sets the clock back."""
        dice = random.Random(seed)
        for _ in range(count):
            self.now_ms += dice.choice(gap_ms)
            self.ask(next(asks))

    def add(self, **columns: Any) -> None:
        """Log a row of another kind."""
        self.rows.append(self._empty() | columns)

    def write(self, folder: Path, rows: Sequence[Row] | None = None, name: str = "part") -> Path:
        """Write rows, by default all, as the log's writer does."""
        for hour, mine in _by_hour(self.rows if rows is None else rows).items():
            path = folder / hour / f"{name}.parquet"
            path.parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(pa.Table.from_pylist(mine, schema=SCHEMA), path)
        return folder

    def _before(self, ask: Ask, found: Sequence[AppliedQuota]) -> list[tuple[int, set[bytes], set[bytes]]]:
        """For each bucket, before the ask: its clock correction, and which ids are unseen or stale."""
        looked = []
        for each in found:
            quota = each.quota
            bucket = self.oracle.buckets.get((quota.key, each.bucket, quota.identity, quota.epoch))
            correction, unseen, stale = 0, set(spreads_of(ask, SECRET)), set()
            if bucket is not None and bucket.newest_ms is not None and self.now_ms < bucket.newest_ms:
                bucket = copy.deepcopy(bucket)
                at = corrected_now(ask.mode, quota, bucket, self.now_ms)
                correction = 2 if at == self.now_ms else 1
            else:
                at = self.now_ms
            if isinstance(bucket, IdsBucket):
                unseen = {s for s in unseen if bucket.state.find(s, at, quota.layers) is None}
                known = set(spreads_of(ask, SECRET)) - unseen
                stale = {s for s in known if bucket.state.stale(s, at, quota.layers)}
            looked.append((correction, unseen, stale))
        return looked

    def _verdict(
        self,
        ask: Ask,
        decision: Decision,
        found: AppliedQuota,
        verdict: Verdict,
        before: tuple[int, set[bytes], set[bytes]],
    ) -> Row:
        quota = found.quota
        correction, unseen, stale = before
        charged = refreshed = None
        if quota.algorithm == "producer_ids":
            spreads = dict(zip(spreads_of(ask, SECRET), _digests(ask), strict=True))
            wrote = ask.mode in {"admit", "record"}
            charged = [spreads[s] for s in spreads if s in unseen and wrote and decision.charged]
            refreshed = [spreads[s] for s in spreads if s in stale and wrote]
        return {
            "quota": quota.key,
            "entity": found.entity,
            "bucket": found.bucket,
            "limit": float(quota.limit),
            "algorithm": quota.algorithm,
            "enforcement": enforcement_of(ask, quota),
            "shadow": quota.shadow,
            "scope": quota.scope,
            "samples": quota.samples,
            "sample_ms": quota.sample_ms,
            "burst": float(quota.burst),
            "window_ms": quota.window_ms,
            "interval_ms": quota.layers.interval_ms,
            "ttl_ms": quota.layers.ttl_ms,
            "epoch": quota.epoch,
            "max_debt": quota.max_debt if isfinite(quota.max_debt) else None,
            "usage": float(usage_of(ask, quota)),
            "outcome": verdict.outcome,
            "throttle_ms": verdict.throttle_ms,
            "observed": verdict.observed,
            "remaining": verdict.remaining,
            "reason": verdict.reason,
            "correction": correction,
            "charged_ids": charged,
            "refreshed_ids": refreshed,
            "bucket_order": None,
        }

    def _row(self, ask: Ask, decision: Decision) -> Row:
        by = decision.limited_by
        return self._empty() | {
            "kind": "decision",
            "order": self.order,
            "principal": ask.principal,
            "client_id": ask.client_id,
            "ip": ask.ip,
            "broker": ask.broker,
            "listener": ask.listener,
            "mode": ask.mode,
            "deny": ask.deny,
            "recheck": ask.recheck,
            "usage": dict(ask.usage),
            "ids": None if ask.producer_ids is None else _digests(ask),
            "decision": decision.decision,
            "throttle_ms": decision.throttle_ms,
            "charged": decision.charged,
            "applied": decision.applied,
            "source": decision.source,
            "limited_by": by
            and {"quota": by.quota, "entity": by.entity, "bucket": by.bucket, "reason": by.reason},
        }

    def _empty(self) -> Row:
        batch, place = divmod(self.batch, ROWS_OF_A_BATCH)
        self.batch += 1
        return {
            **dict.fromkeys(SCHEMA.names),
            "batch": f"n-{batch:012d}",
            "place": place,
            "node": "n",
            "at_ms": self.now_ms,
            "deny": False,
            "recheck": False,
            "cluster_action": False,
            "usage": {},
            "throttle_ms": 0,
            "charged": False,
            "applied": 0,
            "replayed": False,
        }


def _digests(ask: Ask) -> list[int]:
    found = (digest(SECRET, ask.principal or "", each) for each in ids_of(ask))
    return [int.from_bytes(each, "big", signed=True) for each in found]


def _by_hour(rows: Sequence[Row]) -> Mapping[str, list[Row]]:
    hours: dict[str, list[Row]] = {}
    for row in rows:
        hours.setdefault(partition(row["at_ms"]), []).append(row)
    return hours
