"""`quotagate quotas set`, `get`, `list` and `delete`: quotas on a running node."""
# ruff: noqa: D301  a real backspace keeps the lines of examples apart

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer

from app.run.commands import show, values
from app.run.commands.node.pages import pages
from app.run.commands.node.requests import connected
from app.run.commands.node.target import ConfigFile, Key, Url
from app.run.commands.options import OrderedOptionsGroup, Reason
from app.run.commands.show import Out, Output

group = typer.Typer(
    cls=OrderedOptionsGroup,
    epilog="An entity is user=alice, client-id=etl, user=alice,client-id=etl, ip=10.0.0.7, broker=1, "
    "listener=EXTERNAL or broker=1,listener=EXTERNAL; user=* is the default; %2A is the name *.",
)

EntityArgument = Annotated[
    str,
    typer.Argument(
        metavar="ENTITY",
        help="Such as user=alice, 'user=*' or user=alice,client-id=etl.",
        autocompletion=values.completed_types,
    ),
]
IfMatch = Annotated[
    int | None,
    typer.Option(
        metavar="VERSION", help="Change only if the entity is still at this version, which get shows."
    ),
]


@group.command("set")
def set_(
    entity: EntityArgument,
    assignments: Annotated[
        list[str],
        typer.Argument(
            metavar="KEY=VALUE...", help="Quotas and their values.", autocompletion=values.completed_keys
        ),
    ],
    *,
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace all quotas of the entity, instead of merging.")
    ] = False,
    reason: Reason = None,
    if_match: IfMatch = None,
    url: Url = None,
    key: Key = None,
    config: ConfigFile = None,
    output: Out = "table",
) -> None:
    """Set quotas of an entity; quotas that are not named stay unchanged.

    VALUE is a number, the limit; or fields, limit=100,samples=21,enforcement=deny; or JSON. Fields that are
    not named stay too; the value null removes a field or a quota.

    \b
    Examples:
      quotagate quotas set 'user=*' producer_ids_rate=50
      quotagate quotas set user=alice request_rate=limit=100,enforcement=deny
      quotagate quotas set user=alice request_rate=shadow=true --reason trial
      quotagate quotas set ip=10.0.0.7 'request_rate={"limit": 5, "shadow": true}'
      quotagate quotas set user=alice request_rate=10 --replace --if-match 17
    """
    place = f"/v1/quotas/{values.entity(entity)}"
    body = values.assignments(assignments)
    headers = written_headers(reason, if_match)
    with connected(url, key, config) as node:
        if found := node.ask("PUT" if replace else "PATCH", place, body, headers=headers).body:
            show_entity(found, output)
        else:
            show.note(f"{values.entity(entity)} has no quotas left.")
            show.done(output)


@group.command()
def get(
    entity: EntityArgument,
    url: Url = None,
    key: Key = None,
    config: ConfigFile = None,
    output: Out = "table",
) -> None:
    """Show the quotas of one entity, and what they guarantee.

    \b
    Examples:
      quotagate quotas get user=alice
      quotagate quotas get 'user=*' -o yaml
    """
    place = f"/v1/quotas/{values.entity(entity)}"
    with connected(url, key, config) as node:
        show_entity(node.get(place), output)


@group.command("list")
def list_(
    match: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MATCH...]",
            help="type=NAME is this name, 'type=*' the default, type any name; all must match.",
            autocompletion=values.completed_types,
        ),
    ] = None,
    *,
    strict: Annotated[
        bool, typer.Option("--strict", help="Only entities with exactly the named types.")
    ] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="Show at most this many entities.")] = None,
    url: Url = None,
    key: Key = None,
    config: ConfigFile = None,
    output: Out = "table",
) -> None:
    """List the quotas of all entities, or of some.

    \b
    Examples:
      quotagate quotas list
      quotagate quotas list user=alice
      quotagate quotas list user client-id --strict
      quotagate quotas list 'ip=*' -o json
    """
    query = values.matches(match or (), strict=strict)
    with connected(url, key, config) as node:
        found = pages(node, "/v1/quotas", "quotas", query, limit=limit)
    if not show.document({"quotas": found}, output):
        show_rows(found)


@group.command()
def delete(
    entity: EntityArgument,
    keys: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY...]", help="Only these quotas.", autocompletion=values.completed_names),
    ] = None,
    reason: Reason = None,
    if_match: IfMatch = None,
    url: Url = None,
    key: Key = None,
    config: ConfigFile = None,
    output: Out = "table",
) -> None:
    """Remove quotas of an entity: all, or only those that are named.

    \b
    Examples:
      quotagate quotas delete user=alice
      quotagate quotas delete user=alice request_rate --reason 'launch is over'
    """
    place = f"/v1/quotas/{values.entity(entity)}"
    values.check_no_credentials(keys or ())
    headers = written_headers(reason, if_match)
    with connected(url, key, config) as node:
        if keys:
            node.ask("PATCH", place, dict.fromkeys(keys), headers=headers)
        else:
            node.ask("DELETE", place, headers=headers)
    show.done(output)


def written_headers(reason: str | None, if_match: int | None) -> dict[str, str | None]:
    """Return the headers of a change."""
    return {"X-Reason": reason, "If-Match": None if if_match is None else f'"{if_match}"'}


def show_entity(found: Mapping[str, Any], output: Output) -> None:
    """Show one entity: a row per quota, with its guarantee."""
    if show.document(found, output):
        return
    bounds = found.get("bounds", {})
    show.table(
        ["QUOTA", "LIMIT", "SETTINGS", "PROMISE"],
        [
            (quota, definition["limit"], settings_of(definition), bounds.get(quota, {}).get("text"))
            for quota, definition in found["quotas"].items()
        ],
        right=["LIMIT"],
    )
    show.note(f"{found['entity']} is at version {found['version']}.")


def show_rows(found: list[Any]) -> None:
    """Show many entities: a row per quota."""
    show.table(
        ["ENTITY", "QUOTA", "LIMIT", "SETTINGS"],
        [row for entity in found for row in _rows(entity)],
        right=["LIMIT"],
    )


def settings_of(definition: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of a quota without its limit."""
    return {field: setting for field, setting in definition.items() if field != "limit"}


def _rows(entity: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    name = entity["entity"]
    for quota, definition in entity["quotas"].items():
        yield (name, quota, definition["limit"], settings_of(definition))
