"""Writes docs/proofs/tiers.md: what was tested at an earlier commit, and in which tier its tests run now.

`python -m tests.prove.tier_table 1b4a3bd` compares that commit with the working tree. A place that is gone is
not marked as code.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Final

from tests.proofs import record
from tests.tiers import ROOT

FIRST: Final = "not full and not prove and not bench"
ALL: Final = "not prove and not bench"
DEPTH: Final = {"tests/unit": 3, "tests/contract": 3, "tests/http": 2, "tests/system": 3}
"""By folder, how many parts of a path make a line of the table; 2 otherwise, and 1 outside of tests."""


def collected(folder: Path, marks: str) -> list[str]:
    """The ids of the tests that pytest collects in a checkout."""
    command = [
        sys.executable,
        "-P",
        "-m",
        "pytest",
        "--collect-only",
        "-q",
        "-m",
        marks,
        "-p",
        "no:cacheprovider",
    ]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout[-2_000:]
    return [line for line in ended.stdout.splitlines() if "::" in line]


def moved(ref: str) -> dict[str, str]:
    """Where each test file of a commit is now, if git detects that it was moved."""
    command = ["git", "diff", "-M40%", "--diff-filter=R", "--name-status", ref, "HEAD", "--", "*.py"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    rows = [line.split("\t") for line in listed.splitlines()]
    return {before: now for _, before, now in rows}


def line_of(test: str) -> str:
    """The line of the table that counts a test."""
    parts = test.partition("::")[0].split("/")
    depth = 1 if parts[0] != "tests" else DEPTH.get("/".join(parts[:2]), 2)
    return "/".join(parts[:depth])


def main(ref: str) -> None:
    """Collect before and now, and write the tables."""
    now_at = moved(ref)
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(["git", "archive", ref], cwd=ROOT, capture_output=True, check=True).stdout
        subprocess.run(["tar", "x", "-C", folder], input=archive, check=True)
        before_all = collected(Path(folder), "")
        before_default = set(collected(Path(folder), ALL))
    before = [
        (now_at.get(file, file), test in before_default)
        for test in before_all
        for file in [test.partition("::")[0]]
    ]
    every, usual, first = (collected(ROOT, marks) for marks in ("", ALL, FIRST))
    counts = {
        "before, make test": Counter(line_of(file) for file, default in before if default),
        "before, prove and bench": Counter(line_of(file) for file, default in before if not default),
        "now, make test": Counter(map(line_of, first)),
        "now, only make test-all": Counter(map(line_of, set(usual) - set(first))),
        "now, prove and bench": Counter(map(line_of, set(every) - set(usual))),
    }
    lines = sorted(set().union(*counts.values()))
    rows: list[tuple[object, ...]] = [
        (f"`{line}`" if (ROOT / line).exists() else line, *(column[line] or "" for column in counts.values()))
        for line in lines
    ]
    rows.append(("all", *(column.total() for column in counts.values())))
    command = f"python -m tests.prove.tier_table {ref}"
    record("tiers", "Tests by place and tier", command, ("place", *counts), rows)

    was, is_now = (Counter(ids) for ids in ([f for f, _ in before], [t.partition("::")[0] for t in every]))
    fewer = [(file, was[file], is_now[file]) for file in sorted(was) if is_now[file] < was[file]]
    record("tiers", "Files with fewer tests than before", command, ("file", "before", "now"), fewer)


if __name__ == "__main__":
    main(*sys.argv[1:])
