"""Kafka's quotas as ours: entities, limits, scope and samples, and the quotas that cannot be imported."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from app.domain.entity import Entity, spell
from app.domain.errors import EntityError, QuotaValueError
from app.domain.quota import (
    CONNECTION_CREATION_RATE,
    CONSUMER_BYTE_RATE,
    CONTROLLER_MUTATION_RATE,
    KEYS,
    MAX_CONNECTION_CREATION_RATE,
    MAX_INT,
    PRODUCER_BYTE_RATE,
    REQUEST_PERCENTAGE,
    Defaults,
    Scope,
)
from app.domain.quota_value import check
from app.kafka.quotas import BROKER_RATE, LISTENER_RATE, Broker, EntityQuotas, KafkaQuotas

SHARED_KEYS: Final = (
    PRODUCER_BYTE_RATE,
    CONSUMER_BYTE_RATE,
    REQUEST_PERCENTAGE,
    CONTROLLER_MUTATION_RATE,
    CONNECTION_CREATION_RATE,
)
"""The quota keys that Kafka and Quotagate share, with the same meaning."""
IMPORTED_FIELDS: Final = ("limit", "scope", "samples", "sample_ms")
"""The fields that an import sets; Kafka does not have the others, so they stay unchanged."""
DEFAULT_SAMPLES: Final = (11, 1_000)
"""Kafka's defaults: 11 samples of 1,000 ms."""
NEARLY_WHOLE: Final = 1e-6
"""Kafka accepts a value this close to a whole number as whole."""


class SkippedQuota(NamedTuple):
    """A quota of Kafka that cannot be imported, and why."""

    entity: str
    quota: str
    value: str
    reason: str


@dataclass(slots=True)
class QuotaMapping:
    """Kafka's quotas, mapped to ours.

    Attributes:
        scope: whether limits hold on each broker separately, or for all brokers together.
        times: the factor that limits were multiplied by: 1, or the number of brokers.
        quotas: the fields that an import sets, by entity and quota key.
        notes: more information for an operator.
    """

    scope: Scope
    times: int
    quotas: dict[str, dict[str, dict[str, object]]] = field(default_factory=dict)
    skipped: list[SkippedQuota] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def skip(self, entity: str, quota: str, value: object, reason: str) -> None:
        """Add a quota that cannot be imported."""
        text = f"{value:.15g}" if isinstance(value, float) else str(value)
        self.skipped.append(SkippedQuota(entity, quota, text, reason))


def map_quotas(kafka: KafkaQuotas, *, multiply: bool) -> QuotaMapping:
    """Translate Kafka's quotas to ours.

    Args:
        multiply: make limits for all brokers together, times their number, instead of limits for each.
    """
    return _Mapper(kafka, multiply=multiply).map()


def limit_of(key: str, value: float, times: int = 1) -> tuple[int | float, bool]:
    """Return a limit of Kafka as one of ours, and whether it was cut to the largest limit that we have.

    >>> limit_of("producer_byte_rate", 1235.0000001), limit_of("request_percentage", 12.5, 2)
    ((1235, False), (25, False))
    >>> limit_of("producer_byte_rate", 9.223372036854776e18)
    (9007199254740991, True)

    Raises:
        ValueError: it is not a valid limit here.
    """
    row = KEYS[key]
    if math.isnan(value):
        raise ValueError("it is not a number")
    if value < 0:
        raise ValueError("it is below 0")
    if value == 0:
        raise ValueError("a limit of 0 would reject all usage here; in Kafka it does not")
    if value * times > row.max_limit:
        return int(row.max_limit), True
    whole = round(value)
    if row.integer_limit and abs(value - whole) > NEARLY_WHOLE:
        raise ValueError("must be a whole number")
    found = (whole if row.integer_limit else value) * times
    return (int(found) if found == int(found) else found), False


