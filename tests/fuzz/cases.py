"""What a case is: a request, or a visit with a connection of its own; and what must be said of it."""

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
"""What administration changes here; nobody who is judged exactly goes by these names."""
LEDGERS: Final = tuple(f"ledger-{n}" for n in range(16))
"""Principals with a bucket that never runs dry: what was spent in their name must be what was answered."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What must be said of it.

    Attributes:
        statuses: those that may be answered.
        spends: what the answer says was charged to a ledger, which is then to be found there.
        changes: it may change quotas.
    """

    method: str = "POST"
    statuses: frozenset[int] = ANY
    spends: Mapping[str, int] = field(default_factory=dict)
    changes: bool = False


@dataclass(frozen=True, slots=True)
class Request:
    """One request, framed as HTTP has it."""

    kind: str
    text: bytes
    expected: Expected

    @property
    def requests(self) -> int:
        return 1


@dataclass(frozen=True, slots=True)
class Visit:
    """What is sent on a connection of its own.

    Attributes:
        sends: sent one after the other; what is sent slowly has pauses between.
        expected: the answers that must come; others may, if they are answers.
        end: half: we end our side once these answers are there, and read what else is said. closed: the
            server closes by itself. cut, reset: we leave without reading.
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
    """An ask of a ledger, and what it spends there."""
    ledger, tokens = chance.choice(LEDGERS), chance.randint(0, 9)
    return {"principal": ledger, "usage": {"mutations": tokens}}, {ledger: tokens}


def refusable(number: int) -> Json:
    """An ask that would leave a trace in the store if it were charged, which it must not be."""
    return {"principal": f"refused-{number}", "usage": {"requests": 1, "producer_ids": [number, 1, 2]}}


def unjudged(number: int) -> Json:
    """An ask of which nobody knows whether it will be understood."""
    return {"principal": f"unjudged-{number % 500}", "usage": {"requests": 1}}
