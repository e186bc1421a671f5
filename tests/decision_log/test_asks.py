"""A row of the log has the decision and the verdicts of its ask, whatever the store answered.

Two nodes get the same asks and the same answers: one logs, the other one is asked for detail. Planted faults
on the way into the log are found.
"""

from __future__ import annotations

import asyncio
import inspect
import struct
from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from app.admission.admission import Admission
from app.admission.factor import FactorSource
from app.admission.log import decision_log
from app.admission.log import rows as log_rows
from app.admission.metrics.metrics import Metrics
from app.admission.plan import PlannedAsk
from app.admission.recorder import UNRECORDED, Recorder
from app.catalog.snapshot import Snapshot
from app.decision_log.batch import CHARGED, REFRESHED
from app.domain.ask import Ask
from app.domain.binding import Binding
from app.domain.caller import ANYONE, Caller
from app.domain.entity import ANY, Entity
from app.domain.errors import OutOfBoundsError
from app.domain.ladder import MatchingRules
from app.domain.quota import Quota
from app.store.port import Answer, AnswersCallback, Plan
from tests.decision_log import saved
from tests.decision_log.saved import NODE_MS, SECRET, Json, SavedBatches
from tests.decision_log.scripted import ScriptedAnswer, ScriptedResult, ScriptedStore
from workers.decision_log import asked
from workers.decision_log import rows as writer

ALICE, ANYBODY = Entity.of(user="alice"), Entity.of(user=ANY)
SNAPSHOT = Snapshot().apply(
    1,
    [
        ("request_rate", ANYBODY, Quota("request_rate", 100, "sampled_rate", "delay")),
        ("request_rate", ALICE, Quota("request_rate", 7.5, "sampled_rate", "deny", samples=4)),
        ("producer_byte_rate", ALICE, Quota("producer_byte_rate", 1e6, "sampled_rate", "delay")),
        (
            "consumer_byte_rate",
            ANYBODY,
            Quota("consumer_byte_rate", 9, "sampled_rate", "deny", shadow=True, on_store_failure="throttle"),
        ),
        (
            "controller_mutation_rate",
            Entity.of(user=ANY, client_id=ANY),
            Quota("controller_mutation_rate", 5, "token_bucket", "deny", burst=55),
        ),
        ("producer_ids_rate", ANYBODY, Quota("producer_ids_rate", 5, "producer_ids", "deny")),
        (
            "connection_creation_rate",
            Entity.of(ip=ANY),
            Quota("connection_creation_rate", 0, "sampled_rate", "deny"),
        ),
    ],
)
BOUND = Caller("bound", bound_to=(Binding.parse("user=alice"), Binding.parse("user=bob")))
"""For this caller, all buckets but alice's and bob's count as shared."""


class SetFactor(FactorSource):
    """A throttle factor that a test sets."""

    def __init__(self) -> None:
        self.factor = 1.0

    def on(self, _ask: Ask) -> float:
        return self.factor

    def suspension_ms(self, _at_ms: int | None) -> int:
        return 7_000


class RecordingStore(ScriptedStore):
    """Remembers its answers to asks; ids are refreshed in the background."""

    def __init__(self) -> None:
        super().__init__()
        self.answered: list[Answer] = []

    def ask(self, plans: Sequence[Plan], done: AnswersCallback) -> None:
        def came(answers: list[Answer] | Exception) -> None:
            if isinstance(answers, list):
                asks = zip(plans, answers, strict=True)
                self.answered += [answer for plan, answer in asks if plan.mode != "refresh"]
            done(answers)

        super().ask(plans, came)


class LoggedStep(NamedTuple):
    """A step of a history: asks that are sent together, the throttle factor, and how the store answers."""

    asks: tuple[int, ...]
    says: ScriptedAnswer = ScriptedAnswer()
    factor: float = 1.0
    caller: Caller = ANYONE


