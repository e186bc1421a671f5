"""Streams for terminals: all output to them is escaped, by every way of writing."""

from __future__ import annotations

import argparse
import sys

import pytest
from rich.console import Console

from app.run.commands import show
from app.terminal import escape_output, styled
from workers.generate.progress import bar
from workers.jobs.audit.terminal import principal_text

HOSTILE = "\x1b[66m\r\x7f\x9b66m\u202e\u2028\udc80"
ESCAPED = r"\x1b[66m\r\x7f\x9b66m\u202e\u2028\udc80"


@pytest.fixture(autouse=True)
def _streams(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Restore the streams that a test replaces."""
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    monkeypatch.setattr(sys, "stderr", sys.stderr)


def test_every_way_of_writing_is_escaped(capsys: pytest.CaptureFixture[str]):
    escape_output()
    print(HOSTILE)
    sys.stdout.writelines([HOSTILE, "\n"])
    argparse.ArgumentParser(prog=HOSTILE).print_usage(sys.stderr)
    sys.excepthook(RuntimeError, RuntimeError(HOSTILE), None)
    written = capsys.readouterr()
    assert written.out == f"{ESCAPED}\n{ESCAPED}\n"
    assert written.err.count(ESCAPED) == 2
    assert not set(HOSTILE) & set(written.err) - set("[66m")


def test_streams_are_replaced_once(capsys: pytest.CaptureFixture[str]):
    below = sys.stdout
    escape_output()
    once = sys.stdout
    escape_output()
    assert sys.stdout is once
    assert styled(once) is below
    assert styled(below) is below
    assert not hasattr(once, "buffer"), "writers of bytes would write past the escapes"


def test_colours_of_rich_pass(capsys: pytest.CaptureFixture[str]):
    escape_output()
    Console(force_terminal=True, color_system="standard").print("a", style="red")
    assert capsys.readouterr().out == "\x1b[31ma\x1b[0m\n"


def test_progress_is_drawn(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    escape_output()
    with show.working("reading ..."), bar("rows", 2) as advance:
        advance(1)
    drawn = capsys.readouterr().err
    assert "\x1b[?25l" in drawn, "the cursor is hidden"
    assert "\\x1b" not in drawn


def test_principal_in_the_summary_of_an_audit_is_escaped():
    assert principal_text(f"ü{HOSTILE}\n") == f"ü{ESCAPED}\\n"
