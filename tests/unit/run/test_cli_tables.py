"""Tables: aligned, as wide as the terminal, without colours in a pipe, and with nothing cut off."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest

from app.run.commands import show

HEADER = ["ENTITY", "QUOTA", "LIMIT", "SETTINGS"]
LONG = "user=" + "a" * 60 + ",client-id=" + "b" * 60
ROWS = [
    ("user=alice,client-id=etl", "max_connection_creation_rate", 9_007_199_254_740_991, {"shadow": True}),
    (LONG, "request_rate", 0.5, {"enforcement": "deny", "samples": 21, "on_store_failure": "throttle"}),
]
SHOW = f"from app.run.commands import show; show.table({HEADER!r}, {ROWS!r}, right=['LIMIT'])"


def at_a_terminal(columns: int, **environment: str) -> str:
    """The output of the rows at a terminal with this many columns."""
    ours, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    bare = {name: value for name, value in os.environ.items() if name not in {"COLUMNS", "NO_COLOR"}}
    child = subprocess.Popen(
        [sys.executable, "-c", SHOW],
        env={**bare, "TERM": "xterm-256color", **environment},
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
    )
    os.close(terminal)
    sent = b""
    try:
        while said := os.read(ours, 65536):
            sent += said
    except OSError:  # the child has ended, and its terminal with it
        pass
    os.close(ours)
    assert child.wait() == 0, sent
    return sent.decode().replace("\r\n", "\n")


def words_of(text: str) -> str:
    """A text without blanks, line breaks and colours, for comparison."""
    return re.sub(r"\s|\x1b\[[0-9;]*m", "", text)


@pytest.mark.parametrize("columns", [80, 120, 200])
def test_table_fits_its_terminal_and_cuts_nothing(columns):
    shown = re.sub(r"\x1b\[[0-9;]*m", "", at_a_terminal(columns))
    assert max(map(len, shown.splitlines())) <= columns
    assert "9007199254740991" in shown
    assert "max_connection_creation_rate" in shown
    first = shown.index("QUOTA")
    assert {line[first - 2 : first] for line in shown.splitlines()} == {"  "}, "columns are aligned"
    assert sorted(words_of(shown)) == sorted(
        words_of("".join([*HEADER, *(show.cell(v) for r in ROWS for v in r)]))
    )


def test_narrow_terminal_wraps_lines_itself():
    shown = at_a_terminal(20)
    assert "9007199254740991" in shown
    assert "max_connection_creation_rate" in shown


def test_only_a_terminal_gets_colours(capsys: pytest.CaptureFixture[str]):
    assert "\x1b[" in at_a_terminal(120)
    assert "\x1b[" not in at_a_terminal(120, TERM="dumb")
    show.table(HEADER, ROWS, right=["LIMIT"])
    said = capsys.readouterr().out
    assert "\x1b" not in said
    assert len(said.splitlines()) == 3, "one row, one line"
    assert not any(line.endswith(" ") for line in said.splitlines())


def test_control_characters_are_escaped(capsys: pytest.CaptureFixture[str]):
    show.table(["NAME"], [["[red]a\x1b[2J\u202eb:smile:\n"]])
    assert capsys.readouterr().out.splitlines() == ["NAME", "[red]a\\x1b[2J\\u202eb:smile:\\n"]
