"""A terminal in which the command line runs, asking a real node."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Thread

from tests.programs import end
from tests.service import Service

ALTERNATE, ORDINARY = "\x1b[?1049h", "\x1b[?1049l"
"""The sequences that begin and end a full screen."""


@dataclass
class Terminal:
    """A terminal, and a program that runs in it; ``said`` is everything that it wrote."""

    process: subprocess.Popen[bytes]
    pieces: list[bytes] = field(default_factory=list)

    @property
    def said(self) -> str:
        return b"".join(self.pieces).decode(errors="ignore")

    @property
    def screen(self) -> str:
        """The newest screen, without colours."""
        return re.sub(r"\x1b\[[0-9;]*m", "", self.said.rpartition("\x1b[H")[2])

    def shows(self, pattern: str) -> bool:
        """Whether the newest screen has a pattern; the program must be running."""
        assert self.process.poll() is None, self.said
        return re.search(pattern, self.screen) is not None


@contextmanager
def terminal(node: Service, *words: str) -> Iterator[Terminal]:
    """A terminal in which the command line runs, asking a node."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "app.run.cli", *words],
        env={
            **os.environ,
            "QUOTAGATE_URL": node.url,
            "QUOTAGATE_KEY": node.admin_key,
            "TERM": "xterm-256color",
            "COLUMNS": "120",
            "LINES": "50",
        },
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    shown = Terminal(process)

    def read() -> None:
        try:
            while piece := os.read(ours, 65_536):
                shown.pieces.append(piece)
        except OSError:  # the program has ended
            return

    reader = Thread(target=read)
    reader.start()
    try:
        yield shown
    finally:
        end(process)
        reader.join()
        os.close(ours)
