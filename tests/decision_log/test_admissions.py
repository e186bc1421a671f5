"""Plain admissions become the rows that the readable way makes of the same asks; planted faults are found."""

from __future__ import annotations

import asyncio
import inspect
import struct
from collections.abc import Sequence
from itertools import chain
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from app.admission import decision_log, log_pages
from app.admission.admission import Admission
from app.admission.decision_log import DecisionLog
from app.admission.metrics import Metrics
from app.catalog.snapshot import Snapshot
from app.decision_log.status import LogStatus
from app.domain.ask import Ask
from app.domain.entity import ANY, Entity
from app.domain.ladder import MatchingRules
from app.domain.quota import Quota
from app.store.port import Answer, Came, ChargeResult
from tests.packed import packed
from tests.unit.admission.fakes import PromptStore
from workers.decision_log import admissions
from workers.decision_log import rows as writer

SECRET = b"s" * 32
BEGAN_MS = 1_763_719_200_000
ALICE = Entity.of(user="alice")
SNAPSHOT = Snapshot().apply(
    1,
    [
        ("request_rate", Entity.of(user=ANY), Quota("request_rate", 100, "sampled_rate", "delay")),
        ("request_rate", ALICE, Quota("request_rate", 7.5, "sampled_rate", "deny", samples=4)),
        ("producer_byte_rate", ALICE, Quota("producer_byte_rate", 1e6, "sampled_rate", "delay")),
        (
            "controller_mutation_rate",
            Entity.of(user=ANY, client_id=ANY),
            Quota("controller_mutation_rate", 5, "token_bucket", "deny", burst=55),
        ),
        ("producer_ids_rate", Entity.of(user=ANY), Quota("producer_ids_rate", 5, "producer_ids", "deny")),
    ],
)


class Said(NamedTuple):
    """What the store says of an ask: the fate of every id, whether all quotas admit, and whether it says that
    briefly where it can.
    """

    observed: float
    remaining: float
    fate: int
    admits: bool
    is_brief: bool = False


class Step(NamedTuple):
    """A step of a history: which ask, or a change; and how the store answers."""

    ask: int
    said: Said


class Store(PromptStore):
    """Answers by the history."""

    def __init__(self) -> None:
        self.said = Said(0, 0, 0, admits=True)
        self._order = 0

    def ask(self, plans: Sequence[Any], done: Came) -> None:
        is_brief = self.said.admits and self.said.is_brief
        came = [packed(self._answer(plan), brief=is_brief and not plan.ids) for plan in plans]
        asyncio.get_running_loop().call_soon(done, came)

    def _answer(self, plan: Any) -> Answer:
        self._order += 128
        said = self.said
        charges = len(plan.keys) if hasattr(plan, "keys") else len(plan.charges)
        counted = 1 if plan.ids else 0
        results = [
            ChargeResult(
                "admit", 0, None, 0, said.observed + at, said.remaining, None, 3 * (at < counted), 0.0, 2
            )
            for at in range(charges)
        ]
        if not said.admits:
            results[-1] = ChargeResult("delay", 70, None, 0, said.observed, 0.0, None, 0, 0.0)
        fates = bytes((said.fate + at) % 3 for at in range(plan.ids))
        return Answer(tuple(results), None, None, BEGAN_MS + self._order, self._order, fates)


class Stream:
    """Takes every batch."""

    def __init__(self) -> None:
        self.batches: list[bytes] = []

    async def append(self, batch: bytes, rows: int, node: str, number: int) -> bool:
        assert len(writer.decode(batch).rows) == rows, (node, number)
        self.batches.append(batch)
        return True

    async def status(self) -> LogStatus:
        raise AssertionError("nobody looks here")


