"""`quotagate volumes`: show volumes and the throttle factor, run drills, push and forget volumes."""
# ruff: noqa: D301  a real backspace keeps the lines of examples apart

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Annotated, Any, Final

import typer

from app.run.commands import show, values
from app.run.commands.node.requests import connected
from app.run.commands.node.target import ConfigFile, Key, Url
from app.run.commands.options import AtMs, Reason
from app.run.commands.show import Out, Output

group = typer.Typer()

PATH: Final = "/v1/volumes"
DRILL: Final = "/v1/volumes:drill"
BAR: Final = 20
STYLES: Final = {"ok": "green", "violating": "bold red", "unknown": "yellow"}
UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


@group.callback(invoke_without_command=True)
def volumes(
    context: typer.Context,
    at_ms: AtMs = None,
    url: Url = None,
    key: Key = None,
    config: ConfigFile = None,
    output: Out = "table",
) -> None:
    """Show volumes and the throttle factor that follows from them: its value, reason and validity.

    \b
    Examples:
      quotagate volumes
      quotagate volumes -o json
      quotagate volumes drill --factor 0.2 --for PT10M --reason 'fire drill'
    """
    if context.invoked_subcommand is None:
        with connected(url, key, config) as node:
            _show(node.get(PATH, at_ms=at_ms), output)


@group.command()
def drill(
    *,
    factor: Annotated[
        float | None,
        typer.Option(parser=values.factor, metavar="0..1", help="The factor for produce limits."),
    ] = None,
    for_ms: Annotated[
        int | None,
        typer.Option("--for", parser=values.duration_ms, metavar="DURATION", help="How long, such as PT10M."),
    ] = None,
    end: Annotated[bool, typer.Option("--end", help="End the drill that is running.")] = False,
    reason: Reason = None,
    url: Url = None,
    key: Key = None,
    config: ConfigFile = None,
    output: Out = "table",
) -> None:
    """Set the factor for a limited time, whatever the volumes are; a drill ends by itself.

    A drill overrides every observation: with --factor 1, callers may fill a disk.

    \b
    Examples:
      quotagate volumes drill --factor 0.2 --for PT10M --reason 'fire drill'
      quotagate volumes drill --factor 0 --for PT30S
      quotagate volumes drill --end
    """
    given = {"--factor": factor, "--for": for_ms}
    if end and (extra := [name for name, value in given.items() if value is not None]):
        raise typer.BadParameter(f"cannot be combined with {' or '.join(extra)}", param_hint="--end")
    for name, value in given.items():
        if value is None and not end:
            raise typer.BadParameter("is needed to start a drill; --end ends one", param_hint=name)
    with connected(url, key, config) as node:
        if end:
            node.ask("DELETE", DRILL, headers={"X-Reason": reason})
            show.done(output)
        else:
            body = {"factor": factor, "for_ms": for_ms}
            _show(node.ask("POST", DRILL, body, headers={"X-Reason": reason}).body, output)


@group.command()
def push(
    file: Annotated[typer.FileText, typer.Argument(metavar="FILE", help="JSON; - is standard input.")],
    *,
    at_ms: AtMs = None,
    url: Url = None,
    key: Key = None,
    config: ConfigFile = None,
    output: Out = "table",
) -> None:
    """Push an observation, if the source is push; FILE is the body of POST /v1/volumes.

    Volumes that FILE does not name stay known, unless it says that it is complete.

    \b
    Examples:
      quotagate volumes push seen.json
      echo '{"volumes": [], "complete": true}' | quotagate volumes push -
    """
    try:
        seen = json.loads(file.read())
    except ValueError as error:
        raise typer.BadParameter(f"{file.name} is not JSON: {error}", param_hint="FILE") from None
    with connected(url, key, config) as node:
        _show(node.ask("POST", PATH, seen, query={"at_ms": at_ms}).body, output)


@group.command()
def forget(
    broker: Annotated[str, typer.Argument(metavar="BROKER", help="The broker, as pushes name it.")],
    *,
    at_ms: AtMs = None,
    url: Url = None,
    key: Key = None,
    config: ConfigFile = None,
    output: Out = "table",
) -> None:
    """Forget the volumes of a broker that left the cluster, if the source is push.

    \b
    Examples:
      quotagate volumes forget 2
    """
    with connected(url, key, config) as node:
        node.ask("DELETE", PATH, query={"broker": broker, "at_ms": at_ms})
    show.done(output)


def _show(found: Mapping[str, Any], output: Output) -> None:
    if show.document(found, output):
        return
    drilled = found["drill"]
    show.fields(
        [
            ("factor", show.measured(found["factor"])),
            ("since", show.when(found["since_ms"] or None)),
            ("valid until", show.when(found["valid_until_ms"])),
            ("next check", show.when(found["next_check_ms"])),
            ("source", found["source"]),
            ("reason", found["reason"]),
            *([("drill until", f"{show.when(drilled['until_ms'])} by {drilled['who']}")] if drilled else []),
        ]
    )
    if found["volumes"]:
        show.line()
        show.table(
            ["BROKER", "DIR", "USED", "", "LEFT", "OF", "STATE", "OBSERVED"],
            [_row(volume) for volume in found["volumes"]],
            right=["", "LEFT", "OF"],
            styles=STYLES,
        )


def _row(volume: Mapping[str, Any]) -> tuple[Any, ...]:
    total, left = volume["total_bytes"], volume["available_bytes"]
    used = None if total is None or left is None else max(1 - left / total, 0) if total else 1.0
    return (
        volume["broker"],
        volume["dir"],
        None if used is None else bar(used, drawn=sys.stdout.isatty()),
        "" if used is None else f"{used:.0%}",
        size(left),
        size(total),
        volume["state"],
        show.when(volume["observed_ms"]),
    )


def bar(part: float, *, drawn: bool) -> str:
    """Draw a fraction; any fraction above 0 shows, and only 1 fills the bar.

    >>> bar(0.5, drawn=False), bar(0.999, drawn=True)
    ('##########..........', '███████████████████░')
    """
    full = BAR if part >= 1 else min(max(round(part * BAR), 1 if part > 0 else 0), BAR - 1)
    used, left = "█░" if drawn else "#."
    return used * full + left * (BAR - full)


def size(count: int | None) -> str | None:
    """Return bytes for people, rounded down, so a volume never seems to have more space than it has.

    >>> size(1023), size(1024 * 1024 - 1), size(10 * 1024**3)
    ('1023 B', '1023 KiB', '10 GiB')
    """
    if count is None:
        return None
    unit = min(max(count.bit_length() - 1, 0) // 10, len(UNITS) - 1)
    whole = count * 10 // 1024**unit  # tenths
    tenths = f".{whole % 10}" if unit and whole < 1000 and whole % 10 else ""
    return f"{whole // 10}{tenths} {UNITS[unit]}"
