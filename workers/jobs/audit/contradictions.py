"""Checks a row of the log against itself: its decision against its verdicts, and these against its ask.

Three kinds of findings: a decision that does not follow from its verdicts (``differs``), a row with fields
that cannot both be true (``contradicts``), and a time that does not fit the row's place in the
store's order (``clock``). The checks are plain functions of one row; ``row_rules`` finds the rows that need
them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import islice
from operator import attrgetter
from typing import Any, Final, NamedTuple, get_args

import pyarrow as pa

from app.domain.ask import MODES, Ask
from app.domain.decision import OUTCOMES, Source, Verdict, combine, is_charged
from app.domain.entity import Entity
from app.domain.errors import EntityError
from app.domain.ladder import MatchingRules, applied_quotas
from app.domain.quota import KEYS, Quota
from workers.jobs.audit.bucket_findings import SCHEMA, case_of, verdict_text
from workers.jobs.verdicts import ORDERS_PER_MS

SOURCES: Final[tuple[str, ...]] = get_args(Source)
WAITS: Final = frozenset({"delay", "throttle"})
REFUSES: Final = frozenset({"throttle", "reject"})
WITHOUT_COUNTER: Final = frozenset({"store_failure", "store_full"})
"""Reasons of verdicts without a bucket: the failure policy may refuse under any enforcement."""

CLOSE: Final = 1e-9
CLOCK_MS: Final = 1_000
"""How far a row's time may be from the time in its order: smaller clock corrections are normal."""

SINCE_MS: Final = 1_000_000_000_000
"""Orders before 2001 are not times: generated logs just count."""

EXAMPLES: Final = 20
"""How many contradictions of each kind one task keeps as cases; all of them are counted."""

_MANY: Final = 65_536
_PREFIX: Final = re.compile(r"%2F(\d{1,3})(?:;|$)")


class VerdictRow(NamedTuple):
    """The fields of a logged verdict that are checked."""

    quota: str
    entity: str
    bucket: str
    limit: float
    algorithm: str
    enforcement: str
    shadow: bool
    scope: str
    usage: float
    outcome: str
    throttle_ms: int
    reason: str | None
    charged_ids: Sequence[int] | None
    refreshed_ids: Sequence[int] | None


class DecisionRow(NamedTuple):
    """The columns of the log that are checked."""

    kind: str
    batch: str
    place: int
    at_ms: int
    order: int | None
    principal: str | None
    client_id: str | None
    ip: str | None
    broker: str | None
    listener: str | None
    mode: str | None
    deny: bool
    cluster_action: bool
    usage: Sequence[tuple[str, float]]
    ids: Sequence[int] | None
    decision: str | None
    throttle_ms: int
    charged: bool
    applied: int
    source: str | None
    replayed: bool
    failure: str | None
    limited_by: dict[str, Any] | None
    verdicts: Sequence[VerdictRow]


class Contradiction(NamedTuple):
    """A logged value, and the value that the rest of the row implies; ``field`` names the check."""

    field: str
    logged: str
    exact: str
    verdict: VerdictRow | None = None


def decision_rows(batches: Iterable[pa.RecordBatch]) -> Iterator[DecisionRow]:
    """The rows of decisions in Arrow batches, read column by column for speed."""
    for batch in batches:
        columns = [batch.column(name).to_pylist() for name in DecisionRow._fields[:-1]]
        nested = batch.column("verdicts")
        flat = nested.flatten()
        fields = (flat.field(name).to_pylist() for name in VerdictRow._fields)
        verdicts = map(VerdictRow._make, zip(*fields, strict=True))
        sizes = nested.value_lengths().fill_null(0).to_pylist()
        for *row, size in zip(*columns, sizes, strict=True):
            row_verdicts = list(islice(verdicts, size))
            if row[0] in {"decision", "late", "ids"}:
                yield DecisionRow._make((*row, row_verdicts))


def contradictions(row: DecisionRow, *, by_store: bool = True) -> Iterator[Contradiction]:
    """The contradictions in a row.

    Args:
        by_store: times are the store's, not the callers'.
    """
    if by_store:
        yield from _check_clock(row)
    if row.mode is not None and row.mode not in MODES:
        yield Contradiction("mode", f"mode {row.mode}", f"one of {', '.join(MODES)}")
        return
    if row.kind != "ids":
        yield from _check_decision(row)
    for verdict in row.verdicts:
        for found in _check_verdict(row, verdict):
            yield found._replace(verdict=verdict)


