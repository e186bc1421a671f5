"""The traffic: a seed gives the same bytes each time, and the traffic has the documented properties."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import pairwise

from workers.generate.traffic import (
    CAUSES,
    CHUNK,
    CONNECTING,
    CONNECTING_IN_A_STORM,
    DEPLOY_EVERY_MS,
    Cause,
    Event,
    Traffic,
    in_a_storm,
)

EVENTS = 60_000
TRAFFIC = Traffic(seed=7, events=EVENTS, rate=200.0)
STREAM = list(TRAFFIC.stream())
KNOWN = "dcd1488ac85b"
"""The digest of the first asks of seed 7. If it changes, so does every published result with a seed."""


def as_bytes(events: Iterable[Event]) -> bytes:
    return "\n".join(json.dumps([event.at_ms, event.ask]) for event in events).encode()


def test_a_seed_gives_the_same_events_byte_for_byte():
    again = Traffic(seed=7, events=EVENTS, rate=200.0).stream()
    assert as_bytes(again) == as_bytes(STREAM)
    found = hashlib.sha256(as_bytes(STREAM[:2_000])).hexdigest()
    assert found.startswith(KNOWN), f"seed 7 makes other traffic than it did: {found}"


def test_another_seed_gives_other_events():
    other = list(Traffic(seed=8, events=2_000, rate=200.0).stream())
    assert as_bytes(other) != as_bytes(STREAM[:2_000])
    assert sum(a.ask == b.ask for a, b in zip(other, STREAM, strict=False)) < 100


def test_a_part_of_the_stream_is_the_same_as_in_the_whole():
    wanted = list(TRAFFIC.stream(lambda rank, connects: rank % 3 == 1 and not connects))
    assert wanted == [event for event in STREAM if event.rank % 3 == 1 and event.principal is not None]
    longer = Traffic(seed=7, events=EVENTS + CHUNK, rate=200.0).stream()
    assert [next(longer) for _ in range(EVENTS)] == STREAM


def test_times_follow_the_rate():
    assert [event.number for event in STREAM] == list(range(EVENTS))
    assert all(event.at_ms == event.number * 5 for event in STREAM)
    assert TRAFFIC.length_ms == EVENTS * 5


def test_principals_follow_a_zipf_distribution():
    asks = Counter(event.rank for event in STREAM)
    whole = sum(rank**-TRAFFIC.zipf for rank in range(1, TRAFFIC.principals + 1))
    for rank in range(1, 60):
        expected = EVENTS * rank**-TRAFFIC.zipf / whole
        assert abs(asks[rank] - expected) < 5 * math.sqrt(expected), f"rank {rank}"
    assert max(asks) > TRAFFIC.principals * 0.9, "the many small ones ask too"


def test_each_cause_occurs_and_makes_ids_as_its_name_says():
    uses: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for event in STREAM:
        for each in event.ids:
            uses[each // 10**10].append((event.at_ms, each))
    producers = {
        producer.number: producer
        for rank in range(1, TRAFFIC.principals + 1)
        for producer in TRAFFIC.producers(rank)
    }
    seen: Counter[Cause] = Counter()
    for number, producer_uses in uses.items():
        producer = producers[number]
        ids = [each for _, each in producer_uses]
        seen[producer.cause] += len(producer_uses)
        assert ids == sorted(ids), "an id does not come back after the next one"
        turns = len({at_ms // producer.period_ms for at_ms, _ in producer_uses})
        match producer.cause:
            case "steady":
                assert len(set(ids)) == 1
            case "per_batch":
                assert len(set(ids)) == len(ids)
            case "restart_loop":
                assert len(set(ids)) == turns
            case "renew_on_error":
                assert len(set(ids)) <= 2 * turns
    assert seen.keys() == set(CAUSES)
    assert min(seen.values()) > EVENTS / 50
    assert seen["steady"] > EVENTS / 2, "most producers are as they should be"
    assert {producer.cause for producer in TRAFFIC.producers(1)} == set(CAUSES)


def test_errors_occur_at_irregular_intervals():
    """A producer that gets a new id after each error keeps its ids for very different times."""
    producer = next(p for p in TRAFFIC.producers(1) if p.cause == "renew_on_error")
    changes = [
        at_ms
        for at_ms in range(1, 40 * producer.period_ms, 50)
        if producer.id_at(at_ms, 0) != producer.id_at(at_ms - 50, 0)
    ]
    lasted = [after - before for before, after in pairwise(changes)]
    assert 38 <= len(changes) <= 41
    assert max(lasted) > 2 * min(lasted)


def test_ids_belong_to_one_principal_and_occur_once_in_an_ask():
    owners = defaultdict(set)
    for event in STREAM:
        assert len(set(event.ids)) == len(event.ids) == len(event.causes)
        for each in event.ids:
            owners[each].add(event.principal)
            assert 0 <= each < 2**63
    assert all(len(whose) == 1 for whose in owners.values())
    assert 0.05 < sum(len(event.ids) == 2 for event in STREAM) / EVENTS < 0.15


def test_deployments_bring_storms_of_connections():
    assert TRAFFIC.length_ms >= DEPLOY_EVERY_MS
    storm = [event.principal is None for event in STREAM if in_a_storm(event.at_ms)]
    calm = [event.principal is None for event in STREAM if not in_a_storm(event.at_ms)]
    assert len(storm) == 600, "one storm of three seconds"
    assert abs(sum(storm) / len(storm) - CONNECTING_IN_A_STORM) < 0.1
    assert abs(sum(calm) / len(calm) - CONNECTING) < 0.01


def test_asks_have_the_form_of_the_api():
    batch = next(event for event in STREAM if event.principal is not None)
    assert batch.ask == {
        "principal": batch.principal,
        "client_id": batch.client_id,
        "usage": {"producer_ids": list(batch.ids), "requests": 1, "produce_bytes": batch.produce_bytes},
    }
    connection = next(event for event in STREAM if event.principal is None)
    assert connection.ask == {
        "ip": connection.ip,
        "broker": connection.broker,
        "listener": "EXTERNAL",
        "usage": {"connections": 1},
    }
    sizes = [event.produce_bytes for event in STREAM if event.principal]
    assert min(sizes) >= 200
    assert max(sizes) <= 200_000
    assert 0.45 < sum(size < 6_325 for size in sizes) / len(sizes) < 0.55, (
        "half are below the middle magnitude"
    )
