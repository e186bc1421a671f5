"""The options and output of `kafka-configs.sh`, translated to and from entities and quotas.

Nothing here makes a request. A ``ValueError`` says what is wrong with the options.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

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

EntityNames = list[tuple[str, str | None]]
"""Our entity types, each with a name as it is spelled in a path; None is any name."""


@dataclass(frozen=True, slots=True)
class KafkaOptions:
    """The options of one command. The short forms are Kafka's; ``--broker`` is our addition."""

    entity_type: Sequence[str] = ()
    entity_name: Sequence[str] = ()
    entity_default: int = 0
    short: Mapping[str, str] = field(default_factory=dict)
    short_defaults: Sequence[str] = ()
    add_config: Sequence[str] = ()
    delete_config: Sequence[str] = ()


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
    """Return what to change, by entity and quota; None removes a quota.

    Args:
        read_value: reads the text of a quota's value, which comes after its key.

    >>> options = KafkaOptions(add_config=["request_rate=5"], delete_config=["producer_ids_rate"])
    >>> changes(options, [("user", "a")], lambda key, text: int(text))
    {'user=a': {'request_rate': 5, 'producer_ids_rate': None}}
    >>> options = KafkaOptions(add_config=["listener.name.A.max.connection.creation.rate=5"])
    >>> changes(options, [("broker", "1")], lambda key, text: int(text))
    {'broker=1,listener=A': {'max_connection_creation_rate': 5}}
    """
    if missing := [type_ for type_, name in names if name is None]:
        raise ValueError(f"--alter needs a name for {missing[0]}: --entity-name NAME or --entity-default")
    changes: dict[str, dict[str, Any]] = {}
    for key, new in [*_added(options.add_config, read_value), *_deleted(options.delete_config)]:
        entity, quota = _entity_and_quota(names, key)
        if quota in changes.setdefault(str(entity), {}):
            raise ValueError(f"{key} is given twice")
        changes[str(entity)][quota] = new
    if not changes:
        raise ValueError("--alter needs --add-config or --delete-config")
    return changes


def filters(names: EntityNames) -> list[tuple[list[str], bool]]:
    """Return the lists of quotas that `--describe` shows: what each must match, and whether strictly.

    >>> filters([("user", "alice"), ("client-id", None)])
    [(['user=alice', 'client-id'], True)]
    """
    match = [type_ if name is None else f"{type_}={name}" for type_, name in names]
    if names[0][0] != "broker":
        return [(match, True)]
    # A broker's listener limits are set on the pair of both; those for all brokers on the listener alone.
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
            raise ValueError(f"--entity-type {type_} has no quotas: use {', '.join(TYPES)}")
        yield TYPES[type_], name


def _spell(name: str) -> str:
    try:
        return spell(name) if name else ""
    except UnicodeEncodeError:
        raise ValueError(f"{name!r} must be UTF-8") from None


def _added(configs: Sequence[str], read_value: Callable[[str, str], Any]) -> Iterator[tuple[str, Any]]:
    for part in _parts(configs):
        key, equals, text = part.partition("=")
        if not equals or not text:
            raise ValueError(f"{part!r}: write --add-config 'KEY=NUMBER,KEY=NUMBER'")
        new = read_value(key, text)
        if new is None:
            raise ValueError(f"{key}: to remove a quota, write --delete-config {key}")
        yield key, new


def _deleted(configs: Sequence[str]) -> Iterator[tuple[str, None]]:
    for part in _parts(configs):
        if "=" in part:
            raise ValueError(f"{part!r}: --delete-config takes keys without values, 'KEY,KEY'")
        yield part, None


def _parts(configs: Sequence[str]) -> Iterator[str]:
    for config in configs:
        yield from (part.strip() for part in config.split(",") if part.strip())


def _entity_and_quota(names: EntityNames, key: str) -> tuple[Entity, str]:
    """The entity and quota that Kafka's ``key`` means for these names."""
    parts, quota = list(names), key
    listener = LISTENER_RATE.fullmatch(key)
    is_rate = listener is not None or key == BROKER_RATE
    on_brokers = names[0][0] == "broker"
    if is_rate:
        if not on_brokers:
            raise ValueError(f"{key} goes with --entity-type brokers")
        quota = MAX_CONNECTION_CREATION_RATE
    elif on_brokers and key != MAX_CONNECTION_CREATION_RATE:
        raise ValueError(f"{key}: brokers have {BROKER_RATE} and listener.name.NAME.{BROKER_RATE}")
    if listener:
        name = "*" if listener[1] == "*" else _spell(listener[1])
        parts = [("listener", name)] if names[0][1] == "*" else [*names, ("listener", name)]
    try:
        entity = Entity.parse(",".join(f"{type_}={name}" for type_, name in parts))
        if quota not in KEYS:
            raise ValueError(f"Invalid configuration key {key}: use one of {', '.join(KEYS)}")
        check_key(quota, entity)
    except QuotaValueError as wrong:
        raise ValueError(f"{key} {wrong}") from None
    return entity, quota
