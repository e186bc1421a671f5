"""Bounded delay of responses to invalid API keys."""

from __future__ import annotations

from functools import lru_cache
from ipaddress import ip_address
from typing import Final

from app.domain.entity import network_of, normalise_ip

FREE: Final = 20.0
"""This many invalid keys of an address are answered without delay: a gateway with an old key is harmless."""
RATE: Final = 10.0
"""Invalid keys per second that are answered without further delay after that."""
LONGEST_S: Final = 1.0
"""The longest delay in seconds: a waiting connection costs the node as much as the caller."""
REMEMBERED: Final = 4096
"""The most addresses to remember; the one whose last failure is oldest is forgotten first."""
SHARED_BITS: Final = 64
"""An IPv6 network of this prefix length is one caller, who may have any address in it."""


class Slowdown:
    """A token bucket for each address that sent invalid keys; time is an argument."""

    def __init__(self) -> None:
        self._left: dict[str, tuple[float, float]] = {}

    def wait_s(self, address: str, now_s: float) -> float:
        """Count an invalid key of an address, and return how long to delay its answer.

        >>> slowdown = Slowdown()
        >>> [slowdown.wait_s("10.0.0.7", 5.0) for _ in range(22)][-3:]
        [0.0, 0.1, 0.2]
        >>> slowdown.wait_s("10.0.0.8", 5.0), slowdown.wait_s("10.0.0.7", 15.0)
        (0.0, 0.0)
        """
        source = source_of(address)
        left, at = self._left.pop(source, (FREE, now_s))
        left = min(FREE, left + (now_s - at) * RATE)
        left = max(left - 1, -LONGEST_S * RATE)
        self._left[source] = left, now_s
        if len(self._left) > REMEMBERED:
            del self._left[next(iter(self._left))]
        return max(0.0, -left / RATE)

    def forgive(self, address: str) -> None:
        """Count a valid key of an address, which makes up for an invalid one: callers may share an address.

        >>> slowdown = Slowdown()
        >>> for _ in range(1000):
        ...     waited_s = slowdown.wait_s("10.0.0.7", 5.0)
        ...     slowdown.forgive("10.0.0.7")
        >>> waited_s
        0.0
        """
        if self._left and (source := source_of(address)) in self._left:
            left, at = self._left[source]
            self._left[source] = min(FREE, left + 1), at


@lru_cache(REMEMBERED)
def source_of(address: str) -> str:
    """Return the source that connections and invalid keys count for: an address, or an IPv6 network.

    >>> source_of("2001:db8::7"), source_of("10.0.0.7"), source_of("")
    ('2001:db8::/64', '10.0.0.7', '')
    """
    try:
        ip_address(address)
    except ValueError:  # a unix socket's path, or nothing
        return address
    return network_of(normalise_ip(address.partition("%")[0]), SHARED_BITS)
