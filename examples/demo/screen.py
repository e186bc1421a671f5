"""The output of the demo: one calm screen in a terminal, plain lines anywhere else."""
# ruff: noqa: INP001  an example is files to read and run, not a package

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich.console import Console, Group
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from examples.demo.arrangement import Arrangement
from examples.demo.callers import REMEMBERED_S, Answer, Caller

DRAWN_EVERY_S: Final = 0.25
SAID_EVERY_S: Final = 2.0
CELLS_PER_S: Final = 2
WITHOUT_TRACE: Final = 71
"""The width of the table's other columns."""
HEIGHTS: Final = " ▁▂▃▄▅▆▇█"
ADMITTED, THROTTLED = "green", "dark_orange3"
ADMITTED_ALONE, THROTTLED_ALONE = "sky_blue3", "navy_blue"
QUOTAS, EVENTS = 5, 7
"""Lines that are reserved for quotas and events, so that nothing jumps."""


class Screen:
    """The screen, and the events so far.

    Attributes:
        quotas: the quotas of each entity, as the API gives them.
    """

    def __init__(self, console: Console) -> None:
        self.quotas: dict[str, Mapping[str, Any]] = {}
        self._console = console
        self._drawn = console.file.isatty() and not console.is_dumb_terminal
        self._began = time.monotonic()
        self._events: deque[str] = deque(maxlen=EVENTS)

    def note(self, event: str) -> None:
        """Add an event."""
        self._events.append(f"{time.monotonic() - self._began:5.1f} s  {event}")
        if not self._drawn:
            self.say(self._events[-1])

    def say(self, line: str) -> None:
        """Print a line that stays."""
        self._console.print(line, soft_wrap=True, markup=False)

    async def show(self, there: Arrangement, callers: Sequence[Caller], ends_at: float) -> None:
        """Draw until cancelled; without a terminal, say the counts now and then."""
        if self._drawn:
            with Live(console=self._console, auto_refresh=False) as live:
                while True:
                    live.update(self.frame(there, callers, ends_at - time.monotonic()), refresh=True)
                    await asyncio.sleep(DRAWN_EVERY_S)
        for line in (intro(there), *self.quota_lines()):
            self.say(str(line))
        while True:
            await asyncio.sleep(SAID_EVERY_S)
            counts = (f"{one.name} {one.counts['admitted']}+{one.counts['throttled']}" for one in callers)
            self.note(f"admitted+throttled: {'  '.join(counts)}")

    def sum_up(self, callers: Sequence[Caller]) -> None:
        """Print the totals."""
        all_of_them = sum((one.counts + one.sources for one in callers), start=Counter[str]())
        counts = "{admitted} admitted, {throttled} throttled, {fallback} of these without the store"
        self.say(f"in all: {counts.format_map(all_of_them)}")

    def frame(self, there: Arrangement, callers: Sequence[Caller], left_s: float) -> Group:
        """The whole screen, always of one height, 24 lines of 80 at least."""
        ends = f"ends in {left_s:.0f} s, or with q" if math.isfinite(left_s) else "ends with q"
        quotas = self.quota_lines()
        events = [Text(event, no_wrap=True, overflow="ellipsis") for event in self._events]
        lines: list[Text | Table] = [
            Text(intro(there), style="bold"),
            Text("\nquotas in force, as the API gives them", style="dim"),
            *quotas,
            *[Text()] * (QUOTAS - len(quotas) + 1),
            table(callers, time.monotonic(), self._console.width),
            Text(),
            *events,
            *[Text()] * (EVENTS - len(events)),
            Text(f"{ends}; {there.quotagate}/docs describes every route", style="dim"),
        ]
        return Group(*lines)

    def quota_lines(self) -> list[Text]:
        return [
            Text.assemble((f"  {entity:<14}", "cyan"), in_words(key, quota))
            for entity, quotas in self.quotas.items()
            for key, quota in quotas.items()
        ]


def intro(there: Arrangement) -> str:
    """The set-up of the demo, in a line."""
    if there.nginx:
        return "people ─▶ nginx ─▶ a site; nginx asks Quotagate, and so does a Kafka broker"
    return f"people and a Kafka broker ─▶ Quotagate; {there.why_not}"


def in_words(key: str, quota: Mapping[str, Any]) -> str:
    """One quota as text."""
    if key == "producer_ids_rate":
        return f"{key}  {quota['limit']} new ids in {quota['window_ms'] / 1000:g} s"
    without = f"; on_store_failure: {quota['on_store_failure']}" if "on_store_failure" in quota else ""
    return f"{key}  {quota['limit']:g} a second, {quota['burst']:g} at once{without}"


def table(callers: Sequence[Caller], now: float, width: int) -> Table:
    """A row for each caller; a wider table shows more of the past."""
    seconds = max(1, min(REMEMBERED_S - 1, (width - WITHOUT_TRACE) // CELLS_PER_S))
    rows = Table(
        Column("who"),
        Column(),
        Column("asks/s", justify="right"),
        Column("admitted", style=ADMITTED, justify="right"),
        Column("throttled", style=THROTTLED, justify="right"),
        Column("last answer", width=13, no_wrap=True),
        Column(f"last {seconds} s"),
        box=None,
        padding=(0, 2, 0, 0),
    )
    for one in callers:
        counts = (f"{one.rate(now):.0f}", str(one.counts["admitted"]), str(one.counts["throttled"]))
        words = one.recent[-1][1].words if one.recent else ""
        rows.add_row(one.name, Text(one.does, style="dim"), *counts, words, trace(one, now, seconds))
    return rows


def trace(caller: Caller, now: float, seconds: int) -> Text:
    """A cell for each half second: the admitted share fills it from below, in blue without the store."""
    cells: dict[int, list[Answer]] = {}
    for at, answer in caller.recent:
        cells.setdefault(int(at * CELLS_PER_S), []).append(answer)
    text, newest = Text(), int(now * CELLS_PER_S)
    for cell in range(newest - seconds * CELLS_PER_S, newest):
        if answers := cells.get(cell):
            admitted = sum(answer.outcome == "admitted" for answer in answers) / len(answers)
            stored = sum(answer.source == "store" for answer in answers) / len(answers)
            colours = (ADMITTED, THROTTLED) if stored > 0.5 else (ADMITTED_ALONE, THROTTLED_ALONE)
            text.append(HEIGHTS[round(admitted * 8)], " on ".join(colours))
        else:
            text.append(" ")
    return text
