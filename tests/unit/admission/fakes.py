"""Shared parts of tests of admission: quotas for everyone, their charges, answers and fake stores."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from msgspec import structs

from app.admission.admission import Admission
from app.admission.compiled import Tables, charge_of
from app.admission.factor import UNTHROTTLED, FactorSource
from app.admission.gathering.circuit import Circuit
from app.admission.gathering.slices import Slices
from app.admission.metrics.metrics import Metrics
from app.admission.plan import PlannedAsk
from app.admission.recorder import UNRECORDED, Recorder
from app.catalog.snapshot import Snapshot
from app.domain.ask import Ask
from app.domain.decision import Verdict
from app.domain.entity import ANY, Entity
from app.domain.ladder import AppliedQuota, MatchingRules
from app.domain.quota import KEYS, Quota
from app.store.port import (
    NONE_KNOWN,
    Answer,
    AnswersCallback,
    Charge,
    ChargeResult,
    Fault,
    IdsResult,
    LiveLayer,
    Mark,
    Plan,
    Store,
    StoreError,
    UnitsResult,
)
from tests.packed import packed

SECRET = b"s" * 32
NOW_MS = 1_800_000_000_000
EVERYONE = Entity.of(user=ANY)
IDS = Quota("producer_ids_rate", 5, "producer_ids", "deny")
RATE = Quota("request_rate", 5, "sampled_rate", "deny")
ADMITS = UnitsResult("admit", observed=1.0, remaining=2.0)


def snapshot_of(*quotas: Quota) -> Snapshot:
    """Return the snapshot of these quotas, each set for everyone."""
    return Snapshot.of({quota.key: {EVERYONE: quota} for quota in quotas})


def charges_for(ask: Ask, *quotas: Quota) -> list[Charge]:
    """Return the charges of an ask for these quotas, each set for everyone."""
    return Tables(snapshot_of(*quotas), MatchingRules()).charges(ask)


def charge_to(bucket: str, quota: Quota, **more: Any) -> Charge:
    """Return a charge of one unit to a bucket.

    Args:
        more: fields of the charge that differ.
    """
    usage = KEYS[quota.key].usage
    ask = Ask({}, (1,)) if usage == "producer_ids" else Ask({usage: KEYS[quota.key].per_unit})
    return structs.replace(charge_of(AppliedQuota(quota, "user=*", bucket, bucket), ask), **more)


def result(outcome: Any = "admit", **fields: Any) -> UnitsResult:
    """Return a result that differs from ``ADMITS`` in these fields."""
    return structs.replace(ADMITS, outcome=outcome, **fields)


def ids_result(outcome: Any = "admit", **fields: Any) -> IdsResult:
    """Return a result of producer ids."""
    return IdsResult(outcome, **{"observed": 1.0, "remaining": 2.0, **fields})


def sent(answer: Answer, *, brief: bool = False) -> Answer:
    """Return an answer to an ask of one slot as the script sends it.

    Args:
        brief: as the script answers an ask that all quotas of units admit.
    """
    return answer if answer.error is not None or answer.kept is not None else packed(answer, brief=brief)


class PromptStore(Store):
    """A fake store that only decides; subclasses define its answers."""

    lost: Callable[[StoreError], None]

    def answers(self, plans: Sequence[Plan]) -> list[Answer]:
        """Return the answers of a call.

        Raises:
            StoreError: the call fails.
        """
        raise NotImplementedError

    def ask(self, plans: Sequence[Plan], done: AnswersCallback) -> None:
        came: list[Answer] | StoreError
        try:
            came = [sent(answer) for answer in self.answers(plans)]
        except StoreError as error:
            came = error
        asyncio.get_running_loop().call_soon(done, came)

    def silent_since(self) -> float | None:
        return None

    def give_up(self, error: StoreError) -> None:
        raise AssertionError(error)

    async def forget(self, keys: Sequence[bytes], known_ms: Mapping[bytes, int] = NONE_KNOWN) -> int | None:
        raise AssertionError(keys)

    async def live_layers(self, key: bytes, now_ms: int, ttl_ms: int) -> list[LiveLayer]:
        raise AssertionError((key, now_ms, ttl_ms))

    async def examine(self) -> tuple[Fault, ...]:
        return ()

    async def close(self) -> None: ...


class AnsweringStore(PromptStore):
    """A fake store that gives one answer to all asks, or fails.

    Attributes:
        results: the results of an answer, of which an ask gets as many as it has charges.
        more: other fields of the answer.
    """

    def __init__(self, *results: ChargeResult, error: StoreError | None = None, **more: Any) -> None:
        self.results = results
        self.more = {"at_ms": NOW_MS, "order": 1_280, **more}
        self.error = error
        self.plans: list[Plan] = []

    def answers(self, plans: Sequence[Plan]) -> list[Answer]:
        self.plans += plans
        if self.error is not None:
            raise self.error
        return [Answer(self.results[: len(plan.charges)], **self.more) for plan in plans]


class ListRecorder(Recorder):
    """Keeps all that is recorded in lists."""

    def __init__(self) -> None:
        self.heard: list[tuple[PlannedAsk, Answer | None, Sequence[Verdict], str | None]] = []
        self.heard_late: list[tuple[PlannedAsk, Answer, Sequence[Verdict]]] = []
        self.ended: list[float] = []

    def decided(
        self, planned: PlannedAsk, answer: Answer | None, verdicts: Sequence[Verdict], failure: str | None
    ) -> None:
        self.heard.append((planned, answer, verdicts, failure))

    def late(self, planned: PlannedAsk, answer: Answer, verdicts: Sequence[Verdict]) -> None:
        self.heard_late.append((planned, answer, verdicts))

    def lapsed(self, ask: Ask, charge: object, units: float, answer: Answer) -> None:
        self.ended.append(units)


def admission(
    store: Store,
    snapshot: Snapshot,
    *,
    metrics: Metrics | None = None,
    slices: Slices | None = None,
    recorder: Recorder = UNRECORDED,
    factor: FactorSource = UNTHROTTLED,
    mark: Callable[[], Awaitable[Mark]] | None = None,
    sequential: bool = False,
    of: Any = Admission,
) -> Admission:
    """A node whose store has been answering for a long time."""
    made: Admission = of(
        store,
        lambda: snapshot,
        rules=MatchingRules(),
        secret=lambda: SECRET,
        sequential=sequential,
        budget_s=30.0,
        metrics=Metrics(clock=lambda: 0.0) if metrics is None else metrics,
        slices=slices,
        recorder=recorder,
        factor=factor,
        mark=mark,
    )
    made.local._now_s = lambda: 1.0
    assert isinstance(made.circuit, Circuit)
    made.circuit._working_since = -1e9
    return made
