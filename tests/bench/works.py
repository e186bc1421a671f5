"""What the benchmark asks: kinds of asks, the principals that ask, and the requests as bytes."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from itertools import accumulate
from typing import Final, Literal

import msgspec

from tests.bench.generator import filled

MANY: Final = 100_000
"""Principals of uniform and Zipf keys."""
HOT: Final = 64
"""Principals of hot keys: one for each connection."""
IN_FLIGHT: Final = 8_000
"""The most asks that wait for an answer at once."""
DRAWS: Final = 2**18
SEED: Final = 936

Keys = Literal["hot", "uniform", "zipf"]
Log = Literal["denied", "off", "all"]
Subject = Literal["echo", "quotagate", "fastapi", "node", "nginx"]

ADMIT: Final = '"decision":"admit"'
THROTTLE: Final = '"decision":"throttle"'
LOCAL: Final = '"source":"local"'
"""Texts of answers."""


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of ask of the service.

    Attributes:
        usage: the ask's usage as JSON, with the generator's slots.
        applied: how many quotas apply to it.
        principal: who asks, likewise.
        decision: what every answer must be.
    """

    usage: str
    applied: int = 1
    principal: str = "user-{next6}"
    decision: str = ADMIT


KINDS: Final = {
    "one quota": Kind(usage='{"requests":1}'),
    "token bucket": Kind(usage='{"mutations":1}'),
    "three quotas": Kind(
        usage='{"requests":1,"produce_bytes":1000,"producer_ids":["id-{same6}"]}', applied=3
    ),
    "known id": Kind(usage='{"producer_ids":["id-{same6}"]}'),
    "known id elsewhere": Kind(usage='{"producer_ids":["{same12}"]}', principal="known-{next2}"),
    "new id": Kind(usage='{"producer_ids":["n{fresh12}"]}', principal="new-{next6}"),
    "denied id": Kind(usage='{"producer_ids":["n{fresh12}"]}', principal="denied-{next6}", decision=THROTTLE),
    "denied rate": Kind(usage='{"fetch_bytes":9}', principal="denied-{next6}", decision=THROTTLE),
    "no quota": Kind(usage='{"connections":1}', applied=0),
    "check": Kind(usage='{"requests":1}'),
}
"""What the service is asked. `three quotas` are two rates and a known id. The ids of `known id elsewhere`
became known through another node, and each is asked for once, so that a node's memory of known ids cannot
answer."""

PEER_KINDS: Final = {
    "one quota": Kind(usage='{"requests":1}'),
    "three quotas": Kind(usage='{"requests":1,"produce_bytes":1000,"fetch_bytes":1}', applied=3),
    "denied rate": Kind(usage='{"requests":1}', principal="denied-{next6}", decision=THROTTLE),
}
"""What peers with a shared store are asked. They have no ids, so `three quotas` are three rates."""

