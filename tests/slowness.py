"""Measures how slow a shared processor is now, to scale bounds of processor time set for another one."""

from __future__ import annotations

from ipaddress import ip_address
from time import thread_time
from typing import Final

ADDRESS_US: Final = 2.8
"""The time to read and spell an address on the reference processor, for which the bounds are set."""
ADDRESSES: Final = 2_000


def slowness() -> float:
    """The time that this processor takes now, as a multiple of the reference processor's; at least 1."""
    began = thread_time()
    for _ in range(ADDRESSES):
        str(ip_address("10.20.30.40"))
    return max(1.0, (thread_time() - began) * 1e6 / ADDRESSES / ADDRESS_US)
