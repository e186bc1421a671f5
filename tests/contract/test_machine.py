"""The script and the oracle agree over random histories; the same machine finds every planted fault."""

from __future__ import annotations

from collections import Counter
from types import ModuleType

import pytest

from app.admission import admission, answers, compiled, plan
from app.admission.known_ids import local
from app.catalog import snapshot
from app.store import compiled_quota, encoding, redis
from app.store.script import SCRIPT
from tests.contract import machine
from tests.contract.machine import Difference, rare, run
from tests.planted import planted
from tests.report import say
from tests.stores import KINDS, running

pytestmark = pytest.mark.usefixtures("patient_connections")

STEPS, LONG_STEPS = 3_000, 100_000
"""Steps in each run of the tests, and in `make prove`."""
MOST_STEPS = 4 * STEPS
"""A short run goes on up to here while it lacks an event."""

FAULTS = {
    "the last ask's ids taken for those of an ask": (
        "check.looked_up, check.alive, check.changed, check.dirty,",
        "check.dirty, check.alive, check.changed, check.dirty,",
    ),
    "the last ask's bucket taken for a missing one": (
        "check.text, check.newest = '', false",
        "check.text = ''",
    ),
    "> for >= at a bucket's last token": (
        "tokens >= check.usage then return ADMIT",
        "tokens > check.usage then return ADMIT",
    ),
    "< for <= at a rate's limit": (
        "/ 1000) <= limit then return ADMIT",
        "/ 1000) < limit then return ADMIT",
    ),
    "> for >= at the first id too many": (
        "if alive + unseen > check.limit then",  # for whole numbers the same as >= check.limit + 1
        "if alive + unseen > check.limit + 1 then",
    ),
    "a TTL left out": (
        "set(check.key, text, ttl(begins + ",
        "call('SET', check.key, text) tostring((begins + ",
    ),
    "charging before every quota was looked at": (
        "do checks[i].algorithm.touch(checks[i]) end",
        "do local p = checks[i] p.algorithm[p.outcome < THROTTLE and 'charge' or 'touch'](p) end",
    ),
    "remembering a throttled id": (
        "  if check.dirty then write_head(check) end\nend\n\n-- Write known",
        "for _, id in ipairs(check.unseen) do write(check, id) end write_head(check)\nend\n\n-- Write known",
    ),
    "time taken from the caller under the store's clock": (
        "now = caller_clock and at_ms or store_time",
        "now = at_ms",
    ),
    "a layer never dying": (
        "and check.t - check.starts[number % LAYERS] < check.layer_ttl",
        "and check.t - check.starts[number % LAYERS] < huge",
    ),
    "a live layer not counted": ("layers + 1 end", "layers + (number < check.number and 1 or 0) end"),
    "refresh left out": ("for _, id in ipairs(check.stale) do", "for _, id in ipairs({}) do"),
    "a refund below 0": ("local taken = min(list[i][1], left)", "local taken = left"),
    "a refund without a TTL": (
        "check.tokens = min(check.most, check.tokens + check.usage)\n  write_tokens(check)",
        "call('SET', check.key, pack(TOKENS, min(check.most, check.tokens + check.usage), check.at))",
    ),
    "a debt without an end": (
        "forgive(check, before - check.usage), check.t",
        "before - check.usage, check.t",
    ),
    "a debt that is over coming back": (
        "if check.over == 0 and lapsed_in(check) == 0 then return end",
        "do return end",
    ),
    "a block not scrubbed": ("keep = keep * 17", "keep = 255"),
    "a new bucket in a full store": (
        "if is_full() then\n    check.outcome",
        "if false then\n    check.outcome",
    ),
    "an answer kept in a full store": ("not refused) and not is_full()", "not refused)"),
    "a larger filter in a full store": (
        "return check.newest and is_short(check, 1) and is_full()",
        "return false",
    ),
    "more charges in a full store": (
        "if alive + n > check.capacity and check.newest and is_full()",
        "if false",
    ),
    "new ids that pass in a full store": ("mode == ADMIT_MODE and is_full() then", "false then"),
    "a refresh that grows a full store": (
        "if is_stale and not (is_short(check, 1) and is_full()) then",
        "if is_stale then",
    ),
    "charges although another quota refuses in a full store": (
        "band(check.flags, CLOSED) > 0 and THROTTLE or ADMIT",
        "ADMIT",
    ),
    "a renewal of what was reset": (
        "return last_reset and tonumber",
        "return false and tonumber",
    ),
    "a renewal to a state that nobody knows": ("if not birth or birth ..", "if birth and birth .."),
    "a renewal of what another state had": (
        "if not birth or birth .. history_now() ~= known_birth then",
        "if not birth then",
    ),
    "a renewal that leaves out what was lost": (
        "for _, id in ipairs(check.unseen) do\n    if remembered(check) < max_ids and",
        "for _, id in ipairs({}) do\n    if remembered(check) < max_ids and",
    ),
    "a renewal that grows a full store": (
        "if remembered(check) < max_ids and not (is_short(check, 1) and is_full()) then",
        "if remembered(check) < max_ids then",
    ),
    "a renewal beyond the most ids": ("    if remembered(check) < max_ids and not", "    if not"),
    "an open layer that does not hold all ids": ("check.ids > 0 and check.missing == 0", "check.ids > 0"),
    "a lease that is charged and not held": (
        "  add_hold(check, lease, check.usage, lease_ms)\n  write_record(check)",
        "  record(check, check.usage, check.t)\n  write_record(check)",
    ),
    "a token bucket that fills beyond what it holds": (
        "return max(check.burst - held, 0)",
        "return check.burst",
    ),
    "a lease over one millisecond late": (
        "while over < #holds and holds[over + 1][3] <= check.t do",
        "while over < #holds and holds[over + 1][3] < check.t do",
    ),
    "a lease that nobody settled given back": (
        "for i = 1, over do record(check, holds[i][2],",
        "for i = 1, over do record(check, 0,",
    ),
    "a lease charged by now and not at its end": (
        "max(holds[i][3], check.last)) end\nend",
        "check.t) end\nend",
    ),
    "a lapse forgotten at a refusal": (
        "function sampled_rate.touch(check)\n  if check.holds and check.lapsed > 0 then",
        "function sampled_rate.touch(check)\n  if false then",
    ),
    "leases lost when a sample begins": (
        "if check.holds then begins, text = max(begins, last_end(check)), text .. packed_holds(check) end",
        "",
    ),
    "leases that a clock leaves behind": ("hold[3] = hold[3] + by", "hold[3] = hold[3]"),
    "what a settlement frees kept": ("tokens + (units - check.usage)), check.t", "tokens), check.t"),
    "a settlement for nothing": (
        "  record(check, check.usage, check.t)\n  write_record(check)\n  return true",
        "  write_record(check)\n  return true",
    ),
    "a grant of all that is free": ("free / ((holds and #holds or 0) + 1)", "free"),
    "a peek that holds": (
        "if mode == PEEK_HOLD then return peek_hold_all() end",
        "if mode == PEEK_HOLD then peek_hold_all() return hold_all(unpack_(LEASE, ask, ends)) end",
    ),
    "a peek at the wish and not at the grant": (
        "checks[i].largest = checks[i].slice end",
        "checks[i].largest = checks[i].usage end",
    ),
    "one lease too many": (
        "#holds >= MOST_HOLDS then return THROTTLE",
        "#holds > MOST_HOLDS then return THROTTLE",
    ),
    "a lease held where another quota refuses": (
        "local slices, grants = {}, not refused",
        "local slices, grants = {}, true",
    ),
    "a wait that takes leases for over": ("usage + units_of(holds, i, #holds)", "usage"),
    "a wait for tokens that takes leases for lasting": (
        "if not holds then return tokens_at(check, tokens, since, at) end",
        "do return tokens_at(check, tokens, since, at) end",
    ),
    "a retry charged again": (
        "elseif kept and now - unpack_('<d', kept) < RETRY_MS then",
        "elseif false then",
    ),
}

