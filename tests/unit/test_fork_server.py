"""A fork has the environment, folder, descriptors, exit code and signals of a program that was started."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path

from tests import fork_server


def forked(output: Path, *arguments: str, **environment: str) -> fork_server.Forked:
    """A fork that writes into a file; it starts in the folder of the file."""
    with output.open("wb") as file:
        return fork_server.start(
            arguments,
            environment={**os.environ, **environment},
            folder=output.parent,
            descriptors={1: file.fileno(), 2: file.fileno()},
        )


def test_fork_exits_with_the_code_of_its_command(tmp_path: Path):
    said, refused = tmp_path / "said", tmp_path / "refused"
    assert forked(said, "--version").wait() == 0
    assert said.read_text().startswith("quotagate ")
    assert forked(refused, "serv").wait() == 2
    assert "serv" in refused.read_text()


def test_two_programs_fork_in_turn(tmp_path: Path):
    latest = []
    for _ in range(3):
        assert forked(tmp_path / "said", "--version").wait() == 0
        latest.append(fork_server._servers[-1])
    assert latest[0] is latest[2] is not latest[1]


def test_fork_has_its_own_environment_and_folder(tmp_path: Path):
    said = tmp_path / "said"
    wrong = forked(said, "serve", QUOTAGATE_REDIS_URL="unix:///none", QUOTAGATE_QUEUE_MS="none")
    assert wrong.wait() == 1
    assert "QUOTAGATE_QUEUE_MS" in said.read_text()
    (tmp_path / ".env").write_text("QUOTAGATE_STORE_BUDGET_MS=none\n")
    forked(said, "serve").wait()
    assert "QUOTAGATE_STORE_BUDGET_MS" in said.read_text(), "settings of the file in its folder"


def test_fork_is_ended_by_signals_and_its_processor_time_counts(tmp_path: Path):
    before = sum(os.times()[2:4])
    with socket.create_server(("127.0.0.1", 0)) as listener, (tmp_path / "said").open("wb") as file:
        node = fork_server.start(
            ["serve", "--fd", str(listener.fileno())],
            environment={**os.environ, "QUOTAGATE_REDIS_URL": "unix:///none", "QUOTAGATE_ADMIN_KEY": "k"},
            folder=tmp_path,
            descriptors={1: file.fileno(), 2: file.fileno(), listener.fileno(): listener.fileno()},
        )
        assert node.poll() is None
        node.kill()
        assert node.wait() == -signal.SIGKILL
    assert forked(tmp_path / "help", "serve", "--help").wait() == 0
    assert sum(os.times()[2:4]) > before


READ_BY_IMPORTS = """
import os, sysconfig, wsgiref.handlers  # the latter copies all variables, for CGI
from tests import fork_server

sysconfig.get_config_vars()  # reads HOME, for the packages of a user
read, get = set(), type(os.environ).__getitem__
def noted(environment, name):
    read.add(name)
    return get(environment, name)
type(os.environ).__getitem__ = noted
fork_server._import_nodes()
print(*(name for name in read if not name.startswith(fork_server.OF_A_START)))
"""


def test_no_import_reads_a_variable_in_which_a_fork_may_differ():
    read = subprocess.run(
        [sys.executable, "-P", "-c", READ_BY_IMPORTS], check=True, capture_output=True, text=True
    )
    assert read.stdout.split() == []


def test_programs_with_other_limits_or_another_umask_are_not_forked():
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    assert fork_server.can_fork(os.environ)
    umask = os.umask(0o123)
    assert not fork_server.can_fork(os.environ)
    os.umask(umask)
    assert fork_server.can_fork(os.environ)
    resource.setrlimit(resource.RLIMIT_CORE, (1 if soft != 1 else 0, hard))
    try:
        assert not fork_server.can_fork(os.environ)
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, (soft, hard))


def test_variables_that_a_start_reads_are_those_of_the_server():
    same = dict(os.environ)
    assert fork_server.can_fork(same)
    assert fork_server.can_fork({**same, "QUOTAGATE_HOME": "/elsewhere"})
    assert not fork_server.can_fork({**same, "PYTHONPATH": "/elsewhere"})
    assert not fork_server.can_fork({**same, "MALLOC_ARENA_MAX": "1"})
