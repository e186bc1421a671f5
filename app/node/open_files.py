"""The limit of open files, raised as far as the connections need."""

from __future__ import annotations

import resource
from contextlib import suppress
from typing import Final

RESERVE: Final = 512
"""Open files besides connections: the store, the catalog, logs, and TLS handshakes in progress."""


def room_for(connections: int) -> int:
    """Raise the limit of open files for this many connections; return how many of them fit.

    The hard limit is raised too if the process may do that. If the limit stays very low, at most half of it
    is reserved for other files.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + RESERVE
    if _is_below(soft, wanted):
        soft = _raised(wanted, hard)
    if not _is_below(soft, wanted):
        return connections
    return max(1, soft - min(RESERVE, soft // 2))


def _raised(wanted: int, hard: int) -> int:
    limits = [(wanted, hard)] if not _is_below(hard, wanted) else [(wanted, wanted), (hard, hard)]
    for limit in limits:
        with suppress(OSError, ValueError):  # only root may raise the hard limit
            resource.setrlimit(resource.RLIMIT_NOFILE, limit)
            return limit[0]
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def _is_below(limit: int, wanted: int) -> bool:
    return limit != resource.RLIM_INFINITY and limit < wanted
