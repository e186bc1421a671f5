"""Loading a history during live traffic: the script is compared with the oracle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from app.domain.ask import Ask
from app.domain.digest import digest, spread
from app.domain.ladder import AppliedQuota, applied_quotas
from app.domain.loading import (
    Charges,
    LoadResult,
    WrittenId,
    load_charges,
    load_ids,
    load_samples,
    load_tokens,
)
from app.domain.oracle import IdsBucket, RateBucket, TokensBucket
from app.domain.quota import KEYS
from app.domain.sampled_rate import Sample
from app.domain.token_bucket import Tokens
from app.store import loading
from app.store.keys import bucket_key
from app.store.loading import Load, Loader
from tests.contract.histories import IDS
from tests.contract.machine import RULES, SECRET, Difference, Machine, checking_each_time, explored, rare
from tests.report import say
from tests.stores import KINDS, running

pytestmark = pytest.mark.usefixtures("patient_connections")

MUST_MEET = (
    *(f"{kind} {what}" for kind in ("ids", "charges", "samples") for what in ("added", "there", "over")),
    "ids no room",
    "charges no room",
    "tokens added",
    "tokens there",
    "live layers before an id was loaded",
    "charges between charges",
    "layer begun",
)
AT_LEAST = 20
STEPS, MOST_STEPS = 800, 40_000
AMOUNTS = st.sampled_from((1.0, 2.5, 7.0, 30.0))


class LoadMachine(Machine):
    """The state machine of decisions, which also loads random histories that are partly loaded already."""

    script_of_load = loading.SCRIPT

    @initialize(max_ids=st.sampled_from((40, 160)), sequential=st.just(value=False), data=st.data())
    def begin(self, max_ids: int, sequential: bool, data: Any) -> None:
        super().begin(max_ids, sequential, data)
        script = checking_each_time(self.script_of_load)
        self.loader = Loader(self.url, "machine", at_ms=self.now, max_ids=max_ids, script=script)

    def teardown(self) -> None:
        if hasattr(self, "loader"):
            self.loop.run_until_complete(self.loader.close())
        super().teardown()

    @rule(
        principal=st.sampled_from(("a", "b")),
        first=st.sampled_from((0, 5, 20, 60, 200)),
        ages=st.lists(st.integers(0, 6_000), min_size=1, max_size=40),
        begun=st.integers(0, 10_000),
    )
    def load_some_ids(self, principal: str, first: int, ages: list[int], begun: int) -> None:
        self._load_ids(principal, (IDS[first:] + IDS)[: len(ages)], ages, begun)

    @rule(principal=st.sampled_from(("a", "b")), age=st.integers(0, 500))
    def load_more_ids_than_there_is_room_for(self, principal: str, age: int) -> None:
        """Load recent ids, so that all of them still count."""
        chosen = IDS[: self.max_ids + 10]
        self._load_ids(principal, chosen, [age] * len(chosen), begun=0)

    def _load_ids(self, principal: str, chosen: Sequence[int | str], ages: Sequence[int], begun: int) -> None:
        found = self._applied("producer_ids_rate", principal)
        if found is None:
            return
        bucket, now = self._bucket_of(found)
        layers = found.quota.layers
        ids = [
            WrittenId(
                spread(digest(SECRET, principal, id_)), now - age, now - age - begun % layers.interval_ms
            )
            for id_, age in zip(chosen, sorted(ages, reverse=True), strict=True)
        ]
        assert isinstance(bucket, IdsBucket)
        before = len(bucket.state.layers), max(bucket.state.layers, default=0)
        expected = load_ids(bucket.state, ids, now, found.quota, self.max_ids)
        self.met["live layers before an id was loaded"] += before[0] > 0 and expected.added > 0
        self.met["layer begun"] += max(bucket.state.layers, default=0) - before[1]
        self._load("ids", found, ids, expected)
        self._decide([Ask({}, tuple(chosen[:5]), principal, broker=self._broker(found), detail=True)])

    @rule(
        principal=st.sampled_from(("a", "b")),
        charges=st.dictionaries(
            st.integers(0, 4_500), st.sampled_from((1, 1, 2, 3, 30)), min_size=1, max_size=20
        ),
        most=st.sampled_from((1, 30)),
        close=st.booleans(),
    )
    def load_some_charges(self, principal: str, charges: dict[int, int], most: int, close: bool) -> None:
        found = self._applied("producer_ids_rate", principal)
        if found is None:
            return
        bucket, now = self._bucket_of(found)
        assert isinstance(bucket, IdsBucket)
        wanted = {now - age: min(n, most) for age, n in charges.items()}
        if close:  # added to the existing content
            wanted |= {
                at + more: 2 for at in bucket.state.charges[-10:] for more in (0, -1) if at + more <= now
            }
        items = [Charges(at, wanted[at]) for at in sorted(wanted)]
        newest = max(bucket.state.charges, default=0)
        expected = load_charges(bucket.state, items, now, found.quota, self.max_ids)
        self.met["charges between charges"] += expected.added > 0 and items[0].at_ms < newest
        self._load("charges", found, items, expected)
        again = load_charges(bucket.state, items, now, found.quota, self.max_ids)
        if not expected.no_room and again.added:
            raise Difference("loading twice charges twice")
        self._decide([Ask({}, (f"new-{self.now}",), principal, broker=self._broker(found), detail=True)])

    @rule(principal=st.sampled_from(("a", "b")), data=st.data())
    def load_some_samples(self, principal: str, data: Any) -> None:
        found = self._one_of("sampled_rate", principal, data)
        if found is None:
            return
        bucket, now = self._bucket_of(found)
        assert isinstance(bucket, RateBucket)
        ages = data.draw(st.lists(st.integers(0, 1_500), min_size=1, max_size=6, unique=True))
        close = {sample.start_ms for sample in bucket.state[: data.draw(st.integers(0, 3))]}
        samples = tuple(
            Sample(data.draw(AMOUNTS), start, min(start + data.draw(st.integers(0, 200)), now))
            for start in sorted({now - age for age in ages} | close)
        )
        for each in (samples, bucket.state):
            if each:
                bucket.state, expected = load_samples(bucket.state, each, now, found.quota)
                self._load("samples", found, each, expected)
        self._ask_for(found, principal)

    @rule(principal=st.sampled_from(("a", "b")), age=st.sampled_from((0, 0, 20, 3_000)), data=st.data())
    def load_some_tokens(self, principal: str, age: int, data: Any) -> None:
        found = self._one_of("token_bucket", principal, data)
        if found is None:
            return
        bucket, now = self._bucket_of(found)
        assert isinstance(bucket, TokensBucket)
        level = found.quota.burst - data.draw(AMOUNTS)
        for tokens in (Tokens(level, now - age), Tokens(level + 0.5, now), bucket.state):
            if tokens is not None:
                bucket.state, expected = load_tokens(bucket.state, tokens, now, found.quota)
                self._load("tokens", found, [tokens], expected)
        self._ask_for(found, principal)

    def _one_of(self, algorithm: str, principal: str, data: Any) -> AppliedQuota | None:
        """A quota of this algorithm that applies to a principal whose ask has every field."""
        keys = sorted(set(KEYS) - {"producer_ids_rate"})
        every = [each for key in keys if (each := self._applied(key, principal)) is not None]
        fitting = [each for each in every if each.quota.algorithm == algorithm]
        return data.draw(st.sampled_from(fitting)) if fitting else None

    def _ask_for(self, found: AppliedQuota, principal: str) -> None:
        """Send an ask whose answer depends on the bucket's content."""
        usage = {KEYS[found.quota.key].usage: 1}
        self._decide([Ask(usage, None, principal, "c", "10.0.0.1", "1", "L", detail=True)])

    def _applied(self, key: str, principal: str) -> AppliedQuota | None:
        """The first quota of a key that applies to a principal whose ask has every field."""
        usage = {KEYS[key].usage: 1.0}
        ids = () if key == "producer_ids_rate" else None
        broker = None if ids == () and self.now % 2 else "1"
        ask = Ask(usage if ids is None else {}, ids, principal, "c", "10.0.0.1", broker, "L")
        return next(iter(applied_quotas(ask, self.quotas, RULES)), None)

    @staticmethod
    def _broker(found: AppliedQuota) -> str | None:
        return "1" if found.bucket.endswith(";broker=1") else None

    def _bucket_of(self, found: AppliedQuota) -> tuple[Any, int]:
        """The oracle's bucket, and the time of the load."""
        quota = found.quota
        name = (quota.key, found.bucket, quota.identity, quota.epoch)
        bucket = self.oracle.buckets.setdefault(name, self.oracle._absent(quota))
        return bucket, max(self.now, bucket.newest_ms if bucket.newest_ms is not None else self.now)

    def _load(self, kind: str, found: AppliedQuota, items: Any, expected: LoadResult) -> None:
        """Load the same twice: first the result equals the oracle's, then nothing changes."""
        self._fill(full=False)  # a full store loads no history
        self.loader.at_ms = self.now
        load = Load(found, items)
        (got,) = self.loop.run_until_complete(self.loader.load([load], len(items)))
        if got != expected:
            raise Difference(f"{load}\nstore:  {got}\noracle: {expected}")
        key = bucket_key(found)
        held = self.redis.dump(key)
        (again,) = self.loop.run_until_complete(self.loader.load([load], len(items)))
        if not expected.no_room and (again.added or self.redis.dump(key) != held):
            raise Difference(f"{load}\nloading twice changed something: {again}")
        if expected.no_room:
            self._twice_where_there_is_no_room(found, items, again)
        if held is not None and self.redis.pttl(key) == -1:
            raise Difference(f"no expiry on {key!r}")
        for what in ("added", "there", "over", "no_room"):
            self.met[f"{kind} {what.replace('_', ' ')}"] += getattr(expected, what)

    def _twice_where_there_is_no_room(self, found: AppliedQuota, items: Any, got: LoadResult) -> None:
        """Load into the oracle too, so that both hold the same at the next ask."""
        bucket, now = self._bucket_of(found)
        if isinstance(items[0], WrittenId):
            expected = load_ids(bucket.state, items, now, found.quota, self.max_ids)
        else:
            expected = load_charges(bucket.state, items, now, found.quota, self.max_ids)
        if got != expected:
            raise Difference(f"{items}\nstore:  {got}\noracle: {expected}")


