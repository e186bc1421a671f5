"""Decides events in order, and gathers the rows that a node would log."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from app.domain.decision import Verdict, combine
from app.domain.digest import digest
from app.domain.exact_ids import ExactIds
from app.domain.oracle import BucketCharge, RateBucket
from app.domain.quota import RECHECK_MS, Quota
from app.domain.sampled_rate import Samples
from workers.generate import quotas
from workers.generate.columns import NONE, OUTCOME, Columns
from workers.generate.exact import charge, delayed, judged, shown, touched
from workers.generate.traffic import LISTENER, Event

IDS: Final = quotas.quota("user=*", "producer_ids_rate")
REQUESTS: Final = quotas.quota("user=*", "request_rate")
BYTES: Final = quotas.quota("user=*", "producer_byte_rate")
BY_ADDRESS: Final = quotas.quota("ip=*", "connection_creation_rate")
BY_LISTENER: Final = quotas.quota("listener=*", "max_connection_creation_rate")


class EventOutcome(NamedTuple):
    """The decision on an event, and the digests of its ids: all, the new ones, and the charged ones."""

    decision: str
    digests: list[bytes]
    unseen: list[bytes]
    charged: list[bytes]


@dataclass(slots=True)
class Principal:
    """One principal's buckets, and the places of its quotas in the log."""

    ids: ExactIds
    quotas: tuple[int, int, int]
    requests: Samples = ()
    bytes: Samples = ()