GROWING = ("grow_in_a_full_store", "advance", "change_quota")
LEASING = ("lease", "lapse", "leave_a_lease_behind", "change_quota")
SHOWN_BY: dict[str, tuple[str, ...]] = {
    "> for >= at the first id too many": ("exhaust", "change_quota"),
    "time taken from the caller under the store's clock": ("by_the_stores_clock", "change_quota"),
    "a refund below 0": ("ask", "insist", "advance", "change_quota"),
    "a block not scrubbed": ("march", "flood", "advance_far", "change_policy"),
    "a larger filter in a full store": ("be_full_for_a_while", "crowd", "change_quota"),
    "new ids that pass in a full store": GROWING,
    "a renewal of what was reset": ("renew",),
    "a renewal to a state that nobody knows": ("renew",),
    "a renewal of what another state had": ("renew",),
    "a renewal that leaves out what was lost": ("renew",),
    "a renewal that grows a full store": GROWING,
    "a renewal beyond the most ids": ("renew", "grow_in_a_full_store", "flood"),
    "a lease that is charged and not held": LEASING,
    "a token bucket that fills beyond what it holds": LEASING,
    "a lease over one millisecond late": LEASING,
    "a lease that nobody settled given back": LEASING,
    "a lease charged by now and not at its end": LEASING,
    "a lapse forgotten at a refusal": LEASING,
    "leases lost when a sample begins": LEASING,
    "leases that a clock leaves behind": LEASING,
    "what a settlement frees kept": ("settle_at_once", "change_quota"),
    "a settlement for nothing": ("settle_at_once", "change_quota"),
    "a grant of all that is free": LEASING,
    "one lease too many": ("lease_to_many", "change_quota"),
    "a lease held where another quota refuses": LEASING,
    "a wait that takes leases for over": LEASING,
    "a wait for tokens that takes leases for lasting": ("settle_at_once", "lease", "change_quota"),
    "a retry charged again": ("ask", "retry"),
    "kept answers that callers share": ("ask", "retry", "change_quota"),
    "the detail of a retry": ("ask", "retry", "change_quota"),
}
"""By fault, the rules that find it in time; random histories of all rules may not."""

