"""`quotagate quotas effective` and `history`: the limits that apply to a caller, and their changes."""
# ruff: noqa: D301  a real backspace keeps the lines of examples apart

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final

import typer

from app.run.commands import show, values
from app.run.commands.node.pages import pages
from app.run.commands.node.requests import connected
from app.run.commands.node.target import ConfigFile, Key, Url
from app.run.commands.options import AtMs
from app.run.commands.show import Out

group = typer.Typer()

DRILLS: Final = "throttle_factor"
"""The name of drills in the history."""


@group.command()
def effective(
    principal: Annotated[str | None, typer.Option(help="The principal that would ask.")] = None,
    client_id: Annotated[str | None, typer.Option(help="Its client-id.")] = None,
    ip: Annotated[str | None, typer.Option(help="Its address.")] = None,
    broker: Annotated[str | None, typer.Option(help="The broker that would be asked.")] = None,
    listener: Annotated[str | None, typer.Option(help="The listener that would be asked.")] = None,
    at_ms: AtMs = None,
    url: Url = None,
    key: Key = None,
    config: ConfigFile = None,
    output: Out = "table",
) -> None:
    """Explain the limits that apply to a caller: which entity sets each, and which limits it overrides.

    With -o json each quota comes with its whole ladder.

    \b
    Examples:
      quotagate quotas effective --principal alice --client-id etl
      quotagate quotas effective --ip 10.0.0.7 --listener EXTERNAL -o json
    """
    caller = {
        "principal": principal,
        "client_id": client_id,
        "ip": ip,
        "broker": broker,
        "listener": listener,
    }
    if all(name is None for name in caller.values()):
        raise typer.BadParameter("name a caller, such as --principal alice or --ip 10.0.0.7")
    with connected(url, key, config) as node:
        found = node.get("/v1/quotas:effective", **caller, at_ms=at_ms)
    if show.document(found, output):
        return
    if not found["quotas"]:
        show.note("No quota applies: nothing is limited.")
        return
    show.table(
        ["QUOTA", "LIMIT", "NOW", "FROM", "BUCKET"],
        [row for one in found["quotas"] for row in _ladder(one)],
        right=["LIMIT", "NOW"],
    )


@group.command()
def history(
    entity: Annotated[
        str | None,
        typer.Argument(
            help=f"Only changes of this entity; {DRILLS} for drills.", autocompletion=values.completed_types
        ),
    ] = None,
    *,
    limit: Annotated[int, typer.Option(min=1, help="Show at most this many changes.")] = 50,
    url: Url = None,
    key: Key = None,
    config: ConfigFile = None,
    output: Out = "table",
) -> None:
    """Show who changed what, when and why, newest change first.

    \b
    Examples:
      quotagate quotas history
      quotagate quotas history user=alice --limit 5
      quotagate quotas history throttle_factor
    """
    of = entity if entity in (None, DRILLS) else str(values.entity(entity))
    with connected(url, key, config) as node:
        found = pages(node, "/v1/quotas:history", "changes", {"entity": of}, limit=limit)
    if not show.document({"changes": found}, output):
        show.table(
            ["WHEN", "WHO", "ENTITY", "CHANGE", "REASON"], [row for one in found for row in _changes(one)]
        )


def _ladder(one: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    """The limit that applies, and the limits of its ladder that it overrides."""
    yield (one["quota"], one["limit"], _now(one), one["entity"], one["bucket"])
    for level in one["ladder"]:
        if level["entity"] != one["entity"] and level["limit"] is not None:
            yield ("  instead of", level["limit"], "", level["entity"], "")


def _now(one: Mapping[str, Any]) -> str:
    """The limit at the moment; if the throttle factor changes it, it is computed and rounded."""
    return (show.cell if one["limit_now"] == one["limit"] else show.measured)(one["limit_now"])


def _changes(one: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    """The rows of a change, one per quota; the first also shows who, when and why."""
    if one["entity"] == DRILLS:
        change = " -> ".join(
            "none" if each is None else _drill(each) for each in (one["before"], one["after"])
        )
        yield (show.when(one["at_ms"]), one["who"], one["entity"], f"drill {change}", one["reason"])
        return
    before, after = one["before"] or {}, one["after"] or {}
    common = (show.when(one["at_ms"]), one["who"], one["entity"])
    reason = one["reason"]
    for quota in dict.fromkeys([*before, *after]):
        old, new = before.get(quota), after.get(quota)
        if old != new:
            yield (*common, f"{quota} {_brief(old)} -> {_brief(new)}", reason)
            common, reason = ("", "", ""), ""


def _drill(drill: Mapping[str, Any]) -> str:
    return f"{show.measured(drill['factor'])} until {show.when(drill['until_ms'])}"


def _brief(definition: Mapping[str, Any] | None) -> str:
    return "none" if definition is None else show.brief(definition)
