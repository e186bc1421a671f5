"""Measures works next to an echo that gets the same requests, and keeps the results."""

from __future__ import annotations

from statistics import median
from typing import Final

from tests.bench.arena import Arena
from tests.bench.arithmetic import moments
from tests.bench.results import Measured, OpenRun, Pair, Plan, ShedError
from tests.bench.works import COMPARED, ECHO, Work

TRIES: Final = 3


class Comparison:
    """Measures works and keeps the results.

    Attributes:
        shed: measurements that were repeated or failed because the service shed asks, and its statuses.
    """

    def __init__(self, arena: Arena, plan: Plan) -> None:
        self._arena = arena
        self._plan = plan
        self.pairs: list[Pair] = []
        self.open_runs: list[OpenRun] = []
        self.shed: dict[str, str] = {}

    def pair(self, number: int, work: Work) -> None:
        """Measure an echo and then a work with the same requests, in the closed loop."""
        echo = self._measured(work.echo, self._plan.seconds)
        measured = self._measured(work, self._plan.seconds)
        if echo is None or measured is None:
            return
        self.pairs.append(Pair(round=number, name=work.name, echo=echo, work=measured))
        print(
            f"round {number} of {self._plan.rounds}: {work.name}: {measured.api_us:.3g} us, "
            f"store {measured.store_us:.3g} us; {echo.api_us / measured.api_us:.3g} for an echo of "
            f"{echo.api_us:.3g} us; busy {measured.busy:.0%}, generator {measured.generator_us:.3g} us",
            flush=True,
        )

    def at_fixed_rates(self, number: int, work: Work) -> None:
        """Measure a work at each share of its capacity, the median rate of its rounds in the closed loop."""
        loops = [pair.echo for pair in self.pairs_of(COMPARED)] if work == ECHO else self._works(work)
        if not loops:
            return
        capacity = median(loop.answers / loop.wall_s for loop in loops)
        for share in self._plan.open_shares:
            rate = share * capacity
            measured = self._measured(work, self._plan.open_seconds, rate)
            if measured is not None:
                run = OpenRun(
                    round=number, name=work.name, share=share, capacity=capacity, rate=rate, measured=measured
                )
                self.open_runs.append(run)

    def pairs_of(self, work: Work) -> list[Pair]:
        """The rounds of one work so far."""
        return [pair for pair in self.pairs if pair.name == work.name]

    def _works(self, work: Work) -> list[Measured]:
        return [pair.work for pair in self.pairs_of(work)]

    def _measured(self, work: Work, seconds: float, rate: float = 0.0) -> Measured | None:
        """Measure a work once, in the closed loop or at a rate; None if the service sheds asks each time."""
        plan = self._plan
        for _ in range(TRIES):
            found, api_ns, store_ns = self._arena.run(
                work,
                warm_s=plan.warm_s,
                seconds=seconds,
                connections=min(plan.connections, work.most_connections),
                schedule=moments(rate, plan.warm_s + seconds) if rate else (),
            )
            try:
                return Measured.of(work, found, api_ns, store_ns)
            except ShedError as error:
                self.shed[f"{work.name} at {rate:,.0f} a second" if rate else work.name] = str(error)
        return None
