"""The page docs/scale.md: the rates of a core and the size of a deployment, from a run of the benchmark."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from tests.bench.markdown import number, table
from tests.bench.results import Results
from tests.bench.works import COMPARED

KINDS: Final = (
    "one quota",
    "one quota/100 callers",
    "rate and bytes",
    "three quotas",
    "known id",
    "new id/100 callers",
    "refused by a rate",
    "refused id",
    "no quota",
    "check",
    "one quota/batch 100",
)
"""Rows of the service, by name; a row without a number of callers has 100,000."""
FULL: Final = 0.7
"""The share of a core's time that sizing allows for."""
RATES: Final = (1_000, 10_000, 100_000)
HOURS: Final = 1e9 / 1e6 / 3_600
"""Core hours of a billion decisions that take a microsecond each."""
MILLION: Final = 1_000_000


class Cost(NamedTuple):
    """Processor time of a decision in microseconds, the least of all rounds."""

    name: str
    api_us: float
    store_us: float

    @property
    def nodes_at_the_wall(self) -> float:
        """How many API cores keep one store busy."""
        return self.api_us / self.store_us if self.store_us else float("inf")


BY_HAND: Final = "## Which arrangement\n"
"""The heading of the handwritten part of the page, which no run replaces."""


def by_hand(path: Path) -> str:
    """The handwritten part of a page; empty if there is no page yet."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return text[text.index(BY_HAND) :] if BY_HAND in text else ""


def page(results: Results) -> str:
    """The page of a run."""
    costs = list(_costs(results))
    processor, cores = (results.machine.get(name, "") for name in ("processor", "cores"))
    return "\n".join(
        [
            "# Scale",
            "",
            "What a core does, where the store becomes the limit, and how to size a deployment.",
            "Every figure is computed from the [benchmark](benchmarks/README.md);",
            "a whole run of the benchmark writes this part of the page.",
            f"The run: {results.made_at}, commit {results.commit}, {processor}, {cores} cores.",
            "On another machine, multiply by the ratio of an echo there to one here.",
            "",
            "## What a core does",
            "",
            "Decisions a second of one core that does nothing else, for an API process and for the store.",
            "A row without a number of callers has 100,000; each request has a head of its own.",
            "",
            *table(
                [
                    "ask",
                    "API us",
                    "a second of an API core",
                    "store us",
                    "a second of the store",
                    "API cores for one store",
                ],
                (_core_row(cost) for cost in costs),
            ),
            "",
            "## Where the store becomes the limit",
            "",
            *_wall(costs),
            "",
            "## Memory",
            "",
            *_memory(results),
            "",
            "## A billion decisions",
            "",
            "Hours of one core.",
            "",
            *table(
                ["ask", "API", "store", "together"],
                (
                    (
                        cost.name,
                        *(
                            number(us * HOURS)
                            for us in (cost.api_us, cost.store_us, cost.api_us + cost.store_us)
                        ),
                    )
                    for cost in costs
                ),
            ),
            "",
            "## Sizing",
            "",
            f"Cores at {FULL:.0%} of their time, for a steady rate of asks. The store is one thread: where",
            "it needs more than one core, send batches, or use a cluster.",
            "",
            *table(
                ["ask", *(f"{rate:,} a second: API cores, store" for rate in RATES)],
                ((cost.name, *(_sized(cost, rate) for rate in RATES)) for cost in costs),
            ),
            "",
            *_latency(results),
        ]
    )


def _costs(results: Results) -> Iterator[Cost]:
    for kind in KINDS:
        pairs = results.pairs_of(f"quotagate/{kind}")
        if pairs:
            yield Cost(
                kind.replace("/", ", "),
                min(pair.work.api_us for pair in pairs),
                min(pair.work.store_us for pair in pairs),
            )


def _core_row(cost: Cost) -> Sequence[object]:
    own = (cost.name, number(cost.api_us), number(1e6 / cost.api_us))
    if cost.store_us < cost.api_us / 100:  # timers and examinations, not asks
        return *own, "", "", ""
    return *own, number(cost.store_us), number(1e6 / cost.store_us), number(cost.nodes_at_the_wall)


def _wall(costs: Sequence[Cost]) -> Iterator[str]:
    yield "One primary is one thread, so what it decides in a second is the limit of a deployment without a"
    yield "cluster, however many nodes ask."
    by_name = {cost.name: cost for cost in costs}
    single, batch = by_name.get("one quota"), by_name.get("one quota, batch 100")
    if single and single.store_us:
        yield (
            f"Asks of one quota, one at a time, reach it at {number(1e6 / single.store_us)} a second, which "
            f"takes {number(single.nodes_at_the_wall)} API cores."
        )
    if batch and batch.store_us:
        yield (
            f"In batches of 100 it is at {number(1e6 / batch.store_us)} a second, and "
            f"{number(batch.nodes_at_the_wall)} API cores."
        )


def _memory(results: Results) -> Iterator[str]:
    yield "Bytes of the store, measured with 100,000 principals that asked once, and what a million need."
    yield ""
    yield from table(
        ["ask", "bytes for a principal", "a million principals"],
        (
            (kind, number(size), f"{number(size * MILLION / 2**20)} MiB")
            for kind, size in results.store_bytes.items()
        ),
    )
    own = [size for name, size in results.resident_bytes.items() if name.startswith("quotagate/")]
    if own:
        yield ""
        yield f"An API process had {number(max(own) / 2**20)} MiB after the rounds, with 100,000 callers."


def _sized(cost: Cost, rate: int) -> str:
    cores, store = (rate * us / 1e6 / FULL for us in (cost.api_us, cost.store_us))
    return f"{number(cores)}, {number(store)}"


def _latency(results: Results) -> Iterator[str]:
    rows = []
    for share in results.plan.open_shares:
        runs = results.open_runs_of(COMPARED.name, share)
        if runs:
            waits = min((run.measured.waits_ms for run in runs), key=lambda each: each["p99"])
            rows.append((f"{share:.0%}", *(number(waits[name]) for name in ("p50", "p99", "p99.9"))))
    if rows:
        yield "At shares of what one API core can do, an ask of one quota takes:"
        yield ""
        yield from table(["of capacity", "p50 ms", "p99 ms", "p99.9 ms"], rows)
        yield ""
