"""The record of the throttle factor and the drill, in the store; each is written atomically."""

from __future__ import annotations

from asyncio import sleep
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple, TypeVar

from msgspec import MsgspecError, msgpack
from redis.asyncio import Redis

from app.domain.volumes import Drill, FactorState
from app.store.client import client_of, is_clustered, shared_key_of
from app.store.keys import PREFIX
from app.store.leader_election import leadership_keys
from app.store.port import StoreError
from app.store.redis import run, run_script
from app.store.script import text

T = TypeVar("T")

RECORD: Final = "volumes"
DRILL: Final = "volumes:drill"
RECORD_KEY: Final = f"{PREFIX}:{RECORD}".encode()
DRILL_KEY: Final = f"{PREFIX}:{DRILL}".encode()
"""The keys of both, except on a cluster."""
LEASE: Final = "volumes"
"""The name of the lease of the worker that polls the cluster."""

TRIES: Final = 20
"""How often a change is retried while others change the record."""

DRILL_KEPT_MS: Final = 86_400_000
"""How long a drill's key outlives the drill. The drill itself says when it ends."""

READ: Final = text("volumes_read")
REPLACE: Final = text("volumes_replace")


class Reading(NamedTuple):
    """The record, the drill, and the store's time.

    Attributes:
        raw: the record's bytes, by which a writer proves that it read the newest; empty without a record.
    """

    now_ms: int
    state: FactorState | None
    drill: Drill | None
    raw: bytes


async def change(
    record: VolumeRecord, judge: Callable[[Reading], Awaitable[FactorState]], token: int | None = None
) -> tuple[str, FactorState]:
    """Replace the record by the result of ``judge``; retried when another writer was faster.

    Returns:
        what ``replace`` returned, and the state; ``changed`` if others were faster each time.

    Raises:
        StoreError: the store did not answer; it may have been written.
    """
    for _ in range(TRIES):
        reading = await record.read()
        await sleep(0)  # reading 10,000 volumes takes milliseconds
        state = await judge(reading)
        result = await record.replace(reading.raw, state, token)
        if result != "changed":
            break
    return result, state


class VolumeRecord:
    """Reads and writes the record."""

    def __init__(self, client: Redis) -> None:
        self._client = client
        self._token_key = leadership_keys(LEASE, clustered=is_clustered(client))[1]
        self._record_key = shared_key_of(client, RECORD)
        self._drill_key = shared_key_of(client, DRILL)
        self._raw = b""
        self._state: FactorState | None = None
        """The record that was read last."""

    @classmethod
    def at(cls, url: str, *, timeout_s: float = 1.0) -> VolumeRecord:
        """The record in a store, with its own connections."""
        return cls(client_of(url, timeout_s))

    async def read(self) -> Reading:
        """Read the record and the drill, in one round trip.

        Raises:
            StoreError: the store did not answer.
        """
        time, (raw, drill) = await run_script(self._client, READ, (self._record_key, self._drill_key))
        now_ms = int(time[0]) * 1000 + int(time[1]) // 1000
        raw = raw or b""
        if raw != self._raw:
            # 10,000 volumes take milliseconds to decode, and each node reads them four times a second.
            self._state = _decoded(raw, FactorState)
            self._raw = raw
        return Reading(now_ms, self._state, _decoded(drill, Drill), raw)

    async def replace(self, seen: bytes, state: FactorState, token: int | None = None) -> str:
        """Replace the record that was read.

        Returns:
            ``written``; ``changed`` if the record is not the one that was read; ``fenced`` if the token is
            no longer the newest.

        Raises:
            StoreError: the store did not answer; it may have been written.
        """
        fence = b"" if token is None else b"%d" % token
        result = await run_script(
            self._client, REPLACE, (self._record_key, self._token_key), seen, msgpack.encode(state), fence
        )
        return str(result, "ascii")

    async def begin_drill(self, drill: Drill, now_ms: int) -> None:
        """Begin a drill; it replaces any other.

        Raises:
            StoreError: the store did not answer; it may have been written.
        """
        kept_ms = max(drill.until_ms - now_ms, 0) + DRILL_KEPT_MS
        await run(self._client, "SET", self._drill_key, msgpack.encode(drill), "PX", kept_ms)

    async def end_drill(self) -> None:
        """End the drill.

        Raises:
            StoreError: the store did not answer; it may have ended.
        """
        await run(self._client, "DEL", self._drill_key)

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
