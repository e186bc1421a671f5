"""`make kafka-demo`: a producer that loops is held before Kafka, and one that behaves is not.

Both are the same user. The first keeps its producer. The second makes a new producer for each batch, like a
program that answers every error with a new producer. Every broker then remembers the new producer's id.
"""
# ruff: noqa: INP001  an example is files to read and run, not a package

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

import httpx
from kafka import KafkaAdminClient
from kafka.admin import NewTopic
from rich.console import Console

from examples.demo.__main__ import unless_ended
from examples.demo.arrangement import DidNotStart
from examples.kafka.arrangement import Arrangement, arrange
from examples.kafka.screen import Screen
from examples.kafka.senders import TOPIC, Sender

LASTS_S: Final = 40.0
LIMIT, WINDOW_MS = 4, 12_000
NEXT: Final = """
What to read next:
  integrations/kafka-proxy/README.md     what is enforced, and how
  integrations/kafka-proxy/example.yaml  the configuration that this demo ran
  docs/kafka.md                          proxy or broker plugin; cost, sizing"""


async def demo(seconds: float, screen: Screen) -> None:
    """Run the demo, with everything that it starts."""
    async with AsyncExitStack() as stack:
        await unless_ended(stack, play(stack, seconds, screen))
        screen.say("Everything stops.")


async def play(stack: AsyncExitStack, seconds: float, screen: Screen) -> None:
    """Have both send for this time; the started programs end with the stack."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="quotagate-kafka-")))
    there = await arrange(stack, folder, screen.say)
    key = (there.home / "admin.key").read_text(encoding="ascii").strip()
    headers = {"Authorization": f"Bearer {key}"}
    http = httpx.AsyncClient(base_url=there.quotagate, headers=headers, trust_env=False)
    operator = await stack.enter_async_context(http)
    quota = {"producer_ids_rate": {"limit": LIMIT, "window_ms": WINDOW_MS}}
    (await operator.put("/v1/quotas/user=*", json=quota)).raise_for_status()
    await asyncio.to_thread(make_topic, there)
    senders = [
        Sender("well-behaved", "keeps its producer", there.kafka, loops=False),
        Sender("looping", "a new one each time", there.kafka, loops=True),
    ]
    screen.begin()
    for one in senders:
        one.start()
    try:
        async with asyncio.timeout(seconds):
            await screen.show(senders, lambda: charged_ids(operator), time.monotonic() + seconds)
    except TimeoutError:
        pass  # it is over
    finally:
        for one in senders:
            await asyncio.to_thread(one.end)
        screen.sum_up(senders)


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
    parser.add_argument("--seconds", type=float, default=LASTS_S, help="how long both send")
    screen = Screen(Console(highlight=False), LIMIT, WINDOW_MS / 1000)
    try:
        asyncio.run(demo(parser.parse_args().seconds, screen))
    except DidNotStart as error:
        sys.exit(str(error))
    screen.say(NEXT)


if __name__ == "__main__":
    main()