async def log_of(asks: Sequence[Ask], steps: Sequence[Step], *, short: bool, plain_ids: bool) -> list[bytes]:
    """The batches of a node that logs all decisions of a history."""
    store, stream = Store(), Stream()
    log = DecisionLog(
        stream,
        which="all",
        node="n",
        secret=lambda: SECRET,
        now_ms=lambda: BEGAN_MS,
        plain_ids=plain_ids,
    )
    node = Admission(
        store,
        lambda: SNAPSHOT,
        rules=MatchingRules(),
        secret=lambda: SECRET,
        sequential=False,
        budget_s=1e6,
        queue_s=1e6,
        metrics=Metrics(),
        logs=log,
    )
    ready = [node.plain(ask) or ask for ask in asks] if short else list(asks)
    for step in steps:
        if step.ask >= len(ready):
            log.changed("factor", "throttle_factor", 1, 0.5)
            continue
        store.said = step.said
        await node.decide([ready[step.ask]])
    await log._send()
    assert (log.dropped, log._bytes) == (0, 0)
    return stream.batches


def rows_of(batches: Sequence[bytes]) -> list[dict[str, Any]]:
    """The rows that the writer makes, in order; only where they lie in batches may differ."""
    decoded = [writer.decode(batch) for batch in batches]
    found: list[dict[str, Any]] = writer.table(decoded).to_pylist()
    assert [row.pop("place") for row in found] == list(
        chain.from_iterable(range(len(b.rows)) for b in decoded)
    )
    for row in found:
        del row["batch"], row["batch_rows"], row["siblings"]
    return found


NAMES = st.one_of(st.sampled_from([None, "alice", "bob"]), st.text(st.characters(codec="utf-8"), max_size=8))
AMOUNTS = st.one_of(st.integers(0, 10**9), st.floats(0, 1e12))
ASKS = st.builds(
    Ask,
    st.one_of(
        st.sampled_from([{"requests": 1}, {"requests": 2, "mutations": 1}]),
        st.dictionaries(st.sampled_from(["requests", "produce_bytes", "mutations", "fetch_bytes"]), AMOUNTS),
    ),
    st.one_of(
        st.none(),
        st.lists(st.one_of(st.integers(-1, 2**63 - 1), st.text(max_size=4)), max_size=5).map(tuple),
    ),
    NAMES,
    NAMES,
    st.one_of(st.none(), st.just("10.0.0.7")),
    NAMES,
    NAMES,
    deny=st.booleans(),
    detail=st.booleans(),
    at_ms=st.one_of(st.none(), st.integers(0, 2**40)),
)
SAID = st.builds(
    Said,
    st.floats(0, 1e9),
    st.floats(-1e9, 1e9),
    st.integers(0, 2),
    st.sampled_from([True] * 7 + [False]),
    st.booleans(),
)


TELLING = [
    Ask({"requests": 1}, (1, "a"), "bob"),
    Ask({"requests": 1}, (2, "b"), "carol"),
    Ask({"requests": 2, "mutations": 1}, (7,), "alice", "etl", deny=True),
    Ask({"fetch_bytes": 1}, None, "bob"),
    Ask({"requests": 3}, None, "dora", at_ms=5),
]
"""Asks with shared quotas and without, of which each fault shows in some way."""

ADMITTED = [
    Step(ask, Said(ask + 0.5, ask + 40.0, ask, admits=True, is_brief=place > 5))
    for place, ask in enumerate((0, 1, 5, 2, 0, 3, 4, 1, 5, 2))
]


