"""The Redis store: one connection pool, one script, one round trip for the asks of a call."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    BusyLoadingError,
    ConnectionError,  # noqa: A004  redis-py's own name; the built-in one is OSError's
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TimeoutError,  # noqa: A004
)

from app.store.encoding import decode_answer, encode_call, encode_plans
from app.store.port import Answer, Plan, StoreError
from app.store.script import SCRIPT

_REASONS: tuple[tuple[type[RedisError], str], ...] = (
    (OutOfMemoryError, "out_of_memory"),
    (ReadOnlyError, "read_only"),
    (BusyLoadingError, "loading"),
    (AuthenticationError, "authentication"),
    (AuthorizationError, "authentication"),
    (TimeoutError, "timeout"),
    (ConnectionError, "connection"),
)


class RedisStore:
    """A store in Valkey 7.2 or later or Redis 7 or later.

    Args:
        url: ``redis://``, ``rediss://`` or ``unix://``.
        caller_clock: decide by the asks' ``at_ms`` instead of the store's time.
        sequential: sum delays as KIP-124 does.
        max_ids: the most ids remembered for one principal.
        timeout_s: how long a call, and a connection, may take.
        script: another text in place of the script, for the tests that plant faults in it.
    """

    def __init__(
        self,
        url: str,
        *,
        caller_clock: bool = False,
        sequential: bool = False,
        max_ids: int = 1_000_000,
        timeout_s: float = 5.0,
        script: str = SCRIPT,
    ) -> None:
        # no retries of redis-py's own: a decision has a budget, and the next call connects anew
        self._client: Redis = Redis.from_pool(  # which closes the pool with the client
            BlockingConnectionPool.from_url(
                url,
                max_connections=4,
                timeout=timeout_s,
                socket_timeout=timeout_s,
                socket_connect_timeout=timeout_s,
                retry=Retry(NoBackoff(), 0),
                client_name="quotagate",
            )
        )
        self._script = script
        self._sha1 = hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest()
        self._call = encode_call(caller_clock=caller_clock, sequential=sequential, max_ids=max_ids)
        self.now_ms = 0
        """The store's time at the last call, under the store's clock."""
        self.trouble: str | None = None
        """Why the last call failed, in one word; None if it did not."""

    async def decide(self, plans: Sequence[Plan]) -> list[Answer]:
        """Decide plans in order, each atomically, in one round trip.

        Raises:
            StoreError: no answer, or an error for one; a late call may still be counted.
        """
        keys, arguments = encode_plans(plans)
        reply = await self._evaluate(keys, [self._call, *arguments])
        self.now_ms = int(reply[0])
        return [decode_answer(packed) for packed in reply[1:]]

    async def ping(self) -> None:
        """Say that the store can be reached, or raise ``StoreError``."""
        await self.server()

    async def server(self) -> dict[str, Any]:
        """What the server says of itself (INFO), and its ``maxmemory-policy``.

        Raises:
            StoreError: it cannot be reached, or would not say.
        """
        try:
            server: dict[str, Any] = await self._client.info("everything")
        except (RedisError, OSError) as error:
            raise self._failed(error) from error
        self.trouble = None
        return server

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _evaluate(self, keys: list[bytes], arguments: list[bytes]) -> list[bytes]:
        run = cast("Callable[..., Awaitable[list[bytes]]]", self._client.execute_command)
        try:
            try:
                reply = await run("EVALSHA", self._sha1, len(keys), *keys, *arguments)
            except NoScriptError:
                # the store lost the script (restart, failover, SCRIPT FLUSH) before it did anything
                reply = await run("EVAL", self._script, len(keys), *keys, *arguments)
        except (RedisError, OSError) as error:
            raise self._failed(error) from error
        self.trouble = None
        return reply

    def _failed(self, error: Exception) -> StoreError:
        failed = failure(error)
        self.trouble = failed.reason
        return failed


def failure(error: Exception) -> StoreError:
    """Name a failure of the store in one word; BUSY comes as a plain response error."""
    for type_, reason in _REASONS:
        if isinstance(error, type_):
            return StoreError(reason, str(error))
    if isinstance(error, ResponseError) and str(error).startswith("BUSY"):
        return StoreError("busy", str(error))
    return StoreError("connection" if isinstance(error, OSError) else "response", str(error))
