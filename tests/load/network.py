"""A network of the test's own, in which it has as many IPv6 addresses as it wants."""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

CLONE_NEWNET: Final = 0x40000000
SIOCSIFFLAGS: Final = 0x8914
SIOCSIFADDR: Final = 0x8916
IFF_UP: Final = 1
LOOPBACK: Final = 1
"""The index of the interface ``lo`` in each network namespace."""


@contextmanager
def network(addresses: Iterable[str]) -> Iterator[None]:
    """Move this thread, with the programs that it starts, to a network namespace with these addresses.

    Only root may do that. For others the test is skipped, and fails under CI=true.
    """
    kernel = ctypes.CDLL(None, use_errno=True)
    with Path("/proc/thread-self/ns/net").open() as before:
        if kernel.unshare(CLONE_NEWNET):
            reason = f"a network namespace is needed: {os.strerror(ctypes.get_errno())}"
            (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)
        try:
            _bring_up(addresses)
            yield
        finally:
            assert kernel.setns(before.fileno(), CLONE_NEWNET) == 0


def _bring_up(addresses: Iterable[str]) -> None:
    with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP))
        for address in addresses:
            request = struct.pack("16sIi", socket.inet_pton(socket.AF_INET6, address), 128, LOOPBACK)
            fcntl.ioctl(control, SIOCSIFADDR, request)
