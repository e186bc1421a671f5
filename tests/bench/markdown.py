"""Tables and figures as the pages of the benchmark show them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def table(columns: Sequence[str], rows: Iterator[Sequence[object]] | Sequence[Sequence[object]]) -> list[str]:
    r"""Return the lines of a table in Markdown.

    >>> table(["a", "b"], [(1, "x|y")])
    ['| a | b |', '| --- | --- |', '| 1 | x\\|y |']
    """
    lines = [columns, ["---"] * len(columns), *rows]
    return ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines]


def number(value: float) -> str:
    """A figure with three significant digits, or a whole number from 1,000 on.

    >>> number(0.03219), number(4.567), number(43210.9)
    ('0.0322', '4.57', '43,211')
    """
    if abs(value) >= 1_000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value else "0"
