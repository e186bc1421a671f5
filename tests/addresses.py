"""IP addresses of both families."""

from __future__ import annotations

import socket


def family_of(address: str) -> socket.AddressFamily:
    """IPv4 or IPv6."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def in_url(address: str) -> str:
    """An address as a URL or the field Host names it."""
    return f"[{address}]" if ":" in address else address


def in_own_64(address: str) -> str:
    """An IPv6 address in a /64 that belongs to this loopback address of IPv4.

    >>> in_own_64("127.0.0.66")
    'fd00:0:0:66::1'
    """
    return f"fd00:{address.removeprefix('127.').replace('.', ':')}::1"
