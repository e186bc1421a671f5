"""Programs of ours end without a search for garbage."""

from __future__ import annotations

import subprocess
import sys

from app.node.collector import COLLECT_AFTER

PROGRAM = """
import gc
from app.node import collector

class Cycle:
    def __del__(self):
        print("found")

if {configured}:
    collector.configure()
garbage = Cycle()
garbage.itself = garbage
del garbage
print(gc.get_threshold())
"""


def said(*, configured: bool) -> list[str]:
    program = PROGRAM.format(configured=configured)
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_program_collects_seldom_and_not_at_its_end() -> None:
    assert said(configured=True) == [str(COLLECT_AFTER)]


def test_python_itself_collects_at_the_end() -> None:
    assert "found" in said(configured=False)
