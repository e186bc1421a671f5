"""The sieve is held to the judge: it confirms honest buckets, and none in which the judge finds anything."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import pytest

from app.domain.oracle import Oracle
from app.domain.quota import Quota
from tests.jobs.audits import asked_of
from tests.jobs.logs import SECRET, OracleLog, asks, quotas
from tests.jobs.test_judge import bring, know, ordered, renewal
from tests.planted import planted
from workers.jobs.audit import sieve
from workers.jobs.audit.bucket_findings import BucketTally
from workers.jobs.audit.judge import AuditRules, BucketJudge, Replay, judge_of, judged
from workers.jobs.audit.levels import LevelJudge
from workers.jobs.audit.saved_replays import decode, encode
from workers.jobs.audit.sieve import BucketColumns
from workers.jobs.verdicts import BucketRow

QUICK = (0, 0, 1, 2, 5, 20)
SLOW = (0, 5, 100, 1_000, 3_000, 20_000)
CLOCKS = (0, 1, 5, 20, 100, 1_000, -40, -30_000, 20_000)
Tallies = dict[Any, BucketTally]


class Honest(NamedTuple):
    """The buckets of an honest log, and the rules for them."""

    buckets: list[list[BucketRow]]
    rules: AuditRules


PIECE = 37
"""The rows of a piece: buckets of tests have several."""


def confirm(
    rows: Sequence[BucketRow], rules: AuditRules, by: Callable[..., Any] = sieve.confirm, *judge: BucketJudge
) -> Any:
    places: dict[Quota, int] = {}
    chosen = [places.setdefault(row.as_quota(), len(places)) for row in rows]
    columns = [[getattr(row, name) for row in rows] for name in BucketColumns._fields[:-1]] + [chosen]
    ends = [*range(0, len(rows), PIECE), len(rows)]
    pieces = (BucketColumns._make([column[a:b] for column in columns]) for a, b in pairwise(ends))
    return by(pieces, list(places), rules, *judge)


def judge(rows: Sequence[BucketRow], rules: AuditRules) -> tuple[Tallies, list[dict[str, Any]]]:
    """The judge's tallies and cases in one bucket."""
    found: list[dict[str, Any]] = list(judged(rows, rules))
    fields = BucketTally.__annotations__
    tallies = {
        row["principal"]: BucketTally(**{name: row[name] for name in fields})
        for row in found
        if row["case"] == "tally"
    }
    return tallies, [row for row in found if row["case"] != "tally"]


def hold(rows: Sequence[BucketRow], rules: AuditRules, by: Callable[..., Any] = sieve.confirm) -> bool:
    """Hold the sieve to the judge; return whether it confirmed the bucket."""
    mine = confirm(rows, rules, by)
    if mine is not None:
        tallies, cases = judge(rows, rules)
        assert not cases
        assert mine == tallies
        for tally in mine.values():
            counts = ("differs", "falsely_seen", "charged_again", "lost", "altered", "unlogged", "same_order")
            assert not any(getattr(tally, count) for count in counts)
    return mine is not None


def run(
    *changes: dict[str, dict[str, Any]], seed: int = 1, gap_ms: tuple[int, ...] = QUICK, **oracle: Any
) -> OracleLog:
    """Log random asks; each change replaces fields of the quotas by key, and 400 more asks follow."""
    log = OracleLog(Oracle(SECRET, **oracle))
    stream = asks(seed, ("a", "b", "c"))
    for change in ({}, *changes):
        log.quotas = {
            key: {entity: replace(quota, **change.get(key, {})) for entity, quota in mine.items()}
            for key, mine in log.quotas.items()
        }
        log.run(stream, 400, gap_ms, seed)
    return log


def every(**fields: Any) -> dict[str, dict[str, Any]]:
    return dict.fromkeys(quotas(), fields)


