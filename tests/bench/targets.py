"""The targets of this benchmark, and the figures of a run next to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal, NamedTuple

from tests.bench.arithmetic import best_ratio
from tests.bench.results import Pair, Results
from tests.bench.works import COMPARED, ECHO, FEW, ODD_IN, STORED, Work

FLOOR: Final = 0.85
"""The share of a target that a row must reach if it may fall short."""

Outcome = Literal["met", "above the floor", "**short**"]


class Wanted(NamedTuple):
    """The target of one row: decisions for the processor time of one echo that gets the same requests.

    Attributes:
        may_fall_short: whether `FLOOR` of the target is enough, given a profile that explains it.
    """

    ratio: float
    may_fall_short: bool = True


ROWS: Final[dict[str, Wanted]] = {
    "quotagate/one quota": Wanted(1.2, may_fall_short=False),
    "quotagate/one quota/100 callers": Wanted(1.3),
    "quotagate/one quota/100 callers/one head": Wanted(1.5),
    "quotagate/rate and bytes": Wanted(1.0, may_fall_short=False),
    "quotagate/no quota": Wanted(1.7),
    "quotagate/check": Wanted(1.1, may_fall_short=False),
    "quotagate/refused by a rate": Wanted(1.1, may_fall_short=False),
    "quotagate/refused id": Wanted(1.0, may_fall_short=False),
    "quotagate/new id/100 callers": Wanted(0.85),
    "quotagate/three quotas": Wanted(1.0),
    "quotagate/one quota/batch 100": Wanted(2.5),
    "quotagate/one quota/100 callers/batch 100": Wanted(3.5),
}
"""The targets of the rows, by name."""


class Target(NamedTuple):
    """One target.

    Attributes:
        floor: the figure that is enough with an explanation; the target itself if none is allowed.
        at_least: whether more is better.
        reached: the figure of a run, or None if the run has none.
    """

    name: str
    wanted: float
    floor: float
    at_least: bool
    reached: Callable[[Results], float | None]

    def outcome(self, results: Results) -> Outcome | None:
        """The outcome of a run; None if it has no figure for this target."""
        reached = self.reached(results)
        if reached is None:
            return None
        if self._is_met(reached, self.wanted):
            return "met"
        return "above the floor" if self._is_met(reached, self.floor) else "**short**"

    def _is_met(self, reached: float, wanted: float) -> bool:
        return reached >= wanted if self.at_least else reached <= wanted


def ratio(results: Results, name: str) -> float | None:
    """Decisions of a work for the processor time of one echo that gets the same requests."""
    pairs = results.pairs_of(name)
    return ratio_of(pairs) if pairs else None


def ratio_of(pairs: list[Pair]) -> float:
    """Decisions for one echo in some rounds of one work."""
    return best_ratio([pair.echo.api_us for pair in pairs], [pair.work.api_us for pair in pairs])


def api_us(results: Results, name: str) -> float | None:
    """Processor time of a decision, the least of all rounds."""
    return min((pair.work.api_us for pair in results.pairs_of(name)), default=None)


def cost_ratio(results: Results, name: str, reference: str) -> float | None:
    """Processor time of a work's decision, as a multiple of a reference's."""
    work, other = api_us(results, name), api_us(results, reference)
    return work / other if work and other else None


def store_ratio(results: Results, before: Work) -> float | None:
    """The store's processor time for a decision, as a multiple of its time with the former service."""
    today, then = (
        min((pair.work.store_us for pair in results.pairs_of(name)), default=None)
        for name in (before.name.replace("before/", "quotagate/", 1), before.name)
    )
    return today / then if today and then else None


def wait_ratio(results: Results, name: str, reference: str, share: float) -> float | None:
    """The 99th percentile of a work as a multiple of a reference's, each at this share of its own capacity.

    Each is the least of all rounds.
    """
    least = [
        min((each.measured.waits_ms["p99"] for each in results.open_runs_of(one, share)), default=None)
        for one in (name, reference)
    ]
    return least[0] / least[1] if least[0] and least[1] else None


def kept_among_odd(results: Results) -> float | None:
    """The share of its figure that an ordinary request keeps among odd ones on the same connections.

    The processor time of the odd requests comes from a run with no others.
    """
    mixed, odd, plain = (
        api_us(results, f"{COMPARED.name}{ending}") for ending in (f"/1 in {ODD_IN} odd", "/all odd", "")
    )
    if not (mixed and odd and plain):
        return None
    ordinary = (mixed - odd / ODD_IN) / (1 - 1 / ODD_IN)
    return plain / ordinary


def _added_by_log(results: Results) -> float | None:
    cost = cost_ratio(results, f"{COMPARED.name}/log all", f"{COMPARED.name}/log off")
    return None if cost is None else cost - 1


def _row(name: str, wanted: Wanted) -> Target:
    floor = round(FLOOR * wanted.ratio, 4) if wanted.may_fall_short else wanted.ratio
    words = name.removeprefix("quotagate/").replace("/", ", ")
    return Target(
        f"decisions for one echo: {words}", wanted.ratio, floor, True, lambda results: ratio(results, name)
    )


def _store(work: Work) -> Target:
    words = work.name.removeprefix("before/").replace("/", ", ")
    return Target(
        f"store, in times of before: {words}", 1.05, 1.05, False, lambda results: store_ratio(results, work)
    )


TARGETS: Final[tuple[Target, ...]] = (
    *(_row(name, wanted) for name, wanted in ROWS.items()),
    Target(
        f"processor time for 100,000 callers, in times of {FEW}",
        1.15,
        1.15,
        False,
        lambda results: cost_ratio(results, COMPARED.name, f"{COMPARED.name}/{FEW} callers"),
    ),
    Target("share of its figure that an ask keeps among 1 % of odd ones", 0.8, 0.8, True, kept_among_odd),
    *(_store(work) for work in STORED),
    Target(
        "p99 at half of capacity, in times of the echo's",
        3,
        3,
        False,
        lambda results: wait_ratio(results, COMPARED.name, ECHO.name, 0.5),
    ),
    Target(
        "processor time that a log of all decisions adds, as a share of a decision",
        0.2,
        0.2,
        False,
        _added_by_log,
    ),
)
"""All targets of this benchmark. Memory is in `tests/bench/test_memory.py`."""


def shortfalls(results: Results) -> list[str]:
    """The missed targets, each with its figure and bound, and the targets without a figure."""
    found = []
    for target in TARGETS:
        outcome, reached = target.outcome(results), target.reached(results)
        if outcome is None or reached is None:
            found.append(f"{target.name}: not measured")
        elif outcome == "**short**":
            found.append(f"{target.name}: {reached:.3g}, floor {target.floor:g}")
    return found
