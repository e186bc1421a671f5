"""The command line: help, exit codes, and the request and output of `decide`."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
import yaml

import app
from tests.commands import Command, Gate, noting, quotagate

__all__ = ["quotagate"]

ASKED = ("POST", "/v1/decisions")
DECISION = {
    "decision": "admit",
    "throttle_ms": 0,
    "charged": True,
    "applied": 1,
    "source": "store",
    "limited_by": None,
}


@pytest.fixture(autouse=True)
def _unchanged_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Start without settings; undo a command's changes to its process: the umask and the logs."""
    for name in [name for name in os.environ if name.startswith("QUOTAGATE_")]:
        monkeypatch.delenv(name)
    root = logging.getLogger()
    handlers, level, umask = root.handlers, root.level, os.umask(0o022)
    yield
    os.umask(umask)
    root.handlers = handlers
    root.setLevel(level)
    structlog.reset_defaults()


@pytest.fixture
def gate() -> Iterator[Gate]:
    with noting() as noted:
        noted.answers[ASKED] = (200, DECISION)
        yield noted


def test_the_command_line_runs_as_a_program():
    shown = subprocess.run(
        [sys.executable, "-m", "app.run.cli", "--version"], capture_output=True, text=True, check=True
    )
    assert shown.stdout == f"quotagate {app.__version__}\n"


@pytest.mark.parametrize("command", ["", "up", "serve", "migrate", "decide"])
def test_every_command_has_help(quotagate: Command, command: str):
    shown = quotagate(*command.split(), "--help")
    assert shown.code == 0
    assert "Usage: quotagate" in shown.out


def test_version_is_shown(quotagate: Command):
    assert quotagate("--version").out == f"quotagate {app.__version__}\n"


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
def test_wrong_use_exits_with_2(quotagate: Command, arguments: list[str]):
    assert quotagate(*arguments).code == 2


