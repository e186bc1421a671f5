"""How the decision log stands: what waits in the stream, and what its writer has left about itself."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from redis.asyncio import Redis

from app.store.decision_log import NODES, STREAM, Sibling
from app.store.keys import PREFIX
from app.store.redis import run

GROUP: Final = "decision-log"
KEY: Final = f"{PREFIX}:log:standing"
KEPT_MS: Final = 7 * 86_400_000
"""How long the writer's numbers outlast the writer."""

TOOK_AT_ONCE: Final = 500
"""Entries in one call: the store is held for a fraction of a millisecond."""

TOOK: Final = """
-- KEYS: the stream, the standing. ARGV: the group, ms; of each entry its id, rows written, rows unreadable.
-- Removes the entries; counts the rows of those that were still there, so that no entry is counted twice.
local written, unreadable = 0, 0
for at = 3, #ARGV, 3 do
  redis.call('XACK', KEYS[1], ARGV[1], ARGV[at])
  if redis.call('XDEL', KEYS[1], ARGV[at]) == 1 then
    written = written + tonumber(ARGV[at + 1])
    unreadable = unreadable + tonumber(ARGV[at + 2])
  end
end
redis.call('HINCRBY', KEYS[2], 'written', written)
redis.call('HINCRBY', KEYS[2], 'unreadable', unreadable)
redis.call('PEXPIRE', KEYS[2], ARGV[2])
"""

SEEN: Final = """
-- KEYS: the standing. ARGV: ms, failures since the last time, the error or ''.
local time = redis.call('TIME')
redis.call('HSET', KEYS[1], 'seen_ms', string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000)))
redis.call('HINCRBY', KEYS[1], 'failures', ARGV[2])
redis.call('HSET', KEYS[1], 'error', ARGV[3])
redis.call('PEXPIRE', KEYS[1], ARGV[1])
"""

ALIVE_MS: Final = 600_000
"""So long a node that leaves nothing stands in the log's heartbeat."""

STANDING: Final = """
-- KEYS: the stream, the standing, the heartbeat. ARGV: ms a node stands there. Returns {now in ms, entries
-- unread, id of the oldest or '', seen_ms, written, unreadable, failures, error, {node, NUMBER:AT_MS, ...}};
-- of an entry only its id leaves the store.
local time = redis.call('TIME')
local now = string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000))
local oldest = redis.call('XRANGE', KEYS[1], '-', '+', 'COUNT', 1)[1]
local left = redis.call('HMGET', KEYS[2], 'seen_ms', 'written', 'unreadable', 'failures', 'error')
for at = 1, 5 do left[at] = left[at] or '' end
local nodes, alive = redis.call('HGETALL', KEYS[3]), {}
for at = 1, #nodes, 2 do
  if now - tonumber(string.match(nodes[at + 1], ':(.*)$')) > tonumber(ARGV[1]) then
    redis.call('HDEL', KEYS[3], nodes[at])
  else
    alive[#alive + 1] = nodes[at]
    alive[#alive + 1] = nodes[at + 1]
  end
end
left[6] = alive
return { now, redis.call('XLEN', KEYS[1]), oldest and oldest[1] or '', unpack(left) }
"""


class LogStanding(NamedTuple):
    """How the log stood at one moment.

    Attributes:
        lag_ms: how long the oldest batch has waited that is not written yet; 0 if none waits. It grows also
            while no writer runs.
        waiting: the batches that are not written yet.
        written, unreadable: rows that writers have put into files, and rows of batches that they could not
            read and have kept aside. A batch that a node sent twice counts twice.
        failures: how often files could not be written, or looked after.
        error: why files cannot be written now, in one word; empty if they can.
        seen_ms: when a writer was last there, by the store's clock; 0 if it was long ago.
        nodes: those that stand in the log's heartbeat.
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


async def read(client: Redis) -> LogStanding:
    """How the log stands now, in one call.

    Raises:
        StoreError: the store did not answer.
    """
    reply = await run(client, "EVAL", STANDING, 3, STREAM, KEY, NODES, ALIVE_MS)
    now, waiting, oldest, seen, written, unreadable, failures, error, nodes = reply
    lag_ms = max(int(now) - int(oldest.partition(b"-")[0]), 0) if oldest else 0
    return LogStanding(
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


def _sibling(node: bytes, said: bytes) -> Sibling:
    number, _, at_ms = said.partition(b":")
    return node.decode(), int(number), int(at_ms)


async def took(client: Redis, entries: Iterable[tuple[bytes, int, int]]) -> None:
    """Remove entries that are in files, and count their rows: id, rows written, rows unreadable of each.

    Raises:
        StoreError: the store did not answer; to be told again, and counted once all the same.
    """
    told = list(entries)
    for first in range(0, len(told), TOOK_AT_ONCE):
        arguments = [part for entry in told[first : first + TOOK_AT_ONCE] for part in entry]
        await run(client, "EVAL", TOOK, 2, STREAM, KEY, GROUP, KEPT_MS, *arguments)


async def seen(client: Redis, *, failures: int, error: str) -> None:
    """Leave that a writer is there, how often it failed since the last time, and why it fails now.

    Raises:
        StoreError: the store did not answer.
    """
    await run(client, "EVAL", SEEN, 1, KEY, KEPT_MS, failures, error)
