"""Programs that tests start: ended as an operator does, killed, held."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path
from typing import Any, Final

END_WITHIN_S: Final = 60.0


def end(process: subprocess.Popen[Any], within_s: float = END_WITHIN_S) -> None:
    """End a program by SIGTERM, or kill it if it does not end by that; one that ended is left."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(within_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def lives(pid: int) -> bool:
    """Whether a program still runs; one that ended and that nobody has asked after does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Program:
    """A program that can be killed and held; who derives from it starts it."""

    _running: subprocess.Popen[bytes] | None = None

    @property
    def running(self) -> subprocess.Popen[bytes]:
        assert self._running is not None
        return self._running

    @property
    def pid(self) -> int:
        return self.running.pid

    def kill(self) -> None:
        """End it as the kernel would for want of memory; also when it is held."""
        if self._running is not None:
            self._running.kill()
            self._running.wait()

    def hold(self) -> None:
        """Let it hang."""
        self.running.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let it go on after it hung."""
        self.running.send_signal(signal.SIGCONT)
