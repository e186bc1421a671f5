"""The agent of examples/volumes: two brokers' agents at a real node, and answers that go wrong."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from examples.volumes.agent import Agent, dirs_of, properties_of
from tests.disks import mounted
from tests.ports import free_port
from tests.pushing import pushed, volumes_of
from tests.service import ADMIN_KEY, Service, eventually
from tests.threaded import threaded

AGENT: Final = Path(__file__).parents[2] / "examples" / "volumes" / "agent.py"
MIB: Final = 1024 * 1024
SHORT: Final = {
    "QUOTAGATE_VOLUME_MIN_AVAILABLE_BYTES": str(2 * MIB),
    "QUOTAGATE_VOLUME_CHECK_INTERVAL": "PT5S",
    "QUOTAGATE_VOLUME_VALIDITY": "PT10S",
    "QUOTAGATE_VOLUME_FALLBACK_FACTOR": "0.5",
}


class Running(NamedTuple):
    """An agent, and the file that it logs to."""

    process: subprocess.Popen[bytes]
    log: Path

    def logged(self) -> str:
        return self.log.read_text(encoding="utf-8")


@contextmanager
def running(folder: Path, *options: str, url: str, key: str = ADMIN_KEY) -> Iterator[Running]:
    log = folder / "agent.log"
    environment = {"PATH": os.environ["PATH"], "QUOTAGATE_URL": url, "QUOTAGATE_KEY": key}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-I", AGENT, *options], env=environment, stdout=output, stderr=output
        )
    try:
        yield Running(process, log)
    finally:
        process.kill()
        process.wait()


def test_agents_of_two_brokers_push_their_disks_until_one_is_full_and_one_is_gone(tmp_path: Path):
    with pushed(callers=False, environment=SHORT) as node, mounted(tmp_path / "disk", 16 * MIB) as disk:
        folders = [tmp_path / "1", tmp_path / "2"]
        for folder in folders:
            folder.mkdir()
        (folders[0] / "server.properties").write_text(
            f"# of broker 1\nnode.id=1\nlog.dirs={disk},\\\n  {tmp_path}/gone\nmetadata.log.dir={tmp_path}\n",
            encoding="utf-8",
        )
        key = node.http.post("/v1/keys", json={"name": "broker", "scopes": ["write"]}).json()["key"]
        file = ["--properties", str(folders[0] / "server.properties"), "--interval", "1"]
        second = ["--broker", "2", "--dir", str(tmp_path), "--interval", "1"]
        nodes = f"http://127.0.0.1:{free_port()},{node.url}"
        with running(folders[1], *second, url=node.url, key=key) as other:
            eventually(lambda: known(node, "2"))
            (seen,) = known(node, "2")
            assert seen["total_bytes"] == shutil.disk_usage(tmp_path).total
            assert node.http.get("/v1/volumes").json()["factor"] == 1.0
            with running(folders[0], *file, url=nodes) as agent:
                volumes = {v["dir"]: v for v in eventually(lambda: known(node, "1"))}
                assert volumes.keys() == {str(disk), f"{tmp_path}/gone", str(tmp_path)}
                assert volumes[str(disk)]["total_bytes"] == 16 * MIB
                gone = volumes[f"{tmp_path}/gone"]
                assert (gone["total_bytes"], gone["available_bytes"], gone["state"]) == (
                    None,
                    None,
                    "unknown",
                )
                assert "the size of" in agent.logged()
                (disk / "segment").write_bytes(bytes(15 * MIB))
                ask = {"principal": "alice", "usage": {"produce_bytes": 1}}
                eventually(lambda: node.ask(**ask)["decision"] == "throttle")
                agent.process.send_signal(signal.SIGTERM)
                assert agent.process.wait(30) == 0
            eventually(lambda: volumes_of(node)["factor"] == 0.5)
            reason = volumes_of(node)["reason"]
            assert "not renewed within the validity: " in reason
            assert f"{disk} of broker 1" in reason
            assert node.http.delete("/v1/volumes?broker=1").status_code == 204
            eventually(lambda: volumes_of(node)["factor"] == 1.0)
            assert other.logged().count("pushed 1 volumes of broker 2: factor 1.0") >= 1
            assert key not in other.logged()


def known(node: Service, broker: str) -> list[dict[str, Any]]:
    return [volume for volume in volumes_of(node)["volumes"] if volume["broker"] == broker]


def test_node_that_is_away_is_asked_again_ever_more_rarely_and_the_agent_goes_on(
    monkeypatch: pytest.MonkeyPatch,
):
    """Pauses double up to the interval, and each is up to a fifth shorter, by chance."""
    agent = Agent([f"http://127.0.0.1:{free_port()}"], "key", "1", ["/"], 20.0)
    pauses: list[float] = []

    def wait(pause_s: float) -> bool:
        pauses.append(pause_s)
        if len(pauses) == 8:
            agent.stop.set()
        return False

    monkeypatch.setattr(agent.stop, "wait", wait)
    monkeypatch.setattr("examples.volumes.agent.time.monotonic", lambda: 0.0)
    agent.run()
    longest = [1, 2, 4, 8, 16, 20, 20, 20]
    assert all(0.8 * most <= pause <= most for pause, most in zip(pauses, longest, strict=True)), pauses
    assert len(set(pauses)) > 5


class Odd(BaseHTTPRequestHandler):
    """Answers a push according to its path, so that each kind of answer can be tried."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        kind = self.path.split("/")[1]
        if kind == "cut":
            self.wfile.write(b"nonsense\r\n\r\n")
            return
        self.send_response(int(kind) if kind.isdecimal() else 200)
        self.end_headers()
        self.wfile.write(b"[]" if kind == "list" else b"<html>")

    def log_message(self, *_: object) -> None:
        """Stay silent."""


