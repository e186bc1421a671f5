"""Kafka's spelling of quotas, as `kafka-configs.sh` has it, in our words; no request is made here."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import typer
from typer.core import TyperGroup

from app.domain.entity import Entity, EntityError, spell
from app.domain.quota import KEYS, MAX_CONNECTION_CREATION_RATE
from app.domain.quota_value import ValueErrors, check_key
from app.run.commands.show import cell
from app.run.commands.values import value

TYPES: Final[Mapping[str, str]] = {
    "users": "user",
    "clients": "client-id",
    "ips": "ip",
    "brokers": "broker",
}
BROKER_RATE: Final = "max.connection.creation.rate"
_LISTENER_RATE: Final = re.compile(rf"listener\.name\.(.+)\.{re.escape(BROKER_RATE)}")
_ORDER: Final = "the order of the options"
_ALL_BROKERS: Final = "Default configs for brokers in the cluster are:"
_TITLES: Final = {"user": "user-principal", "client-id": "client-id", "ip": "ip"}

Named = list[tuple[str, str | None]]
"""Entity types of ours with their names as they are spelled in a path; None is any name."""


class KafkaWords(TyperGroup):
    """A group that knows in which order its options stood: the n-th name belongs to the n-th type."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the options, and remember their order."""
        if args:
            _, _, order = self.make_parser(ctx).parse_args(args=list(args))
            ctx.meta[_ORDER] = [param.name for param in order]
        return super().parse_args(ctx, args)


@dataclass(frozen=True, slots=True)
class Spelled:
    """What stood on the command line; the short forms are Kafka's, and ``broker``'s are ours beside them."""

    entity_type: Sequence[str] = ()
    entity_name: Sequence[str] = ()
    entity_default: int = 0
    short: Mapping[str, str] = field(default_factory=dict)
    short_defaults: Sequence[str] = ()
    add_config: Sequence[str] = ()
    delete_config: Sequence[str] = ()

    def any(self) -> bool:
        """Whether there is anything."""
        return any((self.entity_type, self.entity_name, self.entity_default, self.short)) or any(
            (self.short_defaults, self.add_config, self.delete_config)
        )


def order_of(ctx: typer.Context) -> list[str]:
    """The names of the options in the order in which they stood."""
    found: list[str] = ctx.meta.get(_ORDER, [])
    return found


def named(spelled: Spelled, order: Sequence[str]) -> Named:
    """The types that are named, with their names.

    >>> named(Spelled(["users", "clients"], ["alice"], 1), ["entity_default", "entity_name"])
    [('user', '*'), ('client-id', 'alice')]
    """
    short = [(type_, _spell(name)) for type_, name in spelled.short.items()]
    short += [(type_, "*") for type_ in spelled.short_defaults]
    if short and (spelled.entity_type or spelled.entity_name or spelled.entity_default):
        raise _wrong("use --entity-type and --entity-name, or short forms such as --user, not both")
    found: Named = [*short, *_long(spelled, order)]
    types = [type_ for type_, _ in found]
    if len(set(types)) < len(types):
        raise _wrong("each type of entity is named once")
    if not found:
        raise _wrong("name an entity: --entity-type users --entity-name alice, or --user alice")
    if len(found) > 1 and set(types) != {"user", "client-id"}:
        raise _wrong(f"{' and '.join(types)} do not go together: only users and clients do")
    return sorted(found, key=lambda one: list(TYPES.values()).index(one[0]))


def changes(spelled: Spelled, names: Named) -> dict[str, dict[str, Any]]:
    """What to change, by entity and quota; None takes a quota away.

    >>> changes(Spelled(add_config=["request_rate=5"], delete_config=["producer_ids_rate"]), [("user", "a")])
    {'user=a': {'request_rate': 5, 'producer_ids_rate': None}}
    >>> changes(Spelled(add_config=["listener.name.A.max.connection.creation.rate=5"]), [("broker", "1")])
    {'broker=1,listener=A': {'max_connection_creation_rate': 5}}
    """
    if missing := [type_ for type_, name in names if name is None]:
        raise _wrong(f"--alter needs a name for {missing[0]}: --entity-name NAME or --entity-default")
    found: dict[str, dict[str, Any]] = {}
    for key, new in [*_added(spelled.add_config), *_deleted(spelled.delete_config)]:
        entity, quota = _place(names, key)
        if quota in found.setdefault(str(entity), {}):
            raise _wrong(f"{key} is given twice")
        found[str(entity)][quota] = new
    if not found:
        raise _wrong("--alter needs --add-config or --delete-config")
    return found


def filters(names: Named) -> list[tuple[list[str], bool]]:
    """The lists that hold what is described: what must match, and whether strictly.

    >>> filters([("user", "alice"), ("client-id", None)])
    [(['user=alice', 'client-id'], True)]
    """
    match = [type_ if name is None else f"{type_}={name}" for type_, name in names]
    if names[0][0] != "broker":
        return [(match, True)]
    # A broker's limits for listeners stand on pairs; the limits of listeners of all brokers on listeners.
    everywhere = [] if names[0][1] not in {None, "*"} else [(["listener"], True)]
    return [(match, False), *everywhere]


