"""Shows answers as a table, JSON or YAML, with control characters escaped."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer

from app import terminal
from app.terminal import UNSAFE, plain, plain_json, styled

if TYPE_CHECKING:  # rich and YAML are imported where they show something: `up` and `serve` start without them
    from rich.console import Console, Group, JustifyMethod
    from rich.live import Live
    from rich.status import Status
    from rich.table import Table

PIPE_COLUMNS: Final = 100_000
"""Lines in a pipe do not wrap, as programs read them."""
WHOLE: Final = ("QUOTA", "WHEN", "WHO", "BUCKETS")
"""Columns whose values are never wrapped."""
NAMES: Final = ("ENTITY", "FROM", "BUCKET", "NAME")
"""Columns whose values are wrapped last: in a narrow terminal, settings wrap first."""
MIN_WIDTH: Final = 12
GAP: Final = 2
MIN_COLUMNS: Final = 72
"""The least width of a table, in columns: a narrower terminal wraps the lines, so no number is cut."""

Output = Literal["table", "json", "yaml"]
"""The format of an answer."""
Out = Annotated[Output, typer.Option("--output", "-o", help="The output format.")]


def document(answer: Any, output: Output) -> bool:
    """Print an answer as JSON or YAML; return False for a table, which the command prints itself."""
    if output == "json":
        typer.echo(as_json(answer))  # noqa: TID251  escaped
    elif output == "yaml":
        typer.echo(as_yaml(answer), nl=False)  # noqa: TID251  escaped
    return output != "table"


def as_json(answer: Any) -> str:
    r"""Return JSON in which unsafe characters, which only strings hold, are escaped.

    >>> print(as_json("\u202e\U000e0041ü"))
    "\u202e\udb40\udc41ü"
    """
    return plain_json(json.dumps(answer, indent=2, ensure_ascii=False))


def as_yaml(answer: Any) -> str:
    r"""Return YAML in which unsafe characters are escaped; the strings that hold them are quoted for it.

    >>> print(as_yaml({"why": "\u202e\x9bü", "who": "ü"}), end="")
    why: "\u202E\x9Bü"
    who: ü
    """
    import yaml

    class Dumper(yaml.SafeDumper):
        pass

    def quoted(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
        style = '"' if UNSAFE.search(text) else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style)

    Dumper.add_representer(str, quoted)
    text: str = yaml.dump(answer, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=100)
    return UNSAFE.sub(lambda found: _yaml_escape(ord(found.group())), text)


def _yaml_escape(character: int) -> str:
    return f"\\u{character:04X}" if character < 0x10000 else f"\\U{character:08X}"


def done(output: Output) -> None:
    """Print an empty document, as programs expect one."""
    document({}, output)


def table(
    header: Sequence[str],
    rows: Iterable[Sequence[Any]],
    right: Iterable[str] = (),
    styles: Mapping[str, str] | None = None,
) -> None:
    """Print rows under a header, as ``grid`` makes them."""
    _print(grid(header, rows, right, styles))


def grid(
    header: Sequence[str],
    rows: Iterable[Sequence[Any]],
    right: Iterable[str] = (),
    styles: Mapping[str, str] | None = None,
) -> Table:
    """Return rows under a header.

    Args:
        right: the columns that are right-aligned, such as numbers.
        styles: the styles of certain values at a terminal.
    """
    from rich.table import Table
    from rich.text import Text

    cells = [[cell(value) for value in row] for row in rows]
    made = Table(box=None, pad_edge=False, header_style="bold", padding=(0, GAP, 0, 0))
    whole = _whole(dict(zip(header, _widths(header, cells), strict=True)), {*right, *WHOLE})
    for name in map(plain, header):
        justify: JustifyMethod = "right" if name in right else "left"
        made.add_column(name, justify=justify, no_wrap=name in whole, overflow="fold")
    for row in cells:
        made.add_row(*(Text(value, (styles or {}).get(value, "")) for value in row))
    return made


def records(rows: Sequence[Mapping[str, Any]], right: Iterable[str] = ()) -> None:
    """Print records as a table if it fits, else with one field per line."""
    cells = [[cell(value) for value in row.values()] for row in rows]
    widths = _widths(list(rows[0]), cells)
    if sum(widths) + GAP * (len(widths) - 1) <= _console().width:
        table(list(rows[0]), cells, right)
        return
    for index, row in enumerate(rows):
        if index:
            line()
        fields(row.items())


def fields(pairs: Iterable[tuple[str, Any]]) -> None:
    """Print names and values, one pair per line."""
    from rich.table import Table

    made = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    made.add_column(style="bold", no_wrap=True)
    made.add_column(overflow="fold")
    for name, value in pairs:
        made.add_row(plain(name), cell(value))
    _print(made)


def cell(value: Any) -> str:
    """Return a value as the text of a table cell.

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
            return " ".join(f"{plain(str(name))}={cell(part)}" for name, part in value.items()) or "-"
        case list():
            return ", ".join(cell(part) for part in value) or "-"
    return plain(str(value))


