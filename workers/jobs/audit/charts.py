"""The report's charts as inline SVG; the page's style sheet colours them, light or dark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from typing import Any, Final

WIDTH, HEIGHT, LEFT, BOTTOM = 900, 220, 64, 24
ROW_HEIGHT: Final = 22
NAMES_WIDTH: Final = 300


def stacked_bars(slices: Sequence[Mapping[str, Any]], names: Sequence[str], slice_ms: int) -> str:
    """A bar for each slice of time, stacked from the counts of these names; empty slices leave gaps."""
    if not slices:
        return ""
    first, last = slices[0]["from_ms"], slices[-1]["from_ms"]
    places = (last - first) // slice_ms + 1
    step = (WIDTH - LEFT) / places
    most = max(sum(one[name] for name in names) for one in slices) or 1
    parts = []
    for one in slices:
        left = LEFT + (one["from_ms"] - first) / slice_ms * step
        top = float(HEIGHT - BOTTOM)
        for name in names:
            tall = one[name] / most * (HEIGHT - BOTTOM - 10)
            if tall:
                top -= tall
                tip = f"{clock(one['from_ms'])}: {one[name]:,} {name}"
                parts.append(
                    f'<rect class="{name}" x="{left:.2f}" y="{top:.2f}" width="{max(step - 1, 0.5):.2f}" '
                    f'height="{tall:.2f}"><title>{escape(tip)}</title></rect>'
                )
    base = HEIGHT - BOTTOM
    parts += [
        f'<line class="axis" x1="{LEFT}" y1="{base}" x2="{WIDTH}" y2="{base}"/>',
        f'<text x="{LEFT - 6}" y="18" text-anchor="end">{most:,}</text>',
        f'<text x="{LEFT - 6}" y="{base}" text-anchor="end">0</text>',
        f'<text x="{LEFT}" y="{HEIGHT - 6}">{clock(first)}</text>',
        f'<text x="{WIDTH}" y="{HEIGHT - 6}" text-anchor="end">{clock(last + slice_ms)}</text>',
    ]
    return _svg(HEIGHT, "decisions over time", parts)


def bars(rows: Sequence[tuple[str, float, str, bool]], label: str) -> str:
    """A bar for each row: its name, its ratio to the bound, the number to show, and whether it held."""
    if not rows:
        return ""
    longest = max(1.0, *(min(part, 3.0) for _, part, _, _ in rows))
    wide = WIDTH - NAMES_WIDTH - 120
    parts = []
    for place, (name, part, number, held) in enumerate(rows):
        top = place * ROW_HEIGHT + 4
        length = min(part, 3.0) / longest * wide
        kind, y = "within" if held else "beyond", top + 13
        parts += [
            f'<text x="{NAMES_WIDTH - 8}" y="{y}" text-anchor="end">{escape(_cut(name))}</text>',
            f'<rect class="{kind}" x="{NAMES_WIDTH}" y="{top}" width="{max(length, 1):.2f}" height="16"/>',
            f'<text x="{NAMES_WIDTH + length + 6:.2f}" y="{y}">{escape(number)}</text>',
        ]
    tall = len(rows) * ROW_HEIGHT + 22
    at = NAMES_WIDTH + wide / longest
    parts += [
        f'<line class="bound" x1="{at:.2f}" y1="0" x2="{at:.2f}" y2="{tall - 18}"/>',
        f'<text x="{at:.2f}" y="{tall - 4}" text-anchor="middle">the bound</text>',
    ]
    return _svg(tall, label, parts)


def clock(at_ms: int) -> str:
    """An instant to the second.

    >>> clock(1_795_255_200_000)
    '2026-11-21 10:00:00'
    """
    return f"{datetime.fromtimestamp(at_ms / 1000, UTC):%Y-%m-%d %H:%M:%S}"


def _cut(name: str) -> str:
    return name if len(name) <= 46 else f"{name[:45]}…"


def _svg(tall: float, label: str, parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {tall}" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'
