"""Every command shows hostile texts with escapes: from a node, files, Kafka, arguments and settings."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import pytest
import typer
from typer import rich_utils

from app.backfill.errors import InvalidAssertionsError
from app.kafka import quotas as kafka_quotas
from app.kafka.errors import KafkaError
from app.kafka.quotas import Broker, EntityQuotas, KafkaQuotas
from app.node import home, logs
from app.run import cli
from app.run.commands import programs
from app.store.samples import COUNTED
from tests.commands import Command, Gate, Ran, noting, quotagate

__all__ = ["quotagate"]

SIGN: Final = "\nFORGED"
HOSTILE: Final = (
    "a\x1b]0;t\x07\x1b[66m\r\t\x08\x7f\x85\x9b66m"
    f"\u061c\u200e\u200f\u202a\u202e\u2066\u2069\u2028\u2029{SIGN}"
)
"""Controls, which also begin a line, and characters that change the direction of text."""
UNSEEN: Final = "a\u061c\u200e\u202e\u2066\u2028b"
MISSING: Final = f"missing{HOSTILE}"
UNSAFE: Final = frozenset(
    {*range(0x20), *range(0x7F, 0xA0), 0x61C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A)}
) - {ord("\n")}
QUOTAS: Final = {HOSTILE: {"limit": 5, HOSTILE: HOSTILE}}
ENTITY: Final = {
    "entity": f"user={HOSTILE}",
    "version": HOSTILE,
    "quotas": QUOTAS,
    "bounds": {HOSTILE: {"text": HOSTILE}},
}
CHANGE: Final = {"entity": HOSTILE, "before": None, "at_ms": 1, "who": HOSTILE, "reason": HOSTILE}
VOLUMES: Final = {
    **dict.fromkeys(("since_ms", "valid_until_ms", "next_check_ms"), 1),
    **dict.fromkeys(("factor", "source", "reason"), HOSTILE),
    "drill": {"until_ms": 1, "who": HOSTILE},
    "volumes": [
        {"broker": HOSTILE, "dir": HOSTILE, "total_bytes": 2, "available_bytes": 1, "state": HOSTILE,
         "observed_ms": 1}
    ],
}  # fmt: skip
KEY: Final = {"name": HOSTILE, "key": HOSTILE, "scopes": [HOSTILE], "bound_to": [HOSTILE]}
LADDER: Final = [{"entity": f"b{HOSTILE}", "limit": 3}]
ANSWERS: Final[Mapping[str, Any]] = {
    "/v1/decisions": {"decision": HOSTILE, HOSTILE: HOSTILE, "quotas": [{HOSTILE: HOSTILE}]},
    "/v1/quotas": {"quotas": [ENTITY], "next_cursor": None},
    "/v1/quotas:apply": {
        "version": HOSTILE,
        "changes": [
            {"entity": HOSTILE, "quota": HOSTILE, "change": "added", "before": None,
             "after": {"limit": HOSTILE, HOSTILE: HOSTILE}, "buckets": HOSTILE}
        ],
    },
    "/v1/quotas:effective": {
        "quotas": [
            {"quota": HOSTILE, "limit": 1, "limit_now": 1, "entity": HOSTILE, "bucket": HOSTILE,
             "ladder": LADDER}
        ]
    },
    "/v1/quotas:history": {
        "changes": [
            CHANGE | {"after": QUOTAS},
            CHANGE | {"entity": "throttle_factor", "after": {"factor": HOSTILE, "until_ms": 1}},
        ],
        "next_cursor": None,
    },
    "/v1/quotas:shadow": {
        "entity": HOSTILE,
        "version": HOSTILE,
        "now_ms": 2,
        "shadows": [
            {**dict.fromkeys(("quota", "enforcement"), HOSTILE), "limit": 1, "since_ms": 1, "window_ms": 5,
             **dict.fromkeys(("admit", "delay", "throttle", "reject"), 3)}
        ],
    },
    "/v1/buckets": {"buckets": [{"bucket": HOSTILE, "quota": HOSTILE, HOSTILE: HOSTILE}]},
    "/v1/buckets:reset": None,
    "/v1/keys": {"keys": [KEY], **KEY},
    "/v1/volumes": VOLUMES,
    "/v1/volumes:drill": VOLUMES,
    "/v1/overview": {
        "now_ms": 5_000,
        "nodes": [{"node": HOSTILE, "version": HOSTILE, "seen_ms": 1}],
        "series": [
            {**dict.fromkeys((*COUNTED, "queue_asks"), 3), "at_ms": at_ms, "latency": [1, 2]}
            for at_ms in (1_000, 2_000)
        ],
        "latency_ms": [1],
        "throttled": [{"quota": HOSTILE, "bucket": HOSTILE, "asks": 1, "throttle_ms": 1}],
        "stores": [{"primary": HOSTILE, "memory_bytes": 1, "max_bytes": 2, "faults": [HOSTILE]}],
        "throttle_factor": HOSTILE,
    },
}  # fmt: skip
PROBLEM: Final = {"detail": HOSTILE, "errors": [{"field": HOSTILE, "message": HOSTILE}]}
GOOD_FILE: Final = "quotas: {user=alice: {request_rate: 5}}"
ENVOY: Final = {
    "domain": HOSTILE,
    "descriptors": [{"key": HOSTILE, "rate_limit": {"unit": "second", "requests_per_unit": 5}}, {HOSTILE: 1}],
}
COMMANDS: Final[Mapping[str, Sequence[str]]] = {
    "up": ("--env-file", MISSING),
    "serve": ("--env-file", MISSING),
    "workers": ("--env-file", MISSING),
    "migrate": ("--env-file", MISSING),
    "decide": ("--principal", HOSTILE, "--requests", "1"),
    "generate": ("drive", "--events", "1", "--truth", "truth", "--url", "URL"),
    "audit": ("--clock", "store", f"--{HOSTILE}"),
    "whatif": ("--out", "x", "--quotas", "wrong.yaml"),
    "recommend": ("--out", "x", "--keys", HOSTILE),
    "backfill run": ("--out", "x", "--at", HOSTILE),
    "spark": ("audit", "--clock", "store", f"--{HOSTILE}"),
    "quotas": ("--describe", "--entity-type", "users"),
    "quotas set": ("user=alice", "request_rate=5"),
    "quotas get": ("user=alice",),
    "quotas list": (),
    "quotas delete": ("user=alice",),
    "quotas effective": ("--principal", HOSTILE),
    "quotas history": (),
    "quotas undo": ("user=alice", "--reason", "oops", "--if-match", "1"),
    "quotas watch": ("user=alice",),
    "quotas promote": ("user=alice", HOSTILE, "--reason", "trial", "--if-match", "1"),
    "quotas export": (),
    "quotas plan": ("-f", HOSTILE),
    "quotas apply": ("-f", HOSTILE),
    "quotas lint": ("-f", "wrong.yaml"),
    "quotas schema": (),
    "quotas import": ("--from-kafka", "kafka:9092"),
    "quotas import-envoy": ("envoy.yaml", "--out", f"out{HOSTILE}", "--allow-looser"),
    "buckets show": ("user=alice",),
    "buckets reset": ("user=alice",),
    "backfill load": (HOSTILE,),
    "keys create": (HOSTILE,),
    "keys list": (),
    "keys revoke": (HOSTILE,),
    "keys rotate": (HOSTILE,),
    "volumes": (),
    "volumes drill": ("--factor", "1", "--for", "PT1S"),
    "volumes push": ("seen.json",),
    "volumes forget": (HOSTILE,),
    "top": (),
}
"""Every command, with arguments that make it show text from outside."""
FORMATS: Final = ("table", "json", "yaml")
JOBS: Final = {"audit", "backfill run", "recommend", "spark", "whatif"}
"""Commands that are jobs over the log."""
ONE_FORMAT: Final = {"up", "serve", "workers", "migrate", "generate", "quotas schema", *JOBS}
"""Commands without ``--output``."""
SILENT: Final = {"quotas delete", "buckets reset", "keys revoke", "volumes forget"}
"""Commands that print nothing, unless a format asks for a document."""
ASKING: Final = {
    name
    for name in COMMANDS
    if name not in {*ONE_FORMAT, "quotas lint", "quotas import-envoy", "backfill load"}
}
"""Commands that ask a node."""


class HostileNode(dict):
    """Answers every request with hostile texts, or refuses it with them."""

    def __init__(self, problem: Any = None, entity: str = f"user={HOSTILE}") -> None:
        self._problem = problem
        self._quotas = ANSWERS["/v1/quotas"] | {"quotas": [ENTITY | {"entity": entity}]}

    def get(self, asked: Any, default: Any = None) -> Any:
        if self._problem is not None:
            return 422, self._problem
        _, path = asked
        if path == "/v1/quotas":
            return 200, self._quotas
        if path.startswith("/v1/quotas/"):
            return 200, ENTITY
        answer = ANSWERS.get(path, KEY)
        return (204 if answer is None else 200), answer


NODES: Final = {
    "generate": HostileNode(PROBLEM),
    "quotas": HostileNode(entity=f"user={quote(UNSEEN)}"),
}
"""Nodes for commands that read more of an answer: one refuses, the other sends a name that a node accepts."""


@pytest.fixture(scope="module")
def server() -> Iterator[Gate]:
    with noting() as noted:
        yield noted


@pytest.fixture
def gate(server: Gate, quotagate: Command, monkeypatch: pytest.MonkeyPatch) -> Gate:
    server.asked.clear()
    server.answers = HostileNode()
    monkeypatch.setenv("QUOTAGATE_URL", server.url)
    return server


@pytest.fixture(autouse=True)
def _surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files and a Kafka cluster with hostile texts; programs run in this process, which stays as it is."""
    monkeypatch.setattr(home, "keep_private", lambda: None)
    monkeypatch.setattr(logs, "configure", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    Path(HOSTILE).write_text(GOOD_FILE, encoding="utf-8")
    Path("wrong.yaml").write_text(json.dumps({HOSTILE: 1, "quotas": {HOSTILE: QUOTAS}}), encoding="utf-8")
    Path("envoy.yaml").write_text(json.dumps(ENVOY), encoding="utf-8")
    Path("seen.json").write_text("{}", encoding="utf-8")
    entries = (EntityQuotas((("user", HOSTILE),), {"producer_byte_rate": 5.0, HOSTILE: 5.0}),)
    kafka = KafkaQuotas(entries, (Broker(HOSTILE, {}),), {})
    monkeypatch.setattr(kafka_quotas, "read", lambda *_: kafka)
    monkeypatch.setattr(programs, "become", run_here)
    monkeypatch.setattr(programs, "_install", lambda: None)


def run_here(module: str, arguments: Sequence[str], settings: object = None) -> None:
    sys.argv[:] = [module, *arguments]
    sys.exit(importlib.import_module(f"{module}.__main__").main())


def assert_safe(ran: Ran) -> None:
    for text in (ran.out, ran.err):
        assert not [hex(ord(each)) for each in text if ord(each) in UNSAFE], text
        assert SIGN not in text, text


def leaves(command: Any, name: str = "") -> Iterator[str]:
    """The names of all commands; a group that does something itself is one."""
    parts = getattr(command, "commands", None)
    if parts is None or command.invoke_without_command:
        yield name
    for word, part in (parts or {}).items():
        yield from leaves(part, f"{name} {word}".strip())


def test_every_command_is_tried():
    assert set(leaves(typer.main.get_command(cli.cli))) == COMMANDS.keys()


@pytest.mark.parametrize(
    ("name", "output"),
    [(name, each) for name in COMMANDS for each in (["table"] if name in ONE_FORMAT else FORMATS)],
)
def test_texts_from_outside_are_escaped(name: str, output: str, quotagate: Command, gate: Gate):
    gate.answers = NODES.get(name, HostileNode())
    arguments = [gate.url if word == "URL" else word for word in COMMANDS[name]]
    ran = quotagate(*name.split(), *arguments, *(() if name in ONE_FORMAT else ("-o", output)))
    assert ran.out or ran.err or name in SILENT
    assert_safe(ran)
    if name in ASKING and (name, output) != ("quotas export", "table"):
        assert ran.code in {0, 1}
        assert gate.asked, ran.err
        if output == "json":
            json.loads(ran.out)


@pytest.mark.parametrize("problem", [PROBLEM, HOSTILE.encode()], ids=["refusal", "no JSON"])
@pytest.mark.parametrize("name", sorted(ASKING))
def test_refusals_of_a_node_are_escaped(name: str, problem: object, quotagate: Command, gate: Gate):
    gate.answers = HostileNode(problem)
    ran = quotagate(*name.split(), *COMMANDS[name])
    assert ran.code == 1
    assert ran.err.startswith("quotagate: ")
    assert_safe(ran)


@pytest.mark.parametrize("name", COMMANDS)
def test_errors_of_use_are_escaped(name: str, quotagate: Command, gate: Gate):
    for extra in ((f"--{HOSTILE}",), (MISSING,) * 4, ("-o", HOSTILE)):
        ran = quotagate(*name.split(), *extra)
        assert ran.err or ran.code == 0, "a command may take any words"
        assert_safe(ran)


@pytest.mark.parametrize("name", sorted(ASKING))
def test_wrong_url_is_escaped(name: str, quotagate: Command):
    ran = quotagate(*name.split(), *COMMANDS[name], "--url", f"http://[{HOSTILE}")
    assert ran.code == 1
    assert_safe(ran)


def test_errors_of_use_are_escaped_among_colours(quotagate: Command, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rich_utils, "FORCE_TERMINAL", True)
    monkeypatch.setenv("TERM", "xterm-256color")
    for arguments in (("decide", f"--{HOSTILE}"), ("keys", HOSTILE), ("quotas", "get", HOSTILE)):
        ran = quotagate(*arguments)
        assert "\x1b[31m" in ran.err, "it has colours"
        assert_safe(Ran(ran.code, ran.out, ran.err.replace("\x1b[", "")))
        assert "\x1b[66m" not in ran.err


def test_errors_of_kafka_and_files_are_escaped(
    quotagate: Command, gate: Gate, monkeypatch: pytest.MonkeyPatch
):
    def refused(*_: object) -> None:
        raise KafkaError(HOSTILE)

    monkeypatch.setattr(kafka_quotas, "read", refused)
    Path("config.toml").write_text(f"{json.dumps(HOSTILE)} = 1", encoding="utf-8")
    Path("broken.toml").write_text(HOSTILE, encoding="utf-8")
    for arguments in (
        ("quotas", "import", "--from-kafka", "kafka:9092"),
        ("keys", "list", "--config", "config.toml"),
        ("keys", "list", "--config", "broken.toml"),
        ("keys", "list", "--config", HOSTILE),
        ("quotas", "plan", "-f", "wrong.yaml"),
        ("quotas", "import-envoy", HOSTILE, "--out", "out"),
        ("volumes", "push", HOSTILE),
    ):
        ran = quotagate(*arguments)
        assert ran.code in {1, 2}
        assert_safe(ran)


def test_traceback_is_escaped(quotagate: Command, monkeypatch: pytest.MonkeyPatch, capsys):
    assert quotagate("--version").code == 0
    sys.excepthook(RuntimeError, RuntimeError(HOSTILE), None)
    ran = Ran(1, *capsys.readouterr())
    assert "RuntimeError" in ran.err
    assert_safe(Ran(1, ran.out, ran.err.replace(SIGN, "").replace("\t", "")))


def test_error_shows_each_argument_as_one_line():
    error = InvalidAssertionsError(f"first {HOSTILE}", f"second {HOSTILE}")
    assert len(str(error).splitlines()) == 2
    assert_safe(Ran(1, "", str(error)))
