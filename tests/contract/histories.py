"""Random quotas and asks, with small limits and short windows so that everything happens often."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any, Final

from hypothesis import strategies as st

from app.domain.ask import COUNTS, NO_PRODUCER_ID, Ask, Mode
from app.domain.entity import ANY, Entity
from app.domain.quota import KEYS, LAYER_POLICIES, Enforcement, Layers, OnStoreFailure, Quota, Scope

ENTITIES: Final = {
    "user": [Entity.of(user="a"), Entity.of(user=ANY)],
    "client": [
        Entity.of(client_id=ANY),
        Entity.of(user=ANY, client_id=ANY),
        Entity.of(user="a", client_id="c"),
    ],
    "ip": [Entity.of(ip="10.0.0.1"), Entity.of(ip=ANY)],
    "listener": [
        Entity.of(broker="1"),
        Entity.of(broker=ANY),
        Entity.of(listener=ANY),
        Entity.of(listener="L"),
        Entity.of(broker="1", listener="L"),
    ],
}
IDS: Final = [*range(100, 400), *(f"p{n}" for n in range(60))]
AMOUNTS: Final = (1, 1, 1, 2, 3, 0, 5, 12, 60)
FRACTIONS: Final = (0.5, 2.25, 0.1, 7.3)


@functools.lru_cache(maxsize=None, typed=True)
def one_of(*values: Any) -> st.SearchStrategy[Any]:
    """One of these values. The strategy is cached, because Hypothesis examines each new strategy."""
    return st.sampled_from(values)


def entities_of(key: str) -> list[Entity]:
    """The entities for which the machine sets quotas of a key."""
    row = KEYS[key]
    kinds = {"ip": "ip", "broker": "listener", "user": "user"}
    found = [e for types in row.entities for e in ENTITIES.get(kinds.get(types[0], ""), [])]
    if ("client-id",) in row.entities:
        found += ENTITIES["client"]
    return list(dict.fromkeys(found))


@functools.cache
@st.composite
def quotas(draw: st.DrawFn, key: str, max_ids: int) -> Quota:
    """A random quota of a key."""
    row = KEYS[key]
    shadow = draw(one_of(*(False,) * 7, True))
    scope: Scope = draw(one_of("cluster", "cluster", "broker"))
    without: OnStoreFailure = draw(one_of("admit", "admit", "throttle"))
    if row.algorithm == "producer_ids":
        limit: float = min(draw(one_of(1, 3, 8, 20, 8, 20, 60, 0)), max_ids // 2)
        window = draw(one_of(1_000, 4_000, 1_000, 4_000, 2_073_600_000))
        ids = Quota(
            key, limit, "producer_ids", "deny", shadow, scope, window_ms=window, layers=draw(layers(window))
        )
        return replace(ids, on_store_failure=without)
    algorithm = draw(one_of(row.algorithm, row.algorithm, "sampled_rate", "token_bucket"))
    limit = draw(one_of(2, 5, 1 if row.integer_limit else 0.7, 20, 9, 0))
    samples, sample_ms = draw(one_of((3, 200), (11, 100), (2, 500), (1, 300)))
    burst = draw(one_of(samples * sample_ms / 1000 * limit, 7.5))
    debt_s = draw(one_of(2.0, 0.3, 60.0))
    max_debt = limit * debt_s if limit else math.inf
    enforcement: Enforcement = draw(one_of("deny", "delay", row.enforcement))
    rate = Quota(
        key,
        limit,
        algorithm,
        enforcement,
        shadow,
        scope,
        samples=samples,
        sample_ms=sample_ms,
        burst=burst,
        max_debt=max_debt,
    )
    return replace(rate, on_store_failure=without)


@functools.cache
def layers(window_ms: int) -> st.SearchStrategy[Layers]:
    """Any layer policy."""
    named = [Layers.named(policy, window_ms) for policy in LAYER_POLICIES]
    return one_of(*named, Layers(150, 600), Layers(400, 500))


@st.composite
def asks(draw: st.DrawFn) -> Ask:
    """An ask for one usage, rarely two; it names a few ids, or very many in mode record."""
    mode: Mode = draw(one_of("admit", "admit", "admit", "admit", "record", "peek", "refund"))
    key = draw(one_of(*KEYS))
    fields = {KEYS[key].usage}
    if draw(st.integers(0, 4)) == 0:
        fields.add(KEYS[draw(one_of(*KEYS))].usage)
    usage: dict[str, float] = {}
    ids: tuple[int | str, ...] | None = None
    for field in sorted(fields):
        if field == "producer_ids":
            first = draw(st.integers(0, len(IDS) - 1))
            many = draw(one_of(*((1, 1, 2, 5, 9, 30) if mode == "admit" else (1, 3, 40, 60))))
            ids = None if mode == "refund" else tuple((IDS[first:] + IDS)[:many])
            if ids is not None and draw(st.integers(0, 4)) == 0:
                ids = (*ids, ids[0], NO_PRODUCER_ID)
        else:
            whole = field in COUNTS
            usage[field] = draw(one_of(*AMOUNTS, *(() if whole else FRACTIONS)))
    return Ask(
        usage=usage or {"requests": 1} if ids is None else usage,
        producer_ids=ids,
        principal=draw(one_of("a", "b")),
        client_id=draw(one_of("c", None, "")),
        ip=draw(one_of("10.0.0.1", "2001:db8::1", "2001:db8::2")),
        broker=draw(one_of("1", "2", None)),
        listener=draw(one_of("L", "REPLICATION")),
        mode=mode,
        deny=draw(one_of(False, False, True)),
        recheck=draw(one_of(False, False, True)),
        detail=True,
        cluster_action=draw(st.integers(0, 19)) == 0,
    )
