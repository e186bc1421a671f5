"""What is logged of a failure: where it happened, and no secret that was at hand there."""

from __future__ import annotations

import subprocess
import sys

import pytest

FAILS = """
import logging, sys
sys.stderr.isatty = lambda: {tty}
from app.run import logs
logs.configure()
import structlog

def answer(headers):
    raise RuntimeError("it broke")

try:
    answer([(b"authorization", b"Bearer the-secret")])
except RuntimeError as error:
    structlog.get_logger("a").exception("a request failed")
    logging.getLogger("uvicorn.error").error("Exception in ASGI application", exc_info=error)
"""


@pytest.mark.parametrize("tty", [True, False])
def test_a_traceback_shows_no_local_variables(tty: bool):
    done = subprocess.run(
        [sys.executable, "-c", FAILS.format(tty=tty)], capture_output=True, text=True, check=True
    )
    assert done.stderr.count("it broke") >= 2
    assert done.stderr.count("answer") >= 2, "where it happened"
    assert "the-secret" not in done.stderr
