"""The limit of open files, raised to what the connections need."""

from __future__ import annotations

import resource
from typing import Final

RESERVE: Final = 512
"""Files and sockets beside connections: the store, the catalog, logs, and greetings of TLS under way."""


def room_for(connections: int) -> int:
    """How many connections fit, at most so many, once the limit is raised as far as it may be.

    The hard limit is raised where this program may do that. Where even half of it is less than the reserve,
    the reserve is that half.
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
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, limit)
        except (OSError, ValueError):  # only the administrator may raise the hard one
            continue
        return limit[0]
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def _is_below(limit: int, wanted: int) -> bool:
    return limit != resource.RLIM_INFINITY and limit < wanted