TOKENS: dict[str, Any] = {"algorithm": "token_bucket", "burst": 40_000.0, "max_debt": 80_000.0}
CHANGED: dict[str, dict[str, Any]] = {
    "producer_byte_rate": {"limit": 5_000},
    "producer_ids_rate": {"limit": 7},
    "request_rate": {"enforcement": "deny"},
    "controller_mutation_rate": {"limit": 10, "burst": 40},
    "consumer_byte_rate": {"limit": 90_000, "shadow": True},
    "connection_creation_rate": {"limit": 1},
}
AS_TOKENS: dict[str, dict[str, Any]] = {
    key: TOKENS | {"limit": 900} for key in ("producer_byte_rate", "consumer_byte_rate")
} | {
    "request_rate": TOKENS | {"limit": 2, "burst": 5.0, "max_debt": 9.0},
    "connection_creation_rate": TOKENS | {"limit": 0.5, "burst": 3.0},
}


def known() -> OracleLog:
    """Nodes answer alone for ids that they know, admitting them or repeating a refusal."""
    log, dice = OracleLog(Oracle(SECRET)), random.Random(1)
    ids: list[int] = []
    for turn in range(400):
        log.now_ms += dice.choice((1, 500, 4_000))
        some = dice.sample(ids, min(len(ids), 2))
        match turn % 7:
            case 0:
                ids = [*ids[-3:], turn]
                bring(log, *ids, mode="record")
            case 1:
                bring(log, *some, mode=dice.choice(("admit", "peek")))
            case 2:
                renewal(log, *ids)
            case 3:
                many = range(1_000 * turn, 1_000 * turn + 38)
                bring(log, *many)
                wait_ms = log.rows[-1]["throttle_ms"]
                if wait_ms > 2:
                    know(log, *many, outcome="throttle", throttle_ms=wait_ms - 2)
            case _:
                know(log, *some, after_ms=dice.choice((1, 900, 2_000)))
    return ordered(log)


LOGS: dict[str, Callable[[], OracleLog]] = {
    "quick": run,
    "slow": lambda: run(gap_ms=SLOW, seed=2),
    "changed limits": lambda: run(CHANGED, {}, every(limit=3), seed=3),
    "no limits": lambda: run(every(limit=0, max_debt=float("inf")), seed=4),
    "shadow": lambda: run(every(shadow=True), seed=5),
    "tokens": lambda: run(AS_TOKENS, seed=6),
    "tokens with delay": lambda: run({key: of | {"enforcement": "delay"} for key, of in AS_TOKENS.items()}),
    "one sample": lambda: run(every(samples=1), seed=7, gap_ms=SLOW),
    "sequential": lambda: run(AS_TOKENS, seed=8, gap_ms=SLOW, sequential=True),
    "known ids": known,
    "clocks": lambda: run(seed=9, gap_ms=CLOCKS),
    "few ids": lambda: run(seed=10, max_ids=60),
}
SHARES = {"clocks": 0.0, "few ids": 0.8, "one sample": 0.5}
"""The least share of buckets that are confirmed, for logs with much that is rare."""


@cache
def honest(name: str) -> Honest:
    rows = asked_of(LOGS[name]().rows)
    rules = AuditRules(sequential=name == "sequential", max_ids=60 if name == "few ids" else 1_000_000)
    return Honest([list(mine) for _, mine in groupby(rows, key=lambda row: row.key)], rules)


@pytest.mark.parametrize("name", LOGS)
def test_honest_buckets_are_confirmed_with_the_tallies_of_the_judge(name: str):
    buckets, rules = honest(name)
    confirmed = sum(hold(rows, rules) for rows in buckets)
    assert confirmed >= SHARES.get(name, 1.0) * len(buckets)


