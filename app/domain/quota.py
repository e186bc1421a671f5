"""Quota keys, and quotas with all their fields resolved."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

Algorithm = Literal["producer_ids", "sampled_rate", "token_bucket"]
Enforcement = Literal["deny", "delay"]
Scope = Literal["cluster", "broker"]
OnStoreFailure = Literal["admit", "throttle"]

MAX_THROTTLE_MS: Final = 2_147_483_647
MAX_EXACT: Final = 2**53 - 1
MAX_INT: Final = 2**31 - 1
MAX_PRODUCER_IDS: Final = 500_000
MAX_DEBT_MS: Final = 3_600_000
"""The default of the longest time that a token bucket's debt lasts."""
MAX_WHOLE: Final = 999_999_999_999_999
"""The largest integer of a structured field (RFC 9651); larger amounts are cut to it."""
_NEARLY_WHOLE: Final = 0.999999
"""A smaller fraction of an amount is no rounding error; this check is faster than rounding."""
_ROUNDING: Final = 2**-51
"""The relative rounding error of a product or a quotient."""
RECHECK_MS: Final = 1_000
"""KIP-612: how long an acceptor holds a connection from an address over its rate before it asks again."""


@dataclass(frozen=True, slots=True)
class QuotaKey:
    """One quota key: the usage that it limits, its entities, and the rules for its quotas.

    Attributes:
        usage: the field of an ask's usage that it limits.
        entities: the combinations of entity types that a quota of it can be set on.
        enforcement, algorithm: the defaults of its quotas.
        integer_limit, max_limit: whether a limit must be a whole number, and the largest.
        longest_delay: in milliseconds, or ``"sample"`` for one sample; None means no longest delay.
        per_unit: the usage in one unit of the limit (10 ms of thread time = 1 percent-second).
    """

    name: str
    usage: str
    entities: tuple[tuple[str, ...], ...]
    enforcement: Enforcement
    algorithm: Algorithm
    integer_limit: bool
    max_limit: float
    longest_delay: int | Literal["sample"] | None = None
    per_unit: float = 1.0


_SAMPLED: Final = "sampled_rate"
CLIENTS: Final = (("user",), ("client-id",), ("user", "client-id"))
"""The entity types of a key that may be set on clients."""
_LISTENERS: Final = (("broker",), ("listener",), ("broker", "listener"))

PRODUCER_IDS_RATE: Final = "producer_ids_rate"
REQUEST_RATE: Final = "request_rate"
REQUEST_PERCENTAGE: Final = "request_percentage"
PRODUCER_BYTE_RATE: Final = "producer_byte_rate"
CONSUMER_BYTE_RATE: Final = "consumer_byte_rate"
CONTROLLER_MUTATION_RATE: Final = "controller_mutation_rate"
CONNECTION_CREATION_RATE: Final = "connection_creation_rate"
MAX_CONNECTION_CREATION_RATE: Final = "max_connection_creation_rate"

# Each row: name, usage, entities, enforcement, algorithm, integer_limit, max_limit, longest_delay.
# Without a Kafka original: MAX_EXACT and no longest_delay. MAX_INT and RECHECK_MS are KIP-612's.
_ROWS: Final = (
    QuotaKey(PRODUCER_IDS_RATE, "producer_ids", (("user",),), "deny", "producer_ids", True, MAX_PRODUCER_IDS),
    QuotaKey(REQUEST_RATE, "requests", (*CLIENTS, ("ip",)), "delay", _SAMPLED, False, MAX_EXACT, "sample"),
    QuotaKey(
        REQUEST_PERCENTAGE,
        "request_time_ms",
        CLIENTS,
        "delay",
        _SAMPLED,
        False,
        MAX_EXACT,
        "sample",
        per_unit=10.0,
    ),
    QuotaKey(PRODUCER_BYTE_RATE, "produce_bytes", CLIENTS, "delay", _SAMPLED, True, MAX_EXACT),
    QuotaKey(CONSUMER_BYTE_RATE, "fetch_bytes", CLIENTS, "deny", _SAMPLED, True, MAX_EXACT),
    QuotaKey(CONTROLLER_MUTATION_RATE, "mutations", CLIENTS, "deny", "token_bucket", False, MAX_EXACT),
    QuotaKey(
        CONNECTION_CREATION_RATE, "connections", (("ip",),), "deny", _SAMPLED, True, MAX_INT, RECHECK_MS
    ),
    QuotaKey(
        MAX_CONNECTION_CREATION_RATE,
        "connections",
        _LISTENERS,
        "delay",
        _SAMPLED,
        True,
        MAX_INT,
        "sample",
    ),
)

KEYS: Final[Mapping[str, QuotaKey]] = {row.name: row for row in _ROWS}
"""Every quota key by name. The order breaks ties between verdicts."""

LAYER_POLICIES: Final[Mapping[str, tuple[tuple[int, int], tuple[int, int]]]] = {
    "layered": ((1, 3), (4, 3)),
    "kip936": ((1, 4), (1, 1)),
    "timed": ((1, 1), (3, 2)),
}
"""Layer policies by name: (interval, ttl), each a fraction of the window; ``layered`` is the default."""


