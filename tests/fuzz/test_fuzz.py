"""Requests of every kind at a running node: nothing breaks, nothing grows, and valid asks are answered right.

`make test` sends 20,000 of one seed, `make prove T=tests/fuzz` 1,000,000 of a new one. FUZZ_SEED=N repeats a
run, and `case(seed, number)` of tests/fuzz/generate.py makes a single case again.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Final

import pytest
import redis
import redis.asyncio

from app.decision_log.batch import STREAM
from app.node.tasks import end
from tests.fuzz.canary import QUOTAS, Canary
from tests.fuzz.cases import LEDGERS
from tests.fuzz.generate import case
from tests.fuzz.storm import CALLERS, Storm
from tests.proofs import print_table
from tests.report import say
from tests.service import Service, eventually, running

ENVIRONMENT: Final = {
    # With this secret, no id of a canary is mistaken for another one, whatever the seed.
    "QUOTAGATE_HASH_SECRET": (b"fuzz" * 8).hex(),
}
WAYS: Final = ("app.run.cli", "tests.handed_over")
"""The program unchanged, and with each connection handed over at once."""
PURSE: Final = {"limit": 1e-9, "algorithm": "token_bucket", "burst": 10**12, "enforcement": "deny"}
CACHED_CALLERS: Final = 20_000
MIB: Final = 1024 * 1024
GROWTH: Final = 8 * MIB
"""How much the node's memory may grow after the warm-up, in which its caches fill.

The growth is the data that 48 callers have in flight, some with a body of a mebibyte, and the fragmentation
that it leaves.
"""
WARM_UP: Final = 250_000
"""How many of the million requests come before the first measurement. The memory grows until then: in one run
to 134 MiB after 80,000 requests, 142 after 240,000 and 144 after 480,000.
"""
STORE_CONNECTIONS: Final = 4
"""The most connections that the pool may open, when an examination and a call coincide."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """The resources that a program holds at a moment."""

    memory: int
    sockets: int
    files: int

    @classmethod
    def of(cls, pid: int) -> Footprint:
        pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
        held = []
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # closed since it was listed
                held.append(str(entry.readlink()))
        return cls(
            pages * os.sysconf("SC_PAGE_SIZE"), sum(at.startswith("socket:") for at in held), len(held)
        )


@dataclass
class Fuzzed:
    """A run: its requests and answers, and the node's resources before and after."""

    storm: Storm
    warm: Footprint
    peak: int
    end: Footprint
    seconds: float


async def fuzzed(node: Service, seed: int, requests: int, warm_up: int) -> Fuzzed:
    """Send this many requests, and check everything that the node promises."""
    canaries = [Canary(f"canary-{n}", Random(f"{seed} {n}")) for n in range(CALLERS)]
    set_up(node, canaries)
    quiet = Footprint.of(node.pid)
    storm = Storm(seed, node.address, canaries)
    began = time.monotonic()
    async with reading_the_log(node):
        await storm.rage(warm_up)
        await without_callers(node, quiet)
        warm = Footprint.of(node.pid)
        async with highest_memory(node) as peak:
            await storm.rage(requests)
        await without_callers(node, quiet)
    end = Footprint.of(node.pid)
    seconds = time.monotonic() - began
    assert storm.faults == [], "\n".join(storm.faults)
    for canary in canaries:
        canary.settle(node)
    assert ledgers(node) == storm.spent, "what was charged is what the answers said, and nothing else"
    assert traces(node, "refused") == [], "what was refused left nothing behind"
    assert complaints(node) == Counter()
    assert node.process.poll() is None
    assert node.logged().count("Started server process") == 1
    assert end.memory - warm.memory < GROWTH
    assert end.files <= warm.files + 2 * CALLERS, "the catalog's own files, as far as its pool goes"
    return Fuzzed(storm, warm, max(peak), end, seconds)


def set_up(node: Service, canaries: list[Canary]) -> None:
    """Set quotas for all principals, and fill every cache."""
    node.put("user=*", request_rate=1_000, producer_ids_rate=1_000)
    for ledger in LEDGERS:
        node.put(f"user={ledger}", controller_mutation_rate=PURSE)
    for canary in canaries:
        node.put(f"user={canary.name}", **QUOTAS)
    for first in range(0, CACHED_CALLERS, 1_000):
        numbers = range(first, first + 1_000)
        asks = [
            {"principal": f"cached-{n}", "ip": f"10.0.{n // 250}.{n % 250}", "usage": {"requests": 1}}
            for n in numbers
        ]
        node.batch(asks)


async def without_callers(node: Service, quiet: Footprint) -> None:
    """Wait until the node has let go of every connection."""
    most = quiet.sockets + STORE_CONNECTIONS
    await asyncio.to_thread(eventually, lambda: Footprint.of(node.pid).sockets <= most)


