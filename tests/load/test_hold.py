"""Long floods on one process, on two, and on one with a tenth of its time (`make prove T=tests/load`)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import nullcontext
from statistics import median
from typing import Final

import pytest
import redis

from tests import stores
from tests.load.generator import Load, loading
from tests.load.holding import AMPLE, COLD, HOT, HOT_IDS, SECRET, flood_and_check, processor_s, starved
from tests.proofs import print_table
from tests.report import say
from tests.service import eventually, running

SECONDS: Final = 40.0
"""Each flood must last at least 30 s after all have connected."""
FLOODS: Final = {
    "64 x one, hot": (HOT, 64, 0),
    "64 x one, cold": (COLD, 64, 0),
    "64 x one with an id": (HOT_IDS, 64, 0),
    "512 x one, hot": (HOT, 512, 0),
    "512 x one, cold": (COLD, 512, 0),
    "512 x one with an id": (HOT_IDS, 512, 0),
    "1,000 x one, hot": (HOT, 1_000, 0),
    "1,000 x one, cold": (COLD, 1_000, 0),
    "1,000 x one with an id": (HOT_IDS, 1_000, 0),
    "64 x 100, hot": (HOT, 64, 100),
    "64 x 100, cold": (COLD, 64, 100),
}
"""The ask, connections, and asks per request; hot principals ask again and again, cold ones once."""
PLACES: Final = {
    "one program": (1, False),
    "two programs": (2, False),
    "a tenth of the time": (1, True),
}
NOTICED_WITHIN_S: Final = 0.6
TRIES: Final = 3
COLUMNS: Final = ("where", "flood", "decisions", "made up", "503", "median ms", "processor s")

pytestmark = [pytest.mark.prove, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def rows() -> Iterator[list[tuple[object, ...]]]:
    """The rows of the proof's table, written after the last flood."""
    lines: list[tuple[object, ...]] = []
    yield lines
    if len(lines) == len(FLOODS) * len(PLACES):
        print_table("Floods", "make prove T=tests/load", COLUMNS, lines)


@pytest.mark.parametrize("flood", FLOODS)
@pytest.mark.parametrize("place", PLACES)
def test_every_answer_comes_from_the_store_in_a_long_flood(rows, place, flood):
    """Limits of a hundred hold exactly, too."""
    processes, poor = PLACES[place]
    ask, connections, batch = FLOODS[flood]
    with (
        running(environment=SECRET, processes=processes) as node,
        starved(node) if poor else nullcontext(),
    ):
        before_s = processor_s(node.pid)
        came = flood_and_check(node, ask=ask, batch=batch, connections=connections, seconds=SECONDS)
        spent_s = processor_s(node.pid) - before_s
    decisions = came.sources["store"]
    shed = f"{came.shed:,}"
    rows.append((place, flood, f"{decisions:,}", 0, shed, f"{median(came.waits_ms):.0f}", f"{spent_s:.1f}"))


def test_hung_store_is_noticed_by_a_starved_node():
    """Measured from the moment the store hangs, under load, until the first answer by policy."""
    took_s = []
    for _ in range(TRIES):
        with (
            stores.server("valkey") as store,
            running(store_url=store.url) as node,
            starved(node),
        ):
            node.put("user=*", **AMPLE)
            flood = Load(address=node.address, ask=HOT, connections=64, seconds=15.0)
            with loading(flood) as (running_load,):
                wait_for_flood(store.url)
                held_at = time.monotonic()
                store.hold()
                came = running_load.outcome()
        assert came.odd == []
        assert came.first_at["fallback"] > held_at, "every answer before came from the store"
        took_s.append(came.first_at["fallback"] - held_at)
    say(f"noticed after {[round(each, 2) for each in took_s]} s")
    assert max(took_s) < NOTICED_WITHIN_S


def wait_for_flood(store_url: str) -> None:
    """Wait until the flood has reached the store: until half of its principals have a bucket there."""
    with redis.Redis.from_url(store_url) as client:
        eventually(lambda: client.dbsize() >= 32)
