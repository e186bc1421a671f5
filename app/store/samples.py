"""Samples in the store: each process appends one a second, and a node reads the new ones.

    qg1:overview:seconds    a stream: a sample of each process for each second, 15 minutes long
    qg1:overview:minutes    a stream: a sample of each process for each minute, a day long
    qg1:overview:bytes      a hash: the bytes ever appended to each, so that their size is known

On a cluster all have the tag ``{overview}``, so they are in one slot. They take at most 1/64 of the memory of
their primary; the larger one gives up its oldest samples (``lua/sample_append.lua``).

The counters of a sample only grow, from 0 at the start of the process. A reader takes the difference of two
samples, so a lost sample loses nothing: the next has its counts too, and none is counted twice. The name of a
process is different after each start, so it tells which counters belong together. The most throttled buckets
are those since the sample before, as a list that grew from the start could not forget any.

A caller can make names of buckets, but no sample is larger than 1 KiB: it has at most eight buckets, and a
long name is hashed.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any, Final, NamedTuple, Self

from msgspec import MsgspecError, Struct, msgpack, structs
from redis.asyncio import Redis

from app.store.client import client_of, shared_key_of
from app.store.redis import run_script
from app.store.script import text

SECONDS_NAME: Final = "overview:seconds"
MINUTES_NAME: Final = "overview:minutes"
BYTES_NAME: Final = "overview:bytes"
"""The names of the keys for ``app.store.client.shared_key_of``."""

SECONDS_MS: Final = 900_000
MINUTES_MS: Final = 86_400_000
"""How long each series goes back."""

UNLIMITED_BYTES: Final = 64 * 1024 * 1024
"""The most bytes of both series in a store without ``maxmemory``."""

LARGEST: Final = 1_024
"""The most bytes of a sample."""
MOST_BUCKETS: Final = 8
LONGEST_BUCKET: Final = 64
LONGEST_NODE: Final = 128
"""The longest names in a sample, in bytes. Longer names of buckets are hashed, and of processes cut."""

AT_ONCE: Final = 50
"""Samples of each series in one reply: a fraction of a millisecond of the store, and some of a node."""

APPEND: Final = text("sample_append").partition("]]\n")[2]
READ: Final = text("samples_read").partition("]]\n")[2]
"""The scripts without their descriptions, as each process sends one every second."""


class ThrottledBucket(Struct, array_like=True, frozen=True, gc=False):
    """A bucket that throttled asks: how many, and their throttle times together."""

    quota: str
    bucket: str
    asks: int
    throttle_ms: int


class ProcessSample(Struct, array_like=True, frozen=True):
    """The counters of a process at one moment; new fields are added at the end, with a default.

    Attributes:
        node: the name of the process, of this start alone.
        version: of the program.
        is_first: whether the series has no earlier sample of the process, so that all counts are new.
        is_last: whether the process stops.
        queue_asks: asks that wait for a store call now.
        counts: by the names of ``COUNTED``, since the process started.
        latency: decisions by the bounds of ``LATENCY_S``, the last number all others, since then too.
        throttled: the most throttled buckets since the last sample of the series.
    """

    node: str
    version: str
    is_first: bool
    is_last: bool
    queue_asks: int
    counts: list[int]
    latency: list[int]
    throttled: list[ThrottledBucket]


COUNTED: Final = ("admit", "delay", "throttle", "reject", "local", "fallback", "shed", "shadow_refused")
"""The names of ``ProcessSample.counts``; new ones are added at the end."""

LATENCY_S: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""The bounds of ``ProcessSample.latency``."""


def short_bucket(name: str) -> str:
    """The name of a bucket in a sample.

    >>> short_bucket("user=alice"), len(short_bucket("user=" + "a" * 60))
    ('user=alice', 33)
    """
    if len(name) <= LONGEST_BUCKET:
        return name
    return "#" + blake2b(name.encode(), digest_size=16).hexdigest()


def packed(sample: ProcessSample) -> bytes:
    """The bytes of a sample, at most ``LARGEST``: it loses its least throttled buckets if it is larger."""
    while len(made := msgpack.encode(sample)) > LARGEST and sample.throttled:
        sample = structs.replace(sample, throttled=sample.throttled[:-1])
    return made


class TimedSample(NamedTuple):
    """A sample from the store.

    Attributes:
        at: the time until which it counts, in seconds or minutes since 1970.
        taken_ms: when the store took it.
        sample: None if another version wrote it, in a layout that this one cannot read.
    """

    at: int
    taken_ms: int
    sample: ProcessSample | None


class NewSamples(NamedTuple):
    """The samples that a reader did not know, in the order of the store.

    Attributes:
        now_ms: the store's time.
        is_all: whether there are no more.
    """

    now_ms: int
    seconds: list[TimedSample]
    minutes: list[TimedSample]
    is_all: bool


class SampleSeries:
    """Both series, with connections of their own, so that no decision waits for them.

    Attributes:
        client: these connections.
    """

    def __init__(self, client: Redis) -> None:
        self.client = client
        self._keys = [shared_key_of(client, name) for name in (SECONDS_NAME, MINUTES_NAME, BYTES_NAME)]
        self._after = [b"-", b"-"]

    @classmethod
    def at(cls, url: str, *, timeout_s: float = 1.0) -> Self:
        """The series in a store."""
        return cls(client_of(url, timeout_s))

    async def append(self, second: bytes, minute: bytes, at: int | None, at_minute: int) -> tuple[int, bool]:
        """Append packed samples.

        Args:
            minute: empty if no sample for the series by the minute is due.
            at, at_minute: the time until which they count; None if the store's time is not known.

        Returns:
            the store's time (ms), and whether it took them.

        Raises:
            StoreError: the store did not answer; it may have taken them.
        """
        named = (b"" if at is None else b"%d" % at, at_minute)
        now_ms, took = await run_script(
            self.client, APPEND, self._keys, second, minute, *named, SECONDS_MS, MINUTES_MS, UNLIMITED_BYTES
        )
        return int(now_ms), bool(took)

    def rewind(self) -> None:
        """Read from the beginning again."""
        self._after = [b"-", b"-"]

    async def read(self) -> NewSamples:
        """Read the next samples.

        Raises:
            StoreError: the store did not answer.
        """
        now_ms, *replies = await run_script(self.client, READ, self._keys[:2], *self._after, AT_ONCE)
        for place, entries in enumerate(replies):
            if entries:
                self._after[place] = b"(" + entries[-1][0]
        seconds, minutes = ([_timed(*entry) for entry in entries] for entries in replies)
        is_all = max(len(seconds), len(minutes)) < AT_ONCE
        return NewSamples(int(now_ms), seconds, minutes, is_all)

    async def close(self) -> None:
        """Close the connections."""
        await self.client.aclose()


_decode: Final = msgpack.Decoder(ProcessSample).decode


def _timed(id_: bytes, fields: list[Any]) -> TimedSample:
    try:
        at, sample = int(fields[1]), _decode(fields[5])
    except (MsgspecError, ValueError, IndexError):
        at, sample = 0, None
    return TimedSample(at, int(id_.partition(b"-")[0]), sample)
