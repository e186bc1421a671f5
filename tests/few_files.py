"""Runs Quotagate under a small limit of open files, which it may not raise."""

from __future__ import annotations

import resource
from typing import Final

from app.run.cli import main

LIMIT: Final = 256
_set = resource.setrlimit


def as_anyone(which: int, limits: tuple[int, int]) -> None:
    """As the kernel does for a user who is not root."""
    if limits[1] > resource.getrlimit(which)[1]:
        raise ValueError("not allowed to raise maximum limit")
    _set(which, limits)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, LIMIT))
    resource.setrlimit = as_anyone
    main()
