"""What Kafka's quotas mean here: entities, limits, scope and samples, and what cannot be taken over."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from app.domain.entity import Entity, EntityError, spell
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
from app.domain.quota_value import ValueErrors, check
from app.run.kafka_quotas import BROKER_RATE, Broker, Entry, KafkaQuotas

TAKEN: Final = (
    PRODUCER_BYTE_RATE,
    CONSUMER_BYTE_RATE,
    REQUEST_PERCENTAGE,
    CONTROLLER_MUTATION_RATE,
    CONNECTION_CREATION_RATE,
)
"""Kafka's quota keys, which are ours too and mean the same."""
SET: Final = ("limit", "scope", "samples", "sample_ms")
"""The fields that an import sets; Kafka has no word for the others, so they stay as they are."""
KAFKAS_WINDOW: Final = (11, 1_000)
NEARLY_WHOLE: Final = 1e-6
"""What Kafka takes for a whole number may be so far from one."""
_LISTENER_RATE: Final = re.compile(rf"listener\.name\.(.+)\.{re.escape(BROKER_RATE)}")


class LeftOut(NamedTuple):
    """Something that Kafka has and that is not taken over, and why."""

    entity: str
    quota: str
    value: str
    reason: str


@dataclass(slots=True)
class Meaning:
    """What Kafka's quotas become here.

    Attributes:
        scope: whether limits hold on each broker by itself, or for all of them together.
        times: what limits were multiplied by: 1, or the number of brokers.
        quotas: the fields that an import sets, by entity and quota key.
        notes: what else an operator should know.
    """

    scope: Scope
    times: int
    quotas: dict[str, dict[str, dict[str, object]]] = field(default_factory=dict)
    left_out: list[LeftOut] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def meaning(kafka: KafkaQuotas, *, multiply: bool) -> Meaning:
    """What Kafka's quotas mean here.

    Args:
        multiply: limits for all brokers together, times their number, in place of limits for each of them.
    """
    return _Reading(kafka, multiply=multiply).all()


def beside(
    entity: str, quota: str, fields: Mapping[str, object], standing: Mapping[str, object] | None
) -> dict[str, object]:
    """A quota as it is to be, where one may stand already: what an import sets, and the rest as it was.

    >>> beside("user=a", "producer_byte_rate", {"limit": 5}, {"limit": 9, "samples": 21, "shadow": True})
    {'limit': 5, 'shadow': True}

    Raises:
        ValueErrors: the two do not go together.
    """
    kept = {name: value for name, value in (standing or {}).items() if name not in SET}
    return check(quota, {**kept, **fields}, Entity.parse(entity), Defaults())


def limit_of(key: str, value: float, times: int = 1) -> tuple[int | float, bool]:
    """A limit of Kafka's as one of ours, and whether it is the largest there is in place of a larger one.

    >>> limit_of("producer_byte_rate", 1235.0000001), limit_of("request_percentage", 12.5, 2)
    ((1235, False), (25, False))
    >>> limit_of("producer_byte_rate", 9.223372036854776e18)
    (9007199254740991, True)

    Raises:
        ValueError: it is no limit here.
    """
    row = KEYS[key]
    if math.isnan(value):
        raise ValueError("it is no number")
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


