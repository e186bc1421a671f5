"""Refused keys in the log: whose, from where and why; never the key, and no more lines than can be read."""

from __future__ import annotations

from typing import Final

import structlog

AT_ONCE: Final = 10.0
"""Lines that are logged at once."""
RATE: Final = 1.0
"""After that so many a second; the metric counts all of them."""

log = structlog.get_logger("quotagate.access")


def fingerprint(digest: bytes) -> str:
    """A key that nobody knows, as the log tells it from others: the beginning of its SHA-256.

    >>> fingerprint(bytes.fromhex("0123456789abcdef"))
    '01234567'
    """
    return digest[:4].hex()


class Refusals:
    """Logs refused keys, within a rate; time is an argument."""

    def __init__(self) -> None:
        self._left = AT_ONCE
        self._at_s = 0.0
        self._left_out = 0

    def told(self, reason: str, address: str, now_s: float, **key: str) -> None:
        """Log one refusal, or count it as left out.

        Args:
            reason: as ``quotagate_access_failures_total`` names it.
            now_s: a clock that only goes forward.
            key: the ``key`` by its name, or the ``fingerprint`` of one that is unknown.
        """
        self._left = min(AT_ONCE, self._left + max(0.0, now_s - self._at_s) * RATE)
        self._at_s = now_s
        if self._left < 1:
            self._left_out += 1
            return
        self._left -= 1
        left_out, self._left_out = self._left_out, 0
        more = {"left_out_before": left_out} if left_out else {}
        log.warning("a key was refused", reason=reason, address=address, **key, **more)
