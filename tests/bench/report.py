"""Makes a page and two plots from the raw JSON of a run.

`python -m tests.bench.report docs/benchmarks/results.json` makes them anew.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

from tests.bench import plot, scale
from tests.bench.arithmetic import best_ratio, usual_ratio
from tests.bench.markdown import number, table
from tests.bench.results import Measured, Results, read
from tests.bench.targets import TARGETS

DISTURBED = 0.1
"""The median share of the machine's processor time for other programs, above which a page warns."""


def written(path: Path) -> list[Path]:
    """Write the pages and the plots that follow from raw results; return their paths."""
    results = read(path)
    texts = {
        ".md": page(results, path.stem),
        "-cost.svg": plot.costs(results),
        "-latency.svg": plot.latencies(results),
    }
    made = []
    if results.pairs:
        is_published = path.parent.name == "benchmarks"
        made.append((path.parent.parent if is_published else path.parent) / "scale.md")
        made[0].write_text(scale.page(results) + scale.by_hand(made[0]), encoding="utf-8")
    for ending, text in texts.items():
        target = path.with_name(path.stem + ending)
        target.write_text(text, encoding="utf-8")
        made.append(target)
    return made


def page(results: Results, stem: str) -> str:
    """A page in Markdown with all results of a run."""
    return "\n".join(
        [
            "# Results of the benchmark",
            "",
            f"Made by `{results.command}`, {results.made_at}, at commit {results.commit}.",
            f"The raw figures are in [{stem}.json]({stem}.json).",
            "[README.md](README.md) says what each program does, and how this is measured.",
            "",
            *_warnings(results),
            f"![Decisions for the processor time of one echo]({stem}-cost.svg)",
            "",
            f"![Latency at fixed rates]({stem}-latency.svg)",
            "",
            "## Targets",
            "",
            *table(["target", "wanted", "floor", "reached", ""], _targets(results)),
            "",
            "## Processor time",
            "",
            _how(results),
            "",
            *table(
                [
                    "work",
                    "decisions for one echo",
                    "median of rounds",
                    "echo us",
                    "API us per decision",
                    "store us",
                    "store, echoes",
                    "decisions per API second",
                    "without the store",
                    "API busy",
                    "answers a second",
                    "p50 ms",
                    "p99 ms",
                ],
                _costs(results),
            ),
            "",
            "## Latency at fixed rates",
            "",
            "From when a request was due, whether or not it could be sent then. Of each, the round with the",
            "least p99.",
            "",
            *table(
                [
                    "work",
                    "of capacity",
                    "a second",
                    "p50 ms",
                    "p90 ms",
                    "p99 ms",
                    "p99.9 ms",
                    "max ms",
                    "unanswered",
                    "sent late, p99 ms",
                ],
                _open(results),
            ),
            "",
            "## Machine and versions",
            "",
            *table(["", ""], [*results.machine.items(), ("cores", results.cores), *results.versions.items()]),
            "",
        ]
    )


def _warnings(results: Results) -> Iterator[str]:
    others = [pair.work.others for pair in results.pairs]
    if others and median(others) > DISTURBED:
        share = f"{median(others):.0%}"
        yield f"**Disturbed:** other programs had {share} of the machine's processor time in the median."
        yield ""
    if "share core" in results.cores:
        yield "**One core:** server, store and generator shared it."
        yield ""
    for what, reason in results.skipped.items():
        yield f"**{'Shed' if '/' in what else 'Skipped'}:** {what}: {reason}"
        yield ""


def _how(results: Results) -> str:
    plan = results.plan
    return (
        f"Closed loop, {plan.connections} connections, {plan.rounds} interleaved rounds of "
        f"{plan.seconds:g} s, an echo of the same requests before each work. "
        "Each figure is the best of all rounds, each ratio that of two such figures. "
        f"Cores: {results.cores}."
    )


def _targets(results: Results) -> Iterator[Sequence[object]]:
    for target in TARGETS:
        reached = target.reached(results)
        wanted = f"{'at least' if target.at_least else 'at most'} {target.wanted:g}"
        floor = "" if target.floor == target.wanted else f"{target.floor:g}"
        shown = "not measured" if reached is None else number(reached)
        yield target.name, wanted, floor, shown, target.outcome(results) or ""


def _costs(results: Results) -> Iterator[Sequence[object]]:
    for name in results.works:
        pairs = results.pairs_of(name)
        if pairs:
            yield _cost_row(name, [pair.echo for pair in pairs], [pair.work for pair in pairs])


def _cost_row(name: str, echoes: Sequence[Measured], works: Sequence[Measured]) -> Sequence[object]:
    echo_us = [echo.api_us for echo in echoes]
    work_us = [work.api_us for work in works]
    store_us = min(work.store_us for work in works)
    return (
        name,
        number(best_ratio(echo_us, work_us)),
        number(usual_ratio(echo_us, work_us)),
        number(min(echo_us)),
        number(min(work_us)),
        number(store_us) if store_us else "",
        number(store_us / min(echo_us)) if store_us else "",
        number(1e6 / min(work_us)),
        f"{median(work.local for work in works):.1%}" if name.startswith(("quotagate/", "before/")) else "",
        f"{max(work.busy for work in works):.0%}",
        number(max(work.answers / work.wall_s for work in works)),
        number(min(work.waits_ms["p50"] for work in works)),
        number(min(work.waits_ms["p99"] for work in works)),
    )


def _open(results: Results) -> Iterator[Sequence[object]]:
    for name in results.works:
        for share in results.plan.open_shares:
            if runs := results.open_runs_of(name, share):
                best = min(runs, key=lambda run: run.measured.waits_ms["p99"])
                waits = [
                    number(best.measured.waits_ms[each]) for each in ("p50", "p90", "p99", "p99.9", "max")
                ]
                yield (
                    name,
                    f"{share:.0%}",
                    number(best.rate),
                    *waits,
                    best.measured.unanswered,
                    number(best.measured.late_ms),
                )


if __name__ == "__main__":
    print(*written(Path(sys.argv[1])), sep="\n")
