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
        [sys.executable, "-m", "examples.kafka", "--seconds", "25"],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if " ids; " in line]
    assert any(re.search(r"looping: \d+ records, held for", line) for line in lines), done.stdout
    good, looping = map(int, re.findall(r": (\d+) records", lines[-1]))
    assert good > 2 * looping, lines[-1]
    assert not any("well-behaved: 0 records" in line for line in lines[-2:])
