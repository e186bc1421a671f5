"""A case: a request, or a visit with its own connection; and the answers that are right."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Final, Literal

from tests.fuzz.bodies import Json
from tests.fuzz.messages import KEY, message
from tests.service import ADMIN_KEY

ADMIN: Final = KEY + ADMIN_KEY
JSON: Final = "Content-Type: application/json"
ANY: Final = frozenset(range(200, 500))
OK: Final = frozenset({200})
ENTITIES: Final = tuple(f"user=fuzz-{n}" for n in range(40))
"""The entities whose quotas the cases change; no principal with exact expectations has these names."""
LEDGERS: Final = tuple(f"ledger-{n}" for n in range(16))
"""Principals with a bucket that is never empty: the sum of all charges answered must be in it."""


@dataclass(frozen=True, slots=True)
class Expected:
    """The answers that are right for a case.

    Attributes:
        statuses: the allowed statuses.
        spends: the charge of the answer to each ledger, which must be found there later.
        changes: it may change quotas.
    """

    method: str = "POST"
    statuses: frozenset[int] = ANY
    spends: Mapping[str, int] = field(default_factory=dict)
    changes: bool = False


@dataclass(frozen=True, slots=True)
class Request:
    """One request, framed as HTTP requires."""

    kind: str
    text: bytes
    expected: Expected

    @property
    def requests(self) -> int:
        return 1


@dataclass(frozen=True, slots=True)
class Visit:
    """Bytes that are sent on their own connection.

    Attributes:
        sends: the pieces, sent one after the other, with pauses between them if the visit is slow.
        expected: the answers that must come; further valid answers may follow.
        end: half: we close our side after these answers, and read the rest. closed: the server closes the
            connection. cut, reset: we leave without reading.
        requests: how many it counts for.
    """

    kind: str
    sends: tuple[bytes, ...]
    expected: tuple[Expected, ...] = ()
    end: Literal["half", "closed", "cut", "reset"] = "half"
    slow: bool = False
    requests: int = 1


Case = Request | Visit
Maker = Callable[[Random, int], Case]


def post(path: str, body: bytes, *headers: str | bytes) -> bytes:
    return message("POST", path, headers, body)


def answer(method: str, *statuses: int) -> Expected:
    return Expected(method, frozenset(statuses))


def spending(chance: Random) -> tuple[Json, dict[str, int]]:
    """An ask of a ledger's principal, and its charge to the ledger."""
    ledger, tokens = chance.choice(LEDGERS), chance.randint(0, 9)
    return {"principal": ledger, "usage": {"mutations": tokens}}, {ledger: tokens}


def refusable(number: int) -> Json:
    """An ask that would leave a trace in the store if it were charged, which it must not be."""
    return {"principal": f"refused-{number}", "usage": {"requests": 1, "producer_ids": [number, 1, 2]}}


def unjudged(number: int) -> Json:
    """An ask that may be valid or not."""
    return {"principal": f"unjudged-{number % 500}", "usage": {"requests": 1}}
