"""Quotas are found by the names of callers as the readable rule finds them."""

from __future__ import annotations

from collections import Counter
from random import Random

from app.domain.ask import Ask
from app.domain.ladder import applied_quotas
from tests.unit.admission.test_compiled import readable, some_asks, some_changes, some_rules
from workers.jobs.whatif.matching import QuotaMatcher
from workers.jobs.whatif.rows import LoggedCaller


def caller_of(ask: Ask) -> LoggedCaller:
    return LoggedCaller(
        ask.principal,
        ask.client_id,
        ask.ip,
        ask.broker,
        ask.listener,
        ask.cluster_action,
        ask.producer_ids is not None,
        tuple(ask.usage),
    )


def test_matches_are_those_of_the_readable_rule() -> None:
    met: Counter[str] = Counter()
    for seed in range(1_000):
        random = Random(seed)
        quotas, rules = readable(some_changes(random)), some_rules(random)
        matcher = QuotaMatcher(quotas, rules)
        for ask in some_asks(random, rules.inter_broker_listener):
            applied = applied_quotas(ask, quotas, rules)
            matches = matcher.matches(caller_of(ask))
            assert [match.applied for match in matches] == applied
            assert all(match.forms.quota is match.applied.quota for match in matches)
            met["several"] += len(matches) > 1
            for each in applied:
                met[each.quota.key] += 1
                met["networks"] += "%2F" in each.bucket
                met["at brokers"] += ";" in each.bucket
    assert len(met) == 11, met
    assert min(met.values()) > 100, met
