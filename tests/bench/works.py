"""The works of the benchmark: kinds of asks, numbers of callers, and the requests as bytes."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from fnmatch import fnmatch
from random import Random
from typing import Final, Literal

import msgspec

from tests.bench.generator import filled

MANY: Final = 100_000
FEW: Final = 100
DRAWS: Final = 2**18
"""How many callers are drawn for one measurement. It ends before the draws repeat, except for batches."""
IN_FLIGHT: Final = 8_000
"""The most asks that wait for an answer at once."""
ODD_IN: Final = 100
"""One in this many requests of a mix is odd."""

Head = Literal["own", "one"]
Log = Literal["denied", "off", "all"]
Subject = Literal["echo", "quotagate", "before", "fastapi", "node", "nginx"]
SERVICES: Final = frozenset({"quotagate", "before"})
"""The service: of this working tree, and of the commit in `tests.bench.arena.BEFORE`."""

ADMIT: Final = '"decision":"admit"'
THROTTLE: Final = '"decision":"throttle"'
LOCAL: Final = '"source":"local"'
"""Texts of answers."""

HEAD: Final = (
    "Host: 127.0.0.1\r\n"
    "User-Agent: python-httpx/0.28.1\r\n"
    "Accept: application/json\r\n"
    "Content-Type: application/json\r\n"
)
"""The head of a client that traces nothing."""
OWN: Final = "traceparent: 00-{hex32}-{hex16}-01\r\nx-request-id: {hex16}\r\n"
"""The fields that a client with tracing adds. Their values differ in each request."""


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of ask.

    Attributes:
        usage: the ask's usage as JSON, with the generator's slots.
        applied: the number of quotas that apply.
        principal: the caller, with the generator's slots too.
        decision: the text in every answer.
    """

    usage: str
    applied: int = 1
    principal: str = "user-{next6}"
    decision: str = ADMIT


KINDS: Final = {
    "one quota": Kind(usage='{"requests":1}'),
    "rate and bytes": Kind(usage='{"requests":1,"produce_bytes":1{digits5}}', applied=2),
    "no quota": Kind(usage='{"connections":1}', applied=0),
    "check": Kind(usage='{"requests":1}'),
    "refused by a rate": Kind(usage='{"fetch_bytes":900}', decision=THROTTLE),
    "refused id": Kind(usage='{"producer_ids":["n{fresh12}"]}', decision=THROTTLE),
    "new id": Kind(usage='{"producer_ids":["n{fresh12}"]}', principal="new-{next6}"),
    "known id": Kind(usage='{"producer_ids":["id-{same6}"]}'),
    "three quotas": Kind(
        usage='{"requests":1,"produce_bytes":1000,"producer_ids":["id-{same6}"]}', applied=3
    ),
}
"""The kinds of asks, by name. `three quotas` are two rates and a known id."""
OF_PEERS: Final = ("one quota", "rate and bytes", "refused by a rate")
"""Kinds of asks that the peers with a store understand. They have no producer ids and no check."""
WITH_KNOWN_IDS: Final = frozenset({"known id", "refused id", "three quotas"})
"""Kinds of asks whose callers each have one known id, and may have no other."""

