"""Child programs: tethered to this one, started again when they die, and stopped in good order."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import structlog

from app.run import tether

PAUSES_S: Final = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""How long to wait before each restart in a row; the last one is repeated."""

SETTLED_S: Final = 60.0
"""A child that lived this long is taken to be well: its next death begins a new row."""

log = structlog.get_logger("quotagate.children")


def quotagate(*arguments: str) -> list[str]:
    """The command line that runs this very installation again, whatever lies in the working directory."""
    return [sys.executable, "-P", "-m", "app.run.cli", *arguments]


class Child:
    """One program that is to be kept running.

    Attributes:
        name: what the log calls it.
        stop_within_s: how long it may take to finish before it is killed.

    Args:
        pass_fds: the file descriptors that it inherits.
        clock: tells how long it lived, in seconds.
        pause: waits before a restart, for so many seconds.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
        stop_within_s: float = 15.0,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.name = name
        self.stop_within_s = stop_within_s
        self._command = command
        self._env = env
        self._pass_fds = pass_fds
        self._clock = clock
        self._pause = pause
        self._running: asyncio.subprocess.Process | None = None
        self._keeping: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        return self._running.pid if self._running else None

    async def start(self) -> None:
        # A session of its own: Ctrl-C goes to the supervisor alone, which stops its children in order.
        # Isolated and without site: the tether needs nothing of ours, and starts in 10 ms.
        self._running = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", str(Path(tether.__file__)), str(os.getpid())),
            *self._command,
            env=self._env,
            pass_fds=self._pass_fds,
            stdin=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )

    async def died(self) -> int:
        """Wait until it ends; the exit code, or minus the signal."""
        assert self._running is not None
        return await self._running.wait()

    def keep(self) -> None:
        """From now on, start it again whenever it dies."""
        self._keeping = asyncio.create_task(self._keep(), name=f"keep {self.name}")

    async def _keep(self) -> None:
        deaths = 0
        while True:
            began = self._clock()
            code = await self.died()
            deaths = 1 if self._clock() - began >= SETTLED_S else deaths + 1
            pause_s = PAUSES_S[min(deaths, len(PAUSES_S)) - 1]
            log.warning("a child died and is started again", child=self.name, code=code, pause_s=pause_s)
            await self._pause(pause_s)
            try:
                await self.start()
            except OSError as error:  # no memory, too many programs: counts as one more death
                log.warning("a child could not be started", child=self.name, error=str(error))

    async def stop(self) -> None:
        """Ask it to finish, and kill it when it does not in time."""
        if self._keeping:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
        if self._running is None or self._running.returncode is not None:
            return
        self._running.terminate()
        try:
            await asyncio.wait_for(self._running.wait(), self.stop_within_s)
        except TimeoutError:
            log.warning("a child did not finish in time and is killed", child=self.name)
            self._running.kill()
            await self._running.wait()


def stop_asked() -> asyncio.Event:
    """An event that SIGINT and SIGTERM set."""
    asked = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, asked.set)
    return asked