def measured(value: Any) -> str:
    """Return a number that was measured or computed as the text of a table cell.

    >>> measured(22.78527160043748), measured(1_000_000), measured(None)
    ('22.8', '1,000,000', '-')
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return terminal.measured(value) if is_number else cell(value)


def brief(definition: Mapping[str, Any]) -> str:
    """Return a quota as short text: its limit, then its other fields.

    >>> brief({"limit": 5, "samples": 21})
    '5 samples=21'
    """
    more = {field: setting for field, setting in definition.items() if field != "limit"}
    return cell(definition["limit"]) + (f" {cell(more)}" if more else "")


def when(at_ms: int | None) -> str:
    """Return a time in UTC, for people.

    >>> when(1_700_000_000_123)
    '2023-11-14 22:13:20Z'
    """
    return "-" if at_ms is None else f"{datetime.fromtimestamp(at_ms / 1000, UTC):%Y-%m-%d %H:%M:%SZ}"


def line(text: str = "") -> None:
    """Print a line; line breaks in it are escaped."""
    typer.echo(plain(text))  # noqa: TID251  escaped


def note(text: str) -> None:
    """Print a note on stderr, so that it does not go into a pipe."""
    typer.echo(plain(text), err=True)  # noqa: TID251  escaped


def _widths(header: Sequence[str], cells: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(header, *cells, strict=True)]


def _whole(widths: Mapping[str, int], whole: set[str]) -> set[str]:
    """The columns that are not wrapped: ``whole``, and names as long as the rest fits."""
    room = _console().width - GAP * (len(widths) - 1)
    for name in NAMES:
        needed = (width if one in {*whole, name} else min(width, MIN_WIDTH) for one, width in widths.items())
        if name in widths and sum(needed) <= room:
            whole = {*whole, name}
    return whole


def _print(made: Table) -> None:
    console = _console()
    if sys.stdout.isatty():
        console.print(made)
        return
    with console.capture() as captured:
        console.print(made)
    for each in captured.get().splitlines():
        line(each.rstrip())


def _console() -> Console:
    """The console for answers."""
    from rich.console import Console

    columns = max(get_terminal_size().columns, MIN_COLUMNS) if sys.stdout.isatty() else PIPE_COLUMNS
    return Console(width=columns, markup=False, emoji=False, highlight=False)


def working(text: str) -> Status:
    """A spinner with a text, on stderr, if that is a terminal."""
    from rich.console import Console
    from rich.text import Text

    console = Console(file=styled(sys.stderr), markup=False, emoji=False, highlight=False)
    return console.status(Text(plain(text)))


def grids(made: Iterable[Table]) -> None:
    """Print tables, with an empty line between two."""
    for index, each in enumerate(made):
        if index:
            line()
        _print(each)


def group(made: Iterable[Table]) -> Group:
    """Return tables as one, with an empty line between two."""
    from rich.console import Group

    parts = [part for each in made for part in (each, "")]
    return Group(*parts[:-1])


def columns() -> int:
    """The width of a line."""
    return _console().width


def live() -> Live:
    """A screen at the terminal whose content is updated; the lines before it come back at its end."""
    from rich.console import Console
    from rich.live import Live

    console = Console(markup=False, emoji=False, highlight=False)  # it follows the size of the terminal
    return Live(console=console, screen=True, auto_refresh=False)