class _Reading:
    """One reading of what a cluster said."""

    def __init__(self, kafka: KafkaQuotas, *, multiply: bool) -> None:
        self._kafka = kafka
        self._found = Meaning("cluster", len(kafka.brokers)) if multiply else Meaning("broker", 1)
        self._larger = 0

    def all(self) -> Meaning:
        self._clients()
        self._connections()
        if self._larger:
            self._note(f"Larger than any limit here, and taken as the largest there is: {self._larger}.")
        return self._found

    def _clients(self) -> None:
        """The quotas of users, client-ids and addresses."""
        values: dict[tuple[str, str], list[tuple[str, float]]] = {}
        for entry in self._kafka.entries:
            shown = _shown(entry)
            try:
                entity = str(Entity.parse(shown))
            except EntityError as error:
                for key, value in entry.values.items():
                    self._leave(shown, key, value, str(error))
                continue
            for key, value in entry.values.items():
                if key in TAKEN:
                    values.setdefault((entity, key), []).append((shown, value))
                else:
                    self._leave(entity, key, value, f"not known here: only {', '.join(TAKEN)} are")
        for (entity, key), said in sorted(values.items()):
            if len({value for _, value in said}) == 1:
                self._take(entity, key, said[0][1], self._shared_window(_prefix(key)))
                continue
            for shown, value in said:  # one address in two spellings
                self._leave(shown, key, value, f"{entity} has several limits: Kafka holds to the newest")

    def _connections(self) -> None:
        """How many connections a second brokers and their listeners take."""
        for name, value in self._kafka.defaults.items():
            self._rate("broker=*", "", name, value, self._shared_window("quota"))
        between = set()
        for broker in self._kafka.brokers:
            own, window = f"broker={broker.id}", _window(broker, "quota")
            for name, setting in broker.settings.items():
                if setting.own:
                    self._rate(own, f"{own},", name, setting.value, window)
            if rate := _rate_between_brokers(broker):
                listener = broker.inter_broker_listener
                between.add(listener)
                self._take(f"{own},listener={spell(listener)}", MAX_CONNECTION_CREATION_RATE, rate, window)
        for listener in sorted(between):
            self._note(
                f"Kafka does not count connections between brokers (listener {listener}) in the limit of a "
                f"broker, but holds them to the same number: set QUOTAGATE_INTER_BROKER_LISTENER={listener}."
            )

    def _rate(self, broker: str, prefix: str, name: str, value: str | None, window: tuple[int, int]) -> None:
        """One setting of brokers, if it is such a rate."""
        listener = _LISTENER_RATE.fullmatch(name)
        if listener is None and name != BROKER_RATE:
            return
        # Kafka writes a listener in lower case here, and in upper case everywhere else.
        entity = f"{prefix}listener={spell(listener[1].upper())}" if listener else broker
        if value is None:
            self._leave(entity, name, "hidden", "Kafka does not tell it")
        else:
            self._take(entity, MAX_CONNECTION_CREATION_RATE, float(value), window)

    def _take(self, entity: str, key: str, value: float, window: tuple[int, int]) -> None:
        fields: dict[str, object] = {}
        # One controller of the cluster counts changes; every broker counts all else for itself.
        by_controller = key == CONTROLLER_MUTATION_RATE
        try:
            parsed = Entity.parse(entity)
            by_name = "broker" in parsed.types
            fields["limit"], larger = limit_of(
                key, value, 1 if by_controller or by_name else self._found.times
            )
            if not by_name:
                fields["scope"] = "cluster" if by_controller else self._found.scope
            if window != KAFKAS_WINDOW:
                fields["samples"], fields["sample_ms"] = window
            fields = check(key, fields, parsed, Defaults())
        except ValueErrors as wrong:
            self._leave(
                entity, key, value, "; ".join(f"{f.lstrip('/')} {m}".lstrip() for f, m in wrong.errors)
            )
        except ValueError as error:
            self._leave(entity, key, value, str(error))
        else:
            self._larger += larger
            self._found.quotas.setdefault(entity, {})[key] = fields

    def _shared_window(self, prefix: str) -> tuple[int, int]:
        """The samples of quotas that hold on every broker; where brokers differ, those of the most."""
        windows = Counter(_window(broker, prefix) for broker in self._kafka.brokers)
        if not windows:
            return KAFKAS_WINDOW
        window, _ = windows.most_common(1)[0]
        if len(windows) > 1:
            differing = [broker.id for broker in self._kafka.brokers if _window(broker, prefix) != window]
            self._note(
                f"Brokers differ in {prefix}.window.num or {prefix}.window.size.seconds: "
                f"{window[0]} samples of {window[1] // 1000} s are taken, not those of "
                f"broker {', '.join(differing)}."
            )
        return window

    def _leave(self, entity: str, quota: str, value: object, reason: str) -> None:
        said = f"{value:.15g}" if isinstance(value, float) else str(value)
        self._found.left_out.append(LeftOut(entity, quota, said, reason))

    def _note(self, text: str) -> None:
        if text not in self._found.notes:
            self._found.notes.append(text)


def _rate_between_brokers(broker: Broker) -> float | None:
    """The rate of connections between brokers where it comes from that of the broker; None if it does not.

    Kafka holds each listener without a rate of its own to the broker's. That changes nothing for those that
    count in the broker's rate too; connections between brokers do not, when there is another listener.
    """
    listener = broker.inter_broker_listener
    own = f"listener.name.{listener.lower()}.{BROKER_RATE}"
    rate = broker.said(BROKER_RATE)
    if (
        rate is None
        or own in broker.settings
        or listener not in broker.listeners
        or len(broker.listeners) < 2
    ):
        return None
    return float(rate) if 0 < float(rate) < MAX_INT else None


def _window(broker: Broker, prefix: str) -> tuple[int, int]:
    """How many samples of how many milliseconds a broker measures over."""
    samples, sample_ms = KAFKAS_WINDOW
    number, seconds = broker.said(f"{prefix}.window.num"), broker.said(f"{prefix}.window.size.seconds")
    return int(number or samples), int(seconds) * 1000 if seconds else sample_ms


def _prefix(key: str) -> str:
    return "controller.quota" if key == CONTROLLER_MUTATION_RATE else "quota"


def _shown(entry: Entry) -> str:
    """An entity of Kafka's, spelled as ours are, whether or not it can be one."""
    return ",".join(f"{type_}={'*' if name is None else spell(name)}" for type_, name in entry.entity)
