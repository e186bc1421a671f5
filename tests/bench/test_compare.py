"""The service next to a plain echo and to what else there is, in one run: `make bench
T=tests/bench/test_compare.py`.

docs/benchmarks/README.md says what is compared, how it is measured, and how a run is narrowed.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Final

import pytest

from tests.bench import report, results
from tests.bench.arena import Arena
from tests.bench.arithmetic import moments
from tests.bench.generator import BUILT, compiled
from tests.bench.results import Measured, OpenRun, Pair, Plan, Results, ShedError
from tests.bench.works import ECHO, KEPT, Work, selected
from tests.report import say

PAGES: Final = Path(__file__).parents[2] / "docs" / "benchmarks"
TRIES: Final = 3
COMMAND: Final = "make bench T=tests/bench/test_compare.py"

pytestmark = [pytest.mark.bench, pytest.mark.timeout(3600)]


def test_service_compared_with_its_peers():
    """Every answer must be right; how fast they come is reported, not asserted."""
    plan = Plan.of_environment()
    works = selected(plan.works)
    assert works, f"BENCH_WORKS={plan.works} names nothing"
    compiled()
    machine = results.machine()
    with ExitStack() as stack:
        arena = Arena(stack)
        say(arena.cores)
        works = [work for work in works if arena.has(work)]
        assert arena.has(ECHO)
        comparison = Comparison(arena, plan)
        for number in range(1, plan.rounds + 1):
            for work in works:
                comparison.pair(number, work)
        for number in range(1, plan.open_rounds + 1):
            for work in (ECHO, *works):
                if work.is_open:
                    comparison.at_fixed_rates(number, work)
        weighed = [kind for kind in KEPT if any(makes_buckets(work, kind) for work in works)]
        found = Results(
            made_at=results.now(),
            command=COMMAND,
            commit=results.commit(),
            machine=machine,
            versions={**results.versions(), **arena.versions()},
            cores=str(arena.cores),
            plan=plan,
            skipped={**arena.skipped, **comparison.shed},
            works={work.name: work for work in (ECHO, *works)},
            pairs=comparison.pairs,
            open_runs=comparison.open_runs,
            resident_bytes=arena.resident_bytes(),
            store_bytes={kind: arena.store_bytes(kind) for kind in weighed},
        )
    folder = Path(os.environ.get("BENCH_OUT") or (PAGES if plan == Plan() else BUILT))
    folder.mkdir(parents=True, exist_ok=True)
    results.write(found, folder / "results.json")
    for page in report.written(folder / "results.json"):
        say(f"written: {page}")
    print((folder / "results.md").read_text(encoding="utf-8"))


def makes_buckets(work: Work, kind: str) -> bool:
    """Whether a work makes a bucket for each of many principals by such asks."""
    return (work.subject, work.kind, work.keys) == ("quotagate", kind, "uniform")


class Comparison:
    """Measures works and keeps what was found.

    Attributes:
        shed: measurements that failed because the service shed asks again and again, and why.
    """

    def __init__(self, arena: Arena, plan: Plan) -> None:
        self._arena = arena
        self._plan = plan
        self.pairs: list[Pair] = []
        self.open_runs: list[OpenRun] = []
        self.shed: dict[str, str] = {}

    def pair(self, number: int, work: Work) -> None:
        """Measure an echo and then a work, in the closed loop."""
        echo = self._measured(ECHO, self._plan.seconds)
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
        """Measure a work at each share of what it reached in the closed loop, the median of its rounds."""
        loops = [pair.echo for pair in self.pairs] if work == ECHO else self._works(work)
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

    def _works(self, work: Work) -> list[Measured]:
        return [pair.work for pair in self.pairs if pair.name == work.name]

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