def wrong_decision(row: DecisionRow, *, sequential: bool) -> Contradiction | None:
    """The difference between the store's decision and the decision that follows from its verdicts.

    Args:
        sequential: request delays are added to byte delays (``QUOTAGATE_COMBINE_DELAYS``).
    """
    if row.source != "store" or row.order is None or row.kind == "ids" or row.replayed:
        return None
    if row.decision in ("admit", None) and all(verdict.outcome == "admit" for verdict in row.verdicts):
        return None
    decision, throttle_ms, limited_by = _combined(
        tuple(map(_to_combine, row.verdicts)), sequential=sequential
    )
    by = row.limited_by or {}
    logged_by = tuple(by.get(name) for name in ("quota", "bucket", "entity", "reason"))
    exact = _decision_text(decision, throttle_ms, *limited_by)
    logged = _decision_text(str(row.decision), row.throttle_ms, *logged_by)
    return None if exact == logged else Contradiction("differs", logged, exact)


def checking(
    *, by_store: bool, sequential: bool
) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """A function from batches of the log's rows to their findings, as rows of ``bucket_findings.SCHEMA``."""

    def check(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        noted: Counter[str] = Counter()
        for batch in batches:
            cases: list[dict[str, Any]] = []
            uncounted: Counter[tuple[str | None, str]] = Counter()
            for row in decision_rows([batch]):
                if wrong := wrong_decision(row, sequential=sequential):
                    cases.append(case_of("differs", row, None, wrong.logged, wrong.exact, differs=1))
                kinds = set()
                for found in contradictions(row, by_store=by_store):
                    kind = "clock" if found.field == "clock" else "contradicts"
                    count = int(kind not in kinds)  # a row counts once
                    kinds.add(kind)
                    noted[found.field] += 1
                    if noted[found.field] <= EXAMPLES:
                        exact = f"{found.exact} (place {row.place} of batch {row.batch})"
                        cases.append(case_of(kind, row, found.verdict, found.logged, exact, **{kind: count}))
                    elif count:
                        uncounted[row.principal, kind] += 1
            cases += [{"principal": who, kind: count} for (who, kind), count in uncounted.items()]
            if cases:
                yield pa.RecordBatch.from_pylist(cases, SCHEMA)

    return check


def _check_clock(row: DecisionRow) -> Iterator[Contradiction]:
    """Compare a row's time with the time in its place in the store's order, which never goes back."""
    if row.order is None:
        return
    ordered_ms = row.order // ORDERS_PER_MS
    if ordered_ms >= SINCE_MS and abs(ordered_ms - row.at_ms) > CLOCK_MS:
        yield Contradiction("clock", f"at_ms {row.at_ms}", f"{ordered_ms}, by its place in the store's order")


def _check_decision(row: DecisionRow) -> Iterator[Contradiction]:
    if row.decision not in OUTCOMES or row.source not in SOURCES or row.mode is None:
        logged = f"mode, decision and source {row.mode}, {row.decision}, {row.source}"
        yield Contradiction("decision", logged, "known words")
        return
    yield from _check_wait(row.decision, row.throttle_ms)
    if row.decision in REFUSES and row.mode in {"record", "refund"}:
        yield Contradiction("mode", f"mode {row.mode}", f"admit or peek, as it was refused: {row.decision}")
    if row.failure is not None and row.source != "fallback":
        yield Contradiction("source", f"source {row.source}", f"fallback, as the store failed: {row.failure}")
    if row.replayed:
        yield from _check_replay(row)
        return
    if row.applied != len(row.verdicts):
        yield Contradiction("applied", f"applied {row.applied}", f"{len(row.verdicts)}, by its verdicts")
    if row.source == "fallback":  # its call may have charged some buckets and not others
        yield from _check_fallback(row)
    elif row.charged != is_charged(row.mode, row.decision):  # type: ignore[arg-type]  # checked above
        exact = f"{not row.charged}, by mode {row.mode} and decision {row.decision}"
        yield Contradiction("charged", f"charged {row.charged}", exact)
    if row.source == "store" and not row.verdicts:
        yield Contradiction("source", "source store", "local, as no quota has a verdict")
    if row.source == "store" and row.order is None and row.mode != "peek":
        yield Contradiction("order", "no order", "a place in the store's order, as the store decided")


def _check_wait(outcome: str, throttle_ms: int) -> Iterator[Contradiction]:
    if (throttle_ms > 0) != (outcome in WAITS):
        exact = "a wait if, and only if, the ask is delayed or throttled"
        yield Contradiction("throttle_ms", f"{outcome} of {throttle_ms} ms", exact)


def _check_replay(row: DecisionRow) -> Iterator[Contradiction]:
    """An answer repeated to a retry charges nothing; only answers that charged a bucket are repeated."""
    if row.verdicts:
        logged = f"replayed, with {len(row.verdicts)} verdicts"
        yield Contradiction("replayed", logged, "no verdicts: it charges nothing")
    if not row.charged or row.applied < 1 or row.mode == "peek" or row.decision in REFUSES:
        logged = f"replayed, {row.mode}, {row.decision}, charged {row.charged}, applied {row.applied}"
        yield Contradiction("replayed", logged, "only an answer that charged a bucket is kept")


def _check_fallback(row: DecisionRow) -> Iterator[Contradiction]:
    """A decision without the store follows from its verdicts, unless the throttle factor refused the ask."""
    if (row.limited_by or {}).get("quota") == "throttle_factor" or len(row.verdicts) != row.applied:
        return
    verdicts = tuple(map(_to_combine, row.verdicts))
    exact = [_combined(verdicts, sequential=sequential)[:2] for sequential in (False, True)]
    if (row.decision, row.throttle_ms) not in exact:
        outcome, wait = exact[0]
        logged = f"{row.decision} of {row.throttle_ms} ms without the store"
        yield Contradiction("decision", logged, f"{outcome} of {wait} ms, by its verdicts")


COMBINED: Final = (
    "quota",
    "entity",
    "bucket",
    "limit",
    "enforcement",
    "shadow",
    "outcome",
    "throttle_ms",
    "reason",
)
"""The fields of verdicts from which a decision follows."""
_to_combine = attrgetter(*COMBINED)


@lru_cache(_MANY)
def _combined(
    verdicts: tuple[tuple[Any, ...], ...], *, sequential: bool
) -> tuple[str, int, tuple[str | None, ...]]:
    whole = [Verdict(**dict(zip(COMBINED, fields, strict=True))) for fields in verdicts]
    decision, throttle_ms, by = combine(whole, sequential=sequential)
    return decision, throttle_ms, (by.quota, by.bucket, by.entity, by.reason) if by else (None,) * 4


def _decision_text(
    decision: str,
    throttle_ms: int,
    quota: str | None,
    bucket: str | None,
    entity: str | None,
    reason: str | None,
) -> str:
    by = f" by {quota} of {bucket}" if quota else ""
    entity = f", set on {entity}" if entity else ""
    return f"the decision: {verdict_text(decision, throttle_ms, reason)}{by}{entity}"


def _check_verdict(row: DecisionRow, verdict: VerdictRow) -> Iterator[Contradiction]:
    """The fields of a verdict that do not follow from the ask."""
    if verdict.outcome not in OUTCOMES or verdict.quota not in KEYS:
        yield Contradiction("verdict", f"{verdict.outcome} by {verdict.quota}", "known words")
        return
    yield from _check_bucket(row, verdict)
    yield from _check_usage(row, verdict)
    yield from _check_enforcement(row, verdict)
    yield from _check_wait(verdict.outcome, verdict.throttle_ms)
    if verdict.charged_ids or verdict.refreshed_ids:
        yield from _check_ids(row, verdict)


def _check_bucket(row: DecisionRow, verdict: VerdictRow) -> Iterator[Contradiction]:
    """The bucket must be the caller's bucket under the entity's quota."""
    prefix = _PREFIX.search(verdict.bucket)
    bucket = _bucket(
        verdict.quota,
        verdict.scope,
        verdict.entity,
        int(prefix[1]) if prefix and verdict.bucket.startswith("ip=") else 64,
        row.cluster_action,
        (row.principal, row.client_id, row.ip, row.broker, row.listener),
    )
    if bucket is None:
        logged = f"{verdict.quota} of {verdict.entity}"
        yield Contradiction("entity", logged, "an entity that matches the caller")
    elif bucket != verdict.bucket:
        field = "broker" if bucket.partition(";")[0] == verdict.bucket.partition(";")[0] else "bucket"
        yield Contradiction(field, f"bucket {verdict.bucket}", f"{bucket}, by the caller")


@lru_cache(_MANY)
def _bucket(
    key: str,
    scope: str,
    entity: str,
    ipv6_prefix: int,
    cluster_action: bool,
    caller: tuple[str | None, ...],
) -> str | None:
    """The bucket that a quota of an entity has for a caller; None if it does not apply to the caller."""
    quota_key = KEYS[key]
    principal, client_id, ip, broker, listener = caller
    usage = {quota_key.usage: 1}
    ask = Ask(usage, (), principal, client_id, ip, broker, listener, cluster_action=cluster_action)
    try:
        quota = Quota(key, 1, quota_key.algorithm, "deny", scope=scope)  # type: ignore[arg-type]  # as logged
        quotas = {key: {Entity.parse(entity): quota}}
        applied = applied_quotas(ask, quotas, MatchingRules(ipv6_prefix=ipv6_prefix))
    except (EntityError, ValueError):
        return None
    return applied[0].bucket if applied else None


def _check_usage(row: DecisionRow, verdict: VerdictRow) -> Iterator[Contradiction]:
    key = KEYS[verdict.quota]
    if verdict.algorithm == "producer_ids":
        usage: float | None = float(len(row.ids or ()))
    else:
        usage = next((amount / key.per_unit for name, amount in row.usage if name == key.usage), None)
    if usage is None or not abs(usage - verdict.usage) <= CLOSE * max(1.0, abs(usage)):
        exact = f"no {key.usage}" if usage is None else f"{usage:.12g}"
        yield Contradiction("usage", f"usage {verdict.usage:.12g}", f"{exact}, by its ask")


def _check_enforcement(row: DecisionRow, verdict: VerdictRow) -> Iterator[Contradiction]:
    """The ask's mode must allow the enforcement, and both must allow the outcome.

    An ask by a bound key is logged with ``deny``, and its verdicts have the enforcement ``deny``.
    """
    records = row.mode == "record"
    enforcement = "deny" if row.deny else verdict.enforcement
    if records and verdict.algorithm != "producer_ids":
        enforcement = "delay"
    if row.kind != "ids" and verdict.enforcement != enforcement:
        exact = f"{enforcement}, by mode {row.mode}{' and deny' if row.deny else ''}"
        yield Contradiction("enforcement", f"enforcement {verdict.enforcement}", exact)
    if verdict.reason in WITHOUT_COUNTER:
        return
    if records:
        allowed = {"admit", "delay"}
    elif row.mode == "refund":
        allowed = {"admit"}
    else:
        allowed = {"admit", "reject", "delay" if verdict.enforcement == "delay" else "throttle"}
    if verdict.outcome not in allowed:
        why = f"by mode {row.mode} and enforcement {verdict.enforcement}"
        exact = f"one of {', '.join(sorted(allowed))}, {why}"
        yield Contradiction("mode", f"outcome {verdict.outcome}", exact)


def _check_ids(row: DecisionRow, verdict: VerdictRow) -> Iterator[Contradiction]:
    charged, refreshed = set(verdict.charged_ids or ()), set(verdict.refreshed_ids or ())
    if not charged | refreshed <= set(row.ids or ()) or charged & refreshed:
        exact = "ids of the ask, each charged or refreshed, not both"
        yield Contradiction("ids", "ids charged or refreshed", exact)
    if row.mode in {"peek", "refund"}:
        yield Contradiction("mode", f"mode {row.mode}", "one that writes, as ids were charged or refreshed")
    if charged and row.decision in REFUSES:
        exact = "one that lets the ask pass, as ids were charged"
        yield Contradiction("decision", f"decision {row.decision}", exact)