LONG: Final = {"samples": 11, "sample_ms": 100_000}
DAY_MS: Final = 86_400_000
ALL_KEYS: Final[dict[str, object]] = {
    "request_rate": 1e9,
    "producer_byte_rate": 10**12,
    "consumer_byte_rate": {"limit": 1, **LONG},
    "producer_ids_rate": {"limit": 1, "window_ms": DAY_MS},
}
QUOTAS: Final[dict[str, dict[str, object]]] = {
    "user=*": ALL_KEYS,
    **{f"user=new-{number:06}": {"producer_ids_rate": 500_000} for number in range(FEW)},
    **{f"user=tenant-{number:03}": ALL_KEYS for number in range(FEW)},
}
"""The service's quotas, by entity. The defaults admit one producer id and any rate except `fetch_bytes`: 900
bytes once in a quarter of an hour. No caller is a `tenant-...`. Its quotas make each ask look for a quota of
its own user before the default."""


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the benchmark.

    Attributes:
        callers: the number of principals that ask.
        batch: asks in a request; 0 asks for a single decision.
        head: whether the fields of `OWN` are in each request.
        log: which decisions the service logs.
        odd_in: one in this many requests is odd (see `odd_requests`); 0: none is, 1: all are.
        is_open: whether the work is also measured at fixed rates.
    """

    subject: Subject
    kind: str
    callers: int = MANY
    batch: int = 0
    head: Head = "own"
    log: Log = "denied"
    odd_in: int = 0
    is_open: bool = False

    @property
    def name(self) -> str:
        """The name in results. Without a number of callers there are `MANY`.

        >>> Work(subject="quotagate", kind="one quota", callers=FEW, batch=100).name
        'quotagate/one quota/100 callers/batch 100'
        """
        parts = [self.subject, self.kind]
        parts += [f"{self.callers} callers"] if self.callers != MANY else []
        parts += [f"batch {self.batch}"] if self.batch else []
        parts += ["one head"] if self.head == "one" else []
        parts += [f"log {self.log}"] if self.log != "denied" else []
        parts += [] if not self.odd_in else ["all odd"] if self.odd_in == 1 else [f"1 in {self.odd_in} odd"]
        return "/".join(parts)

    @property
    def echo(self) -> Work:
        """The echo that gets the same requests."""
        return msgspec.structs.replace(self, subject="echo", log="denied")

    @property
    def asked(self) -> Kind:
        """The kind of the asks."""
        return KINDS[self.kind]

    @property
    def asks(self) -> int:
        """Decisions for each request; an echo makes one answer, also to a batch."""
        return 1 if self.subject == "echo" else max(1, self.batch)

    @property
    def most_connections(self) -> int:
        """The most connections; with more, asks of large batches would wait until a node sheds them."""
        return IN_FLIGHT // max(1, self.batch)

    @property
    def expected(self) -> str:
        """The text in every decision; empty where the status suffices."""
        return "" if self.subject in {"echo", "nginx"} or self.odd_in == 1 else self.asked.decision

    @property
    def local(self) -> str:
        """The text of decisions that were made without the store."""
        return LOCAL if self.subject in SERVICES else ""

    @property
    def statuses(self) -> set[str]:
        """The statuses that answers may have."""
        return {"429"} if self.subject == "nginx" and self.asked.decision == THROTTLE else {"200"}


KEPT: Final = ("one quota", "rate and bytes", "known id", "three quotas")
"""Kinds of asks whose memory in the store is measured."""
COMPARED: Final = Work(subject="quotagate", kind="one quota", is_open=True)
"""The work that others are compared with."""
ECHO: Final = COMPARED.echo
STORED: Final = (
    *(
        Work(subject="before", kind=kind)
        for kind in (
            "one quota",
            "rate and bytes",
            "refused by a rate",
            "refused id",
            "three quotas",
        )
    ),
    Work(subject="before", kind="new id", callers=FEW),
    Work(subject="before", kind="one quota", batch=100),
)
"""Works of the former service, whose store is compared with the store of today."""


def all_works() -> Iterator[Work]:
    """Every work, in the order in which a round measures them."""
    yield COMPARED
    yield Work(subject="quotagate", kind="one quota", callers=FEW)
    yield Work(subject="quotagate", kind="one quota", callers=FEW, head="one")
    for kind in KINDS:
        if kind != COMPARED.kind:
            yield Work(subject="quotagate", kind=kind, callers=FEW if kind == "new id" else MANY)
    yield Work(subject="quotagate", kind="one quota", batch=100)
    yield Work(subject="quotagate", kind="one quota", callers=FEW, batch=100)
    for odd_in in (ODD_IN, 1):
        yield Work(subject="quotagate", kind="one quota", odd_in=odd_in)
    for log in ("off", "all"):
        yield Work(subject="quotagate", kind="one quota", log=log)
    yield from STORED
    for subject in ("fastapi", "node"):
        for kind in OF_PEERS:
            yield Work(subject=subject, kind=kind, is_open=kind == COMPARED.kind)
        yield Work(subject=subject, kind="one quota", callers=FEW)
        yield Work(subject=subject, kind="one quota", batch=100)
    yield Work(subject="nginx", kind="one quota", is_open=True)
    yield Work(subject="nginx", kind="refused by a rate")


def selected(patterns: str) -> list[Work]:
    """The works whose names match one of the patterns, which commas separate.

    A pattern without a program is about the service: ``check`` is ``quotagate/check``.
    """
    wanted = [pattern.strip() for pattern in patterns.split(",")]
    return [work for work in all_works() if any(_matches(work, pattern) for pattern in wanted)]


def numbers(callers: int, draw: Random) -> array[int]:
    """Numbers of callers: few ask in turn, many are drawn."""
    if callers <= FEW:
        return array("I", range(callers))
    return array("I", draw.choices(range(callers), k=DRAWS))


def request(work: Work) -> bytes:
    """The request that a work sends, with the generator's slots."""
    if work.subject == "nginx":
        place = {"one quota": "one", "refused by a rate": "refused"}[work.kind]
        return _request(work, "GET", f"/{place}?principal=user-{{next6}}")
    if work.kind == "check":
        return _request(work, "GET", "/v1/check", "X-Quotagate-Principal: user-{next6}\r\n")
    asked = work.asked
    ask = f'{{"principal":"{asked.principal}","usage":{asked.usage}}}'
    if work.batch:
        return _posted(work, "/v1/decisions:batch", f'{{"asks":[{",".join([ask] * work.batch)}]}}')
    return _posted(work, "/v1/decisions", ask)


def odd_requests(work: Work) -> tuple[bytes, ...]:
    """Requests that are not ordinary: a body in chunks, another route, and JSON that repeats a key.

    The first two hand a connection over to the slow protocol; the fast decoder refuses the third.
    """
    if not work.odd_in:
        return ()
    ask = '{"principal":"user-{next6}","usage":{"requests":1}}'
    twice = '{"principal":"","principal":"user-{next6}","usage":{"requests":1}}'
    size = len(filled(ask.encode()))
    chunks = f"{size:x}\r\n{ask}\r\n0\r\n\r\n".encode()
    return (
        _request(work, "POST", "/v1/decisions", "Transfer-Encoding: chunked\r\n") + chunks,
        _request(work, "GET", "/health/live"),
        _posted(work, "/v1/decisions", twice),
    )


def _matches(work: Work, pattern: str) -> bool:
    return fnmatch(work.name, pattern) or fnmatch(work.name, f"quotagate/{pattern}")


def _posted(work: Work, path: str, body: str) -> bytes:
    size = len(filled(body.encode()))
    return _request(work, "POST", path, f"Content-Length: {size}\r\n") + body.encode()


def _request(work: Work, method: str, path: str, fields: str = "") -> bytes:
    own = OWN if work.head == "own" else ""
    return f"{method} {path} HTTP/1.1\r\n{HEAD}{own}{fields}\r\n".encode()
