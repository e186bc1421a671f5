"""`make demo` as a newcomer runs it: its output is true, and it leaves nothing behind."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Final

import httpx
import pytest
from rich.console import Console

from examples.demo.__main__ import QUOTAS, put
from examples.demo.arrangement import Arrangement, arrange
from examples.demo.callers import Answer, Caller, gather
from examples.demo.screen import EVENTS, Screen, intro
from tests.system.test_up import alive, command_line, eventually, programs
from tests.tools import need

ROOT: Final = Path(__file__).parents[2]
WITHIN_S: Final = 90.0
FIRST: Final = "the first decision: alice, 200"
STORY: Final = (
    "people ─▶ nginx ─▶ a site",
    FIRST,
    "an operator raises alice",
    "admitted before",
    "the store hangs",
    "the fallback answers",
    "the store goes on",
    "the store answers again",
    "in all: ",
    "What to try next",
)


class Playing:
    """One demo, which prints to a file or, with a keyboard, to a terminal; and all processes it started."""

    def __init__(self, folder: Path, *options: str, on_terminal: bool = False) -> None:
        need("nginx")
        self.temporary = folder / "t"
        self.temporary.mkdir()
        self._file = folder / "printed"
        self._file.touch()
        self.keyboard, there = pty.openpty()
        fcntl.ioctl(there, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
        with self._file.open("wb") as file:
            out = there if on_terminal else file
            self.process = subprocess.Popen(
                [sys.executable, "-m", "examples.demo", *options],
                cwd=ROOT,
                env={**os.environ, "TMPDIR": str(self.temporary), "TERM": "xterm-256color"},
                stdin=there if on_terminal else subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        os.close(there)
        self.family: dict[int, str] = {}
        self._copying = threading.Thread(target=self._copy)
        self._copying.start()

    def _copy(self) -> None:
        """Copy the terminal's output to the file, until no process has the terminal open."""
        with suppress(OSError), self._file.open("ab", buffering=0) as file:
            while some := os.read(self.keyboard, 65_536):
                file.write(some)

    def printed(self) -> str:
        return self._file.read_text(encoding="utf-8", errors="replace")

    def until_it_prints(self, text: str) -> None:
        eventually(lambda: text in self.printed() or self.process.poll() is not None, within_s=WITHIN_S)
        assert text in self.printed(), self.printed()
        self.family |= descendants(self.process.pid)

    def ended(self) -> int:
        """Wait for the end; return the exit code. No process of the demo may be left."""
        code = self.process.wait(WITHIN_S)
        for program in ("quotagate", "valkey-server", "serve", "nginx"):
            assert any(program in line for line in self.family.values()), self.family
        assert alive(self.family) == {}
        assert list(self.temporary.iterdir()) == []
        assert "Traceback" not in self.printed()
        assert "killed" not in self.printed(), "all processes ended in time by themselves"
        return code

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._copying.join()
        os.close(self.keyboard)


def descendants(pid: int) -> dict[int, str]:
    """All descendants of a process: their command lines by pid."""
    parents = {one: parent for one, (parent, _) in programs().items()}
    family = {pid}
    while more := {one for one, parent in parents.items() if parent in family} - family:
        family |= more
    return {one: command_line(one) for one in family - {pid}}


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short name, because a socket's path must not be too long."""
    with tempfile.TemporaryDirectory(prefix="qg-") as name:
        yield Path(name)


@pytest.fixture
def play(folder: Path) -> Iterator[Callable[..., Playing]]:
    started: list[Playing] = []

    def play(*options: str, on_terminal: bool = False) -> Playing:
        started.append(Playing(folder, *options, on_terminal=on_terminal))
        return started[-1]

    yield play
    for one in started:
        one.close()


