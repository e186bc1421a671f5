"""The example proxy as a child program, a target behind it, and clients of several loopback addresses."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from tests.service import eventually

T = TypeVar("T")
PROXY: Final = Path(__file__).parents[2] / "examples" / "connections" / "proxy.py"
ACCEPTING: Final = "accepting on port "
PATIENT: Final = ("--ask-within", "20")
"""The proxy's timeout is raised: on a very busy machine, connections would be decided without Quotagate."""
CALM_WITHIN_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Proxy:
    """A running proxy."""

    port: int
    process: subprocess.Popen[bytes]
    log: Path

    def counts(self) -> Counter[str]:
        """The counts that it reports on SIGUSR1."""
        before = len(self.reports())
        self.process.send_signal(signal.SIGUSR1)
        eventually(lambda: len(self.reports()) > before)
        return self.reports()[before]

    def reports(self) -> list[Counter[str]]:
        """All reports so far; it writes the last one when it ends."""
        lines = [line for line in self.logged().splitlines(keepends=True) if line.startswith("held=")]
        pairs = [[pair.split("=") for pair in line.split()] for line in lines if line.endswith("\n")]
        return [Counter({name: int(n) for name, n in line}) for line in pairs]

    def logged(self) -> str:
        return self.log.read_text(encoding="utf-8")

    def descriptors(self) -> int:
        return sum(1 for _ in Path(f"/proc/{self.process.pid}/fd").iterdir())


@asynccontextmanager
async def proxying(
    quotagate: str, target: int, *options: str, broker: str = "1", listener: str = "PLAINTEXT"
) -> AsyncIterator[Proxy]:
    """A proxy in front of a target; at the end of the test, it must hold no connection."""
    with tempfile.TemporaryDirectory(prefix="qg-proxy-") as folder:
        log = Path(folder) / "log"
        places = ("--listen", "127.0.0.1:0", "--to", f"127.0.0.1:{target}", "--quotagate", quotagate)
        names = ("--broker", broker, "--listener", listener)
        command = [sys.executable, str(PROXY), *places, *names, *PATIENT, *options]
        with log.open("wb") as output, subprocess.Popen(command, stderr=output) as process:  # noqa: ASYNC220
            try:
                await until(lambda: ACCEPTING in log.read_text() or process.poll() is not None)
                assert process.poll() is None, log.read_text()
                proxy = Proxy(int(log.read_text().split(ACCEPTING)[1].split()[0]), process, log)
                at_start = proxy.descriptors()
                yield proxy
                if process.poll() is None:
                    # the connection to Quotagate may stay
                    await until(lambda: proxy.descriptors() <= at_start + 1)
                    last = proxy.counts()
                    assert (last["held"], last["open"]) == (0, 0)
                    process.terminate()
                assert process.wait(CALM_WITHIN_S) == 0, proxy.logged()
                assert "Traceback" not in proxy.logged()
            finally:
                process.kill()


class Echo(asyncio.Protocol):
    """Echo everything that one end of a connection receives."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)


@asynccontextmanager
async def listening(connection: Callable[[], asyncio.Protocol]) -> AsyncIterator[int]:
    """Run a server in this process; yield its port."""
    server = await asyncio.get_running_loop().create_server(connection, "127.0.0.1", 0, backlog=1024)
    async with server:
        yield server.sockets[0].getsockname()[1]


class Attempt(NamedTuple):
    """One connection of a client: when it began and ended, and whether a byte came back."""

    began: float
    ended: float
    passed: bool


@asynccontextmanager
async def connected(
    port: int, source: str
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection from an address."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(source, 0))
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def attempt(port: int, source: str) -> Attempt:
    """Connect, send a byte and wait for it, or for the end."""
    began, got = time.monotonic(), b""
    with contextlib.suppress(ConnectionError):  # a socket closed unread is reset
        async with connected(port, source) as (reader, writer):
            writer.write(b"?")
            got = await reader.read(1)
    return Attempt(began, time.monotonic(), got == b"?")


async def storm(ports: list[int], source: str, *, clients: int, seconds: float) -> list[Attempt]:
    """Run this many clients of one address; each connects again and again, to each port in turn."""
    until = time.monotonic() + seconds

    async def client(n: int) -> list[Attempt]:
        made: list[Attempt] = []
        while time.monotonic() < until:
            made.append(await attempt(ports[(n + len(made)) % len(ports)], source))
        return made

    return list(chain.from_iterable(await asyncio.gather(*map(client, range(clients)))))


async def until(look: Callable[[], T]) -> T:
    """Wait, without blocking the loop, until ``look`` returns something true, and return that."""
    async with asyncio.timeout(CALM_WITHIN_S):
        while not (found := look()):  # noqa: ASYNC110  most of what is waited for is in another program
            await asyncio.sleep(0.01)
    return found
