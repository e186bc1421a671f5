"""A lease elects one of several contenders; a fencing token stops the writes of a former holder.

Every acquisition takes the next token. A fenced write names its token, and the store takes it only while that
token is the newest. So a holder that hung beyond the end of its lease can no longer write, even before its
successor has written anything.
"""

from __future__ import annotations

from typing import Final, Self

from redis.asyncio import Redis

from app.store.client import client_of, is_clustered
from app.store.keys import shared_key
from app.store.redis import run_script
from app.store.script import text

ACQUIRE: Final = text("leader_acquire")
RELEASE: Final = text("leader_release")


def leadership_keys(name: str, *, clustered: bool = False) -> tuple[str, str]:
    """The keys of a lease and of its token."""
    return shared_key(f"{name}:lease", clustered=clustered), shared_key(f"{name}:token", clustered=clustered)


class Contender:
    """One contender for a lease.

    Args:
        name: the work that one contender does.
        owner: the name of this contender; no other has it.
        ttl_s: how long a lease lasts unless it is extended.

    Attributes:
        token: the token it holds; None while it holds none.
        now_ms: the store's time at the last attempt.
    """

    def __init__(self, client: Redis, name: str, owner: str, ttl_s: float) -> None:
        self.token: int | None = None
        self.now_ms = 0
        self._client = client
        self._keys = leadership_keys(name, clustered=is_clustered(client))
        self._owner = owner
        self._ttl_ms = str(max(round(ttl_s * 1000), 1))

    @classmethod
    def at(cls, url: str, name: str, owner: str, ttl_s: float, *, timeout_s: float = 1.0) -> Self:
        """A contender with its own connections."""
        return cls(client_of(url, timeout_s), name, owner, ttl_s)

    async def acquire(self) -> int | None:
        """Take or extend the lease; returns the token, or None while another contender holds the lease.

        Raises:
            StoreError: the store did not answer; whether this contender holds the lease is unknown.
        """
        token, now = await run_script(self._client, ACQUIRE, self._keys, self._owner, self._ttl_ms)
        self.now_ms = int(now)
        self.token = int(token) or None
        return self.token

    async def release(self) -> None:
        """Give the lease up, so that the others need not wait for its end.

        Raises:
            StoreError: the store did not answer; the lease then ends by itself.
        """
        self.token = None
        await run_script(self._client, RELEASE, self._keys[:1], self._owner)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()