@pytest.mark.parametrize("command", ["up", "serve", "migrate"])
def test_invalid_setting_is_named_and_exits_with_1(
    quotagate: Command, command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("QUOTAGATE_HOME")
    monkeypatch.setenv("QUOTAGATE_PORT", "x")
    refused = quotagate(command)
    assert refused.code == 1
    assert refused.err.startswith("quotagate: QUOTAGATE_PORT: ")
    assert "Traceback" not in refused.err
    assert not list(tmp_path.iterdir())


def test_serve_without_a_store_is_refused_after_a_warning_about_an_unknown_variable(
    quotagate: Command, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("QUOTAGATE_PROT", "1")
    refused = quotagate("serve")
    assert refused.code == 1
    warning, reason = refused.err.splitlines()
    assert json.loads(warning)["variable"] == "QUOTAGATE_PROT"
    assert reason.startswith("quotagate: QUOTAGATE_REDIS_URL: ")


def test_decide_sends_only_what_was_given(quotagate: Command, gate: Gate):
    done = quotagate(
        *("decide", "--principal", "alice", "--client-id", "", "--producer-id", "4711", "--producer-id", "x"),
        *("--mode", "record", "--detail", "--url", f"{gate.url}/", "--key", "secret"),
    )
    assert done.code == 0, done.err
    [asked] = gate.asked
    assert (asked.method, asked.path, asked.query) == (*ASKED, [])
    assert asked.headers["Authorization"] == "Bearer secret"
    assert asked.body == {
        "principal": "alice",
        "client_id": "",
        "usage": {"producer_ids": ["4711", "x"]},
        "mode": "record",
        "detail": True,
    }


def test_decide_takes_url_and_key_from_the_environment(
    quotagate: Command, gate: Gate, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("QUOTAGATE_URL", gate.url)
    monkeypatch.setenv("QUOTAGATE_KEY", "secret")
    done = quotagate("decide", "--requests", "1")
    assert done.code == 0, done.err
    assert gate.asked[0].headers["Authorization"] == "Bearer secret"


@pytest.mark.parametrize(("decision", "code"), [("admit", 0), ("delay", 0), ("throttle", 1), ("reject", 1)])
def test_exit_code_of_decide_says_whether_to_do_the_work(
    quotagate: Command, gate: Gate, decision: str, code: int
):
    gate.answers[ASKED] = (200, {**DECISION, "decision": decision})
    assert quotagate("decide", "--requests", "1", "--url", gate.url).code == code


def test_decision_is_shown_as_json_yaml_or_table(quotagate: Command, gate: Gate):
    limited = {"quota": "request_rate", "entity": "user=*", "bucket": "user=alice"}
    decision = {**DECISION, "limited_by": limited, "quotas": [{"quota": "request_rate", "limit": 5.5}]}
    gate.answers[ASKED] = (200, decision)
    ask = ("decide", "--requests", "1", "--url", gate.url)
    assert json.loads(quotagate(*ask, "-o", "json").out) == decision
    assert yaml.safe_load(quotagate(*ask, "-o", "yaml").out) == decision
    assert [line.split() for line in quotagate(*ask).out.splitlines()] == [
        ["decision", "admit"],
        ["throttle", "0", "ms"],
        ["charged", "yes"],
        ["applied", "1"],
        ["source", "store"],
        ["limited_by", "quota=request_rate", "entity=user=*", "bucket=user=alice"],
        [],
        ["quota", "limit"],
        ["request_rate", "5.5"],
    ]


def test_refused_ask_exits_with_1_and_names_the_field(quotagate: Command, gate: Gate):
    problem = {
        "title": "Bad",
        "detail": "wrong",
        "errors": [{"field": "/usage/requests", "message": "is too large"}],
    }
    gate.answers[ASKED] = (422, problem)
    refused = quotagate("decide", "--requests", "1", "--url", gate.url)
    assert refused.code == 1
    assert refused.err == "quotagate: 422 wrong\n  /usage/requests: is too large\n"


@pytest.mark.parametrize("content", [b"", b"<html>"])
def test_answer_that_is_not_json_exits_with_1(quotagate: Command, gate: Gate, content: bytes):
    gate.answers[ASKED] = (502, content)
    refused = quotagate("decide", "--requests", "1", "--url", gate.url)
    assert (refused.code, "502" in refused.err) == (1, True)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "gate", "ftp://gate"])
def test_unreachable_node_exits_with_1(quotagate: Command, url: str):
    refused = quotagate("decide", "--requests", "1", "--url", url)
    assert refused.code == 1
    assert refused.err.startswith("quotagate: ")
    assert "Traceback" not in refused.err


@pytest.mark.parametrize(
    "url",
    [
        "http://user:se/cret@gate",
        "http://user:se#cret@gate",
        "http://user:secret@gate:http",
        "http://user:secret@gate",
        "http://gate:80800",
        "http://gate?key=secret",
        "http://gate/a b",
        '"http://gate"',
        "http://",
    ],
)
def test_url_that_cannot_be_meant_is_refused_and_not_shown(
    quotagate: Command, monkeypatch: pytest.MonkeyPatch, url: str
):
    monkeypatch.setenv("QUOTAGATE_URL", url)
    refused = quotagate("decide", "--requests", "1")
    assert refused.code == 1
    assert refused.err.startswith("quotagate: --url or QUOTAGATE_URL: the URL ")
    said = refused.err.partition("the URL ")[2]
    assert not [part for part in ("cret", "gate", "80800") if part in said]


def test_quotation_marks_around_a_key_are_named(quotagate: Command, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("QUOTAGATE_KEY", '"secret"')
    refused = quotagate("decide", "--requests", "1")
    assert (refused.code, "secret" in refused.err) == (1, False)
    assert "QUOTAGATE_KEY: begins with a quotation mark" in refused.err


@pytest.mark.parametrize("module", ["app.run.cli", "app.run.up", "app.run.serve", "app.catalog.schema"])
def test_command_loads_only_what_it_needs(module):
    """Each of these takes a tenth of a second to import, in every process of `quotagate up`."""
    slow = ["alembic", "fastapi", "httpx", "pyarrow", "redis", "uvicorn", "valkey", "yaml"]
    program = f"import sys, {module}; print(*[name for name in {slow} if name in sys.modules])"
    shown = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True)
    assert shown.stdout.split() == []
