"""The log of a failure: where it happened, without the variables of its frames, which may be secrets."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from app.node import logs

KEY = "a key that nobody may read"


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