class DetailedPair:
    """A node that logs, and one that is asked for detail; both get the same answers."""

    def __init__(self, *, plain_ids: bool, sequential: bool) -> None:
        self.stream = SavedBatches()
        self.log = saved.log_into(self.stream, plain_ids=plain_ids)
        self.stores, self.factor = (RecordingStore(), RecordingStore()), SetFactor()
        self.nodes = [
            self._node(store, recorder, sequential=sequential)
            for store, recorder in zip(self.stores, (self.log, UNRECORDED), strict=True)
        ]
        self.expected: list[Json] = []
        self._plain_ids = plain_ids

    def _node(self, store: ScriptedStore, recorder: Recorder, *, sequential: bool) -> Admission:
        return Admission(
            store,
            lambda: SNAPSHOT,
            rules=MatchingRules(),
            secret=lambda: SECRET,
            sequential=sequential,
            budget_s=1e6,
            queue_s=1e6,
            metrics=Metrics(),
            factor=self.factor,
            recorder=recorder,
        )

    async def take(self, asks: Sequence[Ask], step: LoggedStep) -> None:
        """Send asks to both nodes, and note the rows that the log must have of them."""
        self.factor.factor = step.factor
        for store in self.stores:
            store.says, store.answered = step.says, []
        try:
            logged = await self.nodes[0].decide(asks, step.caller)
        except OutOfBoundsError:
            return
        detailed = await self.nodes[1].decide([replace(ask, detail=True) for ask in asks], step.caller)
        came = iter(self.stores[0].answered)
        for ask, own, other in zip(asks, logged, detailed, strict=True):
            answer = next(came) if own.plan is not None else None
            assert own.decision is not None
            assert other.decision is not None
            assert replace(own.decision, quotas=None) == replace(other.decision, quotas=None)
            self.expected.append(self._row(ask, other, answer))

    def _row(self, ask: Ask, planned: PlannedAsk, answer: Answer | None) -> Json:
        decision = planned.decision
        assert decision is not None
        came = answer if answer is not None and answer.error is None else None
        replayed = came is not None and came.kept is not None
        at_ms = NODE_MS if came is None else came.at_ms
        row = saved.asked(ask, plain_ids=self._plain_ids) | saved.decided_so(decision)
        failure = "store_full" if answer is None or answer.error is None else answer.error.reason
        return row | {
            "kind": "decision",
            "at_ms": at_ms if ask.at_ms is None else ask.at_ms,
            "order": None if came is None else came.order,
            "replayed": replayed,
            "failure": failure if decision.source == "fallback" else None,
            "change": None,
            "verdicts": [] if replayed else self._verdicts(row, planned, came),
        }

    def _verdicts(self, row: Json, planned: PlannedAsk, came: Answer | None) -> list[Json]:
        assert planned.decision is not None
        results = came.results if came is not None else ()
        corrections = [result.correction for result in results] or [0] * len(planned.charges)
        fates = came.id_outcomes if came is not None else b""
        amounts = saved.spent(planned.ask, planned.charges)

        def ids(fate: int) -> list[int]:
            return [each for each, id_fate in zip(row["ids"] or (), fates, strict=False) if id_fate == fate]

        return [
            verdict
            | {
                "usage": amount,
                "correction": correction,
                "charged_ids": ids(CHARGED) if charge.compiled.counts_ids else None,
                "refreshed_ids": ids(REFRESHED) if charge.compiled.counts_ids else None,
                "bucket_order": None,
                "known_until_ms": None,
                "known_resets": None,
                "algorithm": charge.quota.algorithm,
                "samples": charge.quota.samples,
                "burst": charge.quota.burst,
            }
            for verdict, amount, correction, charge in zip(
                saved.shown(planned.decision.quotas), amounts, corrections, planned.charges, strict=True
            )
        ]


COMPARED_LATER = ("scope", "sample_ms", "window_ms", "interval_ms", "ttl_ms", "epoch", "max_debt")
"""Columns of a quota that come with the compared ones."""


def without(row: Json) -> Json:
    """A row without these columns."""
    verdicts = [
        {name: value for name, value in verdict.items() if name not in COMPARED_LATER}
        for verdict in row["verdicts"]
    ]
    return row | {"verdicts": verdicts}


async def history(
    asks: Sequence[Ask], steps: Sequence[LoggedStep], *, plain_ids: bool, sequential: bool
) -> tuple[list[Json], list[Json], int]:
    """The rows of a history, the expected rows, and the number of batches."""
    pair = DetailedPair(plain_ids=plain_ids, sequential=sequential)
    for step in steps:
        chosen = [asks[place % len(asks)] for place in step.asks]
        if chosen:
            await pair.take(chosen, step)
    for node in pair.nodes:
        await node._refresher.close()
    found = await saved.rows_in(pair.log, pair.stream)
    rows = [without(row) for row in found if row["kind"] == "decision"]
    return rows, pair.expected, len(pair.stream.batches)


