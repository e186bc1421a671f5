"""Batches as nodes send them: plausible rows of every kind, reproducible by seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Final

import msgspec

from app.decision_log.batch import (
    CHARGED,
    REFRESHED,
    SEEN,
    VERSION,
    Batch,
    LoggedLimit,
    LoggedQuota,
    LoggedVerdict,
    Row,
)
from app.domain.digest import digest
from app.domain.quota import PRODUCER_BYTE_RATE, PRODUCER_IDS_RATE, REQUEST_RATE

SECRET: Final = bytes(range(32))
BEGAN_MS: Final = 1_763_719_200_000
"""2025-11-21, 10:00 UTC."""

packed = msgspec.msgpack.Encoder().encode


def ids_quota(principal: str) -> LoggedQuota:
    entity = f"user={principal}"
    kept = ("deny", False, "cluster", 11, 1_000, 0.0, 3_600_000, 1_200_000, 4_800_000, 0)
    return LoggedQuota(PRODUCER_IDS_RATE, "user=*", entity, 50.0, "producer_ids", *kept)


def rate_quota(principal: str, key: str = REQUEST_RATE) -> LoggedQuota:
    entity = f"user={principal}"
    kept = ("delay", False, "cluster", 11, 1_000, 0.0, 11_000, 0, 0, 3)
    return LoggedQuota(key, entity, entity, 1_000.5, "sampled_rate", *kept)


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

    def batch(self, rows: int = 200) -> Batch:
        self._made += 1
        quotas: list[LoggedQuota] = []
        places: dict[LoggedQuota, int] = {}

        def place(quota: LoggedQuota) -> int:
            if quota not in places:
                places[quota] = len(quotas)
                quotas.append(quota)
            return places[quota]

        made = [self._row(place) for _ in range(rows)]
        return Batch(VERSION, f"{self._name}-{self._made:012}", self._name, self.now_ms, quotas, made)

    def batches(self, count: int, rows: int = 200) -> Iterator[Batch]:
        for _ in range(count):
            yield self.batch(rows)

    def _row(self, place) -> Row:
        self.now_ms += 1
        self._order += 128
        kind = self._random.random()
        if kind < 0.9:
            return self._decision(place)
        if kind < 0.95:
            return self._fallback()
        if kind < 0.98:
            return self._charged(place)
        return self._change()

    def _decision(self, place) -> Row:
        chance = self._random
        who = chance.choice(self._people)
        ids = [chance.randrange(200) for _ in range(chance.randrange(1, 4))]
        marks = bytes(chance.choices((SEEN, CHARGED, REFRESHED), (90, 5, 5), k=len(ids)))
        delayed = chance.random() < 0.1
        verdicts = [
            LoggedVerdict(place(ids_quota(who)), "deny", len(ids), "admit", 0, 12.0, 38.0, None, 0, marks),
            LoggedVerdict(
                place(rate_quota(who)),
                "delay",
                1.0,
                "delay" if delayed else "admit",
                250 if delayed else 0,
                1_003.25,
                None,
                None,
                chance.choice((0, 0, 0, 1)),
                b"",
            ),
            LoggedVerdict(
                place(rate_quota(who, PRODUCER_BYTE_RATE)),
                "delay",
                2_048.0,
                "admit",
                0,
                9.5,
                100.0,
                None,
                0,
                b"",
            ),
        ]
        return Row(
            "decision",
            self.now_ms,
            self._order,
            principal=who,
            client_id=chance.choice((None, "", "etl", "консьюмер-1")),
            ip=chance.choice((None, "10.0.0.7")),
            broker=chance.choice((None, "1")),
            mode="admit",
            usage={"producer_ids": float(len(ids)), "requests": 1.0, "produce_bytes": 2_048.0},
            ids=b"".join(digest(SECRET, who, one) for one in ids),
            plain_ids=chance.choice((None, [str(one) for one in ids])),
            decision="delay" if delayed else "admit",
            throttle_ms=250 if delayed else 0,
            charged=True,
            applied=3,
            source="store",
            limited_by=LoggedLimit(REQUEST_RATE, f"user={who}", f"user={who}", None) if delayed else None,
            verdicts=verdicts,
        )

    def _fallback(self) -> Row:
        who = self._random.choice(self._people)
        return Row(
            "decision",
            self.now_ms,
            principal=who,
            mode="admit",
            usage={"requests": 1.0},
            decision="throttle",
            throttle_ms=1_000,
            source="fallback",
            failure="budget",
            limited_by=LoggedLimit(REQUEST_RATE, None, None, "store_failure"),
        )

    def _charged(self, place) -> Row:
        who = self._random.choice(self._people)
        quota = place(ids_quota(who))
        verdict = LoggedVerdict(quota, "deny", 1.0, "admit", 0, None, None, None, 0, bytes((CHARGED,)))
        one = digest(SECRET, who, self._random.randrange(200))
        return Row("ids", self.now_ms, self._order, principal=who, ids=one, verdicts=[verdict])

    def _change(self) -> Row:
        return Row(
            "quota",
            self.now_ms,
            what="user=*",
            before=None,
            after='{"producer_ids_rate":{"limit":50}}',
            who="admin",
            version=self._made,
        )
