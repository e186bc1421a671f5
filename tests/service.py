"""The real program as a child: `quotagate serve` on a port of its own, with a real store and catalog."""

from __future__ import annotations

import os
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import httpx

from app.catalog import schema
from tests import fork_server, stores
from tests.addresses import family_of, in_url
from tests.programs import end

T = TypeVar("T")
ADMIN_KEY: Final = "the-key-of-the-tests"
TRIES: Final = 20
READY_WITHIN_S: Final = 120.0
STOP_WITHIN_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Service:
    """One running node; ``http`` sends the admin key."""

    url: str
    store_url: str
    database_url: str
    http: httpx.Client
    process: subprocess.Popen[bytes]
    log: Path
    admin_key: str = ADMIN_KEY

    @property
    def address(self) -> tuple[str, int]:
        return self.http.base_url.host, self.http.base_url.port or 80

    @property
    def pid(self) -> int:
        return self.process.pid

    def put(self, entity: str, **quotas: object) -> None:
        """Replace an entity's quotas."""
        answer = self.http.put(f"/v1/quotas/{entity}", json=quotas)
        assert answer.is_success, f"{answer.status_code} {answer.text}\n{self.logged()}"

    def ask(self, **ask: object) -> dict[str, Any]:
        """The decision on one ask."""
        return self._posted("/v1/decisions", ask)

    def batch(self, asks: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The decisions on a batch."""
        decisions: list[dict[str, Any]] = self._posted("/v1/decisions:batch", {"asks": asks})["decisions"]
        return decisions

    def lease(self, body: dict[str, Any]) -> dict[str, Any]:
        """The answer to a request for a lease."""
        return self._posted("/v1/leases", body)

    def stop(self) -> int:
        """Stop the node as an operator does, and return its exit code."""
        self.process.terminate()
        return self.process.wait(STOP_WITHIN_S)

    def logged(self) -> str:
        """The whole log of the node."""
        return self.log.read_text(encoding="utf-8")

    def clock_ahead_ms(self) -> range:
        """The milliseconds by which its wall clock may be ahead of ours, by a change that it makes."""
        before_ms = time.time_ns() // 1_000_000
        self.put("user=nobody", request_rate={"limit": time.monotonic()})
        after_ms = time.time_ns() // 1_000_000
        history = self.http.get("/v1/quotas:history?limit=1").raise_for_status().json()
        at_ms: int = history["changes"][0]["at_ms"]
        return range(at_ms - after_ms, at_ms - before_ms + 1)

    def _posted(self, path: str, body: object) -> dict[str, Any]:
        answer = self.http.post(path, json=body)
        for _ in range(TRIES):  # on a busy machine a node may shed asks; wait for its Retry-After
            if answer.status_code != 503:
                break
            time.sleep(float(answer.headers["Retry-After"]))
            answer = self.http.post(path, json=body)
        assert answer.status_code == 200, f"{answer.status_code} {answer.text}\n{self.logged()}"
        found: dict[str, Any] = answer.json()
        return found


@contextmanager
def running(
    *,
    store_url: str | None = None,
    database_url: str | None = None,
    environment: Mapping[str, str] | None = None,
    processes: int = 1,
    store: str = "valkey",
    address: tuple[str, int] = ("127.0.0.1", 0),
    trust: ssl.SSLContext | None = None,
    program: str | None = None,
) -> Iterator[Service]:
    """A ready node; without URLs it has a store of the kind `store` and a migrated catalog of its own.

    If its settings turn on TLS, the client needs `trust`. A `program` is a module to run, with its imports.
    Without one, our program runs, as a fork of one that has imported its modules.
    """
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="qg-node-")))
        store_url = store_url or stack.enter_context(stores.running(store))
        database_url = database_url or f"sqlite:///{home / 'catalog.db'}"
        schema.upgrade(database_url)
        bare = {name: value for name, value in os.environ.items() if not name.startswith("QUOTAGATE_")}
        own = {
            "QUOTAGATE_HOME": str(home),
            "QUOTAGATE_REDIS_URL": store_url,
            "QUOTAGATE_DATABASE_URL": database_url,
            "QUOTAGATE_ADMIN_KEY": ADMIN_KEY,
            "QUOTAGATE_PROCESSES": str(processes),
            "QUOTAGATE_DRAIN_MS": "0",
        }
        log = home / "log.jsonl"
        # The socket is bound here and inherited, so nobody can take the port in between; the node listens.
        with socket.socket(family_of(address[0])) as listener, log.open("wb") as output:
            if not address[1]:
                listener.bind(
                    address
                )  # with SO_REUSEADDR it could get the port of another that listens later
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if address[1]:  # a node was there before
                listener.bind(address)
            url = f"{'https' if trust else 'http'}://{in_url(address[0])}:{listener.getsockname()[1]}"
            environment = {**bare, **own, **(environment or {})}
            process = stack.enter_context(
                _started(program, listener.fileno(), output.fileno(), environment, home)
            )
        stack.callback(end, process)
        headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
        http = stack.enter_context(
            httpx.Client(base_url=url, headers=headers, timeout=60, trust_env=False, verify=trust or False)
        )
        service = Service(url, store_url, database_url, http, process, log)
        eventually(lambda: _ready(service), within_s=READY_WITHIN_S)
        yield service


def eventually(look: Callable[[], T], *, within_s: float = 60.0) -> T:
    """Wait until `look` returns something true, and return that."""
    give_up = time.monotonic() + within_s
    while not (found := look()):
        assert time.monotonic() < give_up, f"it did not come true within {within_s:g} s"
        time.sleep(0.01)  # the polling interval
    return found


def _started(
    program: str | None, listener: int, output: int, environment: Mapping[str, str], home: Path
) -> subprocess.Popen[bytes]:
    """Start a node with these descriptors."""
    arguments = ["serve", "--fd", str(listener)]
    if program is None and fork_server.can_fork(environment):
        descriptors = {1: output, 2: output, listener: listener}
        return fork_server.start(arguments, environment=environment, folder=home, descriptors=descriptors)
    return subprocess.Popen(
        [sys.executable, "-P", "-m", program or "app.run.cli", *arguments],
        env=environment,
        cwd=home,
        pass_fds=(listener,),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
    )


def _ready(service: Service) -> bool:
    assert service.process.poll() is None, f"it ended with {service.process.returncode}:\n{service.logged()}"
    try:
        return service.http.get("/health/ready", timeout=30).is_success
    except httpx.HTTPError:
        return False
