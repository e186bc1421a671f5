"""The output of the Kafka demo: one calm screen in a terminal, plain lines anywhere else."""
# ruff: noqa: INP001  an example is files to read and run, not a package

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from rich.console import Console, Group
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from examples.kafka.senders import Sender

DRAWN_EVERY_S: Final = 0.25
SAID_EVERY_S: Final = 2.0
WITHOUT_TRACE: Final = 70
"""The width of the table's other columns."""
SENDS, HELD = ("■", "green"), ("·", "dark_orange3")
EVENTS: Final = 9
"""Lines that are reserved for events, so that nothing jumps."""


class Screen:
    """The screen, and the events so far.

    Args:
        limit: the number of new producer ids within the quota.
        window_s: the window of the quota.
    """

    def __init__(self, console: Console, limit: int, window_s: float) -> None:
        self._console = console
        self._drawn = console.file.isatty() and not console.is_dumb_terminal
        self._limit = limit
        self._window_s = window_s
        self._began = time.monotonic()
        self._events: deque[str] = deque(maxlen=EVENTS)
        self._noted: dict[str, int] = {}

    def say(self, line: str) -> None:
        """Print a line that stays."""
        self._console.print(line, soft_wrap=True, markup=False)

    def begin(self) -> None:
        """Start the clock of the events, when the senders start."""
        self._began = time.monotonic()

    async def show(
        self, senders: Sequence[Sender], charged: Callable[[], Awaitable[int]], ends_at: float
    ) -> None:
        """Draw until cancelled; without a terminal, say the counts now and then."""
        if self._drawn:
            with Live(console=self._console, auto_refresh=False) as live:
                while True:
                    self._look(senders)
                    frame = self.frame(senders, await charged(), ends_at - time.monotonic())
                    live.update(frame, refresh=True)
                    await asyncio.sleep(DRAWN_EVERY_S)
        said_at = 0.0
        while True:
            self._look(senders)
            if time.monotonic() - said_at > SAID_EVERY_S:
                said_at = time.monotonic()
                self.say(self.line(senders, await charged()))
            await asyncio.sleep(DRAWN_EVERY_S)

    def sum_up(self, senders: Sequence[Sender]) -> None:
        """Print the totals of each sender."""
        for one in senders:
            counts = one.counts
            held = f"held {times(counts['holds'], 'time')}, {one.held_s:.0f} s in all"
            self.say(
                f"{one.name}: {counts['records']} records by {times(counts['producers'], 'producer')}, "
                f"{held if counts['holds'] else 'never held'}, {counts['errors']} errors"
            )

    def line(self, senders: Sequence[Sender], charged: int) -> str:
        """The counts in a line."""
        said = (f"{one.name}: {one.counts['records']} records, {one.state}" for one in senders)
        return f"{charged} of {self._limit} ids; " + "; ".join(said)

    def frame(self, senders: Sequence[Sender], charged: int, left_s: float) -> Group:
        """The whole screen, always of one height, 24 lines of 80 at least."""
        events = [Text(event, no_wrap=True, overflow="ellipsis") for event in self._events]
        used = Text("■" * charged, HELD[1] if charged >= self._limit else SENDS[1])
        more = ": the next new one has to wait" if charged >= self._limit else ""
        lines: list[Text | Table] = [
            Text("two producers of one user ─▶ a proxy with Quotagate's filter ─▶ a Kafka broker", "bold"),
            Text(),
            Text.assemble(
                ("  the quota    ", "cyan"), f"{self._limit} new producer ids in {self._window_s:g} s"
            ),
            Text.assemble(
                ("  used of it   ", "cyan"),
                used,
                " " * (self._limit - charged),
                f"  {charged} of {self._limit}{more}",
            ),
            Text(),
            self._table(senders),
            Text(),
            Text.assemble(
                "  ", SENDS, " the broker takes its records   ", HELD, " held: the broker sees nothing of it"
            ),
            Text(),
            *events,
            *[Text()] * (EVENTS - len(events)),
            Text(f"ends in {max(0.0, left_s):.0f} s, or with q", style="dim"),
        ]
        return Group(*lines)

    def _table(self, senders: Sequence[Sender]) -> Table:
        seconds = max(5, self._console.width - WITHOUT_TRACE)
        rows = Table(
            Column("who", no_wrap=True),
            Column(no_wrap=True),
            Column("made", justify="right"),
            Column("records", justify="right"),
            Column("errors", justify="right"),
            Column("now", width=11, no_wrap=True),
            Column(f"last {seconds} s", no_wrap=True),
            box=None,
            padding=(0, 1, 0, 0),
        )
        for one in senders:
            counts = (str(one.counts[name]) for name in ("producers", "records", "errors"))
            trace = Text()
            for cell in list(one.trace)[-seconds:]:
                trace.append(*{"sends": SENDS, "held": HELD}.get(cell, (" ", "")))
            rows.add_row(one.name, Text(one.does, style="dim"), *counts, one.state, trace)
        return rows

    def _look(self, senders: Sequence[Sender]) -> None:
        """Add an event for each sender that is newly held, or goes on again."""
        now = time.monotonic()
        for one in senders:
            one.look(now - self._began)
            if one.is_held and one.name not in self._noted:
                self._noted[one.name] = number = one.counts["producers"]
                asked_s = one.asked_ms / 1000
                self._note(
                    f"{one.name}, producer {number}: held; its client is asked to wait {asked_s:.1f} s"
                )
            elif not one.is_held and one.name in self._noted:
                number = self._noted.pop(one.name)
                self._note(
                    f"{one.name}, producer {number}: goes through, {one.last_s:.1f} s after it was made"
                )

    def _note(self, event: str) -> None:
        """Add an event."""
        self._events.append(f"{time.monotonic() - self._began:5.1f} s  {event}")
        if not self._drawn:
            self.say(self._events[-1])


def times(count: int, what: str) -> str:
    """A number with its noun."""
    return f"{count} {what}{'s' * (count != 1)}"
