"""The options and output of `kafka-configs.sh`, translated to and from entities and quotas.

Nothing here makes a request. A ``ValueError`` names the fault in the options and quotes no value, because
in Kafka the same options set passwords.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Final, NamedTuple

from app.domain.entity import Entity, spell
from app.domain.errors import QuotaValueError
from app.domain.quota import KEYS, MAX_CONNECTION_CREATION_RATE
from app.domain.quota_value import check_key
from app.kafka.quotas import BROKER_RATE, LISTENER_RATE

TYPES: Final[Mapping[str, str]] = {
    "users": "user",
    "clients": "client-id",
    "ips": "ip",
    "brokers": "broker",
}
_ALL_BROKERS: Final = "Default configs for brokers in the cluster are:"
_TITLES: Final = {"user": "user-principal", "client-id": "client-id", "ip": "ip"}

_COMMA: Final = re.compile(r",(?=[^\]]*(?:\[|$))")
"""A comma that separates configurations: as in Kafka, none inside brackets."""
_CREDENTIALS: Final = re.compile(r"scram|sasl|jaas|password|passwd|secret|keystore|truststore", re.IGNORECASE)
_LISTENER: Final = re.compile(rf"listener\.name\.[\w-]+\.(?={re.escape(BROKER_RATE)}\b)", re.IGNORECASE)
"""The name of a listener, such as SASL_SSL, which is no credential."""
_CONTINUED: Final = re.compile(r"(?<!\\)(?:\\\\)*\\$")
_PROPERTY: Final = re.compile(r"((?:\\.|[^\\=:\s])+)\s*[=:]?\s*(.*)", re.DOTALL)
_ESCAPED: Final = re.compile(r"\\(?:u([0-9A-Fa-f]{4})|(.))", re.DOTALL)

EntityNames = list[tuple[str, str | None]]
"""Our entity types, each with a name as spelled in a path; None is any name."""


class _Setting(NamedTuple):
    """One configuration key; ``place`` says where it was found, and ``text`` is its value."""

    place: str
    key: str
    text: str | None


@dataclass(frozen=True, slots=True)
class KafkaOptions:
    """The options of one command. The short forms are Kafka's; ``--broker`` is our addition.

    Attributes:
        add_config_file: the name and the text of a file of Java properties.
    """

    entity_type: Sequence[str] = ()
    entity_name: Sequence[str] = ()
    entity_default: int = 0
    short: Mapping[str, str] = field(default_factory=dict)
    short_defaults: Sequence[str] = ()
    add_config: Sequence[str] = ()
    delete_config: Sequence[str] = ()
    add_config_file: tuple[str, str] | None = None

    @property
    def configs(self) -> list[str]:
        """All texts that hold configurations."""
        return [*self.add_config, *self.delete_config, *(self.add_config_file or ())[1:]]


def refuse_credentials(*configs: str) -> None:
    """Refuse configurations that Kafka keeps as credentials, such as ``SCRAM-SHA-256=[password=...]``.

    >>> refuse_credentials("request_rate=5", "scram-sha-512")
    Traceback (most recent call last):
    ValueError: credentials are not quotas: set them in Kafka, with kafka-configs.sh
    """
    if any(_CREDENTIALS.search(_LISTENER.sub("", config)) for config in configs):
        raise ValueError("credentials are not quotas: set them in Kafka, with kafka-configs.sh")


def entity_names(options: KafkaOptions, order: Sequence[str]) -> EntityNames:
    """Return the entity types of the options with their names.

    Args:
        order: the names of the options in the order they were given: the n-th name belongs to the n-th type.

    >>> entity_names(KafkaOptions(["users", "clients"], ["alice"], 1), ["entity_default", "entity_name"])
    [('user', '*'), ('client-id', 'alice')]
    """
    short = [(type_, _spell(name)) for type_, name in options.short.items()]
    short += [(type_, "*") for type_ in options.short_defaults]
    if short and (options.entity_type or options.entity_name or options.entity_default):
        raise ValueError("use --entity-type and --entity-name, or short forms such as --user, not both")
    names: EntityNames = [*short, *_long(options, order)]
    types = [type_ for type_, _ in names]
    if len(set(types)) < len(types):
        raise ValueError("each type of entity is named once")
    if not names:
        raise ValueError("name an entity: --entity-type users --entity-name alice, or --user alice")
    if len(names) > 1 and set(types) != {"user", "client-id"}:
        raise ValueError(f"{' and '.join(types)} do not go together: only users and clients do")
    return sorted(names, key=lambda one: list(TYPES.values()).index(one[0]))


def changes(
    options: KafkaOptions, names: EntityNames, read_value: Callable[[str, str], Any]
) -> dict[str, dict[str, Any]]:
    """Return the changes by entity and quota; None removes a quota.

    Args:
        read_value: reads the value of a quota from its key and the text of the value.

    >>> options = KafkaOptions(add_config=["request_rate=5"], delete_config=["producer_ids_rate"])
    >>> changes(options, [("user", "a")], lambda key, text: int(text))
    {'user=a': {'request_rate': 5, 'producer_ids_rate': None}}
    >>> options = KafkaOptions(add_config=["listener.name.A.max.connection.creation.rate=5"])
    >>> changes(options, [("broker", "1")], lambda key, text: int(text))
    {'broker=1,listener=A': {'max_connection_creation_rate': 5}}
    """
    if missing := [type_ for type_, name in names if name is None]:
        raise ValueError(f"--alter needs a name for {missing[0]}: --entity-name NAME or --entity-default")
    refuse_credentials(*options.configs)
    if options.add_config and options.add_config_file:
        raise ValueError("use --add-config or --add-config-file, not both")
    changes: dict[str, dict[str, Any]] = {}
    for setting in [
        *_added(options.add_config),
        *_properties(*(options.add_config_file or ("", ""))),
        *_deleted(options.delete_config),
    ]:
        entity, quota = _entity_and_quota(names, setting)
        if quota in changes.setdefault(str(entity), {}):
            raise ValueError(f"{setting.key} is given twice")
        new = None if setting.text is None else read_value(setting.key, setting.text)
        if new is None and setting.text is not None:
            raise ValueError(f"{setting.key}: to remove a quota, write --delete-config {setting.key}")
        changes[str(entity)][quota] = new
    if not changes:
        raise ValueError("--alter needs --add-config or --delete-config")
    return changes


def filters(names: EntityNames) -> list[tuple[list[str], bool]]:
    """Return the lists of quotas that `--describe` shows, each as its filter and whether this is strict.

    >>> filters([("user", "alice"), ("client-id", None)])
    [(['user=alice', 'client-id'], True)]
    """
    match = [type_ if name is None else f"{type_}={name}" for type_, name in names]
    if names[0][0] != "broker":
        return [(match, True)]
    # Limits of a broker's listener are set on the pair; limits for all brokers, on the listener alone.
    everywhere = [] if names[0][1] not in {None, "*"} else [(["listener"], True)]
    return [(match, False), *everywhere]


def describe_lines(
    entities: Sequence[Mapping[str, Any]], format_value: Callable[[Any], str]
) -> Iterator[str]:
    """Yield quotas as Kafka prints them; ``format_value`` is for the fields that Kafka does not have."""

    def limit(definition: Mapping[str, Any]) -> str:
        more = [f"{name}={format_value(part)}" for name, part in definition.items() if name != "limit"]
        return f"{float(definition['limit'])}" + (f" ({', '.join(more)})" if more else "")

    by_broker: dict[str, list[str]] = {}
    for one in entities:
        names = dict(Entity.parse(one["entity"]).parts)
        if {"broker", "listener"} & set(names):
            broker, listener = names.get("broker"), names.get("listener")
            title = f"broker {broker}" if isinstance(broker, str) else ""
            prefix = f"listener.name.{listener if isinstance(listener, str) else '*'}." if listener else ""
            by_broker.setdefault(title, []).extend(
                f"  {prefix}{BROKER_RATE}={limit(definition)}" for definition in one["quotas"].values()
            )
        else:
            limits = ", ".join(f"{key}={limit(definition)}" for key, definition in one["quotas"].items())
            yield f"Quota configs for {title_of(one['entity'])} are {limits}"
    for title, lines in by_broker.items():
        yield f"Dynamic configs for {title} are:" if title else _ALL_BROKERS
        yield from lines


def title_of(entity: str) -> str:
    """Return an entity as Kafka names it.

    >>> title_of("user=*,client-id=etl")
    "the default user-principal, client-id 'etl'"
    """
    return ", ".join(
        f"the default {_TITLES.get(type_, type_)}"
        if not isinstance(name, str)
        else f"{_TITLES.get(type_, type_)} '{name}'"
        for type_, name in Entity.parse(entity).parts
    )


def _long(options: KafkaOptions, order: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    left = iter(options.entity_name)
    names: list[str | None] = [
        _spell(next(left)) if option == "entity_name" else "*"
        for option in order
        if option in {"entity_name", "entity_default"}
    ]
    if len(names) > len(options.entity_type):
        raise ValueError("there are more names than types: give --entity-type before each name")
    names += [None] * (len(options.entity_type) - len(names))
    for type_, name in zip(options.entity_type, names, strict=True):
        if type_ not in TYPES:
            raise ValueError(f"--entity-type: only {', '.join(TYPES)} have quotas")
        yield TYPES[type_], name


def _spell(name: str) -> str:
    try:
        return spell(name) if name else ""
    except UnicodeEncodeError:
        raise ValueError("a name must be UTF-8") from None


def _added(configs: Sequence[str]) -> Iterator[_Setting]:
    for place, part in _parts("--add-config", configs):
        key, equals, text = part.partition("=")
        yield _setting(place, key, text if equals else "")


def _deleted(configs: Sequence[str]) -> Iterator[_Setting]:
    for place, part in _parts("--delete-config", configs):
        if "=" in part:
            raise ValueError(f"{place}: --delete-config takes keys without values, 'KEY,KEY'")
        yield _Setting(place, part, None)


def _properties(name: str, text: str) -> Iterator[_Setting]:
    """The configurations of a file, in the format of Java's properties."""
    line, begun = "", 0
    for number, physical in enumerate([*text.splitlines(), ""], 1):
        begun = begun if line else number
        line += physical.lstrip()
        if line.startswith(("#", "!")):
            line = ""
        elif _CONTINUED.search(line):
            line = line[:-1]
        elif line:
            found = _PROPERTY.fullmatch(line)
            key, value = found.groups() if found else ("", "")
            yield _setting(f"{name}:{begun}", _unescape(key), _unescape(value))
            line = ""


