"""Small disks that tests fill up: each a tmpfs of its own, which only root may mount."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

NAME: Final = "quotagate-disk"
"""The name of a disk in the table of mounts, before a dash and the id of its program."""


@contextmanager
def mounted(folder: Path, size: int) -> Iterator[Path]:
    """A disk of `size` bytes at `folder`; if it cannot be mounted, skip the test, or fail under CI=true."""
    folder.mkdir()
    options = f"size={size},mode=755"
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, f"{NAME}-{os.getpid()}", folder],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        said = done.stderr.splitlines()[0]
        reason = f"this needs a small disk (tmpfs) of its own, and only root may mount one: {said}"
        if os.environ.get("CI") == "true":
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    try:
        yield folder
    finally:
        _unmount(folder)


def clear() -> None:
    """Unmount the disks that killed tests left behind."""
    table = Path("/proc/mounts")
    for line in table.read_text(encoding="utf-8").splitlines() if table.exists() else ():
        name, folder, *_ = line.split()
        serves = name.removeprefix(f"{NAME}-")
        if serves != name and not Path(f"/proc/{serves}").exists():
            _unmount(Path(folder))


def _unmount(folder: Path) -> None:
    """Unmount at once; the kernel frees the disk when the last program that uses it has ended."""
    subprocess.run(["umount", "--lazy", folder], check=False, capture_output=True)
