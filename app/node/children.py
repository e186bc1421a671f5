"""Child processes: they end with their parent, restart when they die, and are stopped in order."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import structlog

from app.node import tether

PAUSES_S: Final = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
"""Pauses before the restarts of a child that keeps dying; the last one is repeated."""

SETTLED_S: Final = 60.0
"""After a child has lived this long, its pauses start from the first again."""

READY_WITHIN_S: Final = 60.0
"""How long the store or an API process may take until it is ready: large files take time to load."""

log = structlog.get_logger("quotagate.children")


class Child:
    """One child process.

    Attributes:
        name: its name in the log.
        stop_within_s: how long it may take to stop before it is killed.

    Args:
        pass_fds: the file descriptors that it inherits.
        clock: returns seconds, to measure how long it lived.
        pause: waits for the given seconds before a restart.
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
        self._signalled: int | None = None

    @property
    def pid(self) -> int | None:
        return self._running.pid if self._running else None

    async def start(self) -> None:
        self._signalled = None
        # In its own session, so that Ctrl-C reaches only the supervisor, which stops its children in order.
        # The tether needs none of our modules: isolated and without site, it starts in 10 ms.
        self._running = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", str(Path(tether.__file__)), str(os.getpid())),
            *self._command,
            env=self._env,
            pass_fds=self._pass_fds,
            stdin=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )

    async def wait(self) -> int:
        """Return the exit code of the ended child, or the negated number of the signal that ended it."""
        assert self._running is not None
        return await self._running.wait()

    def keep(self) -> None:
        """Begin to restart the child whenever it dies."""
        self._keeping = asyncio.create_task(self._keep(), name=f"keep {self.name}")

    async def _keep(self) -> None:
        deaths = 0
        while True:
            began = self._clock()
            code = await self.wait()
            deaths = 1 if self._clock() - began >= SETTLED_S else deaths + 1
            pause_s = PAUSES_S[min(deaths, len(PAUSES_S)) - 1]
            log.warning("child died, restarting", child=self.name, code=code, pause_s=pause_s)
            await self._pause(pause_s)
            try:
                await self.start()
            except OSError as error:  # no memory, too many processes: counts as one more death
                log.warning("child could not be started", child=self.name, error=str(error))

    async def restart(self) -> None:
        """Stop it, start it again and keep it; a start that fails is tried again."""
        await self.stop()
        try:
            await self.start()
        except OSError as error:
            log.warning("child could not be started", child=self.name, error=str(error))
        self.keep()

    async def stop(self, number: int = signal.SIGTERM) -> None:
        """Stop it with a signal; kill it if it does not end in time.

        It gets a signal once, however often it is stopped: a second SIGTERM would end its drain.
        """
        if self._keeping:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
        if self._running is None or self._running.returncode is not None:
            return
        if number != self._signalled:
            self._signalled = number
            self._running.send_signal(number)
        try:
            await asyncio.wait_for(self._running.wait(), self.stop_within_s)
        except TimeoutError:
            log.warning("child did not stop in time, killing it", child=self.name)
            self._running.kill()
            await self._running.wait()


def stop_event() -> asyncio.Event:
    """Return an event that either SIGINT or SIGTERM sets."""
    event = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, event.set)
    return event


class SupervisorSignals:
    """The signals that a supervisor obeys; it must be made in the event loop.

    SIGTERM and SIGINT stop it. SIGHUP restarts its children if it has no controlling terminal. With one,
    SIGHUP says that the terminal was closed, and stops it, unless it was started to ignore that (nohup).

    Attributes:
        stop: set by a signal that stops.
        stopped_by: the number of the signal that set ``stop``.
        restart: set by a signal that restarts; to be cleared before the restart.
    """

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.stopped_by = signal.SIGTERM
        self.restart = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop, number)
        if not _has_terminal():
            loop.add_signal_handler(signal.SIGHUP, self.restart.set)
        elif signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            loop.add_signal_handler(signal.SIGHUP, self._stop, signal.SIGTERM)

    async def run(self, work: Coroutine[Any, Any, None], stopping: Callable[[], None] = lambda: None) -> None:
        """Run the supervisor's work until it ends, or cancel it at a signal that stops and wait for its end.

        Args:
            stopping: called before it is cancelled.
        """
        working = asyncio.create_task(work)
        stop = asyncio.create_task(self.stop.wait())
        await asyncio.wait({working, stop}, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if not working.done():
            stopping()
            working.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await working

    def _stop(self, number: signal.Signals) -> None:
        if not self.stop.is_set():
            self.stopped_by = number
            self.stop.set()


def _has_terminal() -> bool:
    """Whether this process has a controlling terminal, which sends SIGHUP when it is closed."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True
