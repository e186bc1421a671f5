"""Who of several does what one alone must do: a lease with an end, and a token that fences off the late.

Every acquisition takes the next token. A write that is fenced names its token, and the store takes it only
while that token is the newest: a holder that hung beyond the end of its lease can no longer write, even
before its successor has written anything.
"""

from __future__ import annotations

from typing import Final, Self

from redis.asyncio import Redis

from app.store.keys import PREFIX
from app.store.redis import client_of, run

ACQUIRE: Final = """
-- KEYS: the lease, the token. ARGV: the owner, ms. Returns {token or 0, now in ms}.
local time = redis.call('TIME')
local now = string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000))
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return { '0', now } end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
if holder then return { redis.call('GET', KEYS[2]) or tostring(redis.call('INCR', KEYS[2])), now } end
return { tostring(redis.call('INCR', KEYS[2])), now }
"""

RELEASE: Final = """
-- KEYS: the lease. ARGV: the owner.
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
"""


def lease_keys(name: str) -> tuple[bytes, bytes]:
    """The keys of a lease and of its token."""
    return f"{PREFIX}:{name}:lease".encode(), f"{PREFIX}:{name}:token".encode()


class Lease:
    """One contender for a lease.

    Args:
        name: of the work.
        owner: of this contender, and of no other.
        ttl_s: how long a lease lasts that is not renewed.

    Attributes:
        token: the one it holds; None while it does not.
        now_ms: the store's time at the last attempt.
    """

    def __init__(self, client: Redis, name: str, owner: str, ttl_s: float) -> None:
        self.token: int | None = None
        self.now_ms = 0
        self._client = client
        self._keys = lease_keys(name)
        self._owner = owner
        self._ttl_ms = str(max(round(ttl_s * 1000), 1))

    @classmethod
    def at(cls, url: str, name: str, owner: str, ttl_s: float, *, timeout_s: float = 1.0) -> Self:
        """A contender with connections of its own."""
        return cls(client_of(url, timeout_s), name, owner, ttl_s)

    async def acquire(self) -> int | None:
        """Take the lease, or renew it: its token, or None while another holds it.

        Raises:
            StoreError: the store did not answer; whether it is held is not known.
        """
        token, now = await run(self._client, "EVAL", ACQUIRE, 2, *self._keys, self._owner, self._ttl_ms)
        self.now_ms = int(now)
        self.token = int(token) or None
        return self.token

    async def release(self) -> None:
        """Give it up, so that another need not wait for its end.

        Raises:
            StoreError: the store did not answer; then it ends by itself.
        """
        self.token = None
        await run(self._client, "EVAL", RELEASE, 1, self._keys[0], self._owner)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()
