"""SIGHUP restarts the API processes one by one, with settings read again, and no request fails."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import termios
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import httpx
import pytest

from app.catalog import schema
from tests import stores
from tests.gateways.rolling import KEPT, asked_by
from tests.ports import free_port
from tests.system.test_up import Running, alive, eventually

REPLACED = "the API processes were replaced"
UNREADY = "a new API process was not ready, so those before it go on"
INVALID = "the settings are invalid, so nothing restarts"
FIXED = "this setting changes only when quotagate starts anew"


def write(folder: Path, settings: Mapping[str, str]) -> None:
    lines = [f"QUOTAGATE_{name}={value}\n" for name, value in settings.items()]
    (folder / ".env").write_text("".join(lines), encoding="utf-8")


class Detached(Running):
    """One `quotagate up` without a controlling terminal; its settings are in a file."""

    environment: Mapping[str, str] = {}
    begin = staticmethod(os.setsid)

    def write(self, **settings: str) -> None:
        """Change the settings that it reads at SIGHUP."""
        write(self.home.parent, settings)

    def hang_up(self) -> None:
        self.up.send_signal(signal.SIGHUP)

    def apis(self) -> set[int]:
        """The pids of the API processes."""
        return {pid for pid, line in self.family().items() if " --ready-fd " in line}


@pytest.fixture
def detached(tmp_path: Path) -> Iterator[Callable[..., Detached]]:
    started: list[Detached] = []

    def start(**settings: str) -> Detached:
        write(tmp_path, settings)
        started.append(Detached(tmp_path / "home", free_port()))
        return started[-1]

    yield start
    for running in started:
        running.kill()


@contextmanager
def asking(running: Running, *, keeps: bool) -> Iterator[Callable[[], int]]:
    """A caller that keeps its connection, or opens a new one for each ask."""
    limits = httpx.Limits(max_keepalive_connections=1 if keeps else 0)
    ask = {"principal": "alice", "usage": {"requests": 1}}
    with httpx.Client(base_url=running.url, timeout=60, trust_env=False, limits=limits) as http:
        yield lambda: http.post("/v1/decisions", json=ask).status_code


def test_no_request_fails_and_the_new_settings_hold(detached):
    """One process becomes two, and two become one again; the store stays, and both share Envoy's port."""
    same = {"DRAIN_MS": "500", "LOG": "off", "ENVOY_PORT": str(free_port())}
    running = detached(**same).ready()
    running.http.put("/v1/quotas/user=alice", json={"request_rate": KEPT}, headers=running.key())
    store, apis = running.one("valkey-server"), running.apis()
    assert len(apis) == 1
    kept, new = (partial(asking, running, keeps=keeps) for keeps in (True, False))
    with asked_by(kept, 2) as some, asked_by(new, 2) as others:
        for times, processes in enumerate(("2", "1"), start=1):
            running.write(**same, PROCESSES=processes)
            running.hang_up()
            eventually(lambda: len(running.events(REPLACED)) == times)  # noqa: B023
            assert len(running.apis()) == int(processes)
            assert not running.apis() & apis
            apis = running.apis()
    for answers in (some, others):
        assert answers.statuses.keys() == {200}, str(answers)
    assert running.one("valkey-server") == store
    usage = {"principal": "alice", "usage": {"requests": 0}, "mode": "peek", "detail": True}
    (quota,) = running.http.post("/v1/decisions", json=usage).json()["quotas"]
    assert round(quota["observed"]) == some.statuses[200] + others.statuses[200]
    assert running.end() == 0


def test_settings_that_cannot_hold_leave_the_old_process(detached):
    """Invalid settings, settings with which a process ends at once, and settings that need a full restart."""
    running = detached(DRAIN_MS="0").ready()
    apis = running.apis()
    running.write(QUEUE_MS="often", ALLOWED_HOSTS="-")
    running.hang_up()
    eventually(lambda: running.events(INVALID))
    why = running.events(INVALID)[0]["why"]
    assert "QUOTAGATE_QUEUE_MS" in why
    assert "QUOTAGATE_ALLOWED_HOSTS" in why

    running.write(MAX_DEBT="PT2H")  # differs from the catalog's, so a process does not start
    running.hang_up()
    eventually(lambda: running.events(UNREADY))
    eventually(lambda: running.apis() == apis)
    assert not running.events(REPLACED)

    running.write(DRAIN_MS="0", HOST="127.0.0.2", STORE_MEMORY="33554432", ENVOY_PORT=str(free_port()))
    running.hang_up()
    eventually(lambda: running.events(REPLACED))
    named = {event["setting"] for event in running.events(FIXED)}
    assert named == {"QUOTAGATE_HOST", "QUOTAGATE_STORE_MEMORY", "QUOTAGATE_ENVOY_PORT"}
    assert running.http.get("/health/ready").is_success
    assert not running.apis() & apis


def test_second_signal_restarts_once_more_and_sigterm_ends_a_restart(detached):
    running = detached(DRAIN_MS="0").ready()
    running.hang_up()
    eventually(lambda: len(running.apis()) == 2)
    running.hang_up()
    eventually(lambda: len(running.events(REPLACED)) == 2)
    running.hang_up()
    eventually(lambda: len(running.apis()) == 2)
    family = running.family()
    assert running.end() == 0
    assert alive(family) == {}
    assert "quotagate has stopped" in running.logged()


def test_api_ends_before_the_workers_and_sigint_does_not_drain(detached):
    running = detached(DRAIN_MS="600000").ready()
    family = running.family()
    assert running.end(signal.SIGINT) == 0
    assert alive(family) == {}
    assert not running.events("api drains")
    order = [line["event"] for line in running.events("api stopped") + running.events("workers stopped")]
    assert order == ["api stopped", "workers stopped"]
    logged = running.logged()
    assert logged.index('"api stopped"') < logged.index('"workers stopped"')


def test_terminal_that_closes_stops_everything(tmp_path: Path):
    ours, terminal = pty.openpty()

    class AtTerminal(Running):
        @staticmethod
        def begin() -> None:
            os.setsid()
            signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup, under which tests may run, ignores it
            fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)

    running = AtTerminal(tmp_path / "home", free_port(), QUOTAGATE_DRAIN_MS="0")
    try:
        os.close(terminal)
        family = running.ready().family()
        os.close(ours)  # the kernel sends SIGHUP to the session's leader
        assert running.up.wait(timeout=60) == 0
        assert alive(family) == {}
        assert "quotagate has stopped" in running.logged()
    finally:
        running.kill()


def test_serve_with_several_processes_restarts_them_too(tmp_path: Path):
    class Serving(Detached):
        command = "serve"

    with stores.running("valkey") as store_url:
        database_url = f"sqlite:///{tmp_path / 'catalog.db'}"
        schema.upgrade(database_url)
        same = {"REDIS_URL": store_url, "DATABASE_URL": database_url, "DRAIN_MS": "0"}
        write(tmp_path, {**same, "PROCESSES": "2"})
        running = Serving(tmp_path / "home", free_port())
        try:
            eventually(lambda: len(running.events("api started")) == 2)
            apis = running.apis()
            running.write(**same, PROCESSES="3")
            running.hang_up()
            eventually(lambda: running.events(REPLACED))
            assert (len(apis), len(running.apis())) == (2, 3)
            assert not running.apis() & apis
            family = running.family()
            assert running.end() == 0
            assert alive(family) == {}
        finally:
            running.kill()
