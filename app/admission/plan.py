"""From an ask and the snapshot to a plan for the store, and from its answer to a decision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from sys import getsizeof
from typing import Final, NamedTuple

from msgspec import msgpack

from app.admission.fallback import verdict_when_full
from app.domain.ask import Ask, Mode
from app.domain.decision import Decision, Source, Verdict, combine, is_charged
from app.domain.ladder import Applied, Quotas, Rules, applied
from app.domain.quota import Enforcement
from app.domain.retry import Content, content_of
from app.domain.usage import enforcement_of, spreads_of, usage_of
from app.domain.volumes import scaled
from app.store.keys import bucket_key
from app.store.port import Answer, Charge, Plan, Said

MATCHES_BYTES: Final = 16 * 1024 * 1024
"""What the matches of callers may take, as far as they are counted here; of those used lately and before
half each, so that a full memory forgets who asked long ago and not everybody at once."""

ENTRY_BYTES: Final = 300
"""A caller, and each of its matches, without the texts in it."""

RETRY_BYTES: Final = 16

Named = tuple[str, str, str, float, Enforcement, bool]
"""What a verdict says beside the store's part: quota, entity, bucket, limit, enforcement, shadow."""


class Match(NamedTuple):
    """A quota that applies to a caller, and the key of the bucket it charges."""

    applied: Applied
    key: bytes


class Matches:
    """Which quotas of one snapshot apply to whom, remembered for those who asked lately.

    Args:
        most_bytes: how much is remembered.
    """

    def __init__(self, quotas: Quotas, rules: Rules, most_bytes: int = MATCHES_BYTES) -> None:
        self._quotas = quotas
        self._rules = rules
        self._most_bytes = most_bytes // 2
        self._bytes = 0
        self._lately: dict[tuple[object, ...], tuple[Match, ...]] = {}
        self._before: dict[tuple[object, ...], tuple[Match, ...]] = {}

    def __len__(self) -> int:
        return len(self._lately) + len(self._before)

    def of(self, ask: Ask) -> tuple[Match, ...]:
        """The quotas that apply to an ask."""
        who = (ask.principal, ask.client_id, ask.ip, ask.broker, ask.listener, ask.cluster_action)
        caller = (*who, ask.producer_ids is not None, *ask.usage)
        found = self._lately.get(caller)
        if found is None:
            found = self._before.pop(caller, None)
            if found is None:
                found = matches_of(ask, self._quotas, self._rules)
            self._remember(caller, found)
        return found

    def _remember(self, caller: tuple[object, ...], found: tuple[Match, ...]) -> None:
        self._bytes += _size(caller, found)
        if self._bytes > self._most_bytes:
            self._before, self._lately, self._bytes = self._lately, {}, _size(caller, found)
        self._lately[caller] = found


def _size(caller: tuple[object, ...], found: tuple[Match, ...]) -> int:
    """About how many bytes it takes to remember the matches of a caller."""
    texts = [part for part in caller[:5] if part is not None]
    for applied_, key in found:
        texts += (key, applied_.entity, applied_.bucket, applied_.owner)
    return ENTRY_BYTES * (1 + len(found)) + sum(map(getsizeof, texts))


def matches_of(ask: Ask, quotas: Quotas, rules: Rules) -> tuple[Match, ...]:
    """The quotas that apply to an ask, nothing remembered."""
    return tuple(Match(found, bucket_key(found)) for found in applied(ask, quotas, rules))


def scaled_match(match: Match, factor: float) -> Match:
    """A match under a throttle factor above 0; its bucket is the same one."""
    quota = scaled(match.applied.quota, factor)
    return match if quota is match.applied.quota else Match(replace(match.applied, quota=quota), match.key)


def plan_of(ask: Ask, matches: Sequence[Match], secret: bytes, key: str | None = None) -> Plan | None:
    """What to ask the store; None if nothing needs it: no quota applies, and no answer can have been kept.

    Args:
        key: the name of the caller's key, whose kept answers are its own.
    """
    content = content_of(ask, key) if ask.id is not None else None
    retry = None if content is None else (ask.principal, _hash(content, secret))
    if not matches and retry is None:
        return None
    charges = tuple(_charge(ask, found, secret) for found in matches)
    context = b"" if retry is None else msgpack.encode((ask.mode, ask.detail, [_named(c) for c in charges]))
    return Plan(ask.mode, charges, ask.recheck, retry, context, ask.at_ms)


def decided(
    ask: Ask, plan: Plan | None, answer: Answer | None, *, sequential: bool
) -> tuple[Decision, tuple[Verdict, ...]]:
    """The decision by the store's answer, or by none where none was needed; and every verdict of it."""
    if plan is None or answer is None:
        return _decision(ask.mode, (), detail=ask.detail, sequential=sequential), ()
    if answer.kept is None:
        mode, detail, named = ask.mode, ask.detail, [_named(charge) for charge in plan.charges]
    else:
        mode, detail, named = msgpack.decode(answer.kept, type=tuple[Mode, bool, list[Named]])
    verdicts = tuple(_verdict(name, said) for name, said in zip(named, answer.said, strict=True))
    if any(said.reason == "store_full" for said in answer.said):  # of which no answer is kept
        verdicts = tuple(
            verdict_when_full(ask, charge.applied) if verdict.reason == "store_full" else verdict
            for verdict, charge in zip(verdicts, plan.charges, strict=True)
        )
    return _decision(mode, verdicts, detail=detail, sequential=sequential), verdicts


def _decision(mode: Mode, verdicts: tuple[Verdict, ...], *, detail: bool, sequential: bool) -> Decision:
    outcome, throttle_ms, limited_by = combine(verdicts, sequential=sequential)
    full = sum(verdict.reason == "store_full" for verdict in verdicts)
    source: Source = "fallback" if full else "store" if verdicts else "local"
    return Decision(
        outcome,
        throttle_ms,
        is_charged(mode, outcome) and (not full or full < len(verdicts)),
        len(verdicts),
        source,
        limited_by,
        verdicts if detail else None,
    )


def _charge(ask: Ask, match: Match, secret: bytes) -> Charge:
    quota = match.applied.quota
    spreads = b"".join(spreads_of(ask, secret)) if quota.algorithm == "producer_ids" else b""
    return Charge(match.applied, match.key, usage_of(ask, quota), enforcement_of(ask, quota), spreads)


def _hash(content: Content, secret: bytes) -> bytes:
    """What is kept of an ask to know it by: nobody without the secret can tell what it said."""
    return blake2b(msgpack.encode(content), digest_size=RETRY_BYTES, key=secret, person=b"retry").digest()


def _named(charge: Charge) -> Named:
    found, quota = charge.applied, charge.applied.quota
    return quota.key, found.entity, found.bucket, quota.limit, charge.enforcement, quota.shadow


def _verdict(named: Named, said: Said) -> Verdict:
    return Verdict(
        *named,
        said.outcome,
        said.throttle_ms,
        said.observed,
        said.remaining,
        said.reason,
        said.largest,
    )
