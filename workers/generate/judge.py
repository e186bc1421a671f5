"""Decides events in order, by the oracle's buckets with exact sets of ids, and makes the rows of the log."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from app.decision_log.batch import CHARGED, REFRESHED, SEEN, LoggedLimit, LoggedQuota, LoggedVerdict, Row
from app.decision_log.columns import quota_fields
from app.domain.ask import Ask
from app.domain.decision import Verdict, combine, is_charged
from app.domain.digest import digest
from app.domain.exact_ids import ExactIds
from app.domain.ladder import AppliedQuota
from app.domain.oracle import BucketCharge, IdsBucket, Part, RateBucket, judgement_of
from app.domain.quota import KEYS, Quota
from workers.generate import quotas
from workers.generate.traffic import LISTENER, Event

IDS: Final = quotas.quota("user=*", "producer_ids_rate")
REQUESTS: Final = quotas.quota("user=*", "request_rate")
BYTES: Final = quotas.quota("user=*", "producer_byte_rate")
BY_ADDRESS: Final = quotas.quota("ip=*", "connection_creation_rate")
BY_LISTENER: Final = quotas.quota("listener=*", "max_connection_creation_rate")

MAX_IDS: Final = 1_000_000
"""No principal of this traffic comes near this capacity, so `capacity` never occurs as a reason."""

ADMIT: Final = Ask()
"""The ask for every judgement: a bucket reads the usage from the charge."""


@dataclass(frozen=True, slots=True)
class Counted:
    """A quota as it applies to a bucket, in the forms of the domain and of a batch, and the bucket."""

    applied: AppliedQuota
    logged: LoggedQuota
    bucket: IdsBucket | RateBucket


class Judge:
    """The buckets of one node."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._buckets: dict[tuple[str, str], Counted] = {}

    def decide(
        self, event: Event, order: int, now_ms: int, places: dict[LoggedQuota, int]
    ) -> tuple[Row, list[bool]]:
        """Decide an event; returns its row, and for each id whether exact sets did not know it.

        Args:
            order: the event's place in the store's order.
            places: the index of each quota in the row's batch; the event's quotas are added.
        """
        digests = tuple([digest(self._secret, event.principal or "", each) for each in event.ids])
        usage = event.usage
        counted = [self._counted(*applied) for applied in _applied(event)]
        parts = []
        for each in counted:
            quota = each.applied.quota
            amount, spreads = (len(digests), digests) if quota is IDS else (usage[KEYS[quota.key].usage], ())
            charge = BucketCharge(quota, amount, quota.enforcement, False, now_ms, now_ms, spreads)
            parts.append(Part(each.applied, each.bucket, charge))
        verdicts = [_verdict(part) for part in parts]
        decision, throttle_ms, by = combine(verdicts)
        passes = is_charged("admit", decision)
        new, marks = _marks(parts[0], passes=passes)
        for part in parts:
            (part.bucket.charge if passes else part.bucket.touch)(part.charge)
        row = Row(
            "decision",
            now_ms,
            order,
            event.principal,
            event.client_id,
            event.ip,
            event.broker,
            LISTENER if event.broker else None,
            "admit",
            usage=usage,
            ids=b"".join(digests),
            decision=decision,
            throttle_ms=throttle_ms,
            charged=passes,
            applied=len(parts),
            source="store",
            limited_by=LoggedLimit(by.quota, by.entity, by.bucket, by.reason) if by else None,
            verdicts=[
                LoggedVerdict(
                    places.setdefault(each.logged, len(places)),
                    verdict.enforcement,
                    part.charge.usage,
                    verdict.outcome,
                    verdict.throttle_ms,
                    *part.bucket.shows(part.charge),
                    reason=verdict.reason,
                    correction=0,
                    ids=marks if part.charge.spreads else b"",
                )
                for each, part, verdict in zip(counted, parts, verdicts, strict=True)
            ],
        )
        return row, new

    def _counted(self, quota: Quota, entity: str, name: str) -> Counted:
        """A quota as it applies to the bucket of a name; a new bucket is empty."""
        found = self._buckets.get((quota.key, name))
        if found is None:
            found = self._buckets[quota.key, name] = Counted(
                AppliedQuota(quota, entity, name, ""),
                LoggedQuota(**quota_fields(quota, entity, name)),
                IdsBucket(MAX_IDS, ExactIds()) if quota is IDS else RateBucket(),
            )
        return found


def _applied(event: Event) -> Iterable[tuple[Quota, str, str]]:
    """The quotas that apply to an event, each with its entity and the name of its bucket."""
    if event.principal is None:
        return (
            (BY_ADDRESS, "ip=*", f"ip={event.ip}"),
            (BY_LISTENER, "listener=*", f"listener={LISTENER};broker={event.broker}"),
        )
    name = f"user={event.principal}"
    return (IDS, "user=*", name), (REQUESTS, "user=*", name), (BYTES, "user=*", name)


def _verdict(part: Part) -> Verdict:
    applied, judged = part.applied, judgement_of(ADMIT, part)
    return Verdict(
        applied.quota.key,
        applied.entity,
        applied.bucket,
        applied.quota.limit,
        applied.quota.enforcement,
        applied.quota.shadow,
        judged.outcome,
        judged.throttle_ms,
        reason=judged.reason,
    )


def _marks(part: Part, *, passes: bool) -> tuple[list[bool], bytes]:
    """For each id whether it is new, and its mark: charged if the ask passes, or written again if due."""
    new: list[bool] = []
    marks = bytearray()
    if isinstance(part.bucket, IdsBucket):
        state, charge, layers = part.bucket.state, part.charge, part.charge.quota.layers
        for each in charge.spreads:
            new.append(state.find(each, charge.now_ms, layers) is None)
            is_due = not new[-1] and state.stale(each, charge.now_ms, layers)
            marks.append(CHARGED if new[-1] and passes else REFRESHED if is_due else SEEN)
    return new, bytes(marks)