def _unescape(text: str) -> str:
    return _ESCAPED.sub(lambda found: chr(int(found[1], 16)) if found[1] else found[2], text)


def _setting(place: str, key: str, text: str) -> _Setting:
    """A key with its value, without the blanks and brackets that Kafka removes too."""
    key, text = key.strip(), re.sub(r"[\[\]]", "", text).strip()
    if not key or not text:
        raise ValueError(f"{place}: write --add-config 'KEY=NUMBER,KEY=NUMBER'")
    return _Setting(place, key, text)


def _parts(option: str, configs: Sequence[str]) -> Iterator[tuple[str, str]]:
    parts = [part.strip() for config in configs for part in _COMMA.split(config) if part.strip()]
    for number, part in enumerate(parts, 1):
        yield option if len(parts) == 1 else f"{option}, part {number}", part


def _entity_and_quota(names: EntityNames, setting: _Setting) -> tuple[Entity, str]:
    """The entity and quota that Kafka's key means for these names."""
    parts, key = list(names), setting.key
    listener = LISTENER_RATE.fullmatch(key)
    is_rate = listener is not None or key == BROKER_RATE
    on_brokers = names[0][0] == "broker"
    if not is_rate and key not in KEYS:
        near = get_close_matches(key, [*KEYS, BROKER_RATE], 1)
        hint = f"did you mean {near[0]}? " if near else ""
        known = f"{BROKER_RATE} and listener.name.NAME.{BROKER_RATE}" if on_brokers else ", ".join(KEYS)
        raise ValueError(f"{setting.place}: Invalid configuration key: {hint}use one of {known}")
    quota = MAX_CONNECTION_CREATION_RATE if is_rate else key
    if is_rate and not on_brokers:
        raise ValueError(f"{BROKER_RATE} goes with --entity-type brokers")
    if on_brokers and quota != MAX_CONNECTION_CREATION_RATE:
        raise ValueError(f"{key}: brokers have {BROKER_RATE} and listener.name.NAME.{BROKER_RATE}")
    if listener:
        name = "*" if listener[1] == "*" else _spell(listener[1])
        parts = [("listener", name)] if names[0][1] == "*" else [*names, ("listener", name)]
    try:
        entity = Entity.parse(",".join(f"{type_}={name}" for type_, name in parts))
        check_key(quota, entity)
    except QuotaValueError as wrong:
        raise ValueError(f"{quota} {wrong}") from None
    return entity, quota
