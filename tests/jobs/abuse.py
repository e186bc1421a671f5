"""Traffic with planted abusers: tenants of very different sizes that behave, and a few that do not."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Final

from workers.generate.traffic import BROKERS, DEPLOY_EVERY_MS, GENERATIONS, Event, Producer, Traffic

LOOPING: Final = "looping"
"""Restarts again and again, each time with a new id."""
PER_BATCH: Final = "per-batch"
"""Creates a producer for each batch."""
STORMING: Final = "10.66.0."
"""Addresses that connect and connect."""
MOST_CONNECTIONS: Final = 20
EVENTS_OF_A_SHAPE: Final = 4_000
STORM_EVERY_MS, STORM_MS = 120_000, 15_000


@dataclass(frozen=True, slots=True)
class AbusedTraffic(Traffic):
    """Generated traffic whose principals behave, and three kinds of abusers.

    The producers of a principal that behaves keep their ids, but for a restart now and then. Their addresses
    connect at most 20 times for each deployment.

    Attributes:
        abuse: the share of asks that abusers make.
        abusers: how many there are of each kind.
        loop_ms: how long an id of a looping abuser lives.
        restart_ms: how long an id of a producer lives that behaves, on average.
    """

    abuse: float = 0.05
    abusers: int = 1
    loop_ms: int = 2_000
    restart_ms: int = 1_800_000

    def stream(self, wanted: Callable[[int, bool], bool] | None = None) -> Iterator[Event]:
        """Yield in order the events that ``wanted`` accepts; those of abusers replace others."""
        connected: Counter[tuple[str | None, int]] = Counter()
        for made in Traffic.stream(self):
            dice = Random(f"{self.seed}/abuse/{made.number}")
            drawn = dice.random()
            deployment = made.at_ms // DEPLOY_EVERY_MS
            connected[made.ip, deployment] += made.principal is None
            if connected[made.ip, deployment] <= MOST_CONNECTIONS:
                event = made
            else:
                event = self._batch(made.number, made.at_ms, made.rank, dice.random(), dice.random())
            if event.at_ms % STORM_EVERY_MS < STORM_MS and drawn > 0.5:
                found = self._connection_of_a_storm(event, dice)
            else:
                found = self._looping(event, dice) if drawn < self.abuse else event
            if wanted is None or wanted(found.rank, found.principal is None):
                yield found

    def _make_producers(self, rank: int) -> tuple[Producer, ...]:
        dice = Random(f"{self.seed}/restarts/{rank}")
        return tuple(
            each._replace(
                cause="steady" if dice.random() < 0.8 else "restart_loop",
                period_ms=dice.randint(self.restart_ms // 2, self.restart_ms * 3 // 2),
            )
            for each in Traffic._make_producers(self, rank)
        )

    def _connection_of_a_storm(self, event: Event, dice: Random) -> Event:
        ip, broker = f"{STORMING}{dice.randrange(self.abusers) + 1}", dice.choice(BROKERS)
        return Event(event.number, event.at_ms, 0, None, None, (), (), 0, ip, broker)

    def _looping(self, event: Event, dice: Random) -> Event:
        which = dice.randrange(2 * self.abusers)
        kind, ids = (PER_BATCH, event.number) if which % 2 else (LOOPING, event.at_ms // self.loop_ms)
        id_ = (1_000_000 + which) * GENERATIONS + ids
        name = f"{kind}-{which // 2}"
        bytes_ = dice.choice((300, 3_000, 30_000))
        return Event(event.number, event.at_ms, 0, name, "app", (id_,), ("per_batch",), bytes_, None, None)


def drawn(seed: int) -> AbusedTraffic:
    """Traffic of a shape that follows from a seed.

    From 8 to 600 principals, alike or with most of the traffic in one of them, ask for 20 seconds to 11
    minutes. Of each kind there are one to three abusers. A looping one, or one per batch, makes 60 to 200
    asks; the looping ones begin 40 to 150 times, at least ten times as often as a producer that behaves. Each
    storming address connects twice a second, or more often.
    """
    dice = Random(f"shape/{seed}")
    abusers = dice.randint(1, 3)
    rate = _between(dice, max(6.0, 4.0 * abusers), 200.0)
    length_ms = EVENTS_OF_A_SHAPE / rate * 1_000
    loop_ms = length_ms / dice.randint(40, 150)
    return AbusedTraffic(
        seed=seed,
        events=EVENTS_OF_A_SHAPE,
        rate=rate,
        principals=round(_between(dice, 8, 600)),
        zipf=dice.uniform(0.0, 2.3),
        abuse=2 * abusers * dice.randint(60, 200) / EVENTS_OF_A_SHAPE,
        abusers=abusers,
        loop_ms=round(loop_ms),
        restart_ms=round(_between(dice, max(60_000.0, 20 * loop_ms), 3_600_000.0)),
    )


def _between(dice: Random, least: float, most: float) -> float:
    """A number of any order of magnitude between two."""
    return math.exp(dice.uniform(math.log(least), math.log(most)))


def is_abuser(entity: str | None) -> bool:
    """Whether this is a principal or an address of an abuser, or its entity."""
    name = (entity or "").partition("=")[2] or entity or ""
    return name.startswith((LOOPING, PER_BATCH, STORMING))
