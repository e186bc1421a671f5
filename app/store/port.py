"""The port to a store of counters: what is asked of it in one round trip, and what it answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from app.domain.ask import Mode
from app.domain.decision import Outcome, Reason
from app.domain.ladder import Applied
from app.domain.quota import Enforcement


class StoreError(Exception):
    """The store did not answer as it should; ``reason`` is one word for the metric."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(detail or reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Charge:
    """What an ask spends of one quota that applies to it.

    Attributes:
        key: the bucket's name in the store (``app.store.keys``), which a caller may keep for the next ask.
        usage: in units of the limit; of producer ids their number.
        enforcement: as decided for this ask.
        spreads: of producer ids 32 bytes each, joined; empty otherwise.
    """

    applied: Applied
    key: bytes
    usage: float
    enforcement: Enforcement
    spreads: bytes = b""


@dataclass(frozen=True, slots=True)
class Plan:
    """An ask, as far as the store needs to know it.

    Attributes:
        mode: the ask's; or ``refresh``, which refreshes the ids that are seen, as any refusal does, and
            writes nothing else.
        charges: in the order of the answer; may be empty when only a kept answer is looked for.
        retry: (principal, hash of the ask and of who sent it) under which an answer that charged is kept;
            None without an id or in a peek.
        context: the node's own bytes, given back with a kept answer.
        at_ms: the caller's clock; None under the store's.
    """

    mode: Mode | Literal["refresh"]
    charges: tuple[Charge, ...]
    recheck: bool = False
    retry: tuple[str | None, bytes] | None = None
    context: bytes = b""
    at_ms: int | None = None

    @property
    def ids(self) -> int:
        """How many producer ids it brings, which is what makes a call long."""
        return sum(len(charge.spreads) for charge in self.charges) // 32


@dataclass(frozen=True, slots=True)
class Said:
    """What the store says of one charge.

    Attributes:
        correction: 0; 1 if the clock was behind the bucket and taken as its newest time; 2 if it was so by
            more than a window, and the bucket moved back with it.
        observed, remaining: the bucket after the ask's effect.
        remembered, fill: of producer ids; 0 otherwise, but see ``forgiven``.
        layers: how many layers of producer ids are live; 0 otherwise.
    """

    outcome: Outcome
    throttle_ms: int
    reason: Reason | None
    correction: int
    observed: float
    remaining: float
    largest: float | None
    remembered: int
    fill: float
    layers: int = 0

    @property
    def forgiven(self) -> float:
        """Of a token bucket, how many units of a debt this ask was forgiven; it travels as the fill does."""
        return self.fill


@dataclass(frozen=True, slots=True)
class Answer:
    """What the store answers to one plan.

    Attributes:
        kept: the context of the ask that the answer was kept for.
        error: why there is none for this ask, while the store is well: a bucket that it cannot read.
        at_ms: the store's time at the call; 0 under the caller's clock.
        order: its place among all that the store ever decided; None if nothing is logged, or the
            call could only look.
        fates: what became of its ids, a byte each: ``app.store.decision_log`` has the words.
    """

    said: tuple[Said, ...]
    kept: bytes | None = None
    error: StoreError | None = None
    at_ms: int = 0
    order: int | None = None
    fates: bytes = b""


class Memory(NamedTuple):
    """What a store uses of the memory that it may use, in bytes; 0 if it has no bound."""

    used: int
    most: int

    @property
    def is_full(self) -> bool:
        """Whether it takes nothing new: what is left of it serves what is there, the log and the leases."""
        return self.most > 0 and self.used * 8 > self.most * 7


class Fault(NamedTuple):
    """What is wrong with the set-up of a store that decides: one word for the metric, and a sentence."""

    name: str
    detail: str


class Store(Protocol):
    """Counters that every node shares.

    Attributes:
        lost: told when the connection for calls is lost; the next examination makes a new one.
    """

    lost: Callable[[StoreError], None]

    async def decide(self, plans: Sequence[Plan]) -> list[Answer]:
        """Decide plans in order, each atomically, in one round trip, on the connection that is there.

        Returns:
            the answers of the first plans, at least of one: a call that has written much decides no further
            ask, so that it does not hold the store for long. The rest has to be asked again.

        Raises:
            StoreError: no answer, or an error for one; a late call may still be counted.
        """

    def silent_since(self) -> float | None:
        """Since when it owes a reply and says nothing, by the loop's clock; None while it does not.

        It is not silent while something is there to read, however late the loop is to read it.
        """

    def give_up(self, error: StoreError) -> None:
        """Fail the calls that it owes a reply, and hang up."""

    async def forget(self, keys: Sequence[bytes]) -> int | None:
        """Remove the buckets of these keys at once: all of them, or on failure all or none.

        Returns:
            its place in the order of what is logged; None if nothing is.

        Raises:
            StoreError: no answer, or an error for one; a late call may still remove them.
        """

    async def examine(self) -> tuple[Fault, ...]:
        """Prove that the store decides and takes writes, and connect for calls if need be.

        Returns:
            what is not as it should be all the same.

        Raises:
            StoreError: it does not.
        """

    async def close(self) -> None:
        """Close the connections."""
