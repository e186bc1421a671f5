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
    pairs: list[Pair] = []
    open_runs: list[OpenRun] = []
    with ExitStack() as stack:
        arena = Arena(stack)
        say(arena.cores)
        works = [work for work in works if arena.has(work)]
        assert arena.has(ECHO)
        for number in range(1, plan.rounds + 1):
            for work in works:
                echo = measured(arena, ECHO, plan)
                pair = Pair(round=number, name=work.name, echo=echo, work=measured(arena, work, plan))
                pairs.append(pair)
                print(f"round {number} of {plan.rounds}: {shown(pair)}", flush=True)
        for number in range(1, plan.open_rounds + 1):
            for work in (ECHO, *works):
                if work.is_open:
                    open_runs += at_fixed_rates(arena, work, plan, number, capacity(work, pairs))
        weighed = [kind for kind in KEPT if any(fits(work, kind) for work in works)]
        found = Results(
            made_at=results.now(),
            command=COMMAND,
            commit=results.commit(),
            machine=machine,
            versions={**results.versions(), **arena.versions()},
            cores=str(arena.cores),
            plan=plan,
            skipped=arena.skipped,
            works={work.name: work for work in (ECHO, *works)},
            pairs=pairs,
            open_runs=open_runs,
            resident_bytes=arena.resident_bytes(),
            store_bytes={kind: arena.store_bytes(kind) for kind in weighed},
        )
    folder = Path(os.environ.get("BENCH_OUT") or (PAGES if plan == Plan() else BUILT))
    folder.mkdir(parents=True, exist_ok=True)
    results.write(found, folder / "results.json")
    for page in report.written(folder / "results.json"):
        say(f"written: {page}")
    for peer, reason in arena.skipped.items():
        say(f"skipped: {peer}: {reason}")
    print((folder / "results.md").read_text(encoding="utf-8"))


def fits(work: Work, kind: str) -> bool:
    """Whether a work makes a bucket for each of many principals by such asks."""
    return (work.subject, work.kind, work.keys) == ("quotagate", kind, "uniform")


def shown(pair: Pair) -> str:
    """Show one measurement in a line."""
    echo, work = pair.echo, pair.work
    return (
        f"{pair.name}: {work.api_us:.3g} us, store {work.store_us:.3g} us; {echo.api_us / work.api_us:.3g} "
        f"for an echo of {echo.api_us:.3g} us; busy {work.busy:.0%}, generator {work.generator_us:.3g} us"
    )


def measured(
    arena: Arena, work: Work, plan: Plan, *, rate: float = 0.0, seconds: float | None = None
) -> Measured:
    """Measure a work once, in a closed loop, or at a rate."""
    seconds = seconds or plan.seconds
    schedule = moments(rate, plan.warm_s + seconds) if rate else ()
    connections = min(plan.connections, work.most_connections)
    for _ in range(TRIES):
        found, api_ns, store_ns = arena.run(
            work, warm_s=plan.warm_s, seconds=seconds, connections=connections, schedule=schedule
        )
        try:
            return Measured.of(work, found, api_ns, store_ns)
        except ShedError as error:
            say(f"{error}; measured again")
    pytest.fail(f"the machine is so busy that {work.name} was shed {TRIES} times", pytrace=False)


def capacity(work: Work, pairs: list[Pair]) -> float:
    """Answers a second that a work reached in the closed loop, the median of its rounds."""
    if work == ECHO:
        return median(pair.echo.answers / pair.echo.wall_s for pair in pairs)
    return median(pair.work.answers / pair.work.wall_s for pair in pairs if pair.name == work.name)


def at_fixed_rates(arena: Arena, work: Work, plan: Plan, number: int, most: float) -> list[OpenRun]:
    """Measure a work at each share of its capacity."""
    return [
        OpenRun(
            round=number,
            name=work.name,
            share=share,
            capacity=most,
            rate=share * most,
            measured=measured(arena, work, plan, rate=share * most, seconds=plan.open_seconds),
        )
        for share in plan.open_shares
    ]