@dataclass(frozen=True, slots=True)
class Layers:
    """How long a layer is open and how long it lives, in milliseconds; ``policy`` is the name of the pair.

    >>> Layers.named("layered", 1000)
    Layers(interval_ms=334, ttl_ms=1334, policy='layered')
    """

    interval_ms: int
    ttl_ms: int
    policy: str | None = None

    @classmethod
    def named(cls, policy: str, window_ms: int) -> Layers:
        """The layers of a policy for a window, rounded up to whole milliseconds."""
        (interval, interval_of), (ttl, ttl_of) = LAYER_POLICIES[policy]
        return cls(-(-window_ms * interval // interval_of), -(-window_ms * ttl // ttl_of), policy)


@dataclass(frozen=True, slots=True)
class Defaults:
    """The values of fields that a quota leaves out, from the settings."""

    samples: int = 11
    sample_ms: int = 1_000
    window_ms: int = 3_600_000
    layers: str = "layered"
    max_ids: int = 1_000_000
    max_debt_ms: int = MAX_DEBT_MS


@dataclass(frozen=True, slots=True)
class Quota:
    """One quota, with all fields resolved.

    Attributes:
        limit: in the key's unit; 0 rejects every usage above 0.
        samples, sample_ms: used by a sampled rate; for a token bucket they only give the default burst.
        burst: of a token bucket, in units; 0 with a limit of 0.
        max_debt: of a token bucket, in units: how far its tokens may fall below 0. It follows from the limit
            that was set, before any throttle factor. With a limit of 0 the debt is unlimited.
        window_ms, layers: used by producer ids.
        epoch: the catalog version that last reset its buckets; 0 if none did. Part of the bucket's key.
        since_ms: in shadow, when its definition last changed (since 1970); 0 if unknown, or not in shadow.
    """

    key: str
    limit: float
    algorithm: Algorithm
    enforcement: Enforcement
    shadow: bool = False
    scope: Scope = "cluster"
    on_store_failure: OnStoreFailure = "admit"
    samples: int = 11
    sample_ms: int = 1_000
    burst: float = 0.0
    max_debt: float = math.inf
    window_ms: int = 3_600_000
    layers: Layers = Layers(1_200_000, 4_800_000, "layered")
    epoch: int = 0
    since_ms: int = field(default=0, compare=False)

    @property
    def longest_delay_ms(self) -> int:
        """The longest delay that this quota may answer, in milliseconds."""
        longest = KEYS[self.key].longest_delay
        if longest is None:
            return MAX_THROTTLE_MS
        return self.sample_ms if longest == "sample" else longest

    @property
    def clock_window_ms(self) -> float:
        """How far a clock may be behind a bucket's newest time before the times in the bucket move back."""
        if self.algorithm == "producer_ids":
            return self.window_ms
        if self.algorithm == "token_bucket":
            return self.burst / self.limit * 1000 if self.limit else math.inf
        return self.samples * self.sample_ms

    @property
    def allowance(self) -> tuple[int, int]:
        """The number of whole units it admits, and of seconds they are for, as in ``RateLimit-Policy``.

        >>> Quota("request_rate", 100, "sampled_rate", "deny", samples=11, sample_ms=1000).allowance
        (1000, 10)
        >>> Quota("controller_mutation_rate", 5, "token_bucket", "deny", burst=55).allowance
        (55, 11)
        """
        if self.algorithm == "token_bucket":
            return whole(self.burst), max(whole(self.burst / self.limit) if self.limit else 0, 1)
        span_s = (max(self.samples, 2) - 1) * self.sample_ms / 1000  # one sample counts as two under deny
        return whole(self.limit * span_s), max(whole(span_s), 1)

    @property
    def identity(self) -> tuple[object, ...]:
        """The fields whose change resets the bucket: algorithm, samples, sample_ms and scope."""
        if self.algorithm == "producer_ids":
            return (self.algorithm, self.scope)
        return (self.algorithm, self.samples, self.sample_ms, self.scope)

    @property
    def bound(self) -> tuple[float | None, int]:
        """The worst ratio of admitted usage to the limit over any window of a length, and that length in ms.

        - None under delay and in shadow, where nothing is bounded.
        - 0 for a limit of 0, which admits nothing.
        - 1 for ids, which are counted exactly.
        - 2 for a token bucket: over the time in which it refills, it admits its burst and the refill.
        - (N+1)/N for a sampled rate of N samples: all usage admitted in N samples is in the sum that admits
          the last of it. But the oldest sample may have begun one sample earlier, so that sum is measured
          over N+1 samples. ``docs/bounds.md`` has the argument and the search.
        """
        if self.algorithm == "producer_ids":
            ratio, window = 1.0, self.window_ms
        elif self.algorithm == "token_bucket" and self.limit:
            ratio, window = 2.0, math.ceil(min(self.burst / self.limit * 1000, MAX_EXACT))
        else:
            samples = max(self.samples, 2)
            ratio, window = (samples + 1) / samples, samples * self.sample_ms
        if self.shadow:
            return None, window
        if not self.limit:
            return 0.0, window
        return (ratio if self.enforcement == "deny" else None), window


def whole(amount: float) -> int:
    """Round an amount of at least 0 down, but correct rounding errors.

    0.29 a second over 100 s is 29, not 28.999999999999996.

    >>> whole(20 / (20 / 31_536_000)), whole(28.9), whole(31_535_999.9)
    (31536000, 28, 31535999)
    """
    amount = min(amount, MAX_WHOLE)
    units = int(amount)
    if amount - units < _NEARLY_WHOLE:
        return units
    return math.floor(max(round(amount, 9), amount * (1 + _ROUNDING)))
