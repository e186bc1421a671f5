"""A Kafka client in any language, as a child process that is driven line by line."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from app.node import tether
from tests.programs import Program

WITHIN_S: Final = 120.0


class DrivenClient(Program):
    """Obeys the commands of `say`; `heard` returns its answers in order."""

    def __init__(self, folder: Path, command: Sequence[str | Path]) -> None:
        self._folder = folder
        self._command = command
        self._lines: queue.Queue[str] = queue.Queue()
        self.seen: Counter[str] = Counter()
        """How often it answered with a line, by the line's first two words, such as `sent one`."""

    def start(self) -> None:
        """Start it, and wait until it takes commands."""
        self._folder.mkdir(exist_ok=True)
        with (self._folder / "client.log").open("wb") as log:
            self._running = subprocess.Popen(
                [
                    *(sys.executable, "-I", "-S", str(Path(tether.__file__)), str(os.getpid())),
                    *map(str, self._command),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        assert self.heard() == "ready"

    def say(self, command: str) -> None:
        assert self.running.stdin is not None
        self.running.stdin.write(f"{command}\n".encode())
        self.running.stdin.flush()

    def heard(self, within_s: float = WITHIN_S) -> str:
        """The next line of its output; queue.Empty if none comes in time."""
        line = self._lines.get(timeout=within_s) if within_s else self._lines.get_nowait()
        self.seen[" ".join(line.split()[:2])] += 1
        return line

    def said(self) -> list[str]:
        """The lines of its output that have come meanwhile."""
        lines = []
        with suppress(queue.Empty):
            while True:
                lines.append(self.heard(0))
        return lines

    def until(self, beginning: str, within_s: float = WITHIN_S) -> str:
        """Read lines up to one with this beginning, and return that line; an error ends the test."""
        give_up = time.monotonic() + within_s
        while not (line := self.heard(max(0.01, give_up - time.monotonic()))).startswith(beginning):
            assert not line.startswith("error"), f"{line}\n{self.logged()}"
        return line

    def end(self) -> None:
        """Kill it, and close its pipes."""
        self.kill()
        if self._running is not None:
            self._listener.join()
            assert self._running.stdin is not None
            with suppress(OSError):  # commands that it has not read
                self._running.stdin.close()

    def logged(self) -> str:
        return (self._folder / "client.log").read_text(encoding="utf-8", errors="replace")

    def _listen(self) -> None:
        assert self.running.stdout is not None
        for line in self.running.stdout:
            self._lines.put(line.decode().strip())
        self.running.stdout.close()


@contextmanager
def running(folder: Path, command: Sequence[str | Path]) -> Iterator[DrivenClient]:
    """A client that keeps its log in this folder."""
    client = DrivenClient(folder, command)
    try:
        client.start()
        yield client
    finally:
        client.end()
