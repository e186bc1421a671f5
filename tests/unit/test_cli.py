"""The command line: help, exit codes, what `decide` sends and how it shows the answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import yaml

import app

DECISION = {
    "decision": "admit",
    "throttle_ms": 0,
    "charged": True,
    "applied": 1,
    "source": "store",
    "limited_by": None,
}


class Answering(BaseHTTPRequestHandler):
    """Notes what it was asked and answers what the test has laid out."""

    url = ""
    asked: list[dict] = []
    answer: tuple[int, bytes] = (200, b"")

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.asked.append({"path": self.path, "key": self.headers["Authorization"], "ask": json.loads(body)})
        status, content = self.answer
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


@pytest.fixture
def gate():
    """A service that is not there: one address, one laid-out answer."""

    class Own(Answering):
        asked = []
        answer = (200, json.dumps(DECISION).encode())

    server = HTTPServer(("127.0.0.1", 0), Own)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    Own.url = f"http://127.0.0.1:{server.server_port}"
    yield Own
    server.shutdown()
    thread.join()
    server.server_close()


def quotagate(*arguments: str, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    bare = {name: value for name, value in os.environ.items() if not name.startswith("QUOTAGATE_")}
    return subprocess.run(
        [sys.executable, "-m", "app.run.cli", *arguments],
        env={**bare, **env, "COLUMNS": "200"},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


@pytest.mark.parametrize("command", ["", "up", "serve", "migrate", "decide"])
def test_help_is_everywhere(command):
    shown = quotagate(*command.split(), "--help")
    assert shown.returncode == 0
    assert "Usage: quotagate" in shown.stdout


def test_the_version_is_shown():
    assert quotagate("--version").stdout == f"quotagate {app.__version__}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["elsewhere"],
        ["up", "--fast"],
        ["decide"],
        ["decide", "--requests", "many"],
        ["decide", "--requests", "1", "-o", "xml"],
        ["decide", "--requests", "1", "--mode", "maybe"],
    ],
)
def test_wrong_use_is_2(arguments):
    assert quotagate(*arguments).returncode == 2


@pytest.mark.parametrize("command", ["up", "serve", "migrate"])
def test_a_wrong_setting_is_1_and_named(command, tmp_path):
    refused = quotagate(command, cwd=tmp_path, QUOTAGATE_PORT="x", PYTHONPATH=str(Path.cwd()))
    assert refused.returncode == 1
    assert refused.stderr.startswith("quotagate: QUOTAGATE_PORT: ")
    assert "Traceback" not in refused.stderr
    assert not list(tmp_path.iterdir())


def test_serve_needs_a_store(tmp_path):
    refused = quotagate("serve", QUOTAGATE_HOME=str(tmp_path), QUOTAGATE_PROT="1")
    assert refused.returncode == 1
    warning, reason = refused.stderr.splitlines()
    assert json.loads(warning)["variable"] == "QUOTAGATE_PROT"
    assert reason.startswith("quotagate: QUOTAGATE_REDIS_URL: ")


def test_decide_sends_what_it_was_given_and_nothing_else(gate):
    done = quotagate(
        *("decide", "--principal", "alice", "--client-id", "", "--producer-id", "4711", "--producer-id", "x"),
        *("--mode", "record", "--detail", "--url", f"{gate.url}/", "--key", "secret"),
    )
    assert done.returncode == 0, done.stderr
    assert gate.asked == [
        {
            "path": "/v1/decisions",
            "key": "Bearer secret",
            "ask": {
                "principal": "alice",
                "client_id": "",
                "usage": {"producer_ids": ["4711", "x"]},
                "mode": "record",
                "detail": True,
            },
        }
    ]


def test_decide_takes_url_and_key_from_the_environment(gate):
    done = quotagate("decide", "--requests", "1", QUOTAGATE_URL=gate.url, QUOTAGATE_KEY="secret")
    assert done.returncode == 0, done.stderr
    assert gate.asked[0]["key"] == "Bearer secret"


@pytest.mark.parametrize(("decision", "code"), [("admit", 0), ("delay", 0), ("throttle", 1), ("reject", 1)])
def test_the_exit_code_says_whether_to_do_the_work(gate, decision, code):
    gate.answer = (200, json.dumps({**DECISION, "decision": decision}).encode())
    assert quotagate("decide", "--requests", "1", "--url", gate.url).returncode == code


def test_a_decision_is_shown_in_three_ways(gate):
    limited = {"quota": "request_rate", "entity": "user=*", "bucket": "user=alice"}
    decision = {**DECISION, "limited_by": limited, "quotas": [{"quota": "request_rate", "limit": 5.5}]}
    gate.answer = (200, json.dumps(decision).encode())
    ask = ("decide", "--requests", "1", "--url", gate.url)
    assert json.loads(quotagate(*ask, "-o", "json").stdout) == decision
    assert yaml.safe_load(quotagate(*ask, "-o", "yaml").stdout) == decision
    assert [line.split() for line in quotagate(*ask).stdout.splitlines()] == [
        ["decision", "admit"],
        ["throttle_ms", "0"],
        ["charged", "yes"],
        ["applied", "1"],
        ["source", "store"],
        ["limited_by", "quota=request_rate", "entity=user=*", "bucket=user=alice"],
        [],
        ["quota", "limit"],
        ["request_rate", "5.5"],
    ]


def test_a_refused_ask_is_1_with_the_field_named(gate):
    problem = {
        "title": "Bad",
        "detail": "wrong",
        "errors": [{"field": "/usage/requests", "message": "is too large"}],
    }
    gate.answer = (422, json.dumps(problem).encode())
    refused = quotagate("decide", "--requests", "1", "--url", gate.url)
    assert refused.returncode == 1
    assert refused.stderr == "quotagate: 422 wrong\n  /usage/requests: is too large\n"


@pytest.mark.parametrize("content", [b"", b"<html>"])
def test_an_answer_that_is_not_ours_is_1(gate, content):
    gate.answer = (502, content)
    refused = quotagate("decide", "--requests", "1", "--url", gate.url)
    assert (refused.returncode, "502" in refused.stderr) == (1, True)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "gate", "ftp://gate"])
def test_nobody_there_is_1(url):
    refused = quotagate("decide", "--requests", "1", "--url", url)
    assert refused.returncode == 1
    assert refused.stderr.startswith("quotagate: ")
    assert "Traceback" not in refused.stderr
