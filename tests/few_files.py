"""Runs Quotagate under a small limit of open files, as for a user who may not raise the hard limit."""

from __future__ import annotations

import os
import resource
from typing import Final

from app.run.cli import main

LIMIT: Final = 256
OPEN_FILES: Final = "OPEN_FILES"
"""The environment variable with other limits, as ``SOFT:HARD``; the hard one is at most the machine's."""
_set = resource.setrlimit


def as_anyone(which: int, limits: tuple[int, int]) -> None:
    """Set limits, but refuse to raise a hard limit, as the kernel does for users other than root."""
    if limits[1] > resource.getrlimit(which)[1]:
        raise ValueError("not allowed to raise maximum limit")
    _set(which, limits)


if __name__ == "__main__":
    soft, _, hard = os.environ.get(OPEN_FILES, f"{LIMIT}:{LIMIT}").partition(":")
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(soft), min(int(hard), most)))
    resource.setrlimit = as_anyone
    main()