def test_make_demo_runs_it():
    need("make")
    make = subprocess.run(["make", "-n", "demo"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert make.stdout.splitlines()[-1].endswith(".venv/bin/python -m examples.demo")


def test_whole_demo_runs_without_a_terminal(play):
    """Some asks are admitted, some throttled; the raised limit takes effect; the fallback begins and ends."""
    demo = play("--seconds", "12")
    demo.until_it_prints(FIRST)
    assert demo.ended() == 0
    printed = demo.printed()
    places = [printed.find(part) for part in STORY]
    assert -1 not in places
    assert places == sorted(places), printed
    assert "\x1b" not in printed

    raised = re.search(r"alice: (\d+) of (\d+) admitted before, (\d+) of (\d+) since", printed)
    assert raised is not None
    before, asked_before, since, asked_since = map(int, raised.groups())
    assert 0 < before < asked_before
    assert since / asked_since > before / asked_before

    admitted, throttled, by_fallback = map(
        int, re.findall(r"(\d+) [a-z]", printed.partition("in all: ")[2])[:3]
    )
    counts = [line for line in printed.splitlines() if "admitted+throttled" in line]
    each = {name: (int(yes), int(no)) for name, yes, no in re.findall(r"(\S+) (\d+)\+(\d+)", counts[-1])}
    assert each.keys() == {"alice", "bob", "mallory", "127.0.0.7", "etl"}
    assert all(yes > 0 for yes, _ in each.values())
    assert all(each[name][1] > 0 for name in ("alice", "mallory", "127.0.0.7", "etl"))
    assert admitted >= sum(yes for yes, _ in each.values())
    assert throttled >= sum(no for _, no in each.values())
    assert 0 < by_fallback < admitted + throttled


def test_terminal_shows_the_screen_until_q_is_pressed(play):
    demo = play("--forever", on_terminal=True)
    demo.until_it_prints(FIRST)
    os.write(demo.keyboard, b"xq")
    assert demo.ended() == 0
    for heading in ("quotas in force", "who", "asks/s", "admitted", "throttled", "last answer", "mallory"):
        assert heading in demo.printed()
    assert "\x1b[?25h" in demo.printed().rpartition("\x1b[?25l")[2], "the cursor is visible again"
    assert "What to try next" in demo.printed()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_signal_in_the_middle_ends_the_demo(play, number):
    """Also while the store hangs."""
    demo = play("--seconds", "8")
    demo.until_it_prints("the store hangs")
    demo.process.send_signal(number)
    assert demo.ended() == 0


def test_signal_during_the_start_ends_the_demo(play):
    demo = play()
    eventually(
        lambda: any("valkey-server" in line for line in descendants(demo.process.pid).values()),
        within_s=WITHIN_S,
    )
    family = descendants(demo.process.pid)
    demo.process.send_signal(signal.SIGINT)
    assert demo.process.wait(WITHIN_S) == 0
    assert alive(family) == {}
    assert list(demo.temporary.iterdir()) == []


async def test_demo_without_nginx_calls_the_check_directly(folder, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    async with AsyncExitStack() as stack:
        there = await arrange(stack, folder)
        assert there.nginx is None
        assert "there is no nginx here" in intro(there)
        key = (there.home / "admin.key").read_text(encoding="ascii").strip()
        http = httpx.AsyncClient(
            base_url=there.quotagate, headers={"Authorization": f"Bearer {key}"}, timeout=60
        )
        operator = await stack.enter_async_context(http)
        for entity, quotas in QUOTAS.items():
            await put(operator, entity, quotas)
        answers = {one.name: [await one.ask() for _ in range(30)] for one in await gather(stack, there)}
        for name, given in answers.items():
            outcomes = [answer.outcome for answer in given]
            assert outcomes[0] == "admitted", name
            assert name == "bob" or "throttled" in outcomes, name
        assert {answer.words for answer in answers["mallory"]} >= {"429, wait 1 s"}


@pytest.mark.parametrize(("width", "height"), [(100, 30), (80, 24)])
def test_frame_fits_a_terminal(width, height):
    """Nothing is cut off, no line wraps, and all frames have the same height."""
    console = Console(width=width, height=height, file=io.StringIO())
    screen = Screen(console)
    there = Arrangement("http://127.0.0.1:31999", Path(), "http://127.0.0.1:31998", "")
    caller = Caller("127.0.0.7", "larger quota", 10, never)
    first = console.render_lines(screen.frame(there, [caller] * 5, 40))
    screen.quotas = {"ip=127.0.0.7": QUOTAS["ip=127.0.0.7"], "user=etl": QUOTAS["user=etl"]}
    now = time.monotonic()
    for back in range(12, 0, -1):
        caller.take(now - back, Answer("admitted", "200, 19 left", "store"))
        caller.take(now - back, Answer("throttled", "429, wait 1 s", "store"))
    for _ in range(EVENTS + 1):
        screen.note("an operator raises alice: PUT /v1/quotas/user=alice, 20 a second")
    lines = console.render_lines(screen.frame(there, [caller] * 5, 40))
    assert len(lines) == len(first) <= height
    text = "\n".join("".join(segment.text for segment in line) for line in lines)
    assert "…" not in text
    assert text.count("429, wait 1 s") == 5
    assert text.count("▄") > 5


async def never() -> Answer:
    raise AssertionError("nobody asks here")
