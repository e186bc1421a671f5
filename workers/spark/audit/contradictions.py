"""Whether a row of the log agrees with itself: its decision with its verdicts, and these with who asked.

Plain functions of one row, without Spark: the job runs them over all rows, the tests over those of a file.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple, get_args

import pyarrow as pa

from app.domain.ask import MODES, Ask
from app.domain.decision import OUTCOMES, Source, Verdict, combine, is_charged
from app.domain.entity import Entity, EntityError
from app.domain.ladder import Rules, applied
from app.domain.quota import KEYS, Quota

SOURCES: Final[tuple[str, ...]] = get_args(Source)
WAITS: Final = frozenset({"delay", "throttle"})
REFUSES: Final = frozenset({"throttle", "reject"})
WITHOUT_COUNTER: Final = frozenset({"store_failure", "store_full"})
"""Why a verdict was given without its bucket: then the failure's policy refuses, whatever the enforcement."""

CLOSE: Final = 1e-9
CLOCK_MS: Final = 1_000
"""So far a row's time may lie from the time in its place in the store's order: smaller steps are no news."""

ORDER_OF_A_MS: Final = 128 * 1_000
"""The order of a call is the store's time in microseconds, or later, times 128 (docs/decisions, 0033)."""

SINCE_MS: Final = 1_000_000_000_000
"""Orders of before 2001 are no times: generated logs just count."""

EXAMPLES: Final = 20
"""Cases of each kind that one program shows; all of them are counted."""

_MANY: Final = 65_536
_PREFIX: Final = re.compile(r"%2F(\d{1,3})(?:;|$)")


class Said(NamedTuple):
    """What is looked at of a verdict."""

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


class Row(NamedTuple):
    """What is looked at of a row."""

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
    verdicts: Sequence[Said]


class Contradiction(NamedTuple):
    """What a row says, and what the rest of it makes that; ``field`` names it."""

    field: str
    logged: str
    exact: str
    verdict: Said | None = None


def rows_of(batches: Iterable[pa.RecordBatch]) -> Iterator[Row]:
    """The rows of decisions among the log's, column by column: many are read."""
    for batch in batches:
        kinds = batch.column("kind").to_pylist()
        columns = [batch.column(name).to_pylist() for name in Row._fields[1:-1]]
        verdicts = batch.column("verdicts")
        flat = verdicts.flatten()
        said = list(
            map(Said._make, zip(*(flat.field(name).to_pylist() for name in Said._fields), strict=True))
        )
        at = 0
        for row in zip(kinds, *columns, (verdicts.value_lengths().fill_null(0)).to_pylist(), strict=True):
            its = said[at : at + row[-1]]
            at += row[-1]
            if row[0] in {"decision", "late", "ids"}:
                yield Row._make((*row[:-1], its))


def contradictions(row: Row, *, by_store: bool = True) -> Iterator[Contradiction]:
    """What in a row contradicts the rest of it.

    Args:
        by_store: its time is the store's, not the caller's.
    """
    if by_store:
        yield from _clock(row)
    if row.mode is not None and row.mode not in MODES:
        yield Contradiction("mode", f"mode {row.mode}", f"one of {', '.join(MODES)}")
        return
    if row.kind != "ids":
        yield from _decision(row)
    for verdict in row.verdicts:
        for each in _verdict(row, verdict):
            yield each._replace(verdict=verdict)