class Judge:
    """The buckets of one node; ``columns`` gathers the rows."""

    def __init__(self, columns: Columns, secret: bytes) -> None:
        self.columns = columns
        self._secret = secret
        self._principals: dict[str, Principal] = {}
        self._addresses: dict[str, tuple[RateBucket, int]] = {}
        self._listeners: dict[str, tuple[RateBucket, int]] = {}

    def decide(self, event: Event, now_ms: int) -> EventOutcome:
        """Decide an event and gather its row, except for its batch and order."""
        self._whose(event, now_ms)
        if event.principal is None:
            return self._connection(event, now_ms)
        return self._batch(event, event.principal, now_ms)

    def _whose(self, event: Event, now_ms: int) -> None:
        rows, names = self.columns, self.columns.names
        rows.at_ms.append(now_ms)
        for column, name in (
            (rows.principal, event.principal),
            (rows.client_id, event.client_id),
            (rows.ip, event.ip),
            (rows.broker, event.broker),
            (rows.listener, LISTENER if event.broker else None),
        ):
            column.append(NONE if name is None else names.of(name))

    def _batch(self, event: Event, principal: str, now_ms: int) -> EventOutcome:
        rows, whose = self.columns, self._principal(principal)
        digests = [digest(self._secret, principal, each) for each in event.ids]
        ids = judged(IDS, whose.ids, digests, now_ms)
        requests = delayed(REQUESTS, whose.requests, 1, now_ms)
        bytes_ = delayed(BYTES, whose.bytes, event.produce_bytes, now_ms)
        refreshed = touched(IDS, whose.ids, ids.seen, now_ms)
        refused = ids.outcome != "admit"
        if refused:
            charged: list[bytes] = []
            decision, throttle_ms, by = ids.outcome, ids.throttle_ms, whose.quotas[0]
            shows = (
                shown(REQUESTS, whose.requests, now_ms),
                shown(BYTES, whose.bytes, now_ms),
            )
        else:
            charged = ids.unseen
            charge(IDS, whose.ids, charged, now_ms)
            whose.requests, whose.bytes = requests.after, bytes_.after
            throttle_ms = max(requests.throttle_ms, bytes_.throttle_ms)
            decision = "delay" if throttle_ms else "admit"
            by = NONE
            if throttle_ms:
                by = whose.quotas[1 if requests.throttle_ms == throttle_ms else 2]
            shows = ((requests.observed, requests.remaining), (bytes_.observed, bytes_.remaining))
        counted = whose.ids.charged(now_ms, IDS.window_ms)
        rows.ids.add(digests)
        rows.usage_names += ("requests", "produce_bytes")
        rows.usage_values.extend((1, event.produce_bytes))
        rows.usage_sizes.append(2)
        rows.verdict(
            whose.quotas[0],
            len(digests),
            ids.outcome,
            ids.throttle_ms,
            (counted, IDS.limit - counted),
            ids.reason,
            charged,
            refreshed,
        )
        for place, usage, verdict, show in (
            (1, 1, requests, shows[0]),
            (2, event.produce_bytes, bytes_, shows[1]),
        ):
            outcome = "delay" if verdict.throttle_ms else "admit"
            rows.verdict(whose.quotas[place], usage, outcome, verdict.throttle_ms, show)
        self._decided(decision, throttle_ms, by, NONE if ids.reason is None else 0, verdicts=3)
        return EventOutcome(decision, digests, ids.unseen, charged)

    def _connection(self, event: Event, now_ms: int) -> EventOutcome:
        """Decide with the oracle, which is fast enough for the few connections."""
        assert event.ip is not None
        assert event.broker is not None
        rows = self.columns
        parts = [
            (*self._bucket(self._addresses, BY_ADDRESS, "ip=*", f"ip={event.ip}"), BY_ADDRESS),
            (
                *self._bucket(
                    self._listeners, BY_LISTENER, "listener=*", f"listener={LISTENER};broker={event.broker}"
                ),
                BY_LISTENER,
            ),
        ]
        verdicts = []
        for bucket, place, quota in parts:
            result = bucket.judge(_one_connection(quota, now_ms))
            throttle_ms = min(result.throttle_ms, RECHECK_MS) if quota is BY_ADDRESS else result.throttle_ms
            verdicts.append(
                Verdict(
                    quota=quota.key,
                    entity="",
                    bucket=str(place),  # for limited_by
                    limit=quota.limit,
                    enforcement=quota.enforcement,
                    shadow=False,
                    outcome=result.outcome,
                    throttle_ms=throttle_ms,
                )
            )
        decision, throttle_ms, limited_by = combine(verdicts)
        if decision in ("admit", "delay"):
            for bucket, _, quota in parts:
                bucket.charge(_one_connection(quota, now_ms))
        for (bucket, place, quota), verdict in zip(parts, verdicts, strict=True):
            shows = bucket.shows(_one_connection(quota, now_ms))
            rows.verdict(place, 1, verdict.outcome, verdict.throttle_ms, shows)
        rows.ids.add(None)
        rows.usage_names.append("connections")
        rows.usage_values.append(1)
        rows.usage_sizes.append(1)
        by = NONE if limited_by is None or limited_by.bucket is None else int(limited_by.bucket)
        self._decided(decision, throttle_ms, by, NONE, verdicts=2)
        return EventOutcome(decision, [], [], [])

    def _decided(self, decision: str, throttle_ms: int, by: int, why: int, *, verdicts: int) -> None:
        rows = self.columns
        rows.decision.append(OUTCOME[decision])
        rows.throttle_ms.append(throttle_ms)
        rows.charged.append(decision in ("admit", "delay"))
        rows.limited_by.append(by)
        rows.limited_why.append(why)
        rows.verdicts.append(verdicts)

    def _principal(self, name: str) -> Principal:
        found = self._principals.get(name)
        if found is None:
            add, bucket = self.columns.quotas.add, f"user={name}"
            places = (
                add(IDS, "user=*", bucket),
                add(REQUESTS, "user=*", bucket),
                add(BYTES, "user=*", bucket),
            )
            found = self._principals[name] = Principal(ExactIds(), places)
        return found

    def _bucket(
        self, buckets: dict[str, tuple[RateBucket, int]], quota: Quota, entity: str, name: str
    ) -> tuple[RateBucket, int]:
        found = buckets.get(name)
        if found is None:
            found = buckets[name] = (RateBucket(), self.columns.quotas.add(quota, entity, name))
        return found


def _one_connection(quota: Quota, now_ms: int) -> BucketCharge:
    return BucketCharge(
        quota, usage=1, enforcement=quota.enforcement, recording=False, now_ms=now_ms, wait_from_ms=now_ms
    )
