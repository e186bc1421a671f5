"""The script against the oracle over random histories, and planted faults that the same machine must find."""

from __future__ import annotations

from collections import Counter

import pytest

from app.store.script import SCRIPT
from tests.contract.machine import AT_LEAST, MUST_MEET, Difference, run
from tests.said import say
from tests.stores import KINDS, running

STEPS = 20_000

FAULTS = {
    "> for >= at a bucket's last token": (
        "tokens >= part.usage then return ADMIT",
        "tokens > part.usage then return ADMIT",
    ),
    "< for <= at a rate's limit": (
        "/ 1000) <= part.limit then return ADMIT",
        "/ 1000) < part.limit then return ADMIT",
    ),
    "> for >= at the first id too many": (
        "if alive + unseen > part.limit then",  # which for whole numbers is >= part.limit + 1
        "if alive + unseen > part.limit + 1 then",
    ),
    "a TTL left out": (
        "set(part.key, head .. table.concat(packed), ttl(lasts))",
        "call('SET', part.key, head .. table.concat(packed))",
    ),
    "charging before every quota was looked at": (
        "for _, part in ipairs(parts) do part.algorithm.touch(part) end",
        "for _, p in ipairs(parts) do p.algorithm[p.outcome < THROTTLE and 'charge' or 'touch'](p) end",
    ),
    "remembering a throttled id": (
        "  if part.dirty then write_head(part) end",
        "for _, id in ipairs(part.unseen) do write(part, id) end if part.dirty then write_head(part) end",
    ),
    "time taken from the caller under the store's clock": (
        "local now = caller_clock and at_ms or store_time",
        "local now = at_ms",
    ),
    "a layer never dying": (
        "and part.t - part.starts[number % LAYERS] < part.layer_ttl",
        "and part.t - part.starts[number % LAYERS] < huge",
    ),
    "a live layer not counted": ("layers + 1 end", "layers + (number < part.number and 1 or 0) end"),
    "refresh left out": ("for _, id in ipairs(part.stale) do", "for _, id in ipairs({}) do"),
    "a refund below 0": ("local taken = min(list[i][1], left)", "local taken = left"),
    "a refund without a TTL": (
        "part.tokens = min(part.burst, part.tokens + part.usage)\n  write_tokens(part)",
        "call('SET', part.key, pack(TOKENS, min(part.burst, part.tokens + part.usage), part.at))",
    ),
    "a debt without an end": (
        "forgive(part, tokens_now(part) - part.usage), part.t",
        "tokens_now(part) - part.usage, part.t",
    ),
    "a debt that is over coming back": ("if not part.over then return end", "do return end"),
    "a block not scrubbed": ("keep = keep * 17", "keep = 255"),
    "a new bucket in a full store": (
        "if is_full() then\n    part.outcome",
        "if false then\n    part.outcome",
    ),
    "an answer kept in a full store": ("charged and not is_full()", "charged"),
    "a larger filter in a full store": (
        "return part.newest and is_short(part, 1) and is_full()",
        "return false",
    ),
    "more charges in a full store": (
        "if alive + n > part.capacity and part.newest and is_full()",
        "if false",
    ),
    "new ids that pass in a full store": ("part.mode == ADMIT_MODE and is_full() then", "false then"),
    "a refresh that grows a full store": (
        "if is_stale and not (is_short(part, 1) and is_full()) then",
        "if is_stale then",
    ),
    "charges beside a quota that refuses in a full store": (
        "band(part.flags, CLOSED) > 0 and THROTTLE or ADMIT",
        "ADMIT",
    ),
    "a retry charged again": ("if kept and now - unpack_('<d', kept) < RETRY_MS then", "if false then"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_store_and_oracle_agree(kind: str) -> None:
    """No difference in 20,000 steps or more, in which everything that matters happened often."""
    met: Counter[str] = Counter()
    with running(kind) as url:
        while met["steps"] < STEPS or (rare(met) and met["steps"] < 2 * STEPS):
            met += run(url, examples=150, steps=50)
    report(kind, met)
    assert rare(met) == {}


@pytest.mark.prove
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kind", KINDS)
def test_store_and_oracle_agree_for_long(kind: str) -> None:
    """The same for 100,000 steps."""
    met: Counter[str] = Counter()
    with running(kind) as url:
        while met["steps"] < 5 * STEPS:
            met += run(url, examples=1000, steps=50)
    report(kind, met)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str) -> None:
    """The machine that finds nothing in the script finds each of these."""
    right, wrong = FAULTS[fault]
    assert SCRIPT.count(right) == 1, "the fault must be planted in one place"
    with running("valkey") as url, pytest.raises(Difference):
        run(url, examples=400, steps=50, script=SCRIPT.replace(right, wrong), shrink=False)


def rare(met: Counter[str]) -> dict[str, int]:
    """What was met too rarely."""
    return {name: met[name] for name in MUST_MEET if met[name] < AT_LEAST}


def report(kind: str, met: Counter[str]) -> None:
    """Say what the run met."""
    say(f"{kind}: {met['steps']:,} steps, {met['decisions']:,} decisions, no difference")
    for name in sorted(set(met) - {"steps", "decisions"}):
        say(f"{met[name]:>7,}  {name}")
