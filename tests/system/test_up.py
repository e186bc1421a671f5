"""`quotagate up` as a user runs it: one command starts everything, and it leaves nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Container, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.node import home
from app.node.errors import HomeInUseError
from tests.ports import free_port


class Running:
    """One `quotagate up` with its own home and port.

    Attributes:
        command: the command of `quotagate`.
        environment: further variables.
        begin: called in the new process before the program.
    """

    command = "up"
    environment: Mapping[str, str] = {"QUOTAGATE_DRAIN_MS": "0"}
    begin: Callable[[], None] | None = None

    def __init__(self, home: Path, port: int, **settings: str) -> None:
        self.home = home
        self.url = f"http://127.0.0.1:{port}"
        # Each request has a connection of its own, as it may go to any API process; and no CA is read for it.
        self.http = httpx.Client(
            base_url=self.url, timeout=60, verify=False, limits=httpx.Limits(max_keepalive_connections=0)
        )
        self.output = home.with_name(f"{home.name}-{port}.out")
        bare = {name: value for name, value in os.environ.items() if not name.startswith("QUOTAGATE_")}
        own = {"QUOTAGATE_HOME": str(home), "QUOTAGATE_PORT": str(port), **self.environment, **settings}
        with self.output.open("wb") as output:
            self.up = subprocess.Popen(
                [sys.executable, "-P", "-m", "app.run.cli", self.command],
                env={**bare, **own},
                cwd=home.parent,
                stdout=output,
                stderr=subprocess.STDOUT,
                umask=0o022,
                preexec_fn=self.begin,  # noqa: PLW1509  it only makes a session of its own
            )

    def logged(self) -> str:
        return self.output.read_text(encoding="utf-8")

    def ready(self) -> Running:
        line = f"quotagate is ready on {self.url}\n"
        eventually(lambda: line in self.logged() or self.up.poll() is not None, within_s=180)
        assert line in self.logged(), self.logged()
        return self

    def end(self, number: int = signal.SIGTERM) -> int:
        self.up.send_signal(number)
        return self.up.wait(timeout=60)

    def kill(self) -> None:
        """Kill it, if it still runs."""
        if self.up.poll() is None:
            self.up.kill()
            self.up.wait()

    def key(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {(self.home / 'admin.key').read_text(encoding='ascii').strip()}"}

    def set_ids_per_window(self, limit: int) -> None:
        quotas = {"producer_ids_rate": limit}
        self.http.put("/v1/quotas/user=*", json=quotas, headers=self.key()).raise_for_status()
        # Each connection goes to one of the API processes. The process that did not take the change follows;
        # while it is busy, the other may take all of these connections.
        eventually(lambda: all(self.observed()["applied"] for _ in range(20)))

    def decide(self, *producer_ids: int) -> str:
        """The decision on these ids; an id that was seen is not charged again, so it may be asked twice."""
        usage = {"producer_ids": producer_ids}  # with detail, the node does not answer from known ids
        ask = {"principal": "alice", "usage": usage, "detail": True}
        decision: str = self._answer(ask, sources={"store"})["decision"]
        return decision

    def observed(self) -> dict[str, Any]:
        """The observed values of alice's buckets."""
        ask = {"principal": "alice", "usage": {"producer_ids": []}, "mode": "peek", "detail": True}
        return self._answer(ask, sources={"store", "local"})

    def _answer(self, ask: dict[str, Any], sources: Container[str]) -> dict[str, Any]:
        """An answer of these sources; others come without the store, or before a process has the quota."""
        answers: list[dict[str, Any]] = []

        def found() -> bool:
            answer = self.http.post("/v1/decisions", json=ask).raise_for_status()
            answers.append(answer.json())
            return answers[-1]["source"] in sources

        eventually(found)
        return answers[-1]

    def restarts(self, child: str) -> list[float]:
        """The logged pauses before each restart of a child."""
        died = self.events("child died, restarting")
        return [line["pause_s"] for line in died if line["child"] == child]

    def events(self, event: str) -> list[dict[str, Any]]:
        """The log lines of an event."""
        lines = [json.loads(line) for line in self.logged().splitlines() if line.startswith("{")]
        return [line for line in lines if line["event"] == event]

    def family(self) -> dict[int, str]:
        """All descendants of the process: their command lines by pid."""
        parents = {pid: parent for pid, (parent, _) in programs().items()}
        family = {self.up.pid}
        while more := {pid for pid, parent in parents.items() if parent in family} - family:
            family |= more
        return {pid: command_line(pid) for pid in family - {self.up.pid}}

    def one(self, part: str) -> int:
        """The pid of the only child whose command line has `part` in it."""
        (pid,) = [pid for pid, line in self.family().items() if part in line]
        return pid


