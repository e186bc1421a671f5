"""A seeded stream of asks: connections, and batches of producers with their ids.

Every event is a function of the seed and its number, so the same seed gives the same events, and any part of
the stream can be made without the parts before it.
"""

from __future__ import annotations

import itertools
from bisect import bisect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final, Literal, NamedTuple

Cause = Literal["steady", "restart_loop", "renew_on_error", "per_batch"]

CAUSES: Final[tuple[Cause, ...]] = ("steady", "restart_loop", "renew_on_error", "per_batch")
"""How a producer gets its ids: one for life, one per restart in a loop of restarts, one after each error,
or one per batch. KIP-936 names the last three as causes of too many ids."""

WEIGHTS: Final = (80, 8, 6, 6)
MOST_PRODUCERS: Final = 12
"""The most producers of one principal."""

CHUNK: Final = 4096
"""How many events share one random generator."""

DEPLOY_EVERY_MS: Final = 300_000
FIRST_DEPLOYMENT_MS: Final = 5_000
STORM_MS: Final = 3_000
CONNECTING: Final = 0.02
CONNECTING_IN_A_STORM: Final = 0.75
"""The share of events that are connections: after a deployment all clients connect again."""

TWO_IDS: Final = 0.1
"""The share of asks that name two producers at once, as a proxy that gathers requests does."""

SMALLEST_BYTES: Final = 200
SPREAD_OF_BYTES: Final = 1_000
"""A batch has 200 bytes to 200 kB; each order of magnitude is equally frequent."""

BROKERS: Final = ("1", "2", "3")
LISTENER: Final = "EXTERNAL"
GENERATIONS: Final = 10**10
"""Larger than the number of ids a producer can have."""


class Event(NamedTuple):
    """One ask: a connection with an address, or a batch with a principal.

    Attributes:
        number: its place in the stream.
        at_ms: when it happens, in ms since the start of the stream.
        rank: the principal's rank, 1 for the busiest.
        ids: the producers' ids, in order, each once.
        causes: how each of those producers gets its ids.
    """

    number: int
    at_ms: int
    rank: int
    principal: str | None
    client_id: str | None
    ids: tuple[int, ...]
    causes: tuple[Cause, ...]
    produce_bytes: int
    ip: str | None
    broker: str | None

    @property
    def usage(self) -> dict[str, float]:
        """The usage of the ask, without its ids."""
        if self.principal is None:
            return {"connections": 1}
        return {"requests": 1, "produce_bytes": self.produce_bytes}

    @property
    def ask(self) -> dict[str, Any]:
        """The ask as sent over HTTP."""
        if self.principal is None:
            return {"ip": self.ip, "broker": self.broker, "listener": LISTENER, "usage": self.usage}
        usage = {"producer_ids": list(self.ids), **self.usage}
        return {"principal": self.principal, "client_id": self.client_id, "usage": usage}


class Producer(NamedTuple):
    """One producing program; ``number`` is unique, and ``period_ms`` is the average lifetime of an id."""

    number: int
    client_id: str
    ip: str
    cause: Cause
    period_ms: int

    def id_at(self, at_ms: int, event: int) -> int:
        """The id in use at a time; with the cause ``per_batch`` each event has an id of its own."""
        return self.number * GENERATIONS + self._generation(at_ms, event)

    def _generation(self, at_ms: int, event: int) -> int:
        if self.cause == "steady":
            return 0
        if self.cause == "per_batch":
            return event
        turn, into = divmod(at_ms, self.period_ms)
        if self.cause == "restart_loop":
            return turn
        error_at = (turn * 2_654_435_761 + self.number * 40_503) % self.period_ms  # once in a turn, unevenly
        return turn + (into >= error_at)