NODE_FAULTS: dict[str, tuple[ModuleType, str, str]] = {
    "deny left out": (compiled, "DENY if ask.deny else 0", "0"),
    "a recheck taken for a first ask": (compiled, "manner | RECHECK if ask.recheck else manner", "manner"),
    "a record sent as an ask": (compiled, "manner |= RECORDS", "pass"),
    "a cluster action with everybody's quotas": (compiled, "ask.cluster_action,", "None,"),
    "the listener between brokers taken for another": (
        compiled,
        "listener and listener == self._between,",
        "listener is None,",
    ),
    "a bucket that brokers share": (compiled, "form.is_by_broker and broker is not None", "False"),
    "ids counted as often as they came": (
        compiled,
        "amount = len(ids_of(ask)) if form.counts_ids else usage[",
        "amount = len(ask.producer_ids or ()) if form.counts_ids else usage[",
    ),
    "a pair's bucket for its user": (compiled, "owner = texts[USER] if kind == PAIR else", "owner ="),
    "a quota of an older snapshot": (
        snapshot,
        "on_rung[names] = SetQuota(quota, entity)",
        "on_rung.setdefault(names, SetQuota(quota, entity))",
    ),
    "a record that refuses": (compiled_quota, 'enforcement = "delay"', 'enforcement = "deny"'),
    "a shadow that counts": (compiled_quota, "_SHADOW * quota.shadow", "0"),
    "a closed quota that opens": (compiled_quota, "_CLOSED * (", "0 * ("),
    "usage in the place of the limit": (
        encoding,
        "compiled.limit, charge.usage)",
        "charge.usage, compiled.limit)",
    ),
    "the caller's time left out": (encoding, "plan.at_ms or 0", "0"),
    "a wait taken for an admission": (encoding, 'result.outcome == "admit" and', ""),
    "a policy's answer taken for the store's": (encoding, " and result.reason is None", ""),
    "kept answers that callers share": (plan, "content_of(ask, key)", "content_of(ask, None)"),
    "the detail of a retry": (answers, "detail=detail, sequential", "detail=ask.detail, sequential"),
    "what remains taken for what is observed": (answers, "result.observed if", "result.remaining if"),
    "charges where every quota answers by policy": (
        answers,
        " and (not by_policy or by_policy < len(verdicts))",
        "",
    ),
}
"""Faults in a node's code around the script: the module, the right text, and the wrong one."""


@pytest.mark.timeout(900)  # half a minute on an idle machine
@pytest.mark.parametrize("kind", KINDS)
def test_store_and_oracle_agree(kind: str) -> None:
    """At least 3,000 steps, in which each important event happened."""
    met: Counter[str] = Counter()
    with running(kind) as url:
        while met["steps"] < STEPS or (rare(met, at_least=1) and met["steps"] < MOST_STEPS):
            met += run(url, examples=20, steps=50)
    report(kind, met)
    assert rare(met, at_least=1) == {}


@pytest.mark.prove
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kind", KINDS)
def test_store_and_oracle_agree_for_long(kind: str) -> None:
    """At least 100,000 steps, in which each important event happened often."""
    met: Counter[str] = Counter()
    with running(kind) as url:
        while met["steps"] < LONG_STEPS:
            met += run(url, examples=1000, steps=50)
    report(kind, met)
    assert rare(met) == {}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_found(fault: str) -> None:
    """The machine that finds no fault in the script finds each planted one."""
    right, wrong = FAULTS[fault]
    assert SCRIPT.count(right) == 1, "the fault must be planted in one place"
    script, only = SCRIPT.replace(right, wrong), SHOWN_BY.get(fault, ())
    with running("valkey") as url, pytest.raises(Difference):
        run(url, examples=400, steps=50, script=script, shrink=False, only=only)


@pytest.mark.timeout(3600)  # some seconds on an idle machine
@pytest.mark.parametrize("fault", NODE_FAULTS)
def test_planted_fault_in_a_node_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine that finds no fault in a node's code around the script finds each planted one."""
    module, right, wrong = NODE_FAULTS[fault]
    faulty = planted(module, right, wrong)
    for user in (
        snapshot,
        compiled_quota,
        encoding,
        compiled,
        plan,
        answers,
        admission,
        local,
        redis,
        machine,
    ):
        for name, value in vars(user).items():
            if getattr(value, "__module__", None) == module.__name__ and name in faulty:
                monkeypatch.setattr(user, name, faulty[name])
    with running("valkey") as url, pytest.raises((Difference, IndexError)):
        run(url, examples=400, steps=50, shrink=False, only=SHOWN_BY.get(fault, ()))


def report(kind: str, met: Counter[str]) -> None:
    """Print the events of a run."""
    say(f"{kind}: {met['steps']:,} steps, {met['decisions']:,} decisions, no difference")
    for name in sorted(set(met) - {"steps", "decisions"}):
        say(f"{met[name]:>7,}  {name}")
