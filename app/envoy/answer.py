"""A decision as the answer to Envoy: one status for each descriptor, and the headers of a refusal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from google.protobuf.duration_pb2 import Duration

from app.admission.plan import PlannedAsk
from app.domain.decision import Decision, Verdict
from app.envoy.protos.ratelimit_pb2 import HeaderValue, RateLimitResponse
from app.http.ratelimit import decision_fields, left
from app.store.port import Charge

OK: Final = RateLimitResponse.OK
OVER_LIMIT: Final = RateLimitResponse.OVER_LIMIT
Status = RateLimitResponse.DescriptorStatus

MOST: Final = 2**32 - 1
"""The largest number in a status; larger numbers are reported as this one."""
UNITS: Final = {
    1: RateLimitResponse.RateLimit.SECOND,
    60: RateLimitResponse.RateLimit.MINUTE,
    3_600: RateLimitResponse.RateLimit.HOUR,
    86_400: RateLimitResponse.RateLimit.DAY,
    604_800: RateLimitResponse.RateLimit.WEEK,
    2_592_000: RateLimitResponse.RateLimit.MONTH,
    31_536_000: RateLimitResponse.RateLimit.YEAR,
}
"""Envoy's units by their seconds; a window of another length is of an unknown unit."""


def response(decision: Decision, parts: Sequence[PlannedAsk | None]) -> RateLimitResponse:
    """Return the answer to a request.

    Args:
        parts: the decided ask of each descriptor; None for one that names nothing to limit.
    """
    if decision.decision == "admit":
        return RateLimitResponse(overall_code=OK, statuses=map(_status, parts))
    refused, part_decision = _deciding(decision, filter(None, parts))
    return RateLimitResponse(
        overall_code=OVER_LIMIT,
        statuses=map(_status, parts),
        response_headers_to_add=[
            HeaderValue(key=name.decode(), value=value.decode())
            for name, value in decision_fields(
                part_decision,
                refused.charges,
                [verdict.remaining for verdict in part_decision.quotas or ()],
            )
        ],
    )


def _deciding(decision: Decision, parts: Iterable[PlannedAsk]) -> tuple[PlannedAsk, Decision]:
    """Return the first part with the outcome and the wait of the whole, and its decision."""
    whole = decision.decision, decision.throttle_ms
    decided_parts = ((part, part.decision) for part in parts if part.decision is not None)
    return next(each for each in decided_parts if (each[1].decision, each[1].throttle_ms) == whole)


def _status(part: PlannedAsk | None) -> Status:
    decision = None if part is None else part.decision
    if part is None or decision is None or (not part.charges and decision.decision == "admit"):
        return Status(code=OK, limit_remaining=MOST)
    verdicts = decision.quotas or ()
    is_over = decision.decision != "admit"
    status = Status(code=OVER_LIMIT if is_over else OK)
    shown = _shown(list(zip(verdicts, part.charges, strict=True)), is_over=is_over)
    if shown is not None:
        verdict, charge = shown
        units, span_s = charge.compiled.allowance
        status.current_limit.requests_per_unit = min(units, MOST)
        status.current_limit.unit = UNITS.get(span_s, RateLimitResponse.RateLimit.UNKNOWN)
        status.current_limit.name = verdict.quota
        status.limit_remaining = min(left(verdict.remaining or 0), MOST)
        status.duration_until_reset.seconds = span_s
    if decision.throttle_ms:
        status.duration_until_reset.CopyFrom(_duration(decision.throttle_ms))
    return status


def _shown(judged: Sequence[tuple[Verdict, Charge]], *, is_over: bool) -> tuple[Verdict, Charge] | None:
    """Return the verdict that a status is about: the one that refuses longest, or that has the least left.

    For an admitted request without the store it returns None: the units left are unknown.
    """
    binding = [each for each in judged if not each[0].shadow] or judged
    if is_over:
        refusing = [each for each in binding if each[0].outcome in ("throttle", "reject")]
        return max(
            refusing, key=lambda each: (each[0].outcome == "reject", each[0].throttle_ms), default=None
        )
    known = [each for each in binding if each[0].remaining is not None]
    return min(known, key=lambda each: each[0].remaining or 0, default=None)


def _duration(ms: int) -> Duration:
    return Duration(seconds=ms // 1000, nanos=ms % 1000 * 1_000_000)
