"""Real-looking files of envoyproxy/ratelimit: each request of their tables gets the documented answer."""

from __future__ import annotations

import pytest

from tests.envoy.limiter import Limiter
from tests.envoy.ratelimit_cases import Case, by_bucket, cases

CASES = cases()
each_case = pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])


def test_there_are_at_least_twenty():
    assert len(CASES) >= 20


@each_case
def test_nothing_is_lost(case: Case):
    found = case.imported()
    assert not found.is_looser
    assert [(each.what, each.effect) for each in found.left_out] == list(case.left_out)


@each_case
def test_each_request_has_the_documented_limit(case: Case):
    limiter = Limiter(case.imported())
    for each in case.requests:
        ask = limiter.ask(each.domain, each.entries)
        expected = [] if each.limit is None else [(each.limit.number, each.limit.seconds)]
        assert limiter.policies(ask) == expected, each


@each_case
def test_each_bucket_lets_as_many_pass_and_counts_for_itself(case: Case):
    limiter = Limiter(case.imported())
    for bucket, requests in by_bucket(case.requests).items():
        (limit,) = {each.limit for each in requests}
        assert limit is not None
        first, *_ = requests
        if limit.number:
            assert limiter.passes(limiter.ask(first.domain, first.entries, limit.number)), bucket
        for each in requests:
            assert limiter.passes(limiter.ask(each.domain, each.entries)) is limit.is_shadow, each


@each_case
def test_requests_without_a_limit_always_pass(case: Case):
    limiter = Limiter(case.imported())
    for each in case.requests:
        if each.limit is None:
            assert limiter.passes(limiter.ask(each.domain, each.entries, 2**32)), each
