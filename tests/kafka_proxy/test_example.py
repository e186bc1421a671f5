"""`make kafka-demo` as a newcomer runs it: the looping producer is held, and the other is not."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(900)
def test_looping_producer_is_held_and_the_other_is_not():
    done = subprocess.run(
        [sys.executable, "-m", "examples.kafka", "--seconds", "16"],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if " ids; " in line]
    assert any(re.search(r"looping: \d+ records, held", line) for line in lines), done.stdout
    assert re.search(r"looping, producer \d+: held; its client is asked to wait \d", done.stdout), done.stdout
    good, looping = (
        re.search(rf"^{name}: (\d+) records by (\d+) producers?, (.*), 0 errors$", done.stdout, re.MULTILINE)
        for name in ("well-behaved", "looping")
    )
    assert good is not None, done.stdout
    assert looping is not None, done.stdout
    assert (good[2], good[3]) == ("1", "never held")
    assert re.match(r"held [1-9]", looping[3])
    assert int(good[1]) > 2 * int(looping[1])
    assert done.stderr == ""