def programs() -> dict[int, tuple[int, str]]:
    """The parent and the state of all processes on this machine."""
    seen = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, parent = (entry / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[:2]
            seen[int(entry.name)] = (int(parent), state)
    return seen


def command_line(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return ""


def alive(pids: dict[int, str]) -> dict[int, str]:
    """The processes that still run, without zombies."""
    now = programs()
    return {pid: line for pid, line in pids.items() if pid in now and now[pid][1] != "Z"}


def eventually(holds: Callable[[], object], *, within_s: float = 60) -> None:
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.05)


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def start(tmp_path: Path, port: int) -> Iterator[Callable[..., Running]]:
    """Starts `quotagate up`. Starts with the same home, by default one, find the earlier state."""
    started: list[Running] = []
    ports = {"home": port}

    def start(home: str = "home", **settings: str) -> Running:
        started.append(Running(tmp_path / home, ports.setdefault(home, free_port()), **settings))
        return started[-1]

    yield start
    for running in started:
        running.kill()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One `quotagate up` for tests that need no special start and do not disturb each other."""
    running = Running(tmp_path_factory.mktemp("shared") / "home", free_port())
    try:
        yield running.ready()
    finally:
        running.kill()


def most_bytes(running: Running) -> list[float]:
    """The memory limit of the store in the metrics; without a limit, readiness would report a fault."""
    assert running.http.get("/health/ready").json()["store"] == "ok"
    lines = running.http.get("/metrics").text.splitlines()
    return [float(line.split()[1]) for line in lines if line.startswith("quotagate_store_memory_max_bytes ")]


def test_up_prints_its_address_and_what_to_try(shared):
    output = shared.logged()
    assert f"curl '{shared.url}/v1/decisions'" in output
    assert shared.http.get("/health/ready").is_success


def test_store_has_a_memory_limit_by_default(shared):
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert most_bytes(shared) == [machine // 4]


def test_second_instance_with_the_same_home_is_refused(shared):
    second = Running(shared.home, free_port())
    try:
        assert second.up.wait(timeout=60) == 1
    finally:
        second.up.kill()
    assert "another `quotagate up`" in second.logged()


def test_state_and_admin_key_survive_a_restart(start):
    """The key is made once, and only its owner can read it. The store has the memory limit that is set."""
    running = start().ready()
    key = running.key()["Authorization"].removeprefix("Bearer ")
    assert running.logged().count(key) == 1
    assert stat.S_IMODE((running.home / "admin.key").stat().st_mode) == 0o600
    running.set_ids_per_window(5)
    assert running.decide(1, 2, 3, 4, 5) == "admit"
    assert running.end() == 0
    again = start(QUOTAGATE_STORE_MEMORY="33554432").ready()
    assert most_bytes(again) == [33_554_432]
    assert key not in again.logged()
    assert again.key()["Authorization"].endswith(key)
    assert again.decide(6) == "throttle"
    assert again.decide(1, 2, 3, 4, 5) == "admit"


def open_to_others(home: Path) -> dict[str, str]:
    """The paths in a home that other users may read, write or enter, and their modes."""
    found = {path: stat.S_IMODE(path.lstat().st_mode) for path in (home, *home.rglob("*"))}
    return {str(path.relative_to(home)): oct(mode) for path, mode in found.items() if mode & 0o077}


def logged_hour(running: Running) -> bool:
    """Whether a file of the decision log exists."""
    return any((running.home / "log").rglob("*.parquet"))


def stops_everything(running: Running, number: int) -> None:
    """Check that a signal ends it and everything that it started."""
    family = running.family()
    assert len(family) >= 2
    assert running.end(number) == 0
    assert alive(family) == {}
    assert "quotagate has stopped" in running.logged()


def test_everything_in_the_home_is_closed_to_others_and_sigterm_stops_everything(start):
    """While everything runs: the catalog, sockets, and the files of the store and of the log.

    This holds with one API process and with two. The next start closes files that others could open.
    """
    runs = [
        start(home=f"home-{api_programs}", QUOTAGATE_LOG="all", QUOTAGATE_PROCESSES=api_programs)
        for api_programs in ("1", "2")
    ]
    for running in runs:
        running.ready().set_ids_per_window(5)
        running.decide(1)
    for running in runs:
        eventually(lambda: logged_hour(running))  # noqa: B023
        made = {path.name for path in running.home.rglob("*")}
        assert {"admin.key", "catalog.db", "log", "store", "store.sock", "valkey.log", "lock"} <= made
        assert open_to_others(running.home) == {}
        stops_everything(running, signal.SIGTERM)
        assert open_to_others(running.home) == {}
        assert "removed the access of other users" not in running.logged()

    home = runs[0].home
    mine = home / "notes"
    mine.write_text("of the user's own")
    for path in (home, *home.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    again = start(home=home.name).ready()
    assert open_to_others(again.home) == {"notes": "0o644"}
    [line] = [
        json.loads(line)
        for line in again.logged().splitlines()
        if "removed the access of other users" in line
    ]
    assert line["paths"][0] == str(again.home)
    assert {str(again.home / name) for name in ("admin.key", "catalog.db")} <= set(line["paths"])


on_linux = pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux tells a child of its parent's death"
)


@on_linux
@pytest.mark.parametrize("api_programs", ["1", "2"])
def test_kill_leaves_no_orphan_and_the_next_start_finds_the_state(start, api_programs):
    """A start right after the kill succeeds, although the children are still ending."""
    running = start(QUOTAGATE_PROCESSES=api_programs).ready()
    running.set_ids_per_window(5)
    assert running.decide(1, 2, 3, 4, 5) == "admit"
    family = running.family()
    running.end(signal.SIGKILL)
    again = start(QUOTAGATE_PROCESSES=api_programs).ready()
    assert alive(family) == {}
    assert again.decide(6) == "throttle"
    assert again.decide(1, 2, 3, 4, 5) == "admit"
    family = again.family()
    again.end(signal.SIGKILL)
    eventually(lambda: not alive(family))


@on_linux
def test_slow_children_of_a_killed_run_are_waited_for(start):
    """Two stores on one file would corrupt it, and an API that is still ending holds the port."""
    running = start().ready()
    running.set_ids_per_window(5)
    assert running.decide(1, 2, 3) == "admit"
    for slow in ("valkey-server", " serve "):
        held = running.one(slow)
        os.kill(held, signal.SIGSTOP)
        try:
            running.end(signal.SIGKILL)
            running = start()
            eventually(lambda: "waiting for the processes of an earlier run to end" in running.logged())  # noqa: B023
            assert alive({held: slow}), "it still exists"
            assert [pid for pid, line in running.family().items() if slow in line] == []
        finally:
            os.kill(held, signal.SIGCONT)
        running.ready()
        assert running.decide(1, 2, 3) == "admit"
        assert running.decide(4, 5, 6) == "throttle"


def test_children_that_never_end_are_reported(tmp_path):
    os.close(home.lock_of_children(tmp_path, within_s=0))
    held = home.lock_of_children(tmp_path, within_s=0)
    with pytest.raises(HomeInUseError, match="an earlier `quotagate up` still run"):
        home.lock_of_children(tmp_path, within_s=0.1)
    os.close(held)


def test_dead_api_is_started_again(shared):
    os.kill(shared.one(" serve "), signal.SIGKILL)
    eventually(lambda: shared.restarts("api 1") == [0.0])
    # The supervisor holds the listening socket, so a caller waits for the new API instead of being refused.
    assert shared.http.get("/health/live").is_success


def test_dead_api_of_two_is_started_again_and_sigint_stops_everything(start):
    running = start(QUOTAGATE_PROCESSES="2").ready()
    apis = [pid for pid, line in running.family().items() if " --counts " in line]
    assert len(apis) == 2
    os.kill(apis[0], signal.SIGKILL)
    eventually(lambda: running.restarts("api 1") + running.restarts("api 2") == [0.0])
    eventually(lambda: len([line for line in running.family().values() if " --counts " in line]) == 2)
    running.set_ids_per_window(1)
    assert running.decide(1) == "admit"
    stops_everything(running, signal.SIGINT)


def test_dead_store_comes_back_with_its_state(shared):
    """Killed twice, it is started again at once, then after a logged half second. No charge is missing.

    No other test restarts the store of the shared run, or has charges of its user.
    """
    shared.set_ids_per_window(1_000)
    charged = 0
    for restarts in ([0.0], [0.0, 0.5]):
        for _ in range(100):
            charged += 1
            assert shared.decide(charged) == "admit"
        os.kill(shared.one("valkey-server"), signal.SIGKILL)
        eventually(lambda: shared.restarts("store") == restarts)  # noqa: B023
        eventually(lambda: shared.observed()["source"] == "store")
        (ids,) = shared.observed()["quotas"]
        assert (ids["observed"], ids["remaining"]) == (charged, 1_000 - charged)
    assert shared.decide(*range(1, charged + 1)) == "admit"
    (ids,) = shared.observed()["quotas"]
    assert ids["observed"] == charged, "each id was known"


def test_truncated_file_is_read_up_to_its_last_complete_write(start):
    """As after a power failure: the last write is incomplete and lost, and all others remain."""
    running = start().ready()
    running.set_ids_per_window(10)
    for id_ in range(1, 5):
        assert running.decide(id_) == "admit"
    (file,) = (running.home / "store").glob("appendonlydir/*.incr.aof")
    written = file.stat().st_size  # the store writes before it answers
    assert running.decide(5) == "admit"
    assert running.end() == 0
    os.truncate(file, written + 7)
    again = start().ready()
    (ids,) = again.observed()["quotas"]
    assert ids["observed"] == 4
    assert again.decide(1, 2, 3, 4) == "admit"
    assert again.observed()["quotas"][0]["observed"] == 4


def test_port_in_use_is_reported(start, port):
    with socket.create_server(("127.0.0.1", port)):
        refused = start()
        assert refused.up.wait(timeout=60) == 1
    assert f"port {port}" in refused.logged()
    assert "QUOTAGATE_PORT" in refused.logged()


def test_home_with_a_path_too_long_for_a_socket_works_and_sigint_stops_everything(start):
    stops_everything(start(home="x" * 120).ready(), signal.SIGINT)


def test_variable_that_nothing_reads_is_named_and_explained(start):
    running = start(QUOTAGATE_PROT="9000", QUOTAGATE_SERVICE_HOST="10.0.0.1").ready()
    unknown = ["QUOTAGATE_PROT", "QUOTAGATE_SERVICE_HOST"]
    logged = running.events("nothing reads this variable")
    assert [line["variable"] for line in logged] == unknown, "each once, by the outermost process"
    assert logged[0]["why"] == "did you mean QUOTAGATE_PORT?"
    assert "enableServiceLinks: false" in logged[1]["why"]
    assert f"Nothing reads {', '.join(unknown)}" in running.logged()
    ready = running.http.get("/health/ready")
    assert (ready.status_code, ready.json()["settings"]) == (200, "unknown")
    assert "PROT" not in ready.text
    named = running.http.get("/health/ready", headers=running.key()).json()
    assert named["unknown_settings"] == unknown
    assert running.end() == 0
