"""Two plots of a run as SVG: bars on a scale are a few lines of text, and need no library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Final, NamedTuple

from tests.bench.results import Results
from tests.bench.targets import ROWS, ratio

WIDTH: Final = 900
NAMES: Final = 330
"""Pixels for the names of the bars."""
ROW: Final = 20
TOP: Final = 56
STYLE: Final = (
    "text{font:12px sans-serif;fill:#333}.title{font-size:15px;font-weight:bold}"
    ".small{font-size:11px;fill:#777}"
    ".grid{stroke:#ddd}.target{stroke:#c33;stroke-width:2}"
    ".own{fill:#27648f}.peer{fill:#a9b7c2}.tail{fill:#d98c3f}"
)


class Bar(NamedTuple):
    """One bar: its name, its value, its class, and the target for it."""

    name: str
    value: float
    look: str
    target: float | None = None


def costs(results: Results) -> str:
    """Decisions for the processor time of one echo, by work."""
    bars = [
        Bar(
            name,
            reached,
            "own" if name.startswith("quotagate") else "peer",
            ROWS[name].ratio if name in ROWS else None,
        )
        for name in results.works
        if (reached := ratio(results, name)) is not None
    ]
    return _drawn(
        "Decisions for the processor time of one echo of the same requests (more is better; red: the target)",
        bars,
        results,
    )


def latencies(results: Results) -> str:
    """The median and the 99th percentile at fixed rates, by work."""
    bars = []
    for name in results.works:
        for share in results.plan.open_shares:
            runs = results.open_runs_of(name, share)
            if runs:
                best = min(runs, key=lambda run: run.measured.waits_ms["p99"]).measured.waits_ms
                look = "own" if name.startswith("quotagate") else "peer"
                bars.append(Bar(f"{name}, {share:.0%}, p50", best["p50"], look))
                bars.append(Bar(f"{name}, {share:.0%}, p99", best["p99"], "tail"))
    return _drawn(
        "Latency in ms at a share of capacity, from when a request was due (less is better)", bars, results
    )


def _drawn(title: str, bars: Sequence[Bar], results: Results) -> str:
    values = [value for bar in bars for value in (bar.value, bar.target) if value] or [1.0]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    high = max(high, low + 1)
    per_decade = (WIDTH - NAMES - 70) / (high - low)

    def place(value: float) -> float:
        return NAMES + max(0.0, (math.log10(value) - low) * per_decade)

    about = f"{results.made_at}, {results.machine['processor']}; logarithmic scale"
    height = TOP + ROW * len(bars) + 16
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        f"<title>{escape(title)}</title><style>{STYLE}</style>",
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        f'<text class="title" x="10" y="20">{escape(title)}</text>',
        f'<text class="small" x="10" y="38">{escape(about)}</text>',
    ]
    for power in range(low, high + 1):
        x = place(10.0**power)
        parts.append(f'<line class="grid" x1="{x:.1f}" y1="{TOP - 6}" x2="{x:.1f}" y2="{height - 10}"/>')
        parts.append(f'<text class="small" x="{x + 2:.1f}" y="{TOP - 8}">{10.0**power:g}</text>')
    for number, bar in enumerate(bars):
        y = TOP + ROW * number
        parts.append(f'<text x="{NAMES - 8}" y="{y + 13}" text-anchor="end">{escape(bar.name)}</text>')
        end = place(bar.value) if bar.value else NAMES
        parts.append(
            f'<rect class="{bar.look}" x="{NAMES}" y="{y + 3}" width="{end - NAMES:.1f}" height="{ROW - 7}"/>'
        )
        label = end
        if bar.target is not None:
            x = place(bar.target)
            label = max(end, x)
            parts.append(f'<line class="target" x1="{x:.1f}" y1="{y + 1}" x2="{x:.1f}" y2="{y + ROW - 2}"/>')
        parts.append(f'<text x="{label + 5:.1f}" y="{y + 13}">{bar.value:.3g}</text>')
    return "\n".join([*parts, "</svg>", ""])
