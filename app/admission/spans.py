"""Spans of decisions: which decisions get one, by the variables of OpenTelemetry, and its contents.

The SDK's own samplers take a microsecond, a tenth of a decision, so the standard ones are here as arithmetic.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from random import getrandbits
from time import monotonic, time_ns
from typing import Final, NamedTuple, Self

import structlog

from app.admission.plan import PlannedAsk
from app.domain.caller import Caller

MOST_A_SECOND: Final = 100
"""The most spans of one process within any second."""
MAX_TEXT: Final = 256
"""Entities with more characters are replaced by a digest; two names of 512 bytes can take 3 KB."""

DEFAULT_SAMPLER: Final = "parentbased_always_on"
RATIO: Final = "traceidratio"
BY_PARENT: Final = "parentbased_"
LOW: Final = (1 << 64) - 1
"""The part of a trace id that is compared with a bound."""

_TRACEPARENT: Final = re.compile(
    rb"(?:(?P<first>00)|(?!00|ff)[0-9a-f]{2})-(?P<trace>(?!0{32})[0-9a-f]{32})-(?P<span>(?!0{16})[0-9a-f]{16})"
    rb"-[0-9a-f](?P<flag>[0-9a-f])(?(first)|(?:-.*)?)"
)
"""Later versions than the first may have more fields."""
_SAMPLED: Final = frozenset(b"%x" % digit for digit in range(1, 16, 2))

log: Final = structlog.get_logger("quotagate.traces")


class Parent(NamedTuple):
    """The span of a caller, in which it asked."""

    trace_id: int
    span_id: int
    is_sampled: bool


class DecisionSpan(NamedTuple):
    """The span of one decision; times are of the wall clock."""

    trace_id: int
    span_id: int
    parent: Parent | None
    start_ns: int
    end_ns: int
    attributes: Mapping[str, str | int]


class Sampling(NamedTuple):
    """A standard sampler of OpenTelemetry.

    Attributes:
        bound: a trace is sampled if the lower 64 bits of its id are below this.
        is_by_parent: whether the sampled flag of a caller decides instead, if the caller has a key.
    """

    bound: int
    is_by_parent: bool

    @classmethod
    def of(cls, name: str, argument: str) -> Self:
        """Return the sampler by ``OTEL_TRACES_SAMPLER`` and ``OTEL_TRACES_SAMPLER_ARG``, read as by the SDK.

        >>> Sampling.of("always_off", ""), Sampling.of("parentbased_traceidratio", "0.5").bound == 2**63
        (Sampling(bound=0, is_by_parent=False), True)
        """
        name = name.strip().lower() or DEFAULT_SAMPLER
        root = name.removeprefix(BY_PARENT)
        if root not in ("always_on", "always_off", RATIO):
            log.warning("OTEL_TRACES_SAMPLER is unknown", used=DEFAULT_SAMPLER)
            return cls.of(DEFAULT_SAMPLER, "")
        ratio = float(root == "always_on")
        if root == RATIO:
            try:
                ratio = float(argument)
            except ValueError:
                ratio = -1.0
            if not 0 <= ratio <= 1:
                log.warning("OTEL_TRACES_SAMPLER_ARG is not a number from 0 to 1", used=1.0)
                ratio = 1.0
        return cls(round(ratio * (LOW + 1)), name.startswith(BY_PARENT))


class Spans:
    """Gives some decisions a span.

    Without a key, a caller affects neither whether its decisions are sampled, nor the trace id that decides
    it. Its decisions are children of its span nevertheless.

    Args:
        give: takes a span for the exporter.
        clock: the host's monotonic clock, in seconds.
        now_ns: the wall clock.

    Attributes:
        over_rate: sampled decisions that got no span, because of ``MOST_A_SECOND``.
    """

    def __init__(
        self,
        sampling: Sampling,
        give: Callable[[DecisionSpan], None],
        *,
        clock: Callable[[], float] = monotonic,
        now_ns: Callable[[], int] = time_ns,
    ) -> None:
        self.over_rate = 0
        self._bound, self._is_by_parent = sampling
        self._give = give
        self._clock = clock
        self._now_ns = now_ns
        self._given: deque[float] = deque()
        """The times of the spans of the last second."""

    def add(self, decided: Sequence[PlannedAsk], caller: Caller, seconds: float) -> None:
        """Give the decisions on a request a span each, if the request is sampled.

        Args:
            seconds: how long they took, until now.
        """
        header, low = caller.traceparent, getrandbits(64)
        named = None if header is None or caller.key is None else _TRACEPARENT.fullmatch(header)
        if named is None:
            is_sampled = low < self._bound
        elif self._is_by_parent:
            is_sampled = named["flag"] in _SAMPLED
        else:
            is_sampled = int(named["trace"], 16) & LOW < self._bound
        if not is_sampled:
            return
        try:
            self._add_sampled(decided, header, low, seconds)
        except Exception:  # the decisions are charged, so the caller gets them
            log.exception("decisions could not be given spans")

    def _add_sampled(
        self, decided: Sequence[PlannedAsk], header: bytes | None, low: int, seconds: float
    ) -> None:
        given, now = self._given, self._clock()
        while given and now - given[0] >= 1:
            given.popleft()
        chosen = decided[: MOST_A_SECOND - len(given)]
        self.over_rate += len(decided) - len(chosen)
        if not chosen:
            return
        parent, end_ns = parent_of(header), self._now_ns()
        trace_id = getrandbits(64) << 64 | low if parent is None else parent.trace_id
        start_ns = end_ns - round(seconds * 1e9)
        for planned in chosen:
            given.append(now)
            span_id = getrandbits(64) or 1
            self._give(DecisionSpan(trace_id, span_id, parent, start_ns, end_ns, attributes_of(planned)))


def parent_of(traceparent: bytes | None) -> Parent | None:
    """Return the span that a header names (W3C Trace Context); None without a valid one.

    >>> parent_of(b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01").is_sampled
    True
    >>> parent_of(b"00-00000000000000000000000000000000-b7ad6b7169203331-01")
    """
    found = None if traceparent is None else _TRACEPARENT.fullmatch(traceparent)
    if found is None:
        return None
    return Parent(int(found["trace"], 16), int(found["span"], 16), found["flag"] in _SAMPLED)


def attributes_of(planned: PlannedAsk) -> dict[str, str | int]:
    """Return the decision on an ask, and the quota that decided; nothing that only the caller has sent."""
    decision = planned.decision
    assert decision is not None
    found: dict[str, str | int] = {
        "quotagate.decision": decision.decision,
        "quotagate.throttle_ms": decision.throttle_ms,
        "quotagate.source": decision.source,
        "quotagate.mode": planned.ask.mode,
        "quotagate.applied": decision.applied,
    }
    if (by := decision.limited_by) is not None:
        found["quotagate.quota"] = by.quota
        if by.entity is not None:
            found["quotagate.entity"] = bounded(by.entity)
        if by.reason is not None:
            found["quotagate.reason"] = by.reason
    return found


def bounded(text: str) -> str:
    """Return a text, or a digest in place of a long one."""
    return text if len(text) <= MAX_TEXT else f"sha256:{sha256(text.encode()).hexdigest()}"
