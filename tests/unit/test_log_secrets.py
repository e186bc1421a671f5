"""What the log must not say of a failure: the variables of its frames, among which are keys and secrets."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from app.run import logs


@pytest.fixture
def _as_before() -> Iterator[None]:
    handlers, level = logging.getLogger().handlers, logging.getLogger().level
    yield
    logging.getLogger().handlers = handlers
    logging.getLogger().setLevel(level)
    structlog.reset_defaults()


def fail(key: str) -> None:
    raise RuntimeError(len(key))


@pytest.mark.usefixtures("_as_before")
def test_a_failure_is_logged_with_its_frames_and_without_their_variables(capsys):
    logs.configure()
    key = "a key that nobody may read"
    try:
        fail(key)
    except RuntimeError:
        structlog.get_logger("quotagate.test").exception("a request failed")
    said = capsys.readouterr().err
    event = json.loads(said)
    assert event["exception"][0]["exc_type"] == "RuntimeError"
    assert event["exception"][0]["frames"][-1]["name"] == "fail"
    assert key not in said
