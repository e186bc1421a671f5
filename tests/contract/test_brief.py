"""A brief answer means the same as the full one, and is given exactly if the full one has nothing more."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Final

import pytest
import redis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace as with_

from app.domain.ask import Ask
from app.domain.ladder import MatchingRules, Quotas
from app.domain.quota import KEYS, Quota
from app.store.encoding import answers_of
from app.store.port import Answer, Plan, UnitsResult
from app.store.redis import RedisStore
from app.store.script import SCRIPT
from tests.charging import plan_for
from tests.contract.histories import asks, entities_of, quotas
from tests.report import say
from tests.stores import running

SECRET = b"0123456789abcdef0123456789abcdef"
RULES = MatchingRules(inter_broker_listener="REPLICATION")
PAUSES_MS = (-7_000, -300, -1, 0, 0, 1, 99, 334, 500, 1_001, 6_001)
BRIEF = b"\3"
"""The first byte of a brief answer."""

FAULTS: Final = {
    "forgiven debt": ("forgiven ~= 0 or ", ""),
    "a corrected clock": ("check.reason ~= 0 or check.correction ~= 0 or", "check.reason ~= 0 or"),
    "a refusal": ("if check.outcome ~= ADMIT or check.reason", "if check.reason"),
    "ids": ("check.correction ~= 0 or check.algorithm == PRODUCER_IDS then", "check.correction ~= 0 then"),
    "the first quota's numbers for each": ("pack(BRIEF, observed, remaining)", "string.sub(answer, 2, 17)"),
    "an answer that is kept": ("brief and context == 0 and", "brief and"),
}
"""Faults by the content that they hide: the right text, and the wrong one."""


class Different(Exception):
    """A brief answer differs from the full one."""


def test_brief_answers_say_what_full_ones_do() -> None:
    met = compare(SCRIPT, examples=60)
    say(", ".join(f"{count:,} {what}" for what, count in sorted(met.items())))
    assert min(met["brief"], met["full"], met["corrected"], met["forgiven"], met["several brief"]) > 0


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_found(fault: str) -> None:
    right, wrong = FAULTS[fault]
    assert SCRIPT.count(right) == 1, "the fault must be planted in one place"
    with pytest.raises(Different):
        compare(SCRIPT.replace(right, wrong), examples=400)


def compare(script: str, examples: int) -> Counter[str]:
    """Send the same asks to two stores, one with brief answers; return how often each event was met."""
    met: Counter[str] = Counter()
    with running("valkey") as url, redis.Redis.from_url(url) as client:

        @settings(
            max_examples=examples,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate],
            database=None,
            derandomize=True,
        )
        @given(
            all_quotas=st.fixed_dictionaries(
                {
                    key: st.dictionaries(
                        st.sampled_from(entities_of(key)), quotas(key, 40), min_size=1, max_size=2
                    )
                    for key in KEYS
                }
            ),
            sent=st.lists(
                st.tuples(asks(), st.sampled_from(PAUSES_MS), st.sampled_from((None, None, "a", "b"))),
                min_size=10,
                max_size=40,
            ),
        )
        def history(all_quotas: Quotas, sent: list[tuple[Ask, int, str | None]]) -> None:
            client.flushall()
            asyncio.run(_same(url, script, all_quotas, sent, met))

        history()
    return met


async def _same(
    url: str, script: str, all_quotas: Quotas, sent: list[tuple[Ask, int, str | None]], met: Counter[str]
) -> None:
    full, brief = (
        RedisStore(f"{url}?db={at}", caller_clock=True, brief=bool(at), script=script) for at in (0, 1)
    )
    await full.connect()
    await brief.connect()
    now = 1_000_000
    try:
        for number, (each, pause_ms, key) in enumerate(sent):
            now += pause_ms
            if number == len(sent) // 2:  # so that debts are forgiven
                all_quotas = {
                    name: {of: lower_debts(quota) for of, quota in row.items()}
                    for name, row in all_quotas.items()
                }
            ask = replace(each, at_ms=now, id=key if each.mode == "admit" else None)
            plan = plan_for(ask, all_quotas, RULES, SECRET)
            if plan is not None:
                await _compare(full, brief, plan, met)
    finally:
        await full.close()
        await brief.close()


async def _compare(full: RedisStore, brief: RedisStore, plan: Plan, met: Counter[str]) -> None:
    (expected,) = await answers_of(full, [plan])
    try:
        (short,) = await answers_of(brief, [plan])
    except Exception as error:
        raise Different(f"{plan}: it cannot be read") from error
    got = with_(short, packed=expected.packed)
    if got != expected:
        raise Different(f"{plan}\nbrief: {got}\nfull:  {expected}")
    if (short.packed[:1] == BRIEF) is not _is_brief(plan, expected):
        raise Different(f"{plan}: {short.packed!r} of {expected}")
    met["brief" if short.packed[:1] == BRIEF else "full"] += 1
    met["several brief"] += short.packed[:1] == BRIEF and len(plan.charges) > 1
    met["corrected"] += any(result.correction for result in expected.results)
    met["forgiven"] += any(isinstance(result, UnitsResult) and result.forgiven for result in expected.results)


def lower_debts(quota: Quota) -> Quota:
    """Return a quota that allows no debt, in the same bucket."""
    return replace(quota, max_debt=0) if quota.algorithm == "token_bucket" else quota


def _is_brief(plan: Plan, answer: Answer) -> bool:
    """Whether every quota admits, none counts ids, and there is no more to say."""
    if plan.retry is not None or answer.kept is not None or answer.error is not None:
        return False
    return all(
        isinstance(result, UnitsResult)
        and (result.outcome, result.reason, result.correction, result.forgiven) == ("admit", None, 0, 0)
        for result in answer.results
    )
