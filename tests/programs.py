"""Programs that tests start, stop as an operator does, kill, and suspend."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path
from typing import Any, Final

END_WITHIN_S: Final = 60.0


def end(process: subprocess.Popen[Any], within_s: float = END_WITHIN_S) -> None:
    """Stop a program by SIGTERM, and kill it if it does not end in time."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(within_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def lives(pid: int) -> bool:
    """Whether a program still runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Program:
    """A program that can be killed and suspended; subclasses start it."""

    _running: subprocess.Popen[bytes] | None = None

    @property
    def running(self) -> subprocess.Popen[bytes]:
        assert self._running is not None
        return self._running

    @property
    def pid(self) -> int:
        return self.running.pid

    def kill(self) -> None:
        """Kill the program, as the kernel does when memory runs out; works on a suspended program, too."""
        if self._running is not None:
            self._running.kill()
            self._running.wait()

    def hold(self) -> None:
        """Suspend the program, so that it hangs."""
        self.running.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Resume the program."""
        self.running.send_signal(signal.SIGCONT)
