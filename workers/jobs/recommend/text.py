"""The recommendation as texts: the file of quotas with its comments, and the printed summary."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from app import quota_file
from app.domain.quota import PRODUCER_IDS_RATE
from app.terminal import duration, plain
from workers.jobs.charts import clock
from workers.jobs.recommend.limits import DAY_MS, FEWEST_PEERS, KeyLimits, Limit, Outlier

if TYPE_CHECKING:
    from workers.jobs.recommend.report import Recommendation
    from workers.jobs.whatif.compared import World

NAMED: Final = 10
"""How many outliers are printed, and in the file; the table has all."""


def quotas(made: Recommendation) -> str:
    """The file of quotas."""
    comments = {(limit.entity, each.quota): comment(each, limit) for each in made.found for limit in each.own}
    for each in made.found:
        if each.default:
            comments[each.default.entity, each.quota] = comment(each, each.default)
    head = [f"# {plain(line)}".rstrip() for line in _head(made)]
    lines = quota_file.quota_lines(quota_file.ordered(made.definitions.items()), comments)
    return "\n".join([*head, *(line.rstrip("\n") for line in lines), ""])


def comment(found: KeyLimits, limit: Limit) -> str:
    """A limit in words: the need that it rests on, the entities that it is for, and how far to trust it."""
    share = f"{limit.asks / found.asks:.1%} of the asks"
    trust = f"{duration(limit.history_ms)} of history, {limit.confidence} confidence"
    need = f"rests on a need of {shown(limit.need)}, with {limit.limit / limit.need - 1:.0%} of headroom"
    if limit is found.default:
        return f"{need}; {limit.entities:,} of {found.entities:,} entities need no more; {share}; {trust}"
    times = f"{limit.need / found.default.need:.3g} times the default's need; " if found.default else ""
    return f"{need}; {times}{share}; {trust}"


def outlier_line(key: str, outlier: Outlier) -> str:
    """An outlier in words."""
    reasons = [f"needs {shown(outlier.need)}"]
    if outlier.times_typical is not None:
        reasons.append(f"{outlier.times_typical:.3g} times as much as its peers let expect")
    if key == PRODUCER_IDS_RATE:
        reasons.append(f"{outlier.ids_of_an_ask:.2f} new ids for each ask")
    reasons.append(f"{outlier.held:,} of its {outlier.asks:,} asks need more than the default")
    return f"{outlier.entity}: {key}: {', '.join(reasons)}"


def summary(made: Recommendation, out: str, took_s: float) -> str:
    """The text for the terminal."""
    return "\n".join(
        [
            *_table(made),
            *_outlier_lines(made),
            *effects(made),
            *notes(made),
            f"{took_s:.0f} s; the limits are {out}/quotas.yaml, the report is {out}/report.html",
            f"next: quotagate quotas plan -f {out}/quotas.yaml --only-named",
        ]
    )


def _table(made: Recommendation) -> Iterator[str]:
    yield f"{'':28} {'default':>12} {'need':>12} {'own limits':>10} {'outliers':>8}  confidence"
    for each in made.found:
        default = each.default
        limit, need, trust = (
            (shown(default.limit), shown(default.need), default.confidence) if default else ("none", "", "")
        )
        yield f"{each.quota:28} {limit:>12} {need:>12} {len(each.own):10,} {len(each.outliers):8,}  {trust}"


def _outlier_lines(made: Recommendation) -> Iterator[str]:
    lines = [outlier_line(each.quota, outlier) for each in made.found for outlier in each.outliers]
    if lines:
        yield "Outliers get no limit of their own for any key. Look at them first; add those that are right:"
        yield from (f"  {plain(line)}" for line in lines[:NAMED])
        if len(lines) > NAMED:
            yield f"  and {len(lines) - NAMED:,} more, in the table `outliers`"


def basis(made: Recommendation) -> str:
    """How limits follow from the log."""
    return (
        f"A need is the least limit that does not hold up {100 * made.basis.quantile:.8g}% of an entity's "
        f"asks; a limit is the need and {made.basis.headroom:.0%} of headroom."
    )


def effects(made: Recommendation) -> Iterator[str]:
    """The asks that the limits would have refused or delayed."""
    outliers, others = made.effects
    yield f"Under these limits, of the asks of outliers {_held(outliers)}; of all others {_held(others)}."


def _held(world: World) -> str:
    asks, delayed = world.decisions.total(), world.decisions["delay"]
    return f"{world.refused:,} of {asks:,} would have been refused, and {delayed:,} delayed"


def notes(made: Recommendation) -> Iterator[str]:
    """Everything that makes the limits less certain."""
    needed = made.demands
    if few := [each.quota for each in made.found if not each.is_compared]:
        yield f"Too few entities to find outliers by their peers, at most {FEWEST_PEERS}: {', '.join(few)}."
    for each in made.found:
        if each.default is None:
            yield f"No limit for {each.quota}: all of its {len(each.outliers):,} entities are outliers."
    if made.to_ms - made.from_ms < 7 * DAY_MS:
        covered = duration(made.to_ms - made.from_ms)
        yield f"The log covers {covered}; a week would have every hour and every weekday."
    if needed.refused:
        yield (
            f"The quotas of the log refused {needed.refused:,} of {needed.asks:,} asks; one that came again "
            "counts each time."
        )
    if needed.uncovered:
        yield f"No limit of these applies to {needed.uncovered:,} of {needed.asks:,} asks."


def _head(made: Recommendation) -> Iterator[str]:
    yield f"Recommended by `quotagate recommend` from {made.log},"
    yield f"{clock(made.from_ms)} to {clock(made.to_ms)} UTC: {made.demands.asks:,} asks."
    yield basis(made)
    yield from effects(made)
    yield from notes(made)
    outliers = list(_outlier_lines(made))
    yield from outliers or ["No outliers."]
    yield "To see the changes, other entities untouched: quotagate quotas plan -f quotas.yaml --only-named"


def shown(value: float) -> str:
    """A limit or a need, with all its digits.

    >>> shown(1_240_000.0), shown(0.12)
    ('1,240,000', '0.12')
    """
    return f"{value:,.15g}"
