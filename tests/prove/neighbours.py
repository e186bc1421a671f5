"""The programs of the previous version, from git, to run next to this version's."""

from __future__ import annotations

import io
import subprocess
import tarfile
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[2]
BEFORE: Final = "d6b7457"
"""The last commit before nodes drained at SIGTERM and counted connections when they accept them."""


def older(folder: Path, commit: str = BEFORE) -> Path:
    """Write the programs of a commit into a folder, for PYTHONPATH."""
    parts = ("app", "workers", "migrations")
    command = ["git", "archive", commit, *parts]
    made = subprocess.run(command, cwd=ROOT, check=False, capture_output=True)
    if made.returncode:
        pytest.skip(f"the history of this clone does not go back to {commit}: {made.stderr.decode()}")
    with tarfile.open(fileobj=io.BytesIO(made.stdout)) as files:
        files.extractall(folder, filter="data")
    return folder
