"""Batches as nodes send them: plausible rows of every kind, reproducible by seed."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import msgspec
import pyarrow as pa
from msgspec.structs import replace

from app.decision_log.batch import (
    CHARGED,
    CHARGED_ASK,
    CLUSTER_ACTION,
    DENY,
    REFRESHED,
    REPLAYED,
    SEEN,
    VERSION,
    AskRow,
    FullRow,
    LoggedLimit,
    LoggedQuota,
    LoggedVerdict,
    SentBatch,
)
from app.domain.digest import digest
from app.domain.quota import PRODUCER_BYTE_RATE, PRODUCER_IDS_RATE, REQUEST_RATE
from workers.decision_log.rows import decode, table

SECRET: Final = bytes(range(32))
BEGAN_MS: Final = 1_763_719_200_000
"""2025-11-21, 10:00 UTC."""

packed = msgspec.msgpack.Encoder().encode


def table_of(*batches: SentBatch) -> pa.Table:
    """The rows that the writer makes of batches."""
    return table([decode(packed(batch)) for batch in batches])


Placing = Callable[[LoggedQuota], int]
"""Returns the place of a quota in a batch."""
ADMIT, DELAY, THROTTLE = range(3)
"""Places among the outcomes; among the kinds of an ask a decision is 0, and a lease is 2."""
UNKNOWN: Final = math.nan

_FULL_RESULT: Final = struct.Struct("<BBBdddddd")


def ids_quota(bucket: str = "") -> LoggedQuota:
    kept = ("deny", False, "cluster", 11, 1_000, 0.0, 3_600_000, 1_200_000, 4_800_000, 0)
    return LoggedQuota(PRODUCER_IDS_RATE, "user=*", bucket, 50.0, "producer_ids", *kept, applied_as="deny")


def rate_quota(key: str = REQUEST_RATE, applied_as: str = "delay") -> LoggedQuota:
    kept = ("delay", False, "cluster", 11, 1_000, 0.0, 11_000, 0, 0, 3)
    return LoggedQuota(key, "user=*", "", 1_000.5, "sampled_rate", *kept, applied_as=applied_as)


def result(
    outcome: int = ADMIT,
    wait_ms: float = 0,
    observed: float = 12.0,
    remaining: float = 38.0,
    reason: int = 0,
    clock: int = 0,
) -> bytes:
    """The store's result for one quota."""
    return _FULL_RESULT.pack(outcome, reason, clock, wait_ms, observed, remaining, 0.0, 0.0, 0.0)


def full(*results: bytes) -> bytes:
    """A full answer of the store."""
    return b"\0" + b"".join(results)


def brief(*numbers: tuple[float, float]) -> bytes:
    """A brief answer: all quotas admit."""
    return b"\3" + b"".join(struct.pack("<dd", *pair) for pair in numbers)


_ASKED: Final = AskRow(
    kind=0,
    at_ms=0,
    order=None,
    principal=None,
    client_id=None,
    ip=None,
    broker=None,
    listener=None,
    mode=0,
    flags=CHARGED_ASK,
    usage={},
    ids=b"",
    plain_ids=None,
    decision=ADMIT,
    throttle_ms=0,
    applied=0,
    source=0,
    limited_by=None,
    failure=None,
    quotas=[],
    buckets=[],
    answer=b"",
    alone=0,
    outcomes=b"",
    orders=[],
)
"""An ask without names that is admitted, as no quota applies."""