def described(found: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Quotas as Kafka prints them."""
    dynamic: dict[str, list[str]] = {}
    for one in found:
        names = dict(Entity.parse(one["entity"]).parts)
        if {"broker", "listener"} & set(names):
            broker, listener = names.get("broker"), names.get("listener")
            title = f"broker {broker}" if isinstance(broker, str) else ""
            named = f"listener.name.{listener if isinstance(listener, str) else '*'}." if listener else ""
            dynamic.setdefault(title, []).extend(
                f"  {named}{BROKER_RATE}={_limit(said)}" for said in one["quotas"].values()
            )
        else:
            limits = ", ".join(f"{key}={_limit(said)}" for key, said in one["quotas"].items())
            yield f"Quota configs for {title_of(one['entity'])} are {limits}"
    for title, lines in dynamic.items():
        yield f"Dynamic configs for {title} are:" if title else _ALL_BROKERS
        yield from lines


def title_of(entity: str) -> str:
    """An entity as Kafka names it.

    >>> title_of("user=*,client-id=etl")
    "the default user-principal, client-id 'etl'"
    """
    return ", ".join(
        f"the default {_TITLES.get(type_, type_)}"
        if not isinstance(name, str)
        else f"{_TITLES.get(type_, type_)} '{name}'"
        for type_, name in Entity.parse(entity).parts
    )


def _long(spelled: Spelled, order: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    left = iter(spelled.entity_name)
    names: list[str | None] = [
        _spell(next(left)) if option == "entity_name" else "*"
        for option in order
        if option in {"entity_name", "entity_default"}
    ]
    if len(names) > len(spelled.entity_type):
        raise _wrong("there are more names than types: give --entity-type before each name")
    names += [None] * (len(spelled.entity_type) - len(names))
    for type_, name in zip(spelled.entity_type, names, strict=True):
        if type_ not in TYPES:
            raise _wrong(f"--entity-type {type_} has no quotas: use {', '.join(TYPES)}")
        yield TYPES[type_], name


def _spell(name: str) -> str:
    try:
        return spell(name) if name else ""
    except UnicodeEncodeError:
        raise _wrong(f"{name!r} must be UTF-8") from None


def _limit(said: Mapping[str, Any]) -> str:
    more = ", ".join(f"{name}={cell(setting)}" for name, setting in said.items() if name != "limit")
    return f"{float(said['limit'])}" + (f" ({more})" if more else "")


def _added(configs: Sequence[str]) -> Iterator[tuple[str, Any]]:
    for part in _parts(configs):
        key, equals, said = part.partition("=")
        if not equals or not said:
            raise _wrong(f"{part!r}: write --add-config 'KEY=NUMBER,KEY=NUMBER'")
        new = value(key, said)
        if new is None:
            raise _wrong(f"{key}: to take a quota away, write --delete-config {key}")
        yield key, new


def _deleted(configs: Sequence[str]) -> Iterator[tuple[str, None]]:
    for part in _parts(configs):
        if "=" in part:
            raise _wrong(f"{part!r}: --delete-config takes names alone, 'KEY,KEY'")
        yield part, None


def _parts(configs: Sequence[str]) -> Iterator[str]:
    for config in configs:
        yield from (part.strip() for part in config.split(",") if part.strip())


def _place(names: Named, key: str) -> tuple[Entity, str]:
    """The entity and the quota that a name of Kafka's means on these."""
    parts, quota = list(names), key
    rate = key == BROKER_RATE
    listener = _LISTENER_RATE.fullmatch(key)
    on_brokers = names[0][0] == "broker"
    if (rate or listener) and not on_brokers:
        raise _wrong(f"{key} goes with --entity-type brokers")
    if rate or listener:
        quota = MAX_CONNECTION_CREATION_RATE
    elif on_brokers and key != MAX_CONNECTION_CREATION_RATE:
        raise _wrong(f"{key}: brokers have {BROKER_RATE} and listener.name.NAME.{BROKER_RATE}")
    if listener:
        name = "*" if listener[1] == "*" else _spell(listener[1])
        parts = [("listener", name)] if names[0][1] == "*" else [*names, ("listener", name)]
    try:
        entity = Entity.parse(",".join(f"{type_}={name}" for type_, name in parts))
        if quota not in KEYS:
            raise _wrong(f"Invalid configuration key {key}: use one of {', '.join(KEYS)}")
        check_key(quota, entity)
    except EntityError as error:
        raise _wrong(str(error)) from None
    except ValueErrors as wrong:
        raise _wrong(f"{key} {wrong}") from None
    return entity, quota


def _wrong(message: str) -> typer.BadParameter:
    return typer.BadParameter(message)