@pytest.mark.parametrize("name", ["quick", "tokens", "known ids"])
def test_rows_of_the_lead_in_are_replayed_but_not_counted(name: str):
    buckets, rules = honest(name)
    for rows in buckets:
        for from_ms in (rows[len(rows) // 2].at_ms, rows[-1].at_ms + 1):
            assert hold(rows, replace(rules, judge_from_ms=from_ms))
    assert confirm(buckets[0], replace(rules, judge_from_ms=buckets[0][-1].at_ms + 1)) == {}


def test_bucket_of_ids_that_may_be_older_than_the_log_is_left_to_the_judge():
    buckets, rules = honest("quick")
    later = {
        rows[0].algorithm: confirm(rows, replace(rules, is_whole=False, log_from_ms=0)) for rows in buckets
    }
    assert later["producer_ids"] is None
    assert later["token_bucket"] is not None


LATER = (
    "outcome",
    "throttle_ms",
    "usage",
    "observed",
    "is_refused",
    "ids",
    "charged_ids",
    "dropped",
    "again",
)
"""Faults that the judge explains by the state before them."""


@pytest.mark.parametrize("name", LOGS)
def test_sieve_leaves_the_state_that_the_judge_leaves(name: str):
    """After a bucket's first rows the judge goes on with the rest, honest or with a fault."""
    buckets, rules = honest(name)
    dice, confirmed, again = random.Random(name), 0, 0
    for rows in (rows for rows in buckets for _ in range(4)):
        cut = dice.randrange(1, len(rows) + 1)
        mine, theirs = Replay(judge_of(rows[0].algorithm, rules)), Replay()
        if confirm(rows[:cut], rules, sieve.confirm, mine.judge) is None:  # type: ignore[arg-type]  # set above
            continue
        list(judged(rows[:cut], rules, theirs))
        if isinstance(mine.judge, LevelJudge) and isinstance(theirs.judge, LevelJudge):
            mine.judge.before, mine.judge.written = theirs.judge.before, theirs.judge.written
        mine.last_order = theirs.last_order
        confirmed += 1
        rest = rows[cut:]
        if rest and dice.random() < 0.7:
            rest = with_fault(rest, dice.choice(LATER), dice) or rest
        if rest:
            kept = encode(mine)
            assert list(judged(rest, rules, mine)) == list(judged(rest, rules, theirs))
            again += confirm(rest, rules, sieve.confirm, decode(kept).judge) is not None  # type: ignore[arg-type]
    assert confirmed >= 3 * SHARES.get(name, 1.0) * len(buckets)
    assert again or name == "clocks"


POOL: dict[str, Sequence[Any]] = {
    "mode": ("admit", "peek", "record", "refund"),
    "outcome": ("admit", "delay", "throttle", "reject"),
    "reason": (None, "capacity", "too_large"),
    "how": ("", "alone", "renewal", "undo", "lease"),
    "enforcement": ("deny", "delay"),
    "algorithm": ("sampled_rate", "token_bucket", "producer_ids"),
    "quota": ("request_rate", "producer_byte_rate", "connection_creation_rate"),
    "principal": ("a", "b", None),
    "scope": ("cluster", "broker"),
    "correction": (0, 1, 2),
}
"""The values of columns whose values are names."""
LISTS = ("ids", "charged_ids", "refreshed_ids")
UNREAD = {"key", "bucket", "entity", "lease", "lease_ms", "bucket_order"}
FIELDS = [name for name in BucketRow._fields if name not in UNREAD]


def altered(row: BucketRow, field: str, dice: random.Random) -> BucketRow:
    """The row with another value in one field."""
    value = getattr(row, field)
    new: Any
    if field in LISTS:
        ids = value or []
        new = dice.choice((ids[1:], [7, *ids[1:]], [*ids, dice.choice((7, *(row.ids or ())))], ids + ids[:1]))
    elif field in POOL:
        new = dice.choice([each for each in POOL[field] if each != value])
    elif isinstance(value, bool):
        new = not value
    elif value is None:
        new = dice.choice((0.0, 1.0, 1e6))
    elif isinstance(value, int):
        new = max(value + dice.choice((-1_000, -1, 1, 1_000, value)), 1)
    else:
        new = dice.choice((value + 1, value - 1, value * 2, value * (1 + 1e-6), 0.0))
        new = dice.choice((None, new)) if field in {"observed", "remaining", "max_debt"} else new
    return row._replace(**{field: new})


def with_fault(rows: Sequence[BucketRow], kind: str, dice: random.Random) -> list[BucketRow]:
    """A bucket's rows with one fault: a kind is a field, or a change of whole rows."""
    faulty, places = list(rows), range(len(rows))
    place = dice.choice([each for each in places if kind in LISTS and getattr(rows[each], kind)] or places)
    other = dice.randrange(len(rows))
    one, two = faulty[place], faulty[other]
    match kind:
        case "dropped":
            del faulty[place]
        case "doubled":
            faulty.insert(place, one)
        case "again":
            faulty.insert(place + 1, one._replace(order=one.order + 1))
        case "swapped":
            faulty[place], faulty[other] = two, one
        case "exchanged":  # each takes the other's place and time
            faulty[place] = two._replace(order=one.order, at_ms=one.at_ms)
            faulty[other] = one._replace(order=two.order, at_ms=two.at_ms)
        case _:
            faulty[place] = altered(one, kind, dice)
    return faulty


KINDS = (*FIELDS, "dropped", "doubled", "again", "swapped", "exchanged")
TELLING = {"outcome", "throttle_ms", "reason", "correction", "doubled", "swapped", "quota", "algorithm"}
"""The kinds of faults that hardly ever leave an honest bucket."""


def hold_to_faults(
    faults: int, kinds: Sequence[str] = KINDS, by: Callable[..., Any] = sieve.confirm
) -> Counter[str]:
    """Hold the sieve to the judge over buckets with one fault each; count by kind the confirmed ones."""
    dice = random.Random(1)
    choices: dict[str, list[tuple[list[BucketRow], AuditRules]]] = {}
    for buckets, rules in map(honest, LOGS):
        for rows in buckets:
            if confirm(rows, rules) is not None:
                choices.setdefault(rows[0].algorithm, []).append((rows, rules))
    confirmed: Counter[str] = Counter()
    for number in range(faults):
        rows, rules = dice.choice(choices[dice.choice(sorted(choices))])
        kind = kinds[number % len(kinds)]
        confirmed[kind] += hold(with_fault(rows, kind, dice), rules, by)
    return confirmed


@pytest.mark.parametrize("faults", [400, pytest.param(20_000, marks=pytest.mark.prove, id="long")])
def test_no_bucket_with_a_finding_is_confirmed(faults: int):
    confirmed = hold_to_faults(faults)
    assert 0.3 * faults < confirmed.total() < 0.6 * faults, "many fields are not read in every bucket"
    telling = sum(confirmed[kind] for kind in TELLING)
    assert telling < 0.1 * faults * len(TELLING) / len(KINDS), "of these nearly all are stopped"


COMPARED = "if exact != (outcome, throttle_ms, reason):"
PLANTED = {
    "the numbers shown": ("return not (is_close", "return False and (is_close", ("usage", "observed")),
    "the verdict of a rate": (
        f"""{COMPARED}
            return False
        if mode == "refund":""",
        'if mode == "refund":',
        ("outcome", "throttle_ms", "reason"),
    ),
    "the verdict of a token bucket": (
        f"""{COMPARED}
            return False
        if mode != "peek":""",
        'if mode != "peek":',
        ("outcome", "reason"),
    ),
    "the verdict on ids": (
        f"""{COMPARED}
                return False
            if is_refused""",
        "if is_refused",
        ("outcome", "throttle_ms", "reason"),
    ),
    "the least wait": ("if was_enough and throttle_ms > 1:", "if False:", ("throttle_ms",)),
    "the number of charges": ("round(observed) != charged + said", "False", ("observed", "dropped")),
    "the charged ids": ("fresh != set(charged_ids or ())", "False", ("charged_ids", "ids")),
    "the refreshed ids": ("if not stale.issubset(refreshed_ids or ()):", "if False:", ("refreshed_ids",)),
    "the order": ("before < after or", "before <= after or", ("doubled",)),
    "corrections": ("any(rows.correction)", "False", ("correction",)),
}
"""Comparisons that a planted fault leaves out, and the kinds of faults that need them."""


@pytest.mark.parametrize("name", PLANTED)
def test_sieve_without_a_comparison_is_caught(name: str):
    right, wrong, kinds = PLANTED[name]
    with pytest.raises(AssertionError):
        hold_to_faults(300, kinds, planted(sieve, right, wrong)["confirm"])
