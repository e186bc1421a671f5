"""How answers are shown: as a table, JSON or YAML; nothing that a terminal would obey reaches it."""

from __future__ import annotations

import enum
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from shutil import get_terminal_size
from typing import Annotated, Any, Final

import typer
import yaml
from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

PIPE_COLUMNS: Final = 100_000
"""In a pipe nothing wraps: a program reads rows."""
WHOLE: Final = ("QUOTA", "WHEN", "WHO", "BUCKETS")
"""Columns that stay on one line."""
NAMES: Final = ("ENTITY", "FROM", "BUCKET", "NAME")
"""Columns that stay on one line where they can: in a narrow terminal settings give way first."""
NARROWEST: Final = 12
GAP: Final = 2
MIN_COLUMNS: Final = 72
"""In a terminal narrower than this it is the terminal that wraps: no number is ever cut."""
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


class Output(enum.StrEnum):
    """How an answer is shown."""

    table = "table"
    json = "json"
    yaml = "yaml"


Out = Annotated[Output, typer.Option("--output", "-o", help="How to show the answer.")]


def plain(text: str) -> str:
    r"""Text without control characters, which could move a terminal's cursor or colour it.

    >>> plain("a\x1b[31mb")
    'a\\x1b[31mb'
    """
    return _CONTROL.sub(lambda found: found.group().encode("unicode_escape").decode(), text)


def plain_lines(lines: Iterable[str]) -> str:
    """Lines of such text."""
    return "\n".join(map(plain, lines))


def document(answer: Any, output: Output) -> bool:
    """Show an answer as JSON or YAML; False when a table is wanted, which only the command can lay out."""
    if output is Output.json:
        typer.echo(json.dumps(answer, indent=2, ensure_ascii=False))
    elif output is Output.yaml:
        typer.echo(yaml.safe_dump(answer, sort_keys=False, allow_unicode=True, width=100), nl=False)
    return output is not Output.table


def done(output: Output) -> None:
    """Show that there is nothing to show: an empty document for whoever parses it."""
    document({}, output)


def table(
    header: Sequence[str],
    rows: Iterable[Sequence[Any]],
    right: Iterable[str] = (),
    styles: Mapping[str, str] | None = None,
) -> None:
    """Rows under a header; columns named in ``right`` hold numbers, and at a terminal words have styles."""
    cells = [[cell(value) for value in row] for row in rows]
    grid = Table(box=None, pad_edge=False, header_style="bold", padding=(0, GAP, 0, 0))
    whole = _whole(dict(zip(header, _widths(header, cells), strict=True)), {*right, *WHOLE})
    for name in header:
        justify: JustifyMethod = "right" if name in right else "left"
        grid.add_column(name, justify=justify, no_wrap=name in whole, overflow="fold")
    for row in cells:
        grid.add_row(*(Text(value, (styles or {}).get(value, "")) for value in row))
    _print(grid)


def records(rows: Sequence[Mapping[str, Any]], right: Iterable[str] = ()) -> None:
    """Rows of the same fields: as a table where it fits, else one field on a line."""
    cells = [[cell(value) for value in row.values()] for row in rows]
    widths = _widths(list(rows[0]), cells)
    if sum(widths) + GAP * (len(widths) - 1) <= _console().width:
        table(list(rows[0]), cells, right)
        return
    for place, row in enumerate(rows):
        if place:
            typer.echo()
        fields(row.items())


def fields(pairs: Iterable[tuple[str, Any]]) -> None:
    """Names and values, one pair on a line."""
    grid = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in pairs:
        grid.add_row(plain(name), cell(value))
    _print(grid)


def cell(value: Any) -> str:
    """One value in a table.

    >>> cell(None), cell(True), cell(5.0), cell({"limit": 5, "shadow": False})
    ('-', 'yes', '5', 'limit=5 shadow=no')
    """
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case float() if value.is_integer():
            return str(int(value))
        case Mapping():
            return " ".join(f"{name}={cell(part)}" for name, part in value.items()) or "-"
        case list():
            return ", ".join(cell(part) for part in value) or "-"
    return plain(str(value))


def brief(said: Mapping[str, Any]) -> str:
    """A quota in few words: its limit, and what else it says.

    >>> brief({"limit": 5, "samples": 21})
    '5 samples=21'
    """
    more = {field: setting for field, setting in said.items() if field != "limit"}
    return cell(said["limit"]) + (f" {cell(more)}" if more else "")


def when(at_ms: int | None) -> str:
    """An instant as people read it, in UTC.

    >>> when(1_700_000_000_123)
    '2023-11-14 22:13:20Z'
    """
    return "-" if at_ms is None else f"{datetime.fromtimestamp(at_ms / 1000, UTC):%Y-%m-%d %H:%M:%SZ}"


def note(text: str) -> None:
    """Say something beside the answer, where a pipe does not carry it."""
    typer.echo(plain(text), err=True)


def _widths(header: Sequence[str], cells: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(header, *cells, strict=True)]


def _whole(widths: Mapping[str, int], whole: set[str]) -> set[str]:
    """The columns that stay on one line: these, and names, as long as the rest has room."""
    room = _console().width - GAP * (len(widths) - 1)
    for name in NAMES:
        needed = (width if one in {*whole, name} else min(width, NARROWEST) for one, width in widths.items())
        if name in widths and sum(needed) <= room:
            whole = {*whole, name}
    return whole


def _print(grid: Table) -> None:
    console = _console()
    if sys.stdout.isatty():
        console.print(grid)
        return
    with console.capture() as captured:
        console.print(grid)
    for line in captured.get().splitlines():
        typer.echo(line.rstrip())


def _console() -> Console:
    """Where answers are shown."""
    columns = max(get_terminal_size().columns, MIN_COLUMNS) if sys.stdout.isatty() else PIPE_COLUMNS
    return Console(width=columns, markup=False, emoji=False, highlight=False)


def progress() -> Console:
    """Where progress is shown: at a terminal, beside the answer."""
    return Console(stderr=True, markup=False, emoji=False, highlight=False)
