"""The record of the throttle factor in the store, and the drill beside it; neither is ever half-written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple, Protocol, TypeVar

from msgspec import MsgspecError, msgpack
from redis.asyncio import Redis

from app.domain.volumes import Drill, State
from app.store.keys import PREFIX
from app.store.lease import lease_keys
from app.store.port import StoreError
from app.store.redis import client_of, run

T = TypeVar("T")

RECORD_KEY: Final = f"{PREFIX}:volumes".encode()
DRILL_KEY: Final = f"{PREFIX}:volumes:drill".encode()
LEASE: Final = "volumes"
"""The name of the lease of whoever polls the cluster."""

TRIES: Final = 20
"""How often a change is put onto a record that others change meanwhile."""

DRILL_KEPT_MS: Final = 86_400_000
"""How long a drill's key outlasts the drill, whose end is judged by its own times."""

READ: Final = "return { redis.call('TIME'), redis.call('MGET', KEYS[1], KEYS[2]) }"

REPLACE: Final = """
-- KEYS: the record, the fencing token. ARGV: the record as it was read ('' for none), the new one, the token
-- ('' if anybody may write). Returns whether it was written.
if ARGV[3] ~= '' and redis.call('GET', KEYS[2]) ~= ARGV[3] then return 'fenced' end
if (redis.call('GET', KEYS[1]) or '') ~= ARGV[1] then return 'changed' end
redis.call('SET', KEYS[1], ARGV[2])
return 'written'
"""


class Reading(NamedTuple):
    """The record as it stands, and the store's time.

    Attributes:
        raw: its bytes, by which a writer proves that it has seen the newest; empty if there is none.
    """

    now_ms: int
    state: State | None
    drill: Drill | None
    raw: bytes


class Replaced(Protocol):
    """What a change needs of the record."""

    async def read(self) -> Reading:
        """What stands there now."""

    async def replace(self, seen: bytes, state: State, token: int | None = None) -> str:
        """Write over what was read: ``written``, ``changed`` or ``fenced``."""


async def change(
    record: Replaced, judge: Callable[[Reading], State], token: int | None = None
) -> tuple[str, State]:
    """Put what follows from the record in its place; read and judged again when another was faster.

    Returns:
        what became of it, as ``replace`` says, and the state; ``changed`` if others were faster all the time.

    Raises:
        StoreError: the store did not answer; it may have been written.
    """
    for _ in range(TRIES):
        reading = await record.read()
        state = judge(reading)
        said = await record.replace(reading.raw, state, token)
        if said != "changed":
            break
    return said, state


class VolumeRecord:
    """Reads and writes the record."""

    def __init__(self, client: Redis) -> None:
        self._client = client
        self._token_key = lease_keys(LEASE)[1]

    @classmethod
    def at(cls, url: str, *, timeout_s: float = 1.0) -> VolumeRecord:
        """The record in a store, with connections of its own."""
        return cls(client_of(url, timeout_s))

    async def read(self) -> Reading:
        """What stands there now, in one round trip.

        Raises:
            StoreError: the store did not answer.
        """
        time, (raw, drill) = await run(self._client, "EVAL", READ, 2, RECORD_KEY, DRILL_KEY)
        now_ms = int(time[0]) * 1000 + int(time[1]) // 1000
        return Reading(now_ms, _decoded(raw, State), _decoded(drill, Drill), raw or b"")

    async def replace(self, seen: bytes, state: State, token: int | None = None) -> str:
        """Write a record over the one that was read.

        Returns:
            ``written``; ``changed``, if what was read no longer stands there; ``fenced``, if the token is no
            longer the newest.

        Raises:
            StoreError: the store did not answer; it may have been written.
        """
        fence = b"" if token is None else b"%d" % token
        keys = (RECORD_KEY, self._token_key)
        said = await run(self._client, "EVAL", REPLACE, 2, *keys, seen, msgpack.encode(state), fence)
        return str(said, "ascii")

    async def begin_drill(self, drill: Drill, now_ms: int) -> None:
        """Put a drill in the place of any other.

        Raises:
            StoreError: the store did not answer; it may have been written.
        """
        kept_ms = max(drill.until_ms - now_ms, 0) + DRILL_KEPT_MS
        await run(self._client, "SET", DRILL_KEY, msgpack.encode(drill), "PX", kept_ms)

    async def end_drill(self) -> None:
        """End the drill.

        Raises:
            StoreError: the store did not answer; it may have ended.
        """
        await run(self._client, "DEL", DRILL_KEY)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()


def _decoded(raw: bytes | None, type_: type[T]) -> T | None:
    """A stored value.

    Raises:
        StoreError: another version wrote it.
    """
    if not raw:
        return None
    try:
        return msgpack.decode(raw, type=type_)
    except MsgspecError as error:
        raise StoreError("response", f"the record of volumes cannot be read: {error}") from None