@pytest.fixture(scope="module")
def odd() -> Iterator[str]:
    with threaded(ThreadingHTTPServer(("127.0.0.1", 0), Odd)) as server:
        yield f"http://127.0.0.1:{server.server_port}"


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("500", "no node took the push"),
        ("503", "no node took the push"),
        ("429", "no node took the push"),
        ("cut", "no node took the push"),
        ("html", "no node took the push"),
        ("list", "no node took the push"),
        ("401", "401"),
        ("409", "409"),
        ("422", "422"),
    ],
)
def test_one_push_that_is_not_taken_is_an_error_in_a_line(tmp_path: Path, odd: str, kind: str, said: str):
    with running(tmp_path, "--broker", "1", "--dir", "/", "--once", url=f"{odd}/{kind}") as agent:
        assert agent.process.wait(60) == 1
        assert said in agent.logged().splitlines()[-1]
        assert "Traceback" not in agent.logged()
        assert ADMIN_KEY not in agent.logged()


@pytest.mark.parametrize(
    ("options", "url", "named"),
    [
        (["--dir", "/"], "http://127.0.0.1:1", "--broker"),
        (["--broker", "1"], "http://127.0.0.1:1", "--dir"),
        (["--broker", "1", "--dir", "/"], "", "QUOTAGATE_URL"),
        (["--broker", "1", "--dir", "/"], "file:///etc/passwd", "QUOTAGATE_URL"),
        (["--broker", "1", "--dir", "/", "--interval", "0"], "http://127.0.0.1:1", "--interval"),
        (["--properties", "/does/not/exist"], "http://127.0.0.1:1", "--properties"),
    ],
)
def test_wrong_use_names_the_option(tmp_path: Path, options: list[str], url: str, named: str):
    with running(tmp_path, *options, url=url) as agent:
        assert agent.process.wait(60) == 2
        assert named in agent.logged().splitlines()[-1]


@pytest.mark.parametrize(
    ("text", "dirs"),
    [
        ("log.dirs=/a,/b", ["/a", "/b"]),
        ("log.dirs = /a , /b ,\n", ["/a", "/b"]),
        ("log.dirs:/a\nlog.dir=/c", ["/a"]),
        ("log.dir=/c", ["/c"]),
        ("log.dirs=/a,\\\r\n    /b", ["/a", "/b"]),
        ("log.dirs=C\\:/kafka", ["C:/kafka"]),
        ("#log.dirs=/a\n! log.dirs=/b\nnode.id=1", ["/tmp/kafka-logs"]),
        ("log.dirs=/a,/a\nmetadata.log.dir=/m", ["/a", "/m"]),
        ("log.dirs=/a b,/c=d", ["/a b", "/c=d"]),
    ],
)
def test_directories_are_those_of_server_properties(text: str, dirs: list[str]):
    assert dirs_of(properties_of(text)) == dirs
