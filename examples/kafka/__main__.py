"""`make kafka-demo`: a producer that loops is held before Kafka, and one that behaves is not.

Both are the same user. The first keeps its producer; the second makes a new one for each batch, as a program
does that answers every trouble with a new producer. Each has a new id, which every broker then remembers.
"""
# ruff: noqa: INP001  an example is files to read and run, not a package

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any, Final

import httpx
from kafka import KafkaAdminClient, KafkaProducer
from kafka.admin import NewTopic
from kafka.errors import KafkaTimeoutError
from rich.console import Console
from rich.live import Live
from rich.table import Table

from app.node.children import stop_event
from examples.demo.arrangement import DidNotStart
from examples.kafka.arrangement import Arrangement, arrange

LASTS_S: Final = 40.0
TOPIC: Final = "orders"
LIMIT, WINDOW_MS = 4, 12_000
DRAWN_EVERY_S: Final = 0.25
SAID_EVERY_S: Final = 2.0
BATCH: Final = 5


class Sender(threading.Thread):
    """Sends batch after batch, and counts what the broker acknowledged."""

    def __init__(self, name: str, bootstrap: str, *, loops: bool) -> None:
        super().__init__(name=name, daemon=True)
        self.counts: Counter[str] = Counter()
        self.held_since: float | None = None
        self._brokers = bootstrap
        self._loops = loops
        self._ended = threading.Event()
        self._producer: Any = None

    def run(self) -> None:
        """Send until the end."""
        while not self._ended.is_set():
            if self._producer is None or self._loops:
                self.end_producer()
                self._producer = KafkaProducer(bootstrap_servers=self._brokers, client_id=self.name)
                self.counts["producers"] += 1
            began = self.held_since = time.monotonic()
            futures = [self._producer.send(TOPIC, b"an order") for _ in range(BATCH)]
            for future in futures:
                while not future.is_done and not self._ended.is_set():
                    time.sleep(0.01)
                self.counts["records"] += future.is_done and future.succeeded()
                self.counts["errors"] += future.is_done and future.failed()
            self.held_since = None
            self.counts["longest_ms"] = max(self.counts["longest_ms"], int((time.monotonic() - began) * 1000))
            self._ended.wait(0.2)

    def end_producer(self) -> None:
        """Close it, whatever it still waits for."""
        if self._producer is not None:
            with suppress(KafkaTimeoutError):
                self._producer.close(timeout=0)

    def end(self) -> None:
        """Send no more."""
        self._ended.set()
        self.join()
        self.end_producer()

    @property
    def state(self) -> str:
        """What it does just now."""
        waits = time.monotonic() - (self.held_since or time.monotonic())
        return f"held for {waits:.0f} s" if waits > 1 else "sends"


def table(senders: list[Sender], charged: int) -> Table:
    """All there is to show."""
    drawn = Table(title=f"{charged} of {LIMIT} new producer ids in {WINDOW_MS // 1000} s are used")
    for column in ("producer", "made", "records", "errors", "longest wait", "now"):
        drawn.add_column(column)
    for one in senders:
        counts = (one.counts["producers"], one.counts["records"], one.counts["errors"])
        longest = f"{one.counts['longest_ms'] / 1000:.1f} s"
        drawn.add_row(one.name, *map(str, counts), longest, one.state)
    return drawn


def line(senders: list[Sender], charged: int) -> str:
    """The same for a file."""
    said = (f"{one.name}: {one.counts['records']} records, {one.state}" for one in senders)
    return f"{charged} of {LIMIT} ids; " + "; ".join(said)


async def play(console: Console, seconds: float) -> None:
    """From an empty folder to its end; nothing stays behind."""
    asked = stop_event()
    async with AsyncExitStack() as stack:
        console.print("Quotagate, a broker and the proxy start; the first time, Maven fetches their parts")
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="quotagate-kafka-")))
        there = await arrange(stack, folder)
        key = (there.home / "admin.key").read_text(encoding="ascii").strip()
        headers = {"Authorization": f"Bearer {key}"}
        operator = await stack.enter_async_context(
            httpx.AsyncClient(base_url=there.quotagate, headers=headers, trust_env=False)
        )
        quota = {"producer_ids_rate": {"limit": LIMIT, "window_ms": WINDOW_MS}}
        (await operator.put("/v1/quotas/user=*", json=quota)).raise_for_status()
        await asyncio.to_thread(make_topic, there)
        senders = [
            Sender("well-behaved", there.kafka, loops=False),
            Sender("looping", there.kafka, loops=True),
        ]
        for one in senders:
            one.start()
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await show(console, senders, lambda: charged_ids(operator), asked)
        finally:
            for one in senders:
                await asyncio.to_thread(one.end)
        console.print(line(senders, await charged_ids(operator)))


async def show(
    console: Console, senders: list[Sender], charged: Callable[[], Any], asked: asyncio.Event
) -> None:
    """Draw until the end; without a terminal, say the counts now and then."""
    if not console.is_terminal:
        while not asked.is_set():
            console.print(line(senders, await charged()))
            await asyncio.sleep(SAID_EVERY_S)
        return
    with Live(console=console, auto_refresh=False) as live:
        while not asked.is_set():
            live.update(table(senders, await charged()), refresh=True)
            await asyncio.sleep(DRAWN_EVERY_S)


async def charged_ids(operator: httpx.AsyncClient) -> int:
    """The new ids that were counted in the window."""
    asked = {"bucket": "user=ANONYMOUS", "quota": "producer_ids_rate"}
    found = (await operator.get("/v1/buckets", params=asked)).json()["buckets"]
    return int(found[0]["charged_ids"] or 0) if found else 0


def make_topic(there: Arrangement) -> None:
    admin = KafkaAdminClient(bootstrap_servers=there.kafka)
    admin.create_topics([NewTopic(TOPIC, num_partitions=1, replication_factor=1)])
    admin.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m examples.kafka", description="Quotagate before Kafka, live."
    )
    parser.add_argument("--seconds", type=float, default=LASTS_S, help="how long")
    try:
        asyncio.run(play(Console(highlight=False), parser.parse_args().seconds))
    except DidNotStart as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
