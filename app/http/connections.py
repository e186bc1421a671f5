"""The limits on the connections of one process: in total, and per address."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from app.http.slowdown import source_of

MOST: Final = 8_192
MOST_OF_AN_ADDRESS: Final = 2_048

TOO_MANY: Final = "connections"
TOO_MANY_OF_AN_ADDRESS: Final = "connections_per_address"
"""Causes, as in ``quotagate_shed_total``."""


class Connections:
    """Counts the connections of one process, and refuses those above a limit.

    An IPv6 network of 64 bits counts as one address, since a caller may have any address in it.

    Args:
        most: the limit of the process.
        most_of_an_address: the limit of one address.

    Attributes:
        shed: called with the cause of each refused connection.
    """

    def __init__(self, most: int = MOST, most_of_an_address: int = MOST_OF_AN_ADDRESS) -> None:
        self._most = most
        self._most_of_an_address = most_of_an_address
        self._open = 0
        self._by_source: dict[str, int] = {}
        self.shed: Callable[[str], None] = lambda _cause: None

    def enter(self, address: str) -> bool:
        """Count a new connection; return False, and do not count it, if it is above a limit.

        >>> connections = Connections(3, 2)
        >>> [connections.enter(address) for address in ("10.0.0.7", "10.0.0.7", "10.0.0.7", "10.0.0.8")]
        [True, True, False, True]
        >>> connections.enter("10.0.0.9")
        False
        >>> connections.leave("10.0.0.7")
        >>> connections.enter("10.0.0.9")
        True
        """
        source = source_of(address)
        held = self._by_source.get(source, 0)
        if self._open >= self._most:
            self.shed(TOO_MANY)
        elif held >= self._most_of_an_address:
            self.shed(TOO_MANY_OF_AN_ADDRESS)
        else:
            self._open += 1
            self._by_source[source] = held + 1
            return True
        return False

    def leave(self, address: str) -> None:
        """Stop counting a connection that has ended."""
        source = source_of(address)
        self._open -= 1
        self._by_source[source] -= 1
        if not self._by_source[source]:
            del self._by_source[source]
