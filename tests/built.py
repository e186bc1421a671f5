"""Programs in other languages that tests build where their sources changed."""

from __future__ import annotations

import fcntl
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final

NOTHING: Final[Mapping[str, str]] = MappingProxyType({})


def build(
    command: Sequence[str | Path],
    folder: Path,
    lock: Path,
    within_s: float,
    environment: Mapping[str, str] = NOTHING,
) -> None:
    """Run a build command in a folder, under a lock, because another test run may be building the same.

    Args:
        within_s: the timeout of the command.
        environment: variables to add to the environment of this program.
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as locked:
        fcntl.flock(locked, fcntl.LOCK_EX)
        done = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=within_s,
            check=False,
        )
    assert done.returncode == 0, f"{' '.join(map(str, command))}: {done.stdout}{done.stderr}"
