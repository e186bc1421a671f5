"""Runs commands in process, against a real node or one that only records requests."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

import pytest
from typer import main as typer_main

from app.run import cli
from tests.service import Service
from tests.threaded import threaded


class Ran(NamedTuple):
    """The exit code and the output of a command."""

    code: int
    out: str
    err: str


class Asked(NamedTuple):
    """One request: its raw path and its decoded query."""

    method: str
    path: str
    query: list[tuple[str, str]]
    body: Any
    headers: Message


@dataclass
class Gate:
    """A fake node: it records requests, and answers by method and path."""

    url: str = ""
    asked: list[Asked] = field(default_factory=list)
    answers: dict[tuple[str, str], tuple[int, Any]] = field(default_factory=dict)
    etag: str = '"7"'

    def brief(self) -> list[tuple[Any, ...]]:
        """The requests as method, path, query and body, without empty parts."""
        return [
            tuple(part for part in (one.method, one.path, one.query, one.body) if part) for one in self.asked
        ]


@contextmanager
def noting() -> Iterator[Gate]:
    """A fake node, on a free port."""
    gate = Gate()

    class Notes(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            path, _, query = self.path.partition("?")
            gate.asked.append(
                Asked(self.command, path, parse_qsl(query, keep_blank_values=True), body, self.headers)
            )
            status, content = gate.answers.get((self.command, path), (404, {"detail": "Nothing laid out."}))
            sent = (
                b""
                if content is None
                else content
                if isinstance(content, bytes)
                else json.dumps(content).encode()
            )
            self.send_response(status)
            self.send_header("ETag", gate.etag)
            self.send_header("Content-Length", str(len(sent)))
            self.end_headers()
            self.wfile.write(sent)

        do_GET = do_PUT = do_PATCH = do_POST = do_DELETE = _answer  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    with threaded(HTTPServer(("127.0.0.1", 0), Notes)) as server:
        gate.url = f"http://127.0.0.1:{server.server_port}"
        yield gate


Command = Callable[..., Ran]
parser_of = functools.cache(typer_main.get_command)
"""The cached parser of all commands: to make it anew takes most of the time of a command."""


@pytest.fixture
def quotagate(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    """The command line, with only those environment variables that a test names."""
    for name in ("QUOTAGATE_URL", "QUOTAGATE_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("QUOTAGATE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(typer_main, "get_command", parser_of)

    def run(*arguments: str) -> Ran:
        monkeypatch.setattr("sys.argv", ["quotagate", *arguments])
        capsys.readouterr()
        try:
            cli.main()
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(bool(ended.code))
        else:
            code = 0
        said = capsys.readouterr()
        return Ran(code, said.out, said.err)

    return run


@pytest.fixture
def ask(quotagate: Command, node: Service, monkeypatch: pytest.MonkeyPatch) -> Command:
    """The command line with the URL of the fixture `node`, and its key."""
    monkeypatch.setenv("QUOTAGATE_URL", node.url)
    monkeypatch.setenv("QUOTAGATE_KEY", node.admin_key)
    return quotagate
