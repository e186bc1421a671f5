"""Log lines: hostile texts are escaped, and tracebacks show no variables, which may be secrets."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator

import pytest
import structlog

from app.node import logs

KEY = "a key that nobody may read"
HOSTILE = "a\x1b]0;t\x07\x1b[66m\r\x7f\x85\x9b66m\u061c\u200f\u202e\u2069\u2028\ud800\nFORGED"


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    yield
    root.handlers = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def answer(headers: list[tuple[bytes, bytes]]) -> None:
    raise RuntimeError(f"it broke on {len(headers)} headers")


def fail() -> None:
    raise RuntimeError(HOSTILE)


def assert_escaped(written: str) -> None:
    assert "FORGED" in written
    assert "\x1b[66m" not in written
    without_colours = re.sub(r"\x1b\[[0-9;]*m", "", written)
    assert not set(without_colours) & set(HOSTILE) - set("a]0;t[66mFORGED\n")


@pytest.mark.parametrize("tty", [True, False])
def test_traceback_shows_frames_without_their_variables(
    tty: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("sys.stderr.isatty", lambda: tty)
    logs.configure()
    try:
        answer([(b"authorization", KEY.encode())])
    except RuntimeError:
        structlog.get_logger("quotagate.test").exception("a request failed")
        logging.getLogger("uvicorn.error").exception("Exception in ASGI application")
    written = capsys.readouterr().err
    assert written.count("it broke") >= 2
    assert written.count("answer") >= 2, "where it happened"
    assert KEY not in written
    if not tty:
        for event in map(json.loads, written.splitlines()):
            assert event["exception"][0]["exc_type"] == "RuntimeError"
            assert event["exception"][0]["frames"][-1]["name"] == "answer"


@pytest.mark.parametrize("tty", [True, False])
def test_hostile_texts_are_escaped(
    tty: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("sys.stderr.isatty", lambda: tty)
    logs.configure()
    log = structlog.get_logger("quotagate.test")
    log.warning(HOSTILE, who=HOSTILE, many=[HOSTILE], named={HOSTILE: HOSTILE}, error=ValueError(HOSTILE))
    logging.getLogger("uvicorn.error").warning("%s", HOSTILE, extra={"who": HOSTILE})
    written = capsys.readouterr().err
    assert_escaped(written)
    assert len(written.splitlines()) == 2, "one event, one line"
    if not tty:
        first, second = map(json.loads, written.splitlines())
        assert first["event"] == first["who"] == second["event"] == HOSTILE
        assert first["named"] == {HOSTILE: HOSTILE}


@pytest.mark.parametrize("tty", [True, False])
def test_hostile_message_in_a_traceback_is_escaped(
    tty: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("sys.stderr.isatty", lambda: tty)
    logs.configure()
    try:
        fail()
    except RuntimeError:
        structlog.get_logger("quotagate.test").exception("a request failed")
    assert_escaped(capsys.readouterr().err)