@asynccontextmanager
async def meanwhile(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run endless work, and wait until it has ended."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        await end(task)


@asynccontextmanager
async def reading_the_log(node: Service) -> AsyncIterator[None]:
    """Take the decision log's batches out of the store, as its worker does once they are in a file."""

    async def read() -> None:
        async with redis.asyncio.from_url(node.store_url) as store:
            while True:
                await store.xtrim(STREAM, maxlen=0)
                await asyncio.sleep(1.0)  # the interval at which a worker reads

    async with meanwhile(read()):
        yield


@asynccontextmanager
async def highest_memory(node: Service) -> AsyncIterator[list[int]]:
    """The node's memory, from several measurements."""
    seen = [0]

    async def look() -> None:
        while True:
            seen[0] = max(seen[0], Footprint.of(node.pid).memory)
            await asyncio.sleep(0.2)

    async with meanwhile(look()):
        yield seen


def ledgers(node: Service) -> dict[str, int]:
    """The usage in the bucket of each ledger."""
    charged = {}
    for ledger in LEDGERS:
        (purse,) = node.ask(principal=ledger, usage={"mutations": 0}, mode="peek", detail=True)["quotas"]
        charged[ledger] = round(purse["observed"])
    return charged


def traces(node: Service, name: str) -> list[bytes]:
    """The keys in the store with a name in them."""
    with redis.Redis.from_url(node.store_url) as store:
        return list(store.scan_iter(f"*{name}*", count=10_000))


def complaints(node: Service) -> Counter[str]:
    """The events in the node's log of other levels than info, except refused keys."""
    with node.log.open(encoding="utf-8") as lines:
        events = [json.loads(line) if line.startswith("{") else {"event": line} for line in lines]
    worse = Counter(event["event"] for event in events if event.get("level") != "info")
    del worse["a key was refused"]
    return worse


@pytest.mark.timeout(900)
@pytest.mark.parametrize("program", WAYS)
async def test_twenty_thousand_requests(program: str):
    seed = int(os.environ.get("FUZZ_SEED", "4"))
    with running(environment=ENVIRONMENT, program=program) as node:
        run = await fuzzed(node, seed, requests=20_000, warm_up=15_000)
    say(f"seed {seed}: {summary(run)}")
    assert run.storm.kinds.keys() == {made.kind for made in (case(1, n) for n in range(20_000))}, "all kinds"


@pytest.mark.prove
@pytest.mark.timeout(7200)
async def test_a_million_requests():
    seed = int(os.environ.get("FUZZ_SEED", secrets.randbelow(10**9)))
    print(f"\nFUZZ_SEED={seed}")
    with running(environment=ENVIRONMENT) as node:
        run = await fuzzed(node, seed, requests=1_000_000, warm_up=WARM_UP)
    print(summary(run))
    command = f"FUZZ_SEED={seed} make prove T=tests/fuzz"
    by_kind: defaultdict[str, Counter[int]] = defaultdict(Counter)
    for (kind, status), times in run.storm.counts.items():
        by_kind[kind][status] += times
    rows: list[Sequence[object]] = [
        [
            kind,
            f"{run.storm.kinds[kind]:,}",
            ", ".join(f"{s or 'none'}: {n:,}" for s, n in sorted(statuses.items())),
        ]
        for kind, statuses in sorted(by_kind.items())
    ]
    print_table("Requests and answers", command, ("kind", "requests", "answers"), rows)
    held: list[Sequence[object]] = [
        [
            "memory, MiB",
            f"{run.warm.memory / MIB:.0f}",
            f"{run.peak / MIB:.0f}",
            f"{run.end.memory / MIB:.0f}",
        ],
        ["sockets", run.warm.sockets, "", run.end.sockets],
        ["open files", run.warm.files, "", run.end.files],
    ]
    asked = sum(canary.asked for canary in run.storm.canaries)
    sent = [[f"{run.storm.requests:,}", f"{asked:,}", f"{run.seconds:.0f}", len(run.storm.faults)]]
    print_table("The run", command, ("requests", "of canaries besides", "seconds", "faults"), sent)
    print_table("What the node held", command, ("", f"after {WARM_UP:,}", "most", "at the end"), held)


def summary(run: Fuzzed) -> str:
    storm = run.storm
    asked = sum(canary.asked for canary in storm.canaries)
    memory = f"{run.warm.memory / MIB:.0f}, at most {run.peak / MIB:.0f}, then {run.end.memory / MIB:.0f} MiB"
    shed = sum(canary.shed for canary in storm.canaries)
    sent = f"{storm.requests:,} requests and {asked:,} of canaries ({shed:,} shed)"
    return f"{sent} in {run.seconds:.0f} s; {memory}"
