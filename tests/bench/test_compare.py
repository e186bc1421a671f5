"""The service next to a plain echo and its peers: `make bench T=tests/bench/test_compare.py`.

docs/benchmarks/README.md describes the programs, the method, and how to narrow a run.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest

from tests.bench import report, results
from tests.bench.arena import Arena
from tests.bench.comparison import Comparison
from tests.bench.generator import BUILT, compiled
from tests.bench.results import Plan, Results
from tests.bench.works import ECHO, KEPT, Work, selected
from tests.report import say

PAGES: Final = Path(__file__).parents[2] / "docs" / "benchmarks"
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
        names = {work.name for work in works}
        comparison = Comparison(arena, plan)
        for number in range(1, plan.rounds + 1):
            for work in works:
                comparison.pair(number, work)
        for number in range(1, plan.open_rounds + 1):
            for work in (ECHO, *works):
                if work.is_open:
                    comparison.at_fixed_rates(number, work)
        weighed = [kind for kind in KEPT if Work(subject="quotagate", kind=kind).name in names]
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
