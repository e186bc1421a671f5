"""Runs the README's commands unchanged against the service of `make run`, and compares their output.

A reader starts the service anew with another setting, and waits for the log; so does the test.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple, Self

import pytest

from tests.ports import free_port
from tests.spark.java import quick_jobs
from tests.system.test_up import Running, eventually
from tests.tools import need
from workers.decision_log.read import read

pytestmark = pytest.mark.timeout(420)

README: Final = Path(__file__).parents[2] / "README.md"
PORT: Final = 8080
BLOCK: Final = re.compile(r"<!-- run -->\n```(?:console|sh)\n(.*?)```", re.DOTALL)
RESTART: Final = re.compile(r"<!-- restart -->\n```sh\n(\w+)=(\w+) make run\n```")
END: Final = "-- end of a command --"
LOG_READER: Final = re.compile(r"quotagate (recommend|whatif|audit)\b(?!.* --log)")
"""The commands that read the service's own log, which is a few seconds behind."""
PROGRESS: Final = re.compile(r"quotagate: \w+: \d+ % after .*\n")
"""A line of a slow job without a terminal."""
DRIVEN: Final = re.compile(r"generate drive .*--events (\d+)")


class Step(NamedTuple):
    """One command and its expected output, in which `…` matches anything."""

    command: str
    expected: str

    def matches(self, output: str) -> bool:
        pattern = ".*".join(map(re.escape, self.expected.strip().split("…")))
        return re.fullmatch(pattern, output.strip(), re.DOTALL) is not None


def steps(text: str) -> list[Step]:
    """The commands of the marked blocks: the lines that begin with `$ `, and continued lines."""
    found = []
    for block in BLOCK.findall(text):
        for step in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, expected = re.sub(r"\\\n", "\0", step).partition("\n")
            found.append(Step(command.replace("\0", "\\\n"), expected.replace("\0", "\\\n")))
    return found


class Reader:
    """A reader: one service at a time, and one shell for all commands."""

    def __init__(self, folder: Path, port: int) -> None:
        self._folder, self._port = folder, port
        self._started: list[Running] = []
        self._since_ms = 0
        self._driven = 0
        environment = {name: value for name, value in os.environ.items() if not name.startswith("QUOTAGATE_")}
        self._shell = subprocess.Popen(
            ["sh"],
            cwd=folder,
            env={**environment, **quick_jobs(), "QUOTAGATE_URL": f"http://127.0.0.1:{port}"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,  # a reader sees both
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._shell.kill()
        self._shell.communicate()
        for each in self._started:
            each.kill()

    def make_run(self, settings: Mapping[str, str]) -> None:
        """Start the service, after it was stopped; its state stays."""
        self.stop()
        self._started.append(Running(self._folder / ".quotagate", self._port, **settings).ready())
        self._since_ms, self._driven = int(time.time() * 1000), 0

    def stop(self) -> None:
        """Stop the service, if it runs."""
        if self._started:
            assert self._started[-1].end() == 0

    def enter(self, command: str) -> str:
        """Run a command in the shell, and return what it prints."""
        if LOG_READER.search(command):
            eventually(self._is_logged)
        if driven := DRIVEN.search(command):
            self._driven += int(driven[1])
        shell = self._shell
        assert shell.stdin
        assert shell.stdout
        shell.stdin.write(f"{command}\nprintf '\\n%s\\n' '{END}'\n")
        shell.stdin.flush()
        lines = []
        while (line := shell.stdout.readline()) not in {f"{END}\n", ""}:
            lines.append(line)
        return "".join(line for line in lines if not PROGRESS.fullmatch(line))

    def _is_logged(self) -> bool:
        """Whether the log has all the generated traffic since the last start."""
        log = self._folder / ".quotagate" / "log"
        kinds = read(log, since_ms=self._since_ms)["kind"].to_pylist() if log.is_dir() else []
        return kinds.count("decision") >= self._driven


def test_commands_print_what_the_readme_says(tmp_path: Path) -> None:
    """One shell runs all commands in order, as a reader would."""
    need("curl")
    port = PORT if is_free(PORT) else free_port()
    text = README.read_text(encoding="utf-8").replace(f"127.0.0.1:{PORT}", f"127.0.0.1:{port}")
    before, *settings, after = RESTART.split(text)
    assert sum("curl" in step.command for step in steps(text)) >= 6
    (tmp_path / ".venv").symlink_to(sys.prefix)
    with Reader(tmp_path, port) as reader:
        for setting, part in ((), before), (settings, after):
            reader.make_run(dict([setting] if setting else []))
            for step in steps(part):
                output = reader.enter(step.command)
                print(f"$ {step.command}\n{output}")
                assert step.matches(output), f"$ {step.command}\n{output}\nis not\n{step.expected}"
        reader.stop()


def test_commands_and_their_output_are_separated() -> None:
    """A command may continue after a backslash, print nothing, or print several lines."""
    text = "<!-- run -->\n```console\n$ a \\\n  b\none\n…two\n$ c\n```\n```sh\n$ not run\n```\n"
    first, second = steps(text)
    assert first == Step("a \\\n  b", "one\n…two\n")
    assert second == Step("c", "")
    assert first.matches("one\nand two\n")
    assert not first.matches("one\ntwo and a half")
    assert not second.matches("something")


def is_free(port: int) -> bool:
    with socket.socket() as mine:
        mine.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            mine.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
