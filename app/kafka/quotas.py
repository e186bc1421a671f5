"""Reads the quotas of a Kafka cluster as Kafka has them: client quotas, and settings of its brokers."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from app.kafka.configuration import address, silence_library
from app.kafka.errors import BrokerSilentError, BrokerTooOldError, KafkaError

BROKER_RATE: Final = "max.connection.creation.rate"
LISTENER_RATE: Final = re.compile(rf"listener\.name\.(.+)\.{re.escape(BROKER_RATE)}")
BROKER_SETTINGS: Final = (
    BROKER_RATE,
    "quota.window.num",
    "quota.window.size.seconds",
    "controller.quota.window.num",
    "controller.quota.window.size.seconds",
    "listeners",
    "controller.listener.names",
    "inter.broker.listener.name",
    "security.inter.broker.protocol",
)
"""The settings that matter here, besides ``LISTENER_RATE``."""
_BROKER_RESOURCE: Final = 4
"""The resource type of a broker in DescribeConfigs."""
_OWN_SOURCES: Final = frozenset({2, 4})
"""Sources of a broker's own setting: dynamic for that broker, and its file."""
_DEFAULT_SOURCE: Final = 3
"""The source of a dynamic setting for all brokers."""
_UNAUTHORIZED: Final = frozenset({29, 31})
MAX_PARALLEL: Final = 16
"""How many brokers are asked at the same time."""


class EntityQuotas(NamedTuple):
    """The quotas of one entity: its types with their names, None for the default, and values by key."""

    entity: tuple[tuple[str, str | None], ...]
    values: Mapping[str, float]


class Setting(NamedTuple):
    """A setting in force on a broker; the value is None if Kafka hides it.

    Attributes:
        own: set on that broker (in its file or dynamically) and not for the whole cluster.
    """

    value: str | None
    own: bool


@dataclass(frozen=True, slots=True)
class Broker:
    """One broker, with its settings that concern quotas."""

    id: str
    settings: Mapping[str, Setting]

    @property
    def listeners(self) -> tuple[str, ...]:
        """The listeners for clients and other brokers, in upper case."""
        controllers = _names(self.value_of("controller.listener.names"))
        return tuple(name for name in _names(self.value_of("listeners")) if name not in controllers)

    @property
    def inter_broker_listener(self) -> str:
        """The listener that brokers use among themselves."""
        named = self.value_of("inter.broker.listener.name") or self.value_of("security.inter.broker.protocol")
        return (named or "PLAINTEXT").upper()

    def value_of(self, name: str) -> str | None:
        """Return the value of a setting, or None."""
        setting = self.settings.get(name)
        return setting.value if setting else None


@dataclass(frozen=True, slots=True)
class KafkaQuotas:
    """The quotas of a cluster.

    Attributes:
        defaults: dynamic settings for all brokers.
    """

    entries: tuple[EntityQuotas, ...]
    brokers: tuple[Broker, ...]
    defaults: Mapping[str, str | None]


def read(servers: Sequence[str], configuration: Mapping[str, Any], within_s: float) -> KafkaQuotas:
    """Read all quotas of a cluster; the first server that answers names its brokers.

    Raises:
        KafkaError: no server answers, a broker does not answer, or the login lacks a permission.
    """
    ends = time.monotonic() + within_s
    first, brokers = _cluster(servers, configuration, within_s)
    entries = _entries(first, configuration, _left(ends))
    with ThreadPoolExecutor(MAX_PARALLEL) as threads:

        def settings(server: str, name: str) -> dict[str, Setting]:
            return _settings(server, name, configuration, _left(ends))

        for_all, *own = threads.map(settings, [first, *brokers.values()], ["", *brokers])
    return KafkaQuotas(
        entries,
        tuple(Broker(name, settings) for name, settings in zip(brokers, own, strict=True)),
        {name: setting.value for name, setting in for_all.items()},
    )


def _cluster(
    servers: Sequence[str], configuration: Mapping[str, Any], within_s: float
) -> tuple[str, dict[str, str]]:
    """The server that answered, and the addresses of the active brokers by their ids."""
    from kafka.protocol.metadata import MetadataRequest

    question = MetadataRequest(topics=[], allow_auto_topic_creation=False)
    refused: list[str] = []
    for server in servers:
        try:
            answer = _ask(server, configuration, question, within_s / len(servers))
        except KafkaError as why:
            refused += why.args
            continue
        found = sorted(answer.brokers, key=lambda broker: broker.node_id)
        if found:
            return server, {str(broker.node_id): address(broker.host, broker.port) for broker in found}
        refused.append(f"{server}: lists no active broker")
    raise KafkaError(*refused)


def _entries(server: str, configuration: Mapping[str, Any], within_s: float) -> tuple[EntityQuotas, ...]:
    """Every client quota."""
    from kafka.protocol.admin import DescribeClientQuotasRequest

    answer = _ask(server, configuration, DescribeClientQuotasRequest(components=[], strict=False), within_s)
    _granted(server, answer)
    return tuple(
        EntityQuotas(
            tuple((part.entity_type, part.entity_name) for part in entry.entity),
            {value.key: value.value for value in entry.values},
        )
        for entry in answer.entries or ()
    )


def _settings(
    server: str, name: str, configuration: Mapping[str, Any], within_s: float
) -> dict[str, Setting]:
    """The settings of a broker; with an empty name, the dynamic settings for all brokers."""
    from kafka.protocol.admin import DescribeConfigsRequest

    question = DescribeConfigsRequest(
        resources=[(_BROKER_RESOURCE, name, None)], include_synonyms=True, min_version=1
    )
    (answer,) = _ask(server, configuration, question, within_s).results
    _granted(server, answer)
    found = {}
    for config in answer.configs:
        if config.name in BROKER_SETTINGS or LISTENER_RATE.fullmatch(config.name):
            # The synonyms of a listener's rate include the broker's rate, which may come first.
            sources = (one.source for one in config.synonyms if one.name == config.name)
            source = next(sources, config.config_source)
            if name or source == _DEFAULT_SOURCE:
                found[config.name] = Setting(config.value, source in _OWN_SOURCES)
    return found


def _ask(server: str, configuration: Mapping[str, Any], question: Any, within_s: float) -> Any:
    from app.kafka import call

    silence_library()
    try:
        return call.ask(server, configuration, [question], within_s)
    except BrokerTooOldError:
        raise KafkaError(f"{server}: is too old: it does not support {question.name}") from None
    except BrokerSilentError as why:
        raise KafkaError(f"{server}: {why}") from None


def _granted(server: str, answer: Any) -> None:
    """Check that a request was granted.

    Raises:
        KafkaError: the server refused the request.
    """
    if not answer.error_code:
        return
    from kafka import errors

    error = errors.for_code(answer.error_code)
    message = answer.error_message or getattr(error, "message", "") or error.__name__
    hint = ["  The login needs DescribeConfigs on the cluster."] if answer.error_code in _UNAUTHORIZED else []
    raise KafkaError(f"{server}: {message}", *hint)


def _left(ends: float) -> float:
    return max(0.1, ends - time.monotonic())


def _names(listeners: str | None) -> list[str]:
    """The names in ``INTERNAL://host:1,EXTERNAL://host:2``."""
    return [one.strip().partition(":")[0].upper() for one in (listeners or "").split(",") if one.strip()]
