"""A process adds its counts of shadow quotas to the store's, each once, whatever becomes of its calls."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from hypothesis import given
from hypothesis import strategies as st

from app.admission.metrics.shadows import ShadowTally
from app.admission.overview.shadow_publisher import ShadowPublisher
from app.store.compiled_quota import ShadowPeriod
from app.store.port import StoreError
from app.store.shadow_counts import MOST, OUTCOMES, ShadowCount

Fate = Literal["taken", "lost before", "lost after", "no room", "away"]
"""What becomes of a call; a call that is lost after it was carried out has no reply."""


def period(number: int) -> ShadowPeriod:
    return ShadowPeriod("request_rate", f"user={number}", 1_000)


@dataclass
class Store:
    """Adds counts as ``shadow_add.lua`` does; calls have a fate."""

    fate: Fate = "taken"
    last: dict[str, int] = field(default_factory=dict)
    counts: defaultdict[ShadowPeriod, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    sizes: list[int] = field(default_factory=list)

    async def add(self, node: str, batch: int, counts: Sequence[ShadowCount]) -> bool:
        assert self.fate != "away"
        if self.fate == "lost before":
            raise StoreError("connection", "no connection")
        if self.fate == "no room":
            return False
        if self.last.get(node, 0) < batch:
            self.last[node] = batch
            self.sizes.append(len(counts))
            for each, numbers in counts:
                self.counts[each].update(dict(zip(OUTCOMES, numbers, strict=True)))
        if self.fate == "lost after":
            raise StoreError("timeout", "no reply")
        return True


class Node:
    """A process that counts and publishes."""

    def __init__(self, store: Store, name: str = "node-1") -> None:
        self.tally = ShadowTally()
        self.publisher = ShadowPublisher(
            store, node=name, tally=self.tally, away=lambda: store.fate == "away"
        )


@given(
    st.lists(
        st.one_of(
            st.tuples(st.integers(0, 1), st.integers(0, 3), st.sampled_from(OUTCOMES)),
            st.tuples(
                st.integers(0, 1),
                st.sampled_from(("taken", "lost before", "lost after", "no room", "away")),
            ),
        )
    )
)
async def test_every_verdict_is_counted_once_whatever_becomes_of_the_calls(steps: list[tuple[object, ...]]):
    store, asked = Store(), defaultdict[ShadowPeriod, Counter[str]](Counter)
    nodes = [Node(store, "a"), Node(store, "b")]
    for step in steps:
        node = nodes[step[0] == 1]
        match step[1:]:
            case int(number), str(outcome):
                node.tally.add(period(number), outcome)
                asked[period(number)][outcome] += 1
            case (fate,):
                store.fate = fate  # type: ignore[assignment]
                await node.publisher.publish()
    store.fate = "taken"
    for node in nodes:
        while await node.publisher.publish():
            pass
    assert {each: +counts for each, counts in store.counts.items()} == asked


async def test_a_batch_has_a_bound_and_the_longest_waiting_come_first() -> None:
    store = Store()
    node = Node(store)
    for number in range(2 * MOST + 1):
        node.tally.add(period(number), "admit")
    assert await node.publisher.publish()
    assert list(store.counts) == [period(number) for number in range(MOST)]
    node.tally.add(period(0), "admit")
    while await node.publisher.publish():
        pass
    assert store.sizes == [MOST, MOST, 2]
    assert store.counts[period(0)]["admit"] == 2


async def test_a_process_that_stops_sends_everything() -> None:
    store = Store()
    node = Node(store)
    node.publisher.open()
    for number in range(3 * MOST):
        node.tally.add(period(number), "throttle")
    await node.publisher.close()
    assert sum(counts["throttle"] for counts in store.counts.values()) == 3 * MOST


async def test_a_process_that_stops_waits_for_no_store_that_is_away() -> None:
    store = Store("lost before")
    node = Node(store)
    node.publisher.open()
    node.tally.add(period(0), "throttle")
    await node.publisher.close()
    assert not store.counts