class Node:
    """Makes the batches of one node, one after another.

    Args:
        name: the node's name, with which the ids of its batches begin.
        began_ms: the time of its first row; each row is a millisecond later.
    """

    def __init__(
        self, name: str = "n1", *, seed: int = 1, began_ms: int = BEGAN_MS, people: int = 40
    ) -> None:
        self.now_ms = began_ms
        self._name = name
        self._random = random.Random(f"{seed} {name}")
        self._people = [f"principal-{number:04}" for number in range(people)]
        self._made = 0
        self._order = 0

    def batch(self, rows: int = 200) -> SentBatch:
        self._made += 1
        quotas: list[LoggedQuota] = []
        places: dict[LoggedQuota, int] = {}

        def place(quota: LoggedQuota) -> int:
            if quota not in places:
                places[quota] = len(quotas)
                quotas.append(quota)
            return places[quota]

        made = [self._row(place) for _ in range(rows)]
        return SentBatch(VERSION, f"{self._name}-{self._made:012}", self._name, self.now_ms, quotas, made)

    def batches(self, count: int, rows: int = 200) -> Iterator[SentBatch]:
        for _ in range(count):
            yield self.batch(rows)

    def _row(self, place: Placing) -> AskRow | FullRow:
        self.now_ms += 1
        self._order += 128
        kind = self._random.random()
        if kind < 0.8:
            return self._decision(place)
        if kind < 0.85:
            return self._known(place)
        if kind < 0.9:
            return self._lease(place)
        if kind < 0.95:
            return self._fallback(place)
        if kind < 0.98:
            return self._charged(place)
        return self._change()

    def _decision(self, place: Placing) -> AskRow:
        chance = self._random
        who = chance.choice(self._people)
        ids = [chance.randrange(200) for _ in range(chance.randrange(1, 4))]
        marks = bytes(chance.choices((SEEN, CHARGED, REFRESHED), (90, 5, 5), k=len(ids)))
        delayed, replayed = chance.random() < 0.1, chance.random() < 0.05
        rate = result(DELAY, 250, 1_003.25, 0.0) if delayed else result(observed=3.5)
        if not delayed:
            rate = result(observed=3.5, clock=chance.choice((0, 0, 0, 1)))
        answer = full(result(clock=4 * 2), rate, result(observed=9.5, remaining=100.0))
        return AskRow(
            kind=0,
            at_ms=self.now_ms,
            order=self._order,
            principal=who,
            client_id=chance.choice((None, "", "etl", "консьюмер-1")),
            ip=chance.choice((None, "10.0.0.7")),
            broker=chance.choice((None, "1")),
            listener=None,
            mode=0,
            flags=CHARGED_ASK | DENY * chance.choice((0, 1)) | CLUSTER_ACTION | REPLAYED * replayed,
            usage={"producer_ids": float(len(ids)), "requests": 1.0, "produce_bytes": 2_048.0},
            ids=_digests(who, ids),
            plain_ids=chance.choice((None, [str(one) for one in ids])),
            decision=DELAY if delayed else ADMIT,
            throttle_ms=250 if delayed else 0,
            applied=3,
            source=0,
            limited_by=LoggedLimit(REQUEST_RATE, "user=*", f"user={who}", None) if delayed else None,
            failure=None,
            quotas=[] if replayed else _three(place),
            buckets=[] if replayed else [f"user={who}"] * 3,
            answer=b"" if replayed else answer,
            alone=0,
            outcomes=marks,
            orders=chance.choice(([], [self._order, self._order + 1, None])) if not replayed else [],
        )

    def _known(self, place: Placing) -> AskRow:
        """An ask with ids that the node knew, with or without another quota."""
        who, is_mixed = self._random.choice(self._people), self._random.random() < 0.5
        quotas = [place(ids_quota()), place(rate_quota(applied_as="deny"))][: 1 + is_mixed]
        return replace(
            _ASKED,
            at_ms=self.now_ms,
            order=self._order if is_mixed else None,
            principal=who,
            usage={"requests": 2.0} if is_mixed else {},
            ids=_digests(who, [7, 8]),
            applied=len(quotas),
            source=0 if is_mixed else 1,
            quotas=quotas,
            buckets=[f"user={who}"] * len(quotas),
            answer=brief((2.0, 998.5)) if is_mixed else b"",
            alone=1,
            known=(self.now_ms + 1_000, 128),
        )

    def _lease(self, place: Placing) -> AskRow:
        who = self._random.choice(self._people)
        return replace(
            _ASKED,
            kind=2,
            at_ms=self.now_ms,
            order=self._order,
            principal=who,
            flags=CHARGED_ASK | DENY,
            usage={"requests": 5.0},
            applied=1,
            quotas=[place(rate_quota(applied_as="deny"))],
            buckets=[f"user={who};broker=1"],
            answer=full(result()),
            lease=(bytes(16), 900),
        )

    def _fallback(self, place: Placing) -> AskRow:
        who = self._random.choice(self._people)
        return replace(
            _ASKED,
            at_ms=self.now_ms,
            principal=who,
            flags=0,
            usage={"requests": 1.0},
            decision=THROTTLE,
            throttle_ms=1_000,
            applied=1,
            source=2,
            limited_by=LoggedLimit(REQUEST_RATE, None, None, "store_failure"),
            failure="budget",
            quotas=[place(rate_quota())],
            buckets=[f"user={who}"],
            answer=full(result(THROTTLE, 1_000, UNKNOWN, UNKNOWN, 3)),
        )

    def _charged(self, place: Placing) -> FullRow:
        who = self._random.choice(self._people)
        quota = place(ids_quota(f"user={who}"))
        verdict = LoggedVerdict(quota, "deny", 1.0, "admit", 0, None, None, None, 0, bytes((CHARGED,)))
        one = digest(SECRET, who, self._random.randrange(200))
        return FullRow("ids", self.now_ms, self._order, principal=who, ids=one, verdicts=[verdict])

    def _change(self) -> FullRow:
        return FullRow(
            "quota",
            self.now_ms,
            what="user=*",
            before=None,
            after='{"producer_ids_rate":{"limit":50}}',
            who="admin",
            version=self._made,
        )


def _three(place: Placing) -> list[int]:
    return [place(each) for each in (ids_quota(), rate_quota(), rate_quota(PRODUCER_BYTE_RATE))]


def _digests(who: str, ids: Sequence[int]) -> bytes:
    return b"".join(digest(SECRET, who, one) for one in ids)