def contradicting(*, by_store: bool) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """For ``mapInArrow`` over rows of the log: what is found, as rows of cases and counts."""

    def look(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        shown: Counter[str] = Counter()
        for batch in batches:
            found: list[dict[str, Any]] = []
            more: Counter[tuple[str | None, str]] = Counter()
            for row in rows_of([batch]):
                names = set()
                for each in contradictions(row, by_store=by_store):
                    kind = "clock" if each.field == "clock" else "contradicts"
                    count = int(kind not in names)  # a row counts once
                    names.add(kind)
                    shown[each.field] += 1
                    if shown[each.field] <= EXAMPLES:
                        found.append(_case(row, each, kind, count))
                    elif count:
                        more[row.principal, kind] += 1
            found += [{"principal": who, kind: count} for (who, kind), count in more.items()]
            if found:
                yield pa.RecordBatch.from_pylist(found, SCHEMA)

    return look


SCHEMA: Final = pa.schema(
    [
        ("case", pa.string()),
        ("principal", pa.string()),
        ("quota", pa.string()),
        ("bucket", pa.string()),
        ("at_ms", pa.int64()),
        ("order", pa.int64()),
        ("logged", pa.string()),
        ("exact", pa.string()),
        ("contradicts", pa.int64()),
        ("clock", pa.int64()),
    ]
)
"""Cases, and counts of those that are not shown, which have no ``case``."""


def _case(row: Row, found: Contradiction, kind: str, count: int) -> dict[str, Any]:
    verdict = found.verdict
    return {
        "case": kind,
        "principal": row.principal,
        "quota": verdict.quota if verdict else None,
        "bucket": verdict.bucket if verdict else None,
        "at_ms": row.at_ms,
        "order": row.order,
        "logged": found.logged,
        "exact": f"{found.exact} (place {row.place} of batch {row.batch})",
        kind: count,
    }


def _clock(row: Row) -> Iterator[Contradiction]:
    """Whether a row's time is that of its place in the store's order, which never goes back."""
    if row.order is None:
        return
    ordered_ms = row.order // ORDER_OF_A_MS
    if ordered_ms >= SINCE_MS and abs(ordered_ms - row.at_ms) > CLOCK_MS:
        yield Contradiction("clock", f"at_ms {row.at_ms}", f"{ordered_ms}, by its place in the store's order")


def _decision(row: Row) -> Iterator[Contradiction]:
    if row.decision not in OUTCOMES or row.source not in SOURCES or row.mode is None:
        said = f"{row.mode}, {row.decision}, {row.source}"
        yield Contradiction("decision", f"mode, decision and source {said}", "words that there are")
        return
    if (row.throttle_ms > 0) != (row.decision in WAITS):
        yield Contradiction("throttle_ms", f"{row.decision} of {row.throttle_ms} ms", "a wait just to wait")
    refuses = row.decision in REFUSES
    if refuses and row.mode in {"record", "refund"}:
        yield Contradiction("mode", f"mode {row.mode}", f"admit or peek, as it was refused: {row.decision}")
    if row.failure is not None and row.source != "fallback":
        yield Contradiction("source", f"source {row.source}", f"fallback, as the store failed: {row.failure}")
    if row.replayed:
        yield from _replay(row)
        return
    if row.applied != len(row.verdicts):
        yield Contradiction("applied", f"applied {row.applied}", f"{len(row.verdicts)}, by its verdicts")
    if row.source != "fallback":  # which may have charged some buckets and not others
        charged = is_charged(row.mode, row.decision)  # type: ignore[arg-type]  # looked at above
        if row.charged != charged:
            what = f"{charged}, by mode {row.mode} and decision {row.decision}"
            yield Contradiction("charged", f"charged {row.charged}", what)
    else:
        yield from _by_policy(row)
    if row.source == "store" and not row.verdicts:
        yield Contradiction("source", "source store", "local, as no quota has a verdict")
    if row.source == "store" and row.order is None and row.mode != "peek":
        yield Contradiction("order", "no order", "a place in the store's order, as the store decided")


def _replay(row: Row) -> Iterator[Contradiction]:
    """An answer given again: only what charged a bucket is kept, and it charges nothing."""
    if row.verdicts:
        yield Contradiction(
            "replayed", f"replayed, with {len(row.verdicts)} verdicts", "none: it charges none"
        )
    if not row.charged or row.applied < 1 or row.mode == "peek" or row.decision in REFUSES:
        said = f"replayed, {row.mode}, {row.decision}, charged {row.charged}, applied {row.applied}"
        yield Contradiction("replayed", said, "only an answer that charged a bucket is kept")


def _by_policy(row: Row) -> Iterator[Contradiction]:
    """A decision without the store is what its verdicts make, unless the throttle factor held the ask."""
    if (row.limited_by or {}).get("quota") == "throttle_factor" or len(row.verdicts) != row.applied:
        return
    verdicts = tuple((v.quota, v.shadow, v.outcome, v.throttle_ms) for v in row.verdicts)
    exact = [_combined(verdicts, sequential) for sequential in (False, True)]
    if (row.decision, row.throttle_ms) not in exact:
        outcome, wait = exact[0]
        said = f"{row.decision} of {row.throttle_ms} ms without the store"
        yield Contradiction("decision", said, f"{outcome} of {wait} ms, by its verdicts")


@lru_cache(_MANY)
def _combined(verdicts: tuple[tuple[Any, ...], ...], sequential: bool) -> tuple[str, int]:
    said = [
        Verdict(quota, "", "", 0, "deny", shadow, outcome, wait) for quota, shadow, outcome, wait in verdicts
    ]
    return combine(said, sequential=sequential)[:2]


def _verdict(row: Row, said: Said) -> Iterator[Contradiction]:
    """What a verdict says that its ask did not bring about."""
    if said.outcome not in OUTCOMES or said.quota not in KEYS:
        yield Contradiction("verdict", f"{said.outcome} by {said.quota}", "words that there are")
        return
    yield from _whose(row, said)
    yield from _usage(row, said)
    yield from _strictness(row, said)
    if (said.throttle_ms > 0) != (said.outcome in WAITS):
        yield Contradiction("throttle_ms", f"{said.outcome} of {said.throttle_ms} ms", "a wait just to wait")
    if said.charged_ids or said.refreshed_ids:
        yield from _ids(row, said)


def _whose(row: Row, said: Said) -> Iterator[Contradiction]:
    """Whether the bucket is the one that the entity's quota has for who asked."""
    prefix = _PREFIX.search(said.bucket)
    bucket = _bucket(
        said.quota,
        said.scope,
        said.entity,
        int(prefix[1]) if prefix and said.bucket.startswith("ip=") else 64,
        row.cluster_action,
        (row.principal, row.client_id, row.ip, row.broker, row.listener),
    )
    if bucket is None:
        yield Contradiction("entity", f"{said.quota} of {said.entity}", "an entity that matches who asked")
    elif bucket != said.bucket:
        field = "broker" if bucket.partition(";")[0] == said.bucket.partition(";")[0] else "bucket"
        yield Contradiction(field, f"bucket {said.bucket}", f"{bucket}, by who asked")


@lru_cache(_MANY)
def _bucket(
    key: str,
    scope: str,
    entity: str,
    ipv6_prefix: int,
    cluster_action: bool,
    who: tuple[str | None, ...],
) -> str | None:
    """The bucket that a quota of an entity has for who asks; None if it does not apply to that one."""
    its = KEYS[key]
    principal, client_id, ip, broker, listener = who
    ask = Ask({its.usage: 1}, (), principal, client_id, ip, broker, listener, cluster_action=cluster_action)
    try:
        named = Entity.parse(entity)
        quota = Quota(key, 1, its.algorithm, "deny", scope=scope)  # type: ignore[arg-type]  # as was logged
        found = applied(ask, {key: {named: quota}}, Rules(ipv6_prefix=ipv6_prefix))
    except (EntityError, ValueError):
        return None
    return found[0].bucket if found else None


def _usage(row: Row, said: Said) -> Iterator[Contradiction]:
    key = KEYS[said.quota]
    if said.algorithm == "producer_ids":
        usage: float | None = float(len(row.ids or ()))
    else:
        usage = next((amount / key.per_unit for name, amount in row.usage if name == key.usage), None)
    if usage is None or abs(usage - said.usage) > CLOSE * max(1.0, abs(usage)):
        exact = f"no {key.usage}" if usage is None else f"{usage:.12g}"
        yield Contradiction("usage", f"usage {said.usage:.12g}", f"{exact}, by its ask")


def _strictness(row: Row, said: Said) -> Iterator[Contradiction]:
    """Whether the ask's mode allows the enforcement, and both the outcome; a bound key is decided as deny."""
    records = row.mode == "record"
    if records and said.algorithm != "producer_ids":
        wanted = "delay"
    elif row.deny:
        wanted = "deny"
    else:
        wanted = said.enforcement
    if row.kind != "ids" and said.enforcement != wanted:
        exact = f"{wanted}, by mode {row.mode}{' and deny' if row.deny else ''}"
        yield Contradiction("enforcement", f"enforcement {said.enforcement}", exact)
    if said.reason in WITHOUT_COUNTER:
        return
    allowed = {"admit", "delay", "reject"} if said.enforcement == "delay" else {"admit", "throttle", "reject"}
    if records:
        allowed = {"admit", "delay"}
    elif row.mode == "refund":
        allowed = {"admit"}
    if said.outcome not in allowed:
        exact = f"one of {', '.join(sorted(allowed))}, by mode {row.mode} and enforcement {said.enforcement}"
        yield Contradiction("mode", f"outcome {said.outcome}", exact)


def _ids(row: Row, said: Said) -> Iterator[Contradiction]:
    charged, refreshed = set(said.charged_ids or ()), set(said.refreshed_ids or ())
    if not charged | refreshed <= set(row.ids or ()) or charged & refreshed:
        yield Contradiction("ids", "ids charged or refreshed", "each once, and of those that were asked for")
    if row.mode in {"peek", "refund"}:
        yield Contradiction("mode", f"mode {row.mode}", "one that writes, as ids were charged or refreshed")
    if charged and row.decision in REFUSES:
        yield Contradiction("decision", f"decision {row.decision}", "one that goes on, as ids were charged")
