"""Charts of reports as inline SVG; the page's style sheet colours them, light or dark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from itertools import pairwise
from typing import Any, Final, NamedTuple

from app.terminal import measured

WIDTH, HEIGHT, LEFT, BOTTOM = 900, 220, 84, 24
ROW_HEIGHT: Final = 22
REFUSED: Final = 60
"""The height of a chart of refused asks below another one."""

NAMES_WIDTH: Final = 300
SLICES: Final = (1_000, 10_000, 60_000, 600_000, 3_600_000, 6 * 3_600_000, 24 * 3_600_000)
"""The possible lengths of a slice of time, in milliseconds."""
IN_CHART: Final = 150


def slice_of(span_ms: int) -> int:
    """The length of a slice of time in a chart of a span, in milliseconds."""
    return next((one for one in SLICES if span_ms / one <= IN_CHART), SLICES[-1])


class UsageChart(NamedTuple):
    """The values of a chart of usage, by slices of time.

    Attributes:
        usage: by the beginning of each slice.
        limits_before: the limits of the log, each from a time on.
        limit_after: None for no limit.
        refused_before, refused_after: refused asks by the beginning of the slice.
    """

    usage: Mapping[int, float]
    limits_before: Sequence[tuple[int, float]]
    limit_after: float | None
    refused_before: Mapping[int, int]
    refused_after: Mapping[int, int]


def usage_over_time(chart: UsageChart, from_ms: int, to_ms: int, slice_ms: int, label: str) -> str:
    """Usage as a line, with the limits before and after; below it the refused asks before and after."""
    from_ms -= from_ms % slice_ms
    slices = range(from_ms, to_ms + 1, slice_ms)
    step = (WIDTH - LEFT) / len(slices)
    limits = [limit for _, limit in chart.limits_before]
    shown = [*chart.usage.values(), *limits, *([] if chart.limit_after is None else [chart.limit_after])]
    most = max(shown, default=0.0) or 1.0
    base, tall = HEIGHT - BOTTOM, HEIGHT - BOTTOM - 10

    def x(at_ms: float) -> float:
        return LEFT + max(at_ms - from_ms, 0) / slice_ms * step

    def y(value: float) -> float:
        return base - value / most * tall

    def steps(values: Sequence[tuple[float, float]]) -> str:
        """A path of horizontal lines, each from its time on."""
        points = [f"M{x(values[0][0]):.2f} {y(values[0][1]):.2f}"]
        for (_, value), (at_ms, next_) in pairwise(values):
            points.append(f"H{x(at_ms):.2f}" + (f"V{y(next_):.2f}" if next_ != value else ""))
        return "".join([*points, f"H{WIDTH}"])

    usage = [(at, chart.usage.get(at, 0.0)) for at in slices]
    parts = [f'<path class="usage" d="{steps(usage)}"/>']
    if chart.limits_before:
        parts.append(f'<path class="before" d="{steps(chart.limits_before)}"/>')
    if chart.limit_after is not None:
        parts.append(f'<path class="after" d="{steps([(from_ms, chart.limit_after)])}"/>')
    parts += _axis(base, measured(most), clock(from_ms), clock(slices[-1] + slice_ms))
    counts = [*chart.refused_before.values(), *chart.refused_after.values()]
    refused = max(counts, default=0)
    if not refused:
        return _svg(HEIGHT, label, parts)
    floor = HEIGHT + REFUSED
    for place, (kind, asks) in enumerate((("before", chart.refused_before), ("after", chart.refused_after))):
        for at_ms, count in sorted(asks.items()):
            bar = count / refused * (REFUSED - 10)
            left, wide = x(at_ms) + place * step / 2, max(step / 2 - 0.5, 0.5)
            parts.append(
                f'<rect class="{kind}" x="{left:.2f}" y="{floor - bar:.2f}" width="{wide:.2f}"'
                f' height="{bar:.2f}"/>'
            )
    parts.append(f'<line class="axis" x1="{LEFT}" y1="{floor}" x2="{WIDTH}" y2="{floor}"/>')
    parts.append(f'<text x="{LEFT - 6}" y="{HEIGHT + 20}" text-anchor="end">{refused:,}</text>')
    parts.append(f'<text x="{LEFT - 6}" y="{floor}" text-anchor="end">refused</text>')
    return _svg(floor + 4, label, parts)


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
    parts += _axis(HEIGHT - BOTTOM, f"{most:,}", clock(first), clock(last + slice_ms))
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


def _axis(base: float, most: str, first: str, last: str) -> list[str]:
    """The horizontal axis with its two times, and the largest value of the vertical axis."""
    return [
        f'<line class="axis" x1="{LEFT}" y1="{base}" x2="{WIDTH}" y2="{base}"/>',
        f'<text x="{LEFT - 6}" y="18" text-anchor="end">{most}</text>',
        f'<text x="{LEFT - 6}" y="{base}" text-anchor="end">0</text>',
        f'<text x="{LEFT}" y="{HEIGHT - 6}">{first}</text>',
        f'<text x="{WIDTH}" y="{HEIGHT - 6}" text-anchor="end">{last}</text>',
    ]


def _cut(name: str) -> str:
    return name if len(name) <= 46 else f"{name[:45]}…"


def _svg(tall: float, label: str, parts: Sequence[str]) -> str:
    box = f'viewBox="0 0 {WIDTH} {tall}" role="img" aria-label="{escape(label)}"'
    return f'<div class="wide"><svg {box}>{"".join(parts)}</svg></div>'
