"""The progress of a whole job on standard error: a bar on a terminal, elsewhere a line every ten seconds."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Protocol

from app.terminal import styled

LINE_EVERY_S: Final = 10.0
WHOLE: Final = 100.0


class Progress(Protocol):
    """Takes a job's progress: the share of the work that is done, in per cent of the whole."""

    def advance(self, share: float) -> None:
        """Count a further share as done."""


class Silent:
    """Shows nothing."""

    def advance(self, share: float) -> None:
        """Show nothing."""


@contextmanager
def progress(job: str) -> Iterator[Progress]:
    """Show the progress of a job within the block."""
    if not sys.stderr.isatty():
        lines = _Lines(job)
        try:
            yield lines
        finally:
            lines.done.set()
        return
    from rich.console import Console  # a cluster may lack the package rich
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Bars(*columns, console=Console(file=styled(sys.stderr)), transient=True) as bars:
        yield _Bar(bars, bars.add_task(job, total=WHOLE))


class _Bar:
    def __init__(self, bars: object, bar: object) -> None:
        self._bars, self._bar = bars, bar

    def advance(self, share: float) -> None:
        self._bars.advance(self._bar, share)  # type: ignore[attr-defined]  # rich is imported when it is needed


class _Lines:
    def __init__(self, job: str) -> None:
        self._job, self._share, self._began = job, 0.0, time.monotonic()
        self.done = threading.Event()
        threading.Thread(target=self._tell, name="progress", daemon=True).start()

    def advance(self, share: float) -> None:
        self._share += share

    def _tell(self) -> None:
        while not self.done.wait(LINE_EVERY_S):
            took_s = time.monotonic() - self._began
            print(f"quotagate: {self._job}: {self._share:.0f} % after {took_s:.0f} s", file=sys.stderr)  # noqa: T201