def compare(examples: int, phases: Sequence[Phase] = tuple(Phase)) -> None:
    """Compare the rows of many histories, made in both ways."""

    @settings(
        max_examples=examples,
        deadline=None,
        phases=phases,
        derandomize=True,
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    @example(TELLING, ADMITTED, False, decision_log.BATCH_BYTES, decision_log.ROWS_IN_BATCH)
    @example(TELLING, ADMITTED, False, 1_000, 1)
    @given(
        st.lists(ASKS, min_size=1, max_size=6),
        st.lists(st.builds(Step, st.integers(0, 6), SAID), min_size=1, max_size=30),
        st.booleans(),
        st.sampled_from([150, 1_000, decision_log.BATCH_BYTES]),
        st.sampled_from([1, 4, decision_log.ROWS_IN_BATCH]),
    )
    def same(asks: list[Ask], steps: list[Step], plain_ids: bool, size: int, most: int) -> None:
        with mock.patch.dict(DecisionLog._pack.__globals__, BATCH_BYTES=size, ROWS_IN_BATCH=most):
            short, readable = (
                rows_of(asyncio.run(log_of(asks, steps, short=way, plain_ids=plain_ids)))
                for way in (True, False)
            )
        assert short == readable

    same()


def test_both_ways_make_the_same_rows() -> None:
    compare(examples=100)


FAULTS: dict[str, tuple[ModuleType, str, str]] = {
    "remaining for observed": (
        admissions,
        "observed, remaining = numbers[2 * at], numbers[2 * at + 1]",
        "remaining, observed = numbers[2 * at], numbers[2 * at + 1]",
    ),
    "the first quota's numbers in each verdict": (
        admissions,
        "in enumerate(its.charges)",
        "in zip([0] * 9, its.charges, strict=False)",
    ),
    "the fate of ids left out": (admissions, "outcomes if counts_ids else NO_IDS", "NO_IDS"),
    "the store's time for the caller's": (admissions, "at_ms if its.at_ms is None else its.at_ms", "at_ms"),
    "the place in the order left out": (admissions, "None if order == NOT_ASKED else order", "None"),
    "the quotas of another ask": (
        admissions,
        "(group, at, charge.entity, charge.bucket)",
        '(group, at, charge.entity, "")',
    ),
    "the ask before": (admissions, "its = equals[place]", "its = equals[place - 1]"),
    "deny left out": (log_pages, "            ask.deny,\n", "            False,\n"),
    "digests of another principal": (
        log_pages,
        'digest(secret, ask.principal or "", one)',
        'digest(secret, "", one)',
    ),
    "the enforcement of the quota for that of the ask": (
        log_pages,
        "enforcement_of(planned.ask, quota) for",
        "quota.enforcement for",
    ),
    "the ask's place before a page was cut": (
        log_pages,
        "_PLACE.pack(ask.place) + self.rows[begin + _PLACE.size : end]",
        "self.rows[begin:end]",
    ),
    "a row lost where a page is cut": (decision_log, "chain([row], waiting)", "waiting"),
    "plain ids that nobody wants": (log_pages, "plain_texts(ids) if plain_ids else None", "plain_texts(ids)"),
    "the quotas of the first ask for all": (
        log_pages,
        "quotas.page, quotas.place = number, len(self._quotas)",
        "quotas.page, quotas.place = number, 0",
    ),
}
"""Faults of the way of admissions into the log: in which module, what is right, and what is wrong."""


def plant(module: ModuleType, right: str, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace a module in both ends of the log by one with other source."""
    source = inspect.getsource(module)
    faulty = dict(vars(module))
    exec(compile(source.replace(right, wrong), str(module.__file__), "exec"), faulty)
    for user in (writer, decision_log, module):
        for name, value in vars(user).items():
            if getattr(value, "__module__", None) == module.__name__ and name in faulty:
                monkeypatch.setattr(user, name, faulty[name])
    monkeypatch.setitem(globals(), "DecisionLog", decision_log.DecisionLog)


@pytest.mark.parametrize("module", [admissions, log_pages, decision_log])
def test_module_without_a_fault_makes_no_difference(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it is the fault that is found, not how it was planted."""
    plant(module, "", "", monkeypatch)
    compare(examples=1)


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison that finds no difference finds each planted one."""
    module, right, wrong = FAULTS[fault]
    assert inspect.getsource(module).count(right) == 1, "the fault must be planted in one place"
    plant(module, right, wrong, monkeypatch)
    with pytest.raises((AssertionError, writer.UnreadableError, IndexError, struct.error)):
        compare(examples=400, phases=(Phase.explicit, Phase.generate))
