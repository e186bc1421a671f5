"""Script and domain find the same wait for tokens, quickly, even at the precision limit of doubles."""

from __future__ import annotations

import pytest

from app.domain.ask import Ask
from app.domain.ladder import AppliedQuota
from app.domain.quota import MAX_EXACT, Quota
from app.domain.token_bucket import Tokens, wait_ms
from app.store.port import Plan
from app.store.redis import RedisStore
from tests.charging import single_charge
from tests.stores import running


@pytest.mark.parametrize(
    ("limit", "burst"), [(4.7e-7, MAX_EXACT), (1e-6, 1e14), (1e-3, MAX_EXACT), (7.0, 1e9)]
)
async def test_script_finds_the_shortest_wait_of_an_enormous_bucket(limit: float, burst: float):
    """A search in steps of a millisecond occupied the store for seconds, until the call timed out."""
    quota = Quota("controller_mutation_rate", limit, "token_bucket", "deny", burst=burst)
    found = AppliedQuota(quota, "user=*", "user=a", "user=a")

    def ask(usage: float) -> Plan:
        return Plan("admit", (single_charge(found, Ask({"mutations": usage})),), at_ms=0)

    with running("valkey") as url:
        store = RedisStore(url, caller_clock=True)
        await store.connect()
        first, second = await store.decide([ask(1), ask(burst)])
        await store.close()
    assert first.results[0].outcome == "admit"
    assert second.results[0].outcome == "throttle"
    assert second.results[0].throttle_ms == wait_ms(Tokens(burst - 1, 0), burst, 0, limit, burst)
