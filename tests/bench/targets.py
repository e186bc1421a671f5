"""The targets of this benchmark, and what a run reached of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from tests.bench.arithmetic import best_ratio
from tests.bench.results import Pair, Results

UNIFORM_SHARE: Final = 0.75
"""What callers beyond any cache must reach of each target."""
COMPARED: Final = "quotagate/one quota/hot"
NEARLY_ALL: Final = 0.98
"""The share of decisions from which known ids count as answered from memory, or by the store."""


class Target(NamedTuple):
    """One target.

    Attributes:
        at_least: whether more is better.
        reached: the figure of a run, or None if the run has none.
    """

    name: str
    wanted: float
    at_least: bool
    reached: Callable[[Results], float | None]

    def is_met(self, results: Results) -> bool | None:
        """Whether a run meets it; None if the run has no figure for it."""
        reached = self.reached(results)
        if reached is None:
            return None
        return reached >= self.wanted if self.at_least else reached <= self.wanted


def ratio(results: Results, name: str) -> float | None:
    """Decisions of a work for the processor time of one echo."""
    pairs = results.pairs_of(name)
    return _ratio(pairs) if pairs else None


def api_us(results: Results, name: str) -> float | None:
    """Processor time of a decision, the least of all rounds."""
    return min((pair.work.api_us for pair in results.pairs_of(name)), default=None)


def store_echoes(results: Results, name: str) -> float | None:
    """Processor time of the store for a decision, in echoes."""
    pairs = results.pairs_of(name)
    return (
        min(pair.work.store_us for pair in pairs) / min(pair.echo.api_us for pair in pairs) if pairs else None
    )


def cost_ratio(results: Results, name: str, reference: str) -> float | None:
    """How many times the processor time of a reference a work takes for each decision."""
    work, other = api_us(results, name), api_us(results, reference)
    return work / other if work and other else None


def wait_ratio(results: Results, name: str, reference: str, share: float) -> float | None:
    """The 99th percentile of a work at a share of its capacity, compared with a reference at that share of
    its own.

    Each is the least of all rounds.
    """
    least = [
        min((each.measured.waits_ms["p99"] for each in results.open_runs_of(one, share)), default=None)
        for one in (name, reference)
    ]
    return least[0] / least[1] if least[0] and least[1] else None


def _ratio(pairs: list[Pair]) -> float:
    return best_ratio([pair.echo.api_us for pair in pairs], [pair.work.api_us for pair in pairs])


def _known(keys: str, *, is_from_memory: bool) -> Callable[[Results], float | None]:
    """The ratio of known ids in the rounds that were answered from memory, or by the store."""
    name = f"quotagate/known id/{keys}" + ("" if is_from_memory else "/no memory")

    def reached(results: Results) -> float | None:
        pairs = [
            pair
            for pair in results.pairs_of(name)
            if (pair.work.local if is_from_memory else 1 - pair.work.local) >= NEARLY_ALL
        ]
        return _ratio(pairs) if pairs else None

    return reached


def _ratio_of(name: str) -> Callable[[Results], float | None]:
    return lambda results: ratio(results, name)


def _store_of(name: str) -> Callable[[Results], float | None]:
    return lambda results: store_echoes(results, name)


def _cost_of(name: str, reference: str) -> Callable[[Results], float | None]:
    return lambda results: cost_ratio(results, name, reference)


HOT: Final = {
    "one quota": 1.4,
    "token bucket": 1.4,
    "three quotas": 0.8,
    "no quota": 2.5,
    "check": 1.2,
    "one quota/batch": 6.0,
}
"""Decisions for one echo that are wanted, by kind of ask."""


def _named(kind: str, keys: str) -> str:
    kind, slash, _ = kind.partition("/")
    return f"quotagate/{kind}/{keys}" + ("/batch 100" if slash else "")


def _worded(kind: str) -> str:
    return "batch of 100, one quota" if "/" in kind else kind


def _rest_of_log(results: Results) -> float | None:
    cost = cost_ratio(results, "quotagate/one quota/hot/log all", "quotagate/one quota/hot/log off")
    return None if cost is None else cost - 1


def _waits(results: Results) -> float | None:
    return wait_ratio(results, COMPARED, "echo/one quota/hot", 0.5)


TARGETS: Final[tuple[Target, ...]] = (
    *(
        Target(f"decisions for one echo: {_worded(kind)}, hot", wanted, True, _ratio_of(_named(kind, "hot")))
        for kind, wanted in HOT.items()
    ),
    *(
        Target(
            f"decisions for one echo: known id, from {'memory' if is_from_memory else 'the store'}, {words}",
            round(share * wanted, 3),
            True,
            _known(keys, is_from_memory=is_from_memory),
        )
        for keys, words, share in (("hot", "hot", 1.0), ("uniform", "100,000 principals", UNIFORM_SHARE))
        for is_from_memory, wanted in ((False, 1.0), (True, 2.0))
    ),
    *(
        Target(
            f"decisions for one echo: {_worded(kind)}, 100,000 principals",
            round(UNIFORM_SHARE * wanted, 3),
            True,
            _ratio_of(_named(kind, "uniform")),
        )
        for kind, wanted in HOT.items()
    ),
    Target(
        "processor time of one quota, 100,000 principals, in times of hot ones",
        1.3,
        False,
        _cost_of("quotagate/one quota/uniform", COMPARED),
    ),
    Target("store, echoes for an ask: one quota", 0.4, False, _store_of(COMPARED)),
    Target("store, echoes for an ask: batches of 100", 0.2, False, _store_of(f"{COMPARED}/batch 100")),
    Target(
        "store, echoes for an ask: three quotas in batches of 100",
        0.7,
        False,
        _store_of("quotagate/three quotas/hot/batch 100"),
    ),
    Target(
        "decisions for each second of processor, in times of FastAPI with redis-py",
        8,
        True,
        _cost_of("fastapi/one quota/hot", COMPARED),
    ),
    Target(
        "decisions for each second of processor, in times of Node with rate-limiter-flexible",
        1.3,
        True,
        _cost_of("node/one quota/hot", COMPARED),
    ),
    Target("p99 at half of capacity, in times of the echo's", 3, False, _waits),
    Target(
        "processor time that a log of all decisions adds, as a share of a decision", 0.2, False, _rest_of_log
    ),
)
"""What issue "At speed" asks of this benchmark. Its other targets (the share of known ids that need no store
under the generator's traffic, a store that lost its state, a store that is away, memory of eight processes)
are tests."""