def run(
    url: str,
    *,
    examples: int,
    script: str = loading.SCRIPT,
    shrink: bool = True,
    only: Collection[str] = (),
) -> Counter[str]:
    """Run the machine against a store, and return which events it met how often."""

    class Run(LoadMachine):
        pass

    Run.script_of_load = script
    return explored(Run, url, examples=examples, steps=40, shrink=shrink, only=only)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("often", [1, pytest.param(AT_LEAST, marks=pytest.mark.prove)])
@pytest.mark.parametrize("kind", KINDS)
def test_load_equals_the_oracle(kind: str, often: int) -> None:
    """Between loads, store and oracle agree on decisions; each event happens at least so often."""
    met = Counter[str]()
    with running(kind) as url:
        while met["steps"] < STEPS or (rare(met, MUST_MEET, often) and met["steps"] < MOST_STEPS):
            met += run(url, examples=15)
    say(f"{kind}: {met['steps']:,} steps", {name: met[name] for name in MUST_MEET})
    assert rare(met, MUST_MEET, often) == {}


FAULTS = {
    "an id in a layer that dies too early": (
        "is_live(check, number) and at - check.starts[number % LAYERS] < check.interval then return number",
        "is_live(check, number) then return number",
    ),
    "an older layer's cells set in a newer one's place": (
        "words[1] = max(written, number)",
        "words[1] = number",
    ),
    "a moved id counted twice": (
        "counts[number % LAYERS] = max(counts[number % LAYERS] - 1, 0)\n  end\n  local into",
        "counts[number % LAYERS] = max(counts[number % LAYERS], 0)\n  end\n  local into",
    ),
    "charges added to those that are there": ("max(ids - (place - first), 0)", "ids"),
    "charges appended out of order": ("local first = wanted[1][1] - dropped", "local first = check.charges"),
    "sums of samples added": ("max(old[1], value)", "old[1] + value"),
    "the larger level": ("tokens_at(check, check.tokens, check.at, at) <= level", "false"),
}

SHOWN_BY = (
    *(f"load_some_{what}" for what in ("ids", "charges", "samples", "tokens")),
    "load_more_ids_than_there_is_room_for",
    "advance",
    "ask",
)
"""The rules that find all faults sooner than random histories of all rules."""


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_found(fault: str) -> None:
    """The machine that finds no fault in the script finds each planted one."""
    right, wrong = FAULTS[fault]
    assert loading.SCRIPT.count(right) == 1, "the fault must be planted in one place"
    script = loading.SCRIPT.replace(right, wrong)
    with running("valkey") as url, pytest.raises(Difference):
        run(url, examples=1_000, script=script, shrink=False, only=SHOWN_BY)
