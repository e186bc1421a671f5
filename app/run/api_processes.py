"""The API processes of a node: they share the listening socket, and new ones replace old ones one by one."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final

import structlog

from app.node.children import READY_WITHIN_S, Child
from app.node.command_lines import quotagate
from app.node.errors import SettingsError, StartError
from app.node.settings import PREFIX, Settings

END_WITHIN_S: Final = 20.0
"""How long a process may take to end once it has drained: requests in flight have 10 s, its log the rest."""

log = structlog.get_logger("quotagate.processes")


class ApiProcess(Child):
    """One API process. API processes share one port, so each reports its readiness through a pipe.

    Args:
        number: its place among its siblings, from 1.
        arguments: further arguments of `quotagate serve`.
        drain_ms: how long it goes on serving after SIGTERM.
    """

    def __init__(
        self,
        number: int,
        arguments: Sequence[str],
        *,
        env: Mapping[str, str],
        pass_fds: Sequence[int],
        drain_ms: int,
    ) -> None:
        self._ready = asyncio.Event()
        self._pipe = os.pipe()
        reading, writing = self._pipe
        asyncio.get_running_loop().add_reader(reading, self._read)
        super().__init__(
            f"api {number}",
            quotagate("serve", "--ready-fd", str(writing), *arguments),
            env=env,
            pass_fds=(*pass_fds, writing),
            stop_within_s=drain_ms / 1000 + END_WITHIN_S,
        )

    def _read(self) -> None:
        os.read(self._pipe[0], 1024)
        self._ready.set()

    async def becomes_ready(self, within_s: float) -> bool:
        """Wait until it is ready; return False if it ends before, or takes longer."""
        either = [asyncio.ensure_future(self._ready.wait()), asyncio.ensure_future(self.wait())]
        try:
            await asyncio.wait(either, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in either:
                each.cancel()
        return self._ready.is_set()

    async def stop(self, number: int = signal.SIGTERM) -> None:
        await super().stop(number)
        asyncio.get_running_loop().remove_reader(self._pipe[0])
        for end in self._pipe:
            os.close(end)


class ApiProcesses:
    """The API processes of a node, which a supervisor starts, replaces and stops.

    Args:
        settings: the node's settings at its start.
        arguments: the arguments of `quotagate serve` for each process.
        env: their environment.
        fixed: the settings that stay until the supervisor starts again; ``env`` has them.
        pass_fds: the file descriptors that they inherit, with the listening socket.
    """

    def __init__(
        self,
        settings: Settings,
        arguments: Sequence[str],
        *,
        env: Mapping[str, str],
        fixed: Sequence[str],
        pass_fds: Sequence[int],
    ) -> None:
        self._at_start = settings
        self._counts = tempfile.mkdtemp(prefix="quotagate-counts-")
        self._arguments = ("--counts", self._counts, *arguments)
        self._env = {**env, f"{PREFIX}PROCESSES": "1"}
        self._fixed = fixed
        self._pass_fds = pass_fds
        self._processes: list[ApiProcess] = []

    async def start(self) -> None:
        """Start all of them."""
        for number in range(1, self._at_start.processes + 1):
            await self._new(number, self._at_start).start()

    async def become_ready(self) -> None:
        """Wait until all are ready.

        Raises:
            StartError: one ended before, or took too long.
        """
        for each in self._processes:
            if not await each.becomes_ready(READY_WITHIN_S):
                raise StartError(f"the API was not ready within {READY_WITHIN_S:.0f} s; see the log")

    def keep(self) -> None:
        """Begin to restart processes that die."""
        for each in self._processes:
            each.keep()

    async def obey(
        self,
        restart: asyncio.Event,
        read: Callable[[], Settings],
        replaced: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Replace the processes whenever the event is set, until cancelled.

        Args:
            read: reads the settings again. If they are invalid, nothing is replaced.
            replaced: called after all processes were replaced.
        """
        while True:
            await restart.wait()
            restart.clear()
            try:
                settings = read()
            except SettingsError as invalid:
                log.error("the settings are invalid, so nothing restarts", why=str(invalid))  # noqa: TRY400  no traceback
                continue
            for name in self._fixed:
                if getattr(settings, name) != getattr(self._at_start, name):
                    variable = PREFIX + name.upper()
                    log.warning("this setting changes only when quotagate starts anew", setting=variable)
            if await self.replace(settings) and replaced is not None:
                await replaced()

    async def replace(self, settings: Settings) -> bool:
        """Replace the processes one by one: an old one is stopped once a new one is ready.

        Returns:
            Whether all were replaced. A new process that does not become ready is stopped, and the old ones
            that are left go on.
        """
        log.info("the API processes are replaced one by one", processes=settings.processes)
        old = list(self._processes)
        for number in range(1, settings.processes + 1):
            if not await self._add(number, settings):
                return False
            if old:
                await self._end(old.pop(0))
        for each in old:
            await self._end(each)
        log.info("the API processes were replaced", processes=settings.processes)
        return True

    async def stop(self, number: int = signal.SIGTERM) -> None:
        """Stop all of them with a signal."""
        await asyncio.gather(*(each.stop(number) for each in self._processes))
        self._processes.clear()
        shutil.rmtree(self._counts, ignore_errors=True)

    async def _add(self, number: int, settings: Settings) -> bool:
        """Start a process and keep it; return False if it does not become ready."""
        try:
            new = self._new(number, settings)
        except OSError as error:  # no descriptors for its pipe
            log.error("a new API process was not started, so those before it go on", error=str(error))  # noqa: TRY400  no traceback
            return False
        try:
            await new.start()
            is_ready = await new.becomes_ready(READY_WITHIN_S)
        except OSError as error:  # no memory, too many processes
            log.warning("child could not be started", child=new.name, error=str(error))
            is_ready = False
        if is_ready:
            new.keep()
        else:
            log.error("a new API process was not ready, so those before it go on", child=new.name)
            await self._end(new)
        return is_ready

    async def _end(self, process: ApiProcess) -> None:
        await process.stop()
        self._processes.remove(process)

    def _new(self, number: int, settings: Settings) -> ApiProcess:
        process = ApiProcess(
            number,
            self._arguments,
            env=self._env,
            pass_fds=self._pass_fds,
            drain_ms=settings.drain_ms,
        )
        self._processes.append(process)
        return process
