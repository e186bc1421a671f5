"""`quotagate top` at a terminal, asking a real node."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Thread

from tests.programs import end
from tests.service import Service, eventually, running

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


def test_screen_follows_the_deployment_until_ctrl_c() -> None:
    with running() as node, terminal(node, "top") as shown:
        node.put("user=alice", request_rate={"limit": 1e-6, "algorithm": "token_bucket", "burst": 10})
        eventually(lambda: shown.shows(r"delay +\S+ +0 "))
        asks = [{"principal": name, "usage": {"requests": 1}} for name in (*30 * ["nobody"], *20 * ["alice"])]
        given = Counter(each["decision"] for each in node.batch(asks))
        counted = (
            rf"admit +\S+ +{given['admit']} .*[▁▂▃▄▅▆▇█](?s:.*)delay +\S+ +{given['delay']} "
            r"(?s:.*)user=alice +request_rate "
        )
        eventually(lambda: shown.shows(counted))
        shown.process.send_signal(signal.SIGINT)
        assert shown.process.wait(60) == 0
        eventually(lambda: ORDINARY in shown.said)
        assert shown.said.count(ALTERNATE) == 1
        assert "Abort" not in shown.said
        assert "Traceback" not in shown.said


def test_node_that_ends_is_an_error_on_the_ordinary_screen() -> None:
    with running() as node, terminal(node, "top") as shown:
        eventually(lambda: shown.shows("THROTTLE FACTOR"))
        node.stop()
        assert shown.process.wait(60) == 1
        eventually(lambda: f"quotagate: {node.url}/v1/overview" in shown.said.partition(ORDINARY)[2])
