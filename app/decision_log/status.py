"""The status of the decision log: waiting batches, live nodes, and the work of the writer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from redis.asyncio import Redis

from app.decision_log.batch import NODES_NAME, STREAM_NAME, Sibling
from app.store.client import shared_key_of
from app.store.keys import PREFIX
from app.store.redis import run_script
from app.store.script import text

GROUP: Final = "decision-log"
STATUS_NAME: Final = "log:standing"
STATUS_KEY: Final = f"{PREFIX}:{STATUS_NAME}"
KEPT_MS: Final = 7 * 86_400_000
"""How long the writer's last report is kept after the writer has gone."""

ALIVE_MS: Final = 600_000
"""How long a node that sends no batch stays in the heartbeat."""

ENTRIES_AT_ONCE: Final = 500
"""Entries in one call of ``acknowledge``, which then takes the store a fraction of a millisecond."""

ACKNOWLEDGE: Final = text("log_acknowledge")
HEARTBEAT: Final = text("log_heartbeat")
STATUS: Final = text("log_status")


class LogStatus(NamedTuple):
    """The status of the log at one moment.

    Attributes:
        lag_ms: how long the oldest unwritten batch has waited; 0 if none waits. It also grows while no
            writer runs.
        waiting: the batches that are not written yet.
        written, unreadable: rows that writers put into files, and rows of batches that they could not read
            and kept. A batch that a node sent twice counts twice.
        failures: how often files could not be written, or maintained.
        error: why files cannot be written now, in one word; empty if they can.
        seen_ms: the last heartbeat of a writer, by the store's clock; 0 if it was long ago.
        nodes: the nodes in the heartbeat.
    """

    now_ms: int
    lag_ms: int
    waiting: int
    written: int
    unreadable: int
    failures: int
    error: str
    seen_ms: int
    nodes: tuple[Sibling, ...] = ()


async def read_status(client: Redis) -> LogStatus:
    """The status of the log, in one call.

    Raises:
        StoreError: the store did not answer.
    """
    now, waiting, oldest, seen, written, unreadable, failures, error, nodes = await run_script(
        client,
        STATUS,
        [shared_key_of(client, name) for name in (STREAM_NAME, STATUS_NAME, NODES_NAME)],
        ALIVE_MS,
    )
    lag_ms = max(int(now) - int(oldest.partition(b"-")[0]), 0) if oldest else 0
    return LogStatus(
        now_ms=int(now),
        lag_ms=lag_ms,
        waiting=int(waiting),
        written=int(written or 0),
        unreadable=int(unreadable or 0),
        failures=int(failures or 0),
        error=error.decode(),
        seen_ms=int(seen or 0),
        nodes=tuple(_sibling(*pair) for pair in zip(nodes[::2], nodes[1::2], strict=True)),
    )


def _sibling(node: bytes, newest: bytes) -> Sibling:
    number, _, at_ms = newest.partition(b":")
    return Sibling(node.decode(), int(number), int(at_ms))


async def acknowledge(client: Redis, entries: Iterable[tuple[bytes, int, int]]) -> None:
    """Remove entries that are in files, and count their rows: id, rows written, rows unreadable of each.

    Raises:
        StoreError: the store did not answer; call it again, which counts no row twice.
    """
    done = list(entries)
    for first in range(0, len(done), ENTRIES_AT_ONCE):
        arguments = [value for entry in done[first : first + ENTRIES_AT_ONCE] for value in entry]
        keys = shared_key_of(client, STREAM_NAME), shared_key_of(client, STATUS_NAME)
        await run_script(client, ACKNOWLEDGE, keys, GROUP, KEPT_MS, *arguments)


async def heartbeat(client: Redis, *, failures: int, error: str) -> None:
    """Report that a writer is alive, how often it failed since its last report, and why it fails now.

    Raises:
        StoreError: the store did not answer.
    """
    await run_script(client, HEARTBEAT, (shared_key_of(client, STATUS_NAME),), KEPT_MS, failures, error)
