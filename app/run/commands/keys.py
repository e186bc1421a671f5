"""`quotagate keys`: create, list, rotate and revoke API keys."""
# ruff: noqa: D301  a real backspace keeps the lines of examples apart

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, Final

import typer

from app.run.commands import show
from app.run.commands.node.requests import connected, segment
from app.run.commands.node.target import ConfigFile, Key, Url
from app.run.commands.show import Out, Output

group = typer.Typer(help="Create, list, rotate and revoke API keys.", no_args_is_help=True)

SCOPES: Final = ("decide", "account", "read", "write", "admin")
_UNITS: Final = {"s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_SPAN: Final = re.compile(r"([0-9]{1,12})([smhd])")

Name = Annotated[str, typer.Argument(metavar="NAME", help="The key's name.")]


@group.command()
def create(
    name: Name,
    *,
    scope: Annotated[
        list[str] | None,
        typer.Option(
            help=f"A scope: {', '.join(SCOPES)}; repeat for more.  [default: decide]",
            autocompletion=lambda: list(SCOPES),
        ),
    ] = None,
    bound_to: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ENTITY",
            help="Restrict asks to this entity, such as user=acme or 'user=acme-*'; repeat for more.",
        ),
    ] = None,
    expires: Annotated[
        str | None, typer.Option(metavar="WHEN", help="After 90m, 12h or 30d, or at 2027-01-31T12:00:00Z.")
    ] = None,
    url: Url = None,
    key: Key = None,
    config: ConfigFile = None,
    output: Out = "table",
) -> None:
    """Create a key. It is shown only once; the catalog keeps a hash.

    \b
    Examples:
      quotagate keys create gateway
      quotagate keys create acme --bound-to 'user=acme-*' --expires 30d
      quotagate keys create ci --scope read --scope write -o json
    """
    body: dict[str, Any] = {"name": name, "scopes": scope or ["decide"]}
    if bound_to:
        body["bound_to"] = bound_to
    if expires is not None:
        body["expires_ms"] = _instant(expires)
    with connected(url, key, config) as node:
        _show_secret(node.ask("POST", "/v1/keys", body).body, output)


@group.command("list")
def list_(url: Url = None, key: Key = None, config: ConfigFile = None, output: Out = "table") -> None:
    """List all keys with their scopes, without the secrets.

    \b
    Examples:
      quotagate keys list
      quotagate keys list -o json
    """
    with connected(url, key, config) as node:
        found = node.get("/v1/keys")
    if not show.document(found, output):
        show.table(
            ["NAME", "SCOPES", "BOUND TO", "EXPIRES"],
            [
                (one["name"], one["scopes"], one.get("bound_to"), show.when(one.get("expires_ms")))
                for one in found["keys"]
            ],
        )


@group.command()
def revoke(
    name: Name, url: Url = None, key: Key = None, config: ConfigFile = None, output: Out = "table"
) -> None:
    """Revoke a key: within a second, every node refuses it.

    \b
    Examples:
      quotagate keys revoke gateway
    """
    with connected(url, key, config) as node:
        node.ask("DELETE", f"/v1/keys/{segment(name)}")
    show.done(output)


@group.command()
def rotate(
    name: Name,
    *,
    grace: Annotated[
        str | None,
        typer.Option(metavar="SPAN", help="How long the old key stays valid: 90s, 15m, 24h or 7d."),
    ] = None,
    url: Url = None,
    key: Key = None,
    config: ConfigFile = None,
    output: Out = "table",
) -> None:
    """Replace a key by a new one, shown only once; with --grace, the old one stays valid for a while.

    \b
    Examples:
      quotagate keys rotate gateway
      quotagate keys rotate gateway --grace 24h
    """
    body = {} if grace is None else {"grace_ms": _span(grace)}
    with connected(url, key, config) as node:
        _show_secret(node.ask("POST", f"/v1/keys/{segment(name)}:rotate", body).body, output)


def _show_secret(made: Mapping[str, Any], output: Output) -> None:
    """Print only the key on standard output, so that it can be piped to a file."""
    if not show.document(made, output):
        show.line(made["key"])
        show.note(f"This is the key {made['name']}. It is not shown again.")


def _span(text: str) -> int:
    """Return a span of time in milliseconds.

    >>> _span("90s"), _span("7d")
    (90000, 604800000)
    """
    if found := _SPAN.fullmatch(text):
        return int(found[1]) * _UNITS[found[2]]
    raise typer.BadParameter(f"{text!r}: write 90s, 15m, 24h or 7d")


def _instant(text: str) -> int:
    """Return a time in milliseconds: a span from now, or a date and time.

    >>> _instant("2027-01-31T12:00:00Z"), _instant("2027-01-31")
    (1801396800000, 1801353600000)
    """
    if _SPAN.fullmatch(text):
        return time.time_ns() // 1_000_000 + _span(text)
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r}: write 12h, 30d or 2027-01-31T12:00:00Z") from None
    return int((at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() * 1000)