QUOTAS: Final[dict[str, dict[str, object]]] = {
    "user=*": {
        "request_rate": 1e9,
        "producer_byte_rate": 10**12,
        "controller_mutation_rate": 1e9,
        "producer_ids_rate": 100,
        "consumer_byte_rate": 10**12,
    },
    **{f"user=new-{number:06}": {"producer_ids_rate": 500_000} for number in range(HOT)},
    **{f"user=known-{number:02}": {"producer_ids_rate": 500_000} for number in range(100)},
    **{
        f"user=denied-{number:06}": {"producer_ids_rate": 1, "consumer_byte_rate": 1} for number in range(HOT)
    },
}
"""The service's quotas, by entity. The default ones admit all that the benchmark asks; the limits of
`new-...` and `known-...` are larger than the number of ids that it makes."""


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is measured.

    Attributes:
        batch: asks in a request; 0 asks for a single decision.
        log: which decisions the service logs.
        remembers: whether a node of the service remembers producer ids.
        is_open: whether it is also measured at fixed rates.
    """

    subject: Subject
    kind: str
    keys: Keys = "hot"
    batch: int = 0
    log: Log = "denied"
    remembers: bool = True
    is_open: bool = False

    @property
    def name(self) -> str:
        """Its name in results: ``quotagate/one quota/uniform``."""
        parts = [self.subject, self.kind, self.keys]
        parts += [f"batch {self.batch}"] if self.batch else []
        parts += [f"log {self.log}"] if self.log != "denied" else []
        parts += [] if self.remembers else ["no memory"]
        return "/".join(parts)

    @property
    def asked(self) -> Kind:
        """What it asks."""
        return (KINDS if self.subject in {"quotagate", "echo"} else PEER_KINDS)[self.kind]

    @property
    def asks(self) -> int:
        """Decisions for each request."""
        return max(1, self.batch)

    @property
    def most_connections(self) -> int:
        """The most connections; with more, asks of large batches would wait until a node sheds them."""
        return IN_FLIGHT // self.asks

    @property
    def expected(self) -> str:
        """The text that every decision has; empty where the status says it all."""
        return "" if self.subject in {"echo", "nginx"} else self.asked.decision

    @property
    def local(self) -> str:
        """The text of decisions that were made without the store."""
        return LOCAL if self.subject == "quotagate" else ""

    @property
    def statuses(self) -> set[str]:
        """The statuses that answers may have."""
        return {"429"} if self.subject == "nginx" and self.asked.decision == THROTTLE else {"200"}


OPEN: Final = frozenset({"one quota", "three quotas", "known id"})
"""Kinds of asks of the service that are measured at fixed rates, too."""
KEPT: Final = ("one quota", "token bucket", "three quotas", "known id")
"""Kinds of asks whose buckets are weighed."""
ECHO: Final = Work(subject="echo", kind="one quota", is_open=True)


def all_works() -> Iterator[Work]:
    """Every work, in the order in which a round measures them."""
    for kind in KINDS:
        yield Work(subject="quotagate", kind=kind, is_open=kind in OPEN)
    for kind in ("one quota", "token bucket", "three quotas", "known id", "new id", "no quota", "check"):
        yield Work(subject="quotagate", kind=kind, keys="uniform")
    for kind in ("one quota", "three quotas", "known id"):
        yield Work(subject="quotagate", kind=kind, keys="zipf")
    yield Work(subject="quotagate", kind="known id", remembers=False)
    yield Work(subject="quotagate", kind="known id", keys="uniform", remembers=False)
    for batch in (10, 100, 1_000):
        yield Work(subject="quotagate", kind="one quota", batch=batch)
    yield Work(subject="quotagate", kind="one quota", keys="uniform", batch=100)
    yield Work(subject="quotagate", kind="one quota", keys="zipf", batch=100)
    yield Work(subject="quotagate", kind="three quotas", batch=100)
    for log in ("off", "all"):
        for kind in ("one quota", "denied rate"):
            yield Work(subject="quotagate", kind=kind, log=log)
    yield Work(subject="quotagate", kind="one quota", batch=100, log="off")
    yield Work(subject="quotagate", kind="one quota", batch=100, log="all")
    for subject in ("fastapi", "node", "nginx"):
        for keys in ("hot", "uniform", "zipf"):
            yield Work(subject=subject, kind="one quota", keys=keys, is_open=keys == "hot")
        yield Work(subject=subject, kind="three quotas")
        yield Work(subject=subject, kind="denied rate")
        if subject != "nginx":
            yield Work(subject=subject, kind="one quota", batch=100)


def selected(patterns: str) -> list[Work]:
    """The works whose names match one of the patterns, which commas separate (``quotagate/one*,node/*``)."""
    wanted = [pattern.strip() for pattern in patterns.split(",")]
    return [work for work in all_works() if any(fnmatch(work.name, pattern) for pattern in wanted)]


@cache
def numbers(keys: Keys) -> array[int]:
    """Return numbers of principals: hot ones in turn; others are drawn with a fixed seed."""
    draw = random.Random(SEED)
    if keys == "hot":
        return array("I", range(HOT))
    if keys == "uniform":
        return array("I", (draw.randrange(MANY) for _ in range(DRAWS)))
    weights = list(accumulate(1 / rank for rank in range(1, MANY + 1)))
    # The most active principals are spread over all names.
    names = draw.sample(range(MANY), MANY)
    return array("I", (names[rank] for rank in draw.choices(range(MANY), cum_weights=weights, k=DRAWS)))


def request(work: Work) -> bytes:
    """The request that a work sends, with the generator's slots."""
    asked = work.asked
    principal = asked.principal
    if work.subject == "nginx":
        place = {"one quota": "one", "three quotas": "three", "denied rate": "denied"}[work.kind]
        return _head("GET", f"/{place}?principal={principal}")
    if work.kind == "check":
        return _head("GET", "/v1/check", f"X-Quotagate-Principal: {principal}\r\n")
    ask = f'{{"principal":"{principal}","usage":{asked.usage}}}'
    if work.batch:
        return _posted("/v1/decisions:batch", f'{{"asks":[{",".join([ask] * work.batch)}]}}')
    return _posted("/v1/decisions", ask)


def _posted(path: str, body: str) -> bytes:
    size = len(filled(body.encode()))
    return (
        _head("POST", path, f"Content-Type: application/json\r\nContent-Length: {size}\r\n") + body.encode()
    )


def _head(method: str, path: str, fields: str = "") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{fields}\r\n".encode()
