"""Measures rows of the benchmark in about 5 s each: ``python -m tests.bench.quick "refused id" check``.

A row is a name or a pattern of `works.all_works`; without a program before it, it is about the service. The
figures of one or two rounds say whether a change helped, not whether a target is met.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack

from tests.bench.arena import Arena
from tests.bench.comparison import Comparison
from tests.bench.generator import compiled
from tests.bench.markdown import number, table
from tests.bench.results import Pair, Plan
from tests.bench.targets import ROWS, ratio_of
from tests.bench.works import ECHO, Work, all_works, selected

COLUMNS = ("row", "decisions for one echo", "target", "API us", "echo us", "store us", "API busy", "others")


def main(words: list[str]) -> int:
    """Measure the rows that are asked for, and print a table; without any, print the names of all."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.quick", description=__doc__)
    parser.add_argument("rows", metavar="ROW", nargs="*", help="a name or a pattern, such as 'one quota*'")
    parser.add_argument("--rounds", type=int, default=2, help="rounds of each row (2)")
    parser.add_argument("--seconds", type=float, default=0.7, help="length of one measurement (0.7)")
    said = parser.parse_args(words)
    if not said.rows:
        print(*(work.name for work in all_works()), sep="\n")
        return 0
    chosen = selected(",".join(said.rows))
    if not chosen:
        parser.error("no row has such a name; without a ROW this prints all")
    plan = Plan(rounds=said.rounds, seconds=said.seconds, warm_s=0.2, open_rounds=0)
    compiled()
    with ExitStack() as stack:
        arena = Arena(stack)
        works = [work for work in chosen if arena.has(work)]
        assert arena.has(ECHO)
        comparison = Comparison(arena, plan)
        for each in range(1, plan.rounds + 1):
            for work in works:
                comparison.pair(each, work)
    for what, reason in (arena.skipped | comparison.shed).items():
        print(f"not measured, or again: {what}: {reason}")
    rows = [_row(work, pairs) for work in works if (pairs := comparison.pairs_of(work))]
    print(*table(COLUMNS, rows), sep="\n")
    return 0


def _row(work: Work, pairs: list[Pair]) -> tuple[object, ...]:
    figures = [pair.work for pair in pairs]
    return (
        work.name,
        number(ratio_of(pairs)),
        ROWS[work.name].ratio if work.name in ROWS else "",
        number(min(figure.api_us for figure in figures)),
        number(min(pair.echo.api_us for pair in pairs)),
        number(min(figure.store_us for figure in figures)),
        f"{max(figure.busy for figure in figures):.0%}",
        f"{max(figure.others for figure in figures):.0%}",
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
