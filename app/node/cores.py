"""How many processor cores this program may use."""

from __future__ import annotations

import os
from math import ceil
from pathlib import Path
from typing import Final

CONTROL_GROUPS: Final = Path("/sys/fs/cgroup")
"""The folder with a container's own limits; on a host, with the limits of the root group."""


def api_processes(most: int) -> int:
    """Return the number of API processes: one for each core, less one for the store; from 1 to ``most``."""
    return max(1, min(available() - 1, most))


def available() -> int:
    """Return how many cores this process may run on, and a container's limit of processor time allows."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = _limit()
    return cores if limit is None else max(1, min(cores, ceil(limit)))


def _limit() -> float | None:
    """Return the limit in cores; None without one."""
    try:
        quota, period = (CONTROL_GROUPS / "cpu.max").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        try:
            folder = CONTROL_GROUPS / "cpu"  # version 1
            quota = (folder / "cpu.cfs_quota_us").read_text(encoding="ascii")
            period = (folder / "cpu.cfs_period_us").read_text(encoding="ascii")
        except OSError:
            return None
    try:
        return int(quota) / int(period) if int(quota) > 0 else None
    except (ValueError, ZeroDivisionError):  # "max"
        return None
