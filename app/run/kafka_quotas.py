"""What a Kafka cluster says of its quotas, as it says it: client quotas, and the settings of its brokers."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from app.run import kafka_client
from app.run.errors import CannotAsk

BROKER_RATE: Final = "max.connection.creation.rate"
OF_BROKERS: Final = (
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
"""The settings that matter here, beside a listener's rate, whose name nobody knows beforehand."""
_BROKER: Final = 4
"""A broker among the kinds of things that have settings."""
_SET_THERE: Final = frozenset({2, 4})
"""Sources of a setting: on that broker while it runs, and in its file."""
_FOR_ALL: Final = 3
"""The source that all brokers were given while they ran."""
_MAY_NOT: Final = frozenset({29, 31})
AT_ONCE: Final = 16
"""How many brokers are asked at the same moment."""


class Entry(NamedTuple):
    """The quotas of one entity: its types with their names, None for the default, and values by key."""

    entity: tuple[tuple[str, str | None], ...]
    values: Mapping[str, float]


class Setting(NamedTuple):
    """A setting in force on a broker; None where Kafka keeps the value to itself.

    Attributes:
        own: set on that broker, by its file or while it runs, and not for the whole cluster.
    """

    value: str | None
    own: bool


@dataclass(frozen=True, slots=True)
class Broker:
    """One broker, and the settings in force there that have to do with quotas."""

    id: str
    settings: Mapping[str, Setting]

    @property
    def listeners(self) -> tuple[str, ...]:
        """The listeners for clients and other brokers, as Kafka spells them."""
        controllers = _names(self.said("controller.listener.names"))
        return tuple(name for name in _names(self.said("listeners")) if name not in controllers)

    @property
    def inter_broker_listener(self) -> str:
        """The listener that brokers use among themselves."""
        named = self.said("inter.broker.listener.name") or self.said("security.inter.broker.protocol")
        return (named or "PLAINTEXT").upper()

    def said(self, name: str) -> str | None:
        """The value of a setting, if there is any."""
        setting = self.settings.get(name)
        return setting.value if setting else None


@dataclass(frozen=True, slots=True)
class KafkaQuotas:
    """Everything about quotas that a cluster says.

    Attributes:
        defaults: settings that all brokers were given while they ran.
    """

    entries: tuple[Entry, ...]
    brokers: tuple[Broker, ...]
    defaults: Mapping[str, str | None]


def read(servers: Sequence[str], configuration: Mapping[str, Any], within_s: float) -> KafkaQuotas:
    """Ask a cluster for all of it; the first server that answers says which brokers there are.

    Raises:
        CannotAsk: none answers, a broker does not, or the login may not see it.
    """
    ends = time.monotonic() + within_s
    first, brokers = _cluster(servers, configuration, within_s)
    entries = _entries(first, configuration, _left(ends))
    with ThreadPoolExecutor(AT_ONCE) as threads:

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
    """The server that answered, and where the active brokers are, by their numbers."""
    from kafka.protocol.metadata import MetadataRequest  # noqa: PLC0415

    question = MetadataRequest(topics=[], allow_auto_topic_creation=False)
    refused = []
    for server in servers:
        try:
            answer = _ask(server, configuration, question, within_s / len(servers))
        except CannotAsk as why:
            refused.append(str(why))
            continue
        found = sorted(answer.brokers, key=lambda broker: broker.node_id)
        if found:
            return server, {
                str(broker.node_id): kafka_client.address(broker.host, broker.port) for broker in found
            }
        refused.append(f"{server}: names no active broker")
    raise CannotAsk("\n".join(refused))


def _entries(server: str, configuration: Mapping[str, Any], within_s: float) -> tuple[Entry, ...]:
    """Every client quota."""
    from kafka.protocol.admin import DescribeClientQuotasRequest  # noqa: PLC0415

    answer = _ask(server, configuration, DescribeClientQuotasRequest(components=[], strict=False), within_s)
    _granted(server, answer)
    return tuple(
        Entry(
            tuple((part.entity_type, part.entity_name) for part in entry.entity),
            {value.key: value.value for value in entry.values},
        )
        for entry in answer.entries or ()
    )


def _settings(
    server: str, name: str, configuration: Mapping[str, Any], within_s: float
) -> dict[str, Setting]:
    """What is set on a broker; without a name, what was set for all while they ran."""
    from kafka.protocol.admin import DescribeConfigsRequest  # noqa: PLC0415

    question = DescribeConfigsRequest(resources=[(_BROKER, name, None)], include_synonyms=True, min_version=1)
    (answer,) = _ask(server, configuration, question, within_s).results
    _granted(server, answer)
    found = {}
    for said in answer.configs:
        if said.name in OF_BROKERS or said.name.endswith(f".{BROKER_RATE}"):
            # A listener's rate has the broker's among its synonyms, which may come first.
            source = next((one.source for one in said.synonyms if one.name == said.name), said.config_source)
            if name or source == _FOR_ALL:
                found[said.name] = Setting(said.value, source in _SET_THERE)
    return found


def _ask(server: str, configuration: Mapping[str, Any], question: Any, within_s: float) -> Any:
    from app.run import kafka_call  # noqa: PLC0415  the help does without kafka-python

    kafka_client.quiet()
    try:
        return kafka_call.ask(server, configuration, [question], within_s)
    except kafka_call.TooOld:
        raise CannotAsk(f"{server}: is too old: it knows no {question.name}") from None
    except kafka_call.Unanswered as why:
        raise CannotAsk(f"{server}: {why}") from None


def _granted(server: str, answer: Any) -> None:
    """See to it that a question was answered.

    Raises:
        CannotAsk: it was refused.
    """
    if not answer.error_code:
        return
    from kafka import errors  # noqa: PLC0415

    error = errors.for_code(answer.error_code)
    said = answer.error_message or getattr(error, "message", "") or error.__name__
    hint = "\n  The login needs DescribeConfigs on the cluster." if answer.error_code in _MAY_NOT else ""
    raise CannotAsk(f"{server}: {said}{hint}")


def _left(ends: float) -> float:
    return max(0.1, ends - time.monotonic())


def _names(said: str | None) -> list[str]:
    """The names in ``INTERNAL://host:1,EXTERNAL://host:2``."""
    return [one.strip().partition(":")[0].upper() for one in (said or "").split(",") if one.strip()]
