"""Runs the README's commands unchanged against the service of `make run`, and compares their output."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from tests.ports import free_port
from tests.spark.java import quick_jobs
from tests.system.test_up import Running
from tests.tools import need

pytestmark = pytest.mark.timeout(420)

README: Final = Path(__file__).parents[2] / "README.md"
PORT: Final = 8080
BLOCK: Final = re.compile(r"<!-- run -->\n```(?:console|sh)\n(.*?)```", re.DOTALL)
END: Final = "-- end of a command --"


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


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Running]:
    """The service of `make run`, in a folder like the repository's; on another port if 8080 is taken."""
    (tmp_path / ".venv").symlink_to(sys.prefix)
    running = Running(tmp_path / ".quotagate", PORT if is_free(PORT) else free_port())
    try:
        yield running.ready()
        assert running.end() == 0
    finally:
        running.up.kill()
        running.up.wait()


def test_commands_print_what_the_readme_says(service: Running, tmp_path: Path) -> None:
    """One shell runs all commands in order, as a reader would."""
    need("curl")
    here = service.url.rpartition(":")[2]
    wanted = steps(README.read_text(encoding="utf-8").replace(f"127.0.0.1:{PORT}", f"127.0.0.1:{here}"))
    assert sum("curl" in step.command for step in wanted) >= 6
    script = "".join(f"{step.command}\nprintf '\\n%s\\n' '{END}'\n" for step in wanted)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("QUOTAGATE_")}
    shell = subprocess.run(
        ["sh"],
        input=script,
        cwd=service.home.parent,
        env={**environment, **quick_jobs(), "QUOTAGATE_URL": service.url},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,  # a reader sees both
        text=True,
        timeout=360,  # Spark takes a while to start, twice
        check=False,
    )
    outputs = shell.stdout.split(f"\n{END}\n")[:-1]
    for step, output in zip(wanted, outputs, strict=True):
        assert step.matches(output), f"$ {step.command}\n{output}\nis not\n{step.expected}"


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
