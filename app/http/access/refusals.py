"""Log lines for refused API keys, at a bounded rate; never the key itself."""

from __future__ import annotations

from typing import Final

import structlog

AT_ONCE: Final = 10.0
"""How many lines may be logged at once."""
RATE: Final = 1.0
"""How many lines a second may be logged after these; the metric counts all refusals."""

log = structlog.get_logger("quotagate.access")


def fingerprint(digest: bytes) -> str:
    """Return the identifier of an unknown key in the log: the beginning of its SHA-256.

    >>> fingerprint(bytes.fromhex("0123456789abcdef"))
    '01234567'
    """
    return digest[:4].hex()


class Refusals:
    """Logs refused keys at a bounded rate; time is an argument."""

    def __init__(self) -> None:
        self._left = AT_ONCE
        self._at_s = 0.0
        self._left_out = 0

    def record(self, reason: str, address: str, now_s: float, **key: str) -> None:
        """Log one refusal, or count it as omitted.

        Args:
            reason: as in ``quotagate_access_failures_total``.
            now_s: a monotonic clock.
            key: ``key``, a known key's name, or ``fingerprint``, an unknown key's identifier.
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
