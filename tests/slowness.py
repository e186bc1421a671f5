"""How slow a shared processor is now, for bounds of processor time that are meant for another one."""

from __future__ import annotations

from ipaddress import ip_address
from time import thread_time
from typing import Final

ADDRESS_US: Final = 2.8
"""How long the processor for which the bounds are meant takes to read and spell an address."""
ADDRESSES: Final = 2_000


def slowness() -> float:
    """How many times as long as that processor this one takes now; at least 1."""
    began = thread_time()
    for _ in range(ADDRESSES):
        str(ip_address("10.20.30.40"))
    return max(1.0, (thread_time() - began) * 1e6 / ADDRESSES / ADDRESS_US)