@dataclass(frozen=True, slots=True)
class Traffic:
    """A stream with a given number of events at a given rate.

    Attributes:
        principals: their number; the n-th busiest asks n^-zipf times as often as the busiest.
    """

    seed: int
    events: int
    rate: float = 500.0
    principals: int = 1_000
    zipf: float = 1.1
    _shares: list[float] = field(init=False, repr=False, compare=False)
    _producers: dict[int, tuple[Producer, ...]] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        summed = list(itertools.accumulate(rank**-self.zipf for rank in range(1, self.principals + 1)))
        object.__setattr__(self, "_shares", [share / summed[-1] for share in summed])

    @property
    def length_ms(self) -> int:
        """The duration of the whole stream in ms."""
        return self.at_ms(self.events)

    def at_ms(self, number: int) -> int:
        """The time of an event, in ms since the start of the stream."""
        return int(number * 1000 / self.rate)

    def stream(self, wanted: Callable[[int, bool], bool] | None = None) -> Iterator[Event]:
        """Yield in order the events that ``wanted`` accepts, by rank and by whether they connect."""
        shares, last = self._shares, len(self._shares) - 1
        for first in range(0, self.events, CHUNK):
            draw = Random(f"{self.seed}/{first}").random  # noqa: S311  traffic, no secrets
            for number in range(first, min(first + CHUNK, self.events)):
                who, what, how = draw(), draw(), draw()
                at_ms = int(number * 1000 / self.rate)
                connecting = CONNECTING_IN_A_STORM if in_a_storm(at_ms) else CONNECTING
                rank = min(bisect(shares, who), last) + 1
                connects = what < connecting
                if wanted is not None and not wanted(rank, connects):
                    continue
                if connects:
                    yield self._connection(number, at_ms, rank, what / connecting, how)
                else:
                    yield self._batch(number, at_ms, rank, (what - connecting) / (1 - connecting), how)

    def producers(self, rank: int) -> tuple[Producer, ...]:
        """The producers of a principal; the busiest principal has producers of every cause."""
        found = self._producers.get(rank)
        if found is None:
            found = self._producers[rank] = self._make_producers(rank)
        return found

    def _make_producers(self, rank: int) -> tuple[Producer, ...]:
        chosen = Random(f"{self.seed}/producers/{rank}")  # noqa: S311
        count = chosen.randint(1, MOST_PRODUCERS)
        causes = chosen.choices(CAUSES, WEIGHTS, k=count)
        if rank == 1:
            causes = [*CAUSES, *causes][: max(count, len(CAUSES))]
        return tuple(
            Producer(
                number=rank * MOST_PRODUCERS + place,
                client_id=f"app-{place}",
                ip=f"10.{rank >> 8 & 255}.{rank & 255}.{place + 1}",
                cause=cause,
                period_ms=chosen.randint(2_000, 60_000),
            )
            for place, cause in enumerate(causes)
        )

    def _connection(self, number: int, at_ms: int, rank: int, where: float, how: float) -> Event:
        producers = self.producers(rank)
        ip = producers[int(how * len(producers))].ip
        broker = BROKERS[int(where * len(BROKERS))]
        return Event(number, at_ms, rank, None, None, (), (), 0, ip, broker)

    def _batch(self, number: int, at_ms: int, rank: int, which: float, how: float) -> Event:
        producers = self.producers(rank)
        place = int(which * len(producers))
        speaking = producers[place : place + 1]
        if len(producers) > 1 and how * 1000 % 1 < TWO_IDS:
            speaking = (producers[place], producers[place - 1])
        return Event(
            number,
            at_ms,
            rank,
            f"team-{rank:04d}",
            speaking[0].client_id,
            tuple([each.id_at(at_ms, number) for each in speaking]),
            tuple([each.cause for each in speaking]),
            int(SMALLEST_BYTES * SPREAD_OF_BYTES**how),
            None,
            None,
        )


def in_a_storm(at_ms: int) -> bool:
    """Whether all clients are connecting again after a deployment.

    >>> in_a_storm(4_999), in_a_storm(5_000), in_a_storm(8_000), in_a_storm(305_000)
    (False, True, False, True)
    """
    since_ms = at_ms - FIRST_DEPLOYMENT_MS
    return since_ms >= 0 and since_ms % DEPLOY_EVERY_MS < STORM_MS