class _Mapper:
    """Translates the quotas of one cluster."""

    def __init__(self, kafka: KafkaQuotas, *, multiply: bool) -> None:
        self._kafka = kafka
        self._mapping = QuotaMapping("cluster", len(kafka.brokers)) if multiply else QuotaMapping("broker", 1)
        self._larger = 0

    def map(self) -> QuotaMapping:
        self._clients()
        self._connections()
        if self._larger:
            self._note(f"Limits above the largest possible limit, imported as that: {self._larger}.")
        return self._mapping

    def _clients(self) -> None:
        """The quotas of users, client-ids and addresses."""
        values: dict[tuple[str, str], list[tuple[str, float]]] = {}
        for entry in self._kafka.entries:
            shown = _spelled(entry)
            try:
                entity = str(Entity.parse(shown))
            except EntityError as error:
                for key, value in entry.values.items():
                    self._mapping.skip(shown, key, value, str(error))
                continue
            for key, value in entry.values.items():
                if key in SHARED_KEYS:
                    values.setdefault((entity, key), []).append((shown, value))
                else:
                    self._mapping.skip(
                        entity, key, value, f"not supported: only {', '.join(SHARED_KEYS)} are"
                    )
        for (entity, key), spellings in sorted(values.items()):
            if len({value for _, value in spellings}) == 1:
                self._set(entity, key, spellings[0][1], self._shared_window(_prefix(key)))
                continue
            for shown, value in spellings:  # one address in two spellings
                self._mapping.skip(
                    shown, key, value, f"{entity} has several limits; Kafka enforces the newest"
                )

    def _connections(self) -> None:
        """The connection rates of brokers and their listeners."""
        for name, value in self._kafka.defaults.items():
            self._rate("broker=*", "", name, value, self._shared_window("quota"))
        inter_broker = set()
        for broker in self._kafka.brokers:
            own, window = f"broker={broker.id}", _window(broker, "quota")
            for name, setting in broker.settings.items():
                if setting.own:
                    self._rate(own, f"{own},", name, setting.value, window)
            if rate := _rate_between_brokers(broker):
                listener = broker.inter_broker_listener
                inter_broker.add(listener)
                self._set(f"{own},listener={spell(listener)}", MAX_CONNECTION_CREATION_RATE, rate, window)
        for listener in sorted(inter_broker):
            self._note(
                f"Kafka does not count connections between brokers (listener {listener}) towards a broker's "
                f"limit, but gives them the same limit: set QUOTAGATE_INTER_BROKER_LISTENER={listener}."
            )

    def _rate(self, broker: str, prefix: str, name: str, value: str | None, window: tuple[int, int]) -> None:
        """Map one broker setting, if it is a connection rate."""
        listener = LISTENER_RATE.fullmatch(name)
        if listener is None and name != BROKER_RATE:
            return
        # Kafka writes the listener in lower case here, and in upper case everywhere else.
        entity = f"{prefix}listener={spell(listener[1].upper())}" if listener else broker
        if value is None:
            self._mapping.skip(entity, name, "hidden", "Kafka does not show it")
        else:
            self._set(entity, MAX_CONNECTION_CREATION_RATE, float(value), window)

    def _set(self, entity: str, key: str, value: float, window: tuple[int, int]) -> None:
        fields: dict[str, object] = {}
        # The one active controller counts mutations; each broker counts everything else by itself.
        by_controller = key == CONTROLLER_MUTATION_RATE
        try:
            parsed = Entity.parse(entity)
            by_name = "broker" in parsed.types
            fields["limit"], larger = limit_of(
                key, value, 1 if by_controller or by_name else self._mapping.times
            )
            if not by_name:
                fields["scope"] = "cluster" if by_controller else self._mapping.scope
            if window != DEFAULT_SAMPLES:
                fields["samples"], fields["sample_ms"] = window
            fields = check(key, fields, parsed, Defaults())
        except QuotaValueError as wrong:
            self._mapping.skip(
                entity, key, value, "; ".join(f"{f.lstrip('/')} {m}".lstrip() for f, m in wrong.errors)
            )
        except ValueError as error:
            self._mapping.skip(entity, key, value, str(error))
        else:
            self._larger += larger
            self._mapping.quotas.setdefault(entity, {})[key] = fields

    def _shared_window(self, prefix: str) -> tuple[int, int]:
        """The samples for quotas that hold on every broker; if brokers differ, the most common ones."""
        windows = Counter(_window(broker, prefix) for broker in self._kafka.brokers)
        if not windows:
            return DEFAULT_SAMPLES
        window, _ = windows.most_common(1)[0]
        if len(windows) > 1:
            differing = [broker.id for broker in self._kafka.brokers if _window(broker, prefix) != window]
            self._note(
                f"Brokers differ in {prefix}.window.num or {prefix}.window.size.seconds: "
                f"{window[0]} samples of {window[1] // 1000} s are used, not those of "
                f"broker {', '.join(differing)}."
            )
        return window

    def _note(self, text: str) -> None:
        if text not in self._mapping.notes:
            self._mapping.notes.append(text)


def _rate_between_brokers(broker: Broker) -> float | None:
    """The connection rate between brokers, if Kafka derives it from the broker's rate; else None.

    A listener without its own rate gets the broker's. That matters only for the inter-broker listener: its
    connections do not count towards the broker's rate if there is another listener.
    """
    listener = broker.inter_broker_listener
    own = f"listener.name.{listener.lower()}.{BROKER_RATE}"
    rate = broker.value_of(BROKER_RATE)
    if (
        rate is None
        or own in broker.settings
        or listener not in broker.listeners
        or len(broker.listeners) < 2
    ):
        return None
    return float(rate) if 0 < float(rate) < MAX_INT else None


def _window(broker: Broker, prefix: str) -> tuple[int, int]:
    """A broker's number of samples, and the length of one in milliseconds."""
    samples, sample_ms = DEFAULT_SAMPLES
    number, seconds = (
        broker.value_of(f"{prefix}.window.num"),
        broker.value_of(f"{prefix}.window.size.seconds"),
    )
    return int(number or samples), int(seconds) * 1000 if seconds else sample_ms


def _prefix(key: str) -> str:
    return "controller.quota" if key == CONTROLLER_MUTATION_RATE else "quota"


def _spelled(entry: EntityQuotas) -> str:
    """A Kafka entity in our spelling, whether or not it is valid here."""
    return ",".join(f"{type_}={'*' if name is None else spell(name)}" for type_, name in entry.entity)
