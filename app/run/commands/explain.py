"""`quotagate quotas effective` and `history`: which limits hold for somebody, and how they came about."""
# ruff: noqa: D301  a real backspace keeps the lines of examples apart

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final

import typer

from app.run.commands import show, values
from app.run.commands.node import connected
from app.run.commands.options import AtMs
from app.run.commands.pages import pages
from app.run.commands.show import Out, Output
from app.run.commands.target import ConfigFile, Key, Url

group = typer.Typer()

DRILLS: Final = "throttle_factor"
"""What the history calls what drills change."""


@group.command()
def effective(
    principal: Annotated[str | None, typer.Option(help="Who would ask.")] = None,
    client_id: Annotated[str | None, typer.Option(help="Its client-id.")] = None,
    ip: Annotated[str | None, typer.Option(help="Its address.")] = None,
    broker: Annotated[str | None, typer.Option(help="The broker that would be asked.")] = None,
    listener: Annotated[str | None, typer.Option(help="The listener that would be asked.")] = None,
    at_ms: AtMs = None,
    url: Url = None,
    key: Key = None,
    config: ConfigFile = None,
    output: Out = Output.table,
) -> None:
    """Explain the limits that hold for somebody: which entity gives each, and instead of which others.

    With -o json each quota comes with its whole ladder.

    \b
    Examples:
      quotagate quotas effective --principal alice --client-id etl
      quotagate quotas effective --ip 10.0.0.7 --listener EXTERNAL -o json
    """
    asked = {
        "principal": principal,
        "client_id": client_id,
        "ip": ip,
        "broker": broker,
        "listener": listener,
    }
    if all(name is None for name in asked.values()):
        raise typer.BadParameter("name somebody, such as --principal alice or --ip 10.0.0.7")
    with connected(url, key, config) as node:
        found = node.get("/v1/quotas:effective", **asked, at_ms=at_ms)
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
            help=f"Changes of this entity alone; {DRILLS}: drills.", autocompletion=values.completed_types
        ),
    ] = None,
    *,
    limit: Annotated[int, typer.Option(min=1, help="Show at most this many changes.")] = 50,
    url: Url = None,
    key: Key = None,
    config: ConfigFile = None,
    output: Out = Output.table,
) -> None:
    """Show who changed what, when and why; the newest change comes first.

    \b
    Examples:
      quotagate quotas history
      quotagate quotas history user=alice --limit 5
      quotagate quotas history throttle_factor
    """
    of = entity if entity in (None, DRILLS) else str(values.entity(entity))
    query = {"entity": of}
    with connected(url, key, config) as node:
        found = pages(node, "/v1/quotas:history", "changes", query, limit=limit).items
    if not show.document({"changes": found}, output):
        show.table(
            ["WHEN", "WHO", "ENTITY", "CHANGE", "REASON"], [row for one in found for row in _changes(one)]
        )


def _ladder(one: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    """The limit that holds, and below it the limits further down its ladder, which do not."""
    yield (one["quota"], one["limit"], one["limit_now"], one["entity"], one["bucket"])
    for level in one["ladder"]:
        if level["entity"] != one["entity"] and level["limit"] is not None:
            yield ("  instead of", level["limit"], "", level["entity"], "")


def _changes(one: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
    """What a change did, one quota on a line; who did it, when and why stands on the first."""
    if one["entity"] == DRILLS:
        told = " -> ".join("none" if each is None else _drill(each) for each in (one["before"], one["after"]))
        yield (show.when(one["at_ms"]), one["who"], one["entity"], f"drill {told}", one["reason"])
        return
    before, after = one["before"] or {}, one["after"] or {}
    common = (show.when(one["at_ms"]), one["who"], one["entity"])
    reason = one["reason"]
    for quota in dict.fromkeys([*before, *after]):
        old, new = before.get(quota), after.get(quota)
        if old != new:
            yield (*common, f"{quota} {_brief(old)} -> {_brief(new)}", reason)
            common, reason = ("", "", ""), ""


def _drill(said: Mapping[str, Any]) -> str:
    return f"{show.cell(said['factor'])} until {show.when(said['until_ms'])}"


def _brief(said: Mapping[str, Any] | None) -> str:
    return "none" if said is None else show.brief(said)
