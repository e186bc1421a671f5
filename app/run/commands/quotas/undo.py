"""`quotagate quotas undo`: takes the last change of an entity's quotas back."""
# ruff: noqa: D301  a real backspace keeps the lines of examples apart

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import typer

from app.node.errors import CommandError
from app.run.commands import show, values
from app.run.commands.node.requests import Node, NodeRefusalError, connected
from app.run.commands.node.target import ConfigFile, Key, Url
from app.run.commands.options import Reason
from app.run.commands.quotas.entity import EntityArgument, IfMatch, show_entity, written_headers
from app.run.commands.show import Out

group = typer.Typer()


@group.command()
def undo(
    entity: EntityArgument,
    reason: Reason = None,
    if_match: IfMatch = None,
    url: Url = None,
    key: Key = None,
    config: ConfigFile = None,
    output: Out = "table",
) -> None:
    """Take the last change of an entity back: it gets the quotas that it had before.

    It is refused if the entity changes meanwhile. The undo is in the history too, so a second one takes the
    first one back.

    \b
    Examples:
      quotagate quotas undo user=alice
      quotagate quotas undo 'user=*' --reason 'too tight' --if-match 17
    """
    of = str(values.entity(entity))
    place = f"/v1/quotas/{of}"
    with connected(url, key, config) as node:
        now = _now(node, place)
        change = _last_change(node, of)
        if change["after"] != (now["quotas"] if now else None):
            raise CommandError(f"{of} has changed meanwhile: look at its history, and try again")
        if change["before"] == change["after"]:
            raise CommandError(f"the last change of {of} left its quotas as they were")
        said = f"the change of {show.when(change['at_ms'])} by {change['who']}"
        version = if_match if if_match is not None or now is None else now["version"]
        headers = written_headers(reason or f"undo of {said}", version)
        headers["If-None-Match"] = "*" if now is None else None
        if change["before"] is None:
            node.ask("DELETE", place, headers=headers)
            show.done(output)
        else:
            show_entity(node.ask("PUT", place, change["before"], headers=headers).body, output)
    show.note(f"{of} is as it was before {said}.")


def _now(node: Node, place: str) -> Mapping[str, Any] | None:
    """The quotas of an entity; None without any."""
    try:
        return node.get(place)
    except NodeRefusalError as refused:
        if refused.status != HTTPStatus.NOT_FOUND:
            raise
        return None


def _last_change(node: Node, of: str) -> Mapping[str, Any]:
    """The newest change of an entity in the history.

    Raises:
        CommandError: there is no change.
    """
    changes: list[Mapping[str, Any]] = node.get("/v1/quotas:history", entity=of, limit=1)["changes"]
    if not changes:
        raise CommandError(f"the history has no change of {of}")
    return changes[0]