NAMES = st.one_of(st.sampled_from([None, "alice", "bob"]), st.text(st.characters(codec="utf-8"), max_size=8))
AMOUNTS = st.one_of(st.integers(0, 10**9), st.floats(0, 1e12))
FIELDS = ["requests", "produce_bytes", "mutations", "fetch_bytes", "connections"]
ASKS = st.builds(
    Ask,
    st.one_of(
        st.sampled_from([{"requests": 1}, {"requests": 2, "mutations": 1}, {"produce_bytes": 5}]),
        st.dictionaries(st.sampled_from(FIELDS), AMOUNTS),
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
    st.sampled_from(["admit", "admit", "admit", "record", "peek", "refund"]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.sampled_from([None, None, "one", "two"]),
    st.one_of(st.none(), st.integers(0, 2**40)),
).map(lambda ask: replace(ask, producer_ids=None) if ask.mode == "refund" else ask)
REFUSED = ("delay", "throttle")
RESULTS = st.builds(
    ScriptedResult,
    st.sampled_from(["admit", "admit", "admit", "delay", "throttle", "reject"]),
    st.integers(1, 2**31 - 1),
    st.one_of(st.floats(0, 1e9), st.just(float("nan"))),
    st.floats(-1e9, 1e9),
    st.sampled_from([None, None, None, "capacity", "too_large", "store_full", "store_failure"]),
    st.sampled_from([0, 0, 0, 1, 2]),
    st.integers(0, 4),
    st.floats(0, 1e6),
).map(lambda result: result if result.outcome in REFUSED else result._replace(throttle_ms=0))
SAID = st.builds(
    ScriptedAnswer,
    st.one_of(
        st.lists(RESULTS, min_size=1, max_size=4).map(tuple),
        st.tuples(st.floats(0, 1e9), st.floats(-1e9, 1e9)).map(
            lambda pair: (ScriptedResult("admit", 0, *pair), ScriptedResult("admit", 0, pair[1], pair[0]))
        ),
    ),
    st.lists(st.integers(0, 2), min_size=1, max_size=3).map(tuple),
    st.booleans(),
    st.sampled_from([False] * 9 + [True]),
)
STEPS = st.builds(
    LoggedStep,
    st.lists(st.integers(0, 5), min_size=1, max_size=4).map(tuple),
    SAID,
    st.sampled_from([1.0, 1.0, 1.0, 0.5, 0.0]),
    st.sampled_from([ANYONE, ANYONE, ANYONE, BOUND]),
)

TELLING = [
    Ask({"requests": 1}, (1, "a", 2), "bob"),
    Ask({"requests": 1, "produce_bytes": 7}, (2, "b"), "alice"),
    Ask({"requests": 2, "mutations": 1}, (7,), "alice", "etl", deny=True, recheck=True),
    Ask({"fetch_bytes": 1}, None, "bob", mode="record", cluster_action=True),
    Ask({"requests": 3, "produce_bytes": 9}, None, "alice", at_ms=5, id="once"),
    Ask({"connections": 3}, None, None, None, "10.0.0.7", "1", "L"),
]
"""Asks in which each fault shows in some way."""

ALL_SAID = (
    ScriptedAnswer((ScriptedResult(observed=3.5), ScriptedResult(observed=4.5, remaining=9)), (1, 2, 0)),
    ScriptedAnswer((ScriptedResult(observed=3.5), ScriptedResult(observed=4.5, remaining=9)), is_brief=True),
    ScriptedAnswer((ScriptedResult("delay", 70, correction=1), ScriptedResult(correction=2)), (2, 1)),
    ScriptedAnswer((ScriptedResult("throttle", 9, reason="capacity"), ScriptedResult("delay", 8))),
    ScriptedAnswer((ScriptedResult(reason="store_full"), ScriptedResult(correction=1, layers=3)), (1,)),
    ScriptedAnswer((ScriptedResult("reject", reason="too_large", given=3.0),)),
    ScriptedAnswer(is_unreadable=True),
)
SPOKEN = [
    LoggedStep((first, (first + 1) % 6), says, factor, caller)
    for says in ALL_SAID
    for first in (0, 2, 4, 4)
    for factor, caller in ((1.0, ANYONE), (0.0, ANYONE), (0.5, BOUND))
]


def compare(examples: int, phases: Sequence[Phase] = tuple(Phase)) -> None:
    """Compare the rows of many histories with the decisions."""

    @settings(
        max_examples=examples,
        deadline=None,
        phases=phases,
        derandomize=True,
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    @example(TELLING, SPOKEN, False, False, decision_log.BATCH_BYTES)
    @example(TELLING, SPOKEN, True, True, 1_000)
    @given(
        st.lists(ASKS, min_size=1, max_size=6),
        st.lists(STEPS, min_size=1, max_size=12),
        st.booleans(),
        st.booleans(),
        st.sampled_from([150, 1_000, decision_log.BATCH_BYTES]),
    )
    def same(asks: list[Ask], steps: list[LoggedStep], plain_ids: bool, sequential: bool, size: int) -> None:
        # Errors of planted faults are logged, and to render their stacks would take most of the time.
        with mock.patch.dict(decision_log.DecisionLog._take.__globals__, BATCH_BYTES=size), capture_logs():
            rows, expected, batches = asyncio.run(
                history(asks, steps, plain_ids=plain_ids, sequential=sequential)
            )
        assert rows == expected
        assert batches == 1 or size < decision_log.BATCH_BYTES or not rows

    same()


def test_row_has_the_decision_and_the_verdicts_of_its_ask() -> None:
    compare(examples=150)


FAULTS: dict[str, tuple[ModuleType, str, str]] = {
    "remaining for observed": (
        asked,
        "result.observed if is_known",
        "result.remaining if is_known",
    ),
    "unknown numbers as they came": (
        asked,
        "is_known = result.observed == result.observed",
        "is_known = True",
    ),
    "the first result in each verdict": (
        asked,
        "all_results, orders, strict=True",
        "all_results[:1] * 9, orders, strict=False",
    ),
    "what became of ids left out": (asked, "ask.outcomes if counts_ids", "b'' if counts_ids"),
    "the wait of the decision in each verdict": (asked, "result.throttle_ms,", "ask.throttle_ms,"),
    "a correction left out": (asked, "result.correction,", "0,"),
    "the outcome of the ask in each verdict": (asked, "result.outcome,", "OUTCOMES[ask.decision],"),
    "a reason left out": (asked, "result.reason,", "None,"),
    "the enforcement of the quota for that of the ask": (
        asked,
        "quota.applied_as or quota.enforcement",
        "quota.enforcement",
    ),
    "the usage in another unit": (asked, "ask.usage[key.usage] / key.per_unit", "ask.usage[key.usage] * 2"),
    "the bucket left out": (asked, "self._sent[place], bucket=bucket", "self._sent[place], bucket=''"),
    "a recheck for deny": (asked, "ask.flags & DENY", "ask.flags & RECHECK"),
    "verdicts of a kept answer": (log_rows, "            charges = ()\n", "            pass\n"),
    "deny left out": (log_rows, "flags |= DENY", "pass"),
    "a recheck left out": (log_rows, "flags |= RECHECK", "pass"),
    "a cluster action left out": (log_rows, "flags |= CLUSTER_ACTION", "pass"),
    "a kept answer taken for a new one": (log_rows, "flags |= REPLAYED", "pass"),
    "the mode left out": (log_rows, "_MODE[ask.mode]", "0"),
    "digests of another principal": (
        log_rows,
        'digest(self._secret, ask.principal or "", one)',
        'digest(self._secret, "", one)',
    ),
    "the enforcement that did not apply": (
        log_rows,
        "applied_as=compiled.enforcement",
        "applied_as=compiled.quota.enforcement",
    ),
    "plain ids that nobody wants": (
        log_rows,
        "id_texts(ids) if self._plain_ids else None,\n            _OUTCOME",
        "id_texts(ids),\n            _OUTCOME",
    ),
    "the first quota for all": (
        log_rows,
        "self._places[key] = self._equals[equal] = len(self._equals)",
        "self._places[key] = self._equals[equal] = 0",
    ),
    "quotas that differ in the enforcement taken for one": (
        log_rows,
        "compiled.entity, compiled.enforcement, bucket",
        "compiled.entity, '', bucket",
    ),
    "the store's word where a policy decided": (
        log_rows,
        "answer.earlier is None and not by_policy_in(answer)",
        "answer.earlier is None",
    ),
    "corrections lost where a policy decided": (
        log_rows,
        "correction=max(each.correction for each in tries)",
        "correction=0",
    ),
    "an ask for a kept answer taken for one": (
        log_rows,
        "answer is not None and not answer.results",
        "False",
    ),
    "a row that is not counted": (log_rows, "self._count += 1", "self._count = 1"),
}
"""Faults on the way of asks into the log: the module, the right code, and the wrong code."""


def plant(module: ModuleType, right: str, wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace a module in both ends of the log by one with other source."""
    source = inspect.getsource(module)
    faulty = dict(vars(module))
    exec(compile(source.replace(right, wrong), str(module.__file__), "exec"), faulty)
    for user in (writer, decision_log, module):
        for name, value in vars(user).items():
            if getattr(value, "__module__", None) == module.__name__ and name in faulty:
                monkeypatch.setattr(user, name, faulty[name])


@pytest.mark.parametrize("module", [asked, log_rows])
def test_module_without_a_fault_makes_no_difference(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the comparison finds the fault, not the planting."""
    plant(module, "", "", monkeypatch)
    compare(examples=1)


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison that finds no difference finds each planted one."""
    module, right, wrong = FAULTS[fault]
    assert inspect.getsource(module).count(right) == 1, "the fault must be planted in one place"
    plant(module, right, wrong, monkeypatch)
    found: tuple[Any, ...] = (AssertionError, writer.UnreadableError, IndexError, struct.error, ValueError)
    with pytest.raises(found):
        compare(examples=400, phases=(Phase.explicit, Phase.generate))
