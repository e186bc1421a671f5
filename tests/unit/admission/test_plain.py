"""The short way of plain asks: who takes it; it decides, counts and logs as the readable way does."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from app.admission.admission import Admission
from app.admission.circuit import Circuit
from app.admission.errors import CallerGoneError
from app.admission.hold import UNTHROTTLED, FactorSource
from app.admission.logs import UNLOGGED, Logs
from app.admission.metrics import Metrics
from app.admission.plain import ADMITTED, ADMITTED_ALONE, PlainAsk, PlainAsks, PlainQuotas, PlannedAsk
from app.admission.plan import Matches
from app.catalog.snapshot import Snapshot
from app.domain.ask import Ask
from app.domain.binding import Binding
from app.domain.caller import ANYONE, Caller
from app.domain.decision import Decision
from app.domain.entity import ANY, Entity
from app.domain.ladder import MatchingRules
from app.domain.quota import Quota
from app.store.encoding import encode_plans
from app.store.port import Answer, Came, ChargeResult, Fault, Mark, PackedAnswer, PackedPlan, StoreError
from tests.packed import packed

EVERYONE = Entity.of(user=ANY)
RATE = Quota("request_rate", 5, "sampled_rate", "delay")
TOKENS = Quota("controller_mutation_rate", 5, "token_bucket", "deny", burst=55)
IDS = Quota("producer_ids_rate", 5, "producer_ids", "deny", on_store_failure="throttle")
SNAPSHOT = Snapshot().apply(1, [(quota.key, EVERYONE, quota) for quota in (RATE, TOKENS, IDS)])
ASK = Ask({"requests": 1}, principal="alice")
ALL = Ask({"requests": 2, "mutations": 1}, (1, "a"), principal="alice")

ADMIT = ChargeResult("admit", 0, None, 0, 0.25, 40.0, None, 0, 0.0)
SEEN = ChargeResult("admit", 0, None, 0, 1.0, 4.0, None, 2, 0.01, 1)


def but(result: ChargeResult, **fields: Any) -> ChargeResult:
    return msgspec.structs.replace(result, **fields)


OF_ALL = {
    "admitted": Answer((SEEN, ADMIT, ADMIT)),
    "delayed": Answer((SEEN, but(ADMIT, outcome="delay", throttle_ms=7), ADMIT)),
    "throttled": Answer((but(SEEN, outcome="throttle", throttle_ms=9), ADMIT, ADMIT)),
    "rejected": Answer((SEEN, ADMIT, but(ADMIT, outcome="reject", reason="too_large", largest=3.0))),
    "no room": Answer((but(SEEN, reason="store_full"), ADMIT, ADMIT)),
    "clock behind": Answer((SEEN, but(ADMIT, correction=1), ADMIT)),
    "debt forgiven": Answer((SEEN, ADMIT, but(ADMIT, fill=2.5))),
    "ids charged": Answer((SEEN, ADMIT, ADMIT), id_outcomes=b"\0\1"),
    "ids seen": Answer((SEEN, ADMIT, ADMIT), id_outcomes=b"\0\0"),
    "unreadable": Answer((), error=StoreError("response", "WRONGTYPE")),
}
SHORT = {"admitted", "ids seen"}
"""The answers that are read no further than that they admit; so are charged ids if admissions are logged."""


class Store:
    """A fake store that gives one answer to all asks, or fails."""

    lost: Callable[[StoreError], None]

    def __init__(self, answer: Answer, error: StoreError | None = None) -> None:
        self.answer = packed(answer)
        self.error = error
        self.sent: list[object] = []

    def ask(self, plans: Sequence[Any], done: Came) -> None:
        self.sent += plans
        asyncio.get_running_loop().call_soon(done, self.error or [self.answer] * len(plans))

    def silent_since(self) -> None: ...

    def give_up(self, error: StoreError) -> None: ...

    async def forget(self, keys: Sequence[bytes], _known_ms: object = None) -> None:
        raise AssertionError(keys)

    async def examine(self) -> tuple[Fault, ...]:
        return ()

    async def close(self) -> None: ...


class Recorded(Logs):
    """Remembers what it hears."""

    def __init__(self, *, takes_admissions: bool = False) -> None:
        self.takes_admissions = takes_admissions
        self.heard: list[tuple[object, ...]] = []
        self.admissions: list[tuple[Ask, PackedAnswer | None]] = []

    def decided(self, *heard: object) -> None:
        self.heard.append(heard)

    def admitted(self, planned: PlannedAsk, plain: PlainQuotas, packed: PackedAnswer | None) -> None:
        assert planned.plain is plain
        self.admissions.append((planned.ask, packed))

    def late(self, *heard: object) -> None:
        self.heard.append(heard)


async def birth() -> Mark:
    """The marks of a store that never lost anything."""
    return Mark(1_000, b"birth", 0)


def admission(
    store: Store,
    logs: Logs = UNLOGGED,
    factor: FactorSource = UNTHROTTLED,
    snapshot: Snapshot = SNAPSHOT,
    mark: Callable[[], Awaitable[Mark]] | None = None,
) -> Admission:
    made = Admission(
        store,
        lambda: snapshot,
        rules=MatchingRules(),
        secret=lambda: b"s" * 32,
        sequential=False,
        budget_s=1.0,
        metrics=Metrics(clock=lambda: 0.0),
        factor=factor,
        logs=logs,
        mark=mark,
    )
    made.local._now_s = lambda: 1.0
    assert isinstance(made.circuit, Circuit)
    made.circuit._working_since = -1e9
    return made


def ready(of: Admission, ask: Ask) -> PlainAsk:
    plain = of.plain(ask)
    assert plain is not None
    return plain


def counted(of: Admission) -> object:
    """What was counted, without times."""
    counts = of._metrics._counts
    names = ("decisions", "shadows", "fallbacks", "unmatched", "corrections", "forgiven", "local_ids")
    return [getattr(counts, name) for name in names], counts.gauges


@pytest.mark.parametrize("answer", OF_ALL)
@pytest.mark.parametrize("takes_admissions", [False, True])
@pytest.mark.parametrize("detail", [False, True])
async def test_both_ways_decide_count_and_log_the_same(
    answer: str, takes_admissions: bool, detail: bool
) -> None:
    ask = replace(ALL, detail=detail)
    logs = [Recorded(takes_admissions=takes_admissions) for _ in range(2)]
    short, readable = (admission(Store(OF_ALL[answer]), log) for log in logs)
    got = await short.decide([ready(short, ask)])
    expected = await readable.decide([ask])
    assert got == expected
    is_short = answer in SHORT or (takes_admissions and answer == "ids charged")
    assert (got[0] is ADMITTED[3]) is (is_short and not detail)
    assert counted(short) == counted(readable)
    assert logs[0].heard == ([] if is_short else logs[1].heard)
    logged = [(ask, packed(OF_ALL[answer]))] if is_short and takes_admissions else []
    assert logs[0].admissions == logged  # of which tests/decision_log/test_admissions.py compares the rows
    assert logs[1].admissions == []


OF_OTHERS = {
    "admitted": Answer((ADMIT, ADMIT)),
    "throttled": Answer((ADMIT, but(ADMIT, outcome="throttle", throttle_ms=9))),
    "unreadable": Answer((), error=StoreError("response", "WRONGTYPE")),
}
ONLY_IDS = Ask({}, (1, "a"), principal="alice")


def arguments(store: Store) -> list[tuple[list[bytes], list[bytes]]]:
    """The keys and arguments of all that was sent."""
    return [encode_plans([plan]) for plan in store.sent]  # type: ignore[list-item]


@pytest.mark.parametrize("answer", OF_OTHERS)
@pytest.mark.parametrize("takes_admissions", [False, True])
@pytest.mark.parametrize("error", [None, StoreError("timeout")])
async def test_both_ways_learn_ids_and_answer_for_them(
    answer: str, takes_admissions: bool, error: StoreError | None
) -> None:
    """The whole ask is sent first, then its other quotas, and without others nothing."""
    logs = [Recorded(takes_admissions=takes_admissions) for _ in range(2)]
    stores = [Store(Answer((but(SEEN, open_ms=5_000), ADMIT, ADMIT), at_ms=1_000)) for _ in range(2)]
    short, readable = (admission(store, log, mark=birth) for store, log in zip(stores, logs, strict=True))
    for node in (short, readable):
        await node.local._look()
    plain = {repr(ask): ready(short, ask) for ask in (ALL, ONLY_IDS)}
    for ask in (ALL, ALL, ONLY_IDS, ALL):
        assert await short.decide([plain[repr(ask)]]) == await readable.decide([ask])
        for store in stores:
            store.answer, store.error = packed(OF_OTHERS[answer]), error
    assert (await short.decide([plain[repr(ONLY_IDS)]]))[0] is ADMITTED_ALONE or takes_admissions
    await readable.decide([ONLY_IDS])
    assert arguments(stores[0]) == arguments(stores[1])
    assert len(stores[0].sent) == (2 if error else 3)
    assert counted(short) == counted(readable)
    assert vars(short.local._known) == vars(readable.local._known)
    # The log may leave plain admissions out, unless it takes them.
    said = [
        heard for heard in logs[1].heard if takes_admissions or heard[3] not in (*ADMITTED, ADMITTED_ALONE)
    ]
    # The first is a plain admission; an answer of this node alone goes the readable way if it is logged.
    assert [ask for ask, _ in logs[0].admissions] == [ALL] * takes_admissions
    assert logs[0].heard == said[len(logs[0].admissions) :]


async def test_late_answer_of_an_ask_whose_ids_are_known_is_logged_in_full() -> None:
    logs = Recorded()
    store = Store(Answer((but(SEEN, open_ms=5_000), ADMIT, ADMIT), at_ms=1_000))
    node = admission(store, logs, mark=birth)
    await node.local._look()
    plain = ready(node, ALL)
    await node.decide([plain])
    node._log_late((node._planned_one(plain, ANYONE),), 0, packed(OF_OTHERS["admitted"]))
    ((ask, matches, answer, decision, verdicts),) = logs.heard
    assert (ask, answer, decision) == (ALL, OF_OTHERS["admitted"], ADMITTED[3])
    assert isinstance(verdicts, tuple)
    assert isinstance(matches, tuple)
    assert [verdict.observed for verdict in verdicts] == [None, 0.25, 0.25]
    assert len(matches) == 3


async def test_ids_are_learned_with_detail_but_not_answered_alone() -> None:
    store = Store(Answer((but(SEEN, open_ms=5_000),), at_ms=1_000))
    node = admission(store, mark=birth)
    await node.local._look()
    detailed = ready(node, replace(ONLY_IDS, detail=True))
    for _ in range(2):
        (decision,) = await node.decide([detailed])
        assert decision.source == "store"
    assert node.local._known.ids == 2
    (decision,) = await node.decide([ready(node, ONLY_IDS)])
    assert decision is ADMITTED_ALONE
    assert len(store.sent) == 2


async def test_shadow_quota_of_ids_counts_wherever_it_is_decided() -> None:
    snapshot = Snapshot().apply(1, [("producer_ids_rate", EVERYONE, replace(IDS, shadow=True))])
    store = Store(Answer((but(SEEN, open_ms=5_000),), at_ms=1_000))
    node = admission(store, mark=birth, snapshot=snapshot)
    await node.local._look()
    sources = [(await node.decide([ONLY_IDS]))[0].source for _ in range(2)]
    assert sources == ["store", "local"]
    assert node._metrics._counts.shadows == {("admit", "producer_ids_rate"): 2}


@pytest.mark.parametrize("ask", [ASK, ALL, Ask({"fetch_bytes": 1}, principal="alice")])
async def test_both_ways_follow_the_policies_of_a_failed_store(ask: Ask) -> None:
    short, readable = (admission(Store(Answer(()), StoreError("timeout"))) for _ in range(2))
    for _ in range(2):  # the failed call, then the open circuit
        assert await short.decide([ready(short, ask)]) == await readable.decide([ask])
    assert counted(short) == counted(readable)


async def test_batch_may_mix_asks_of_both_ways() -> None:
    store = Store(Answer((ADMIT,)))
    node = admission(store)
    peek = replace(ASK, mode="peek")
    asks: list[Ask | PlainAsk] = [ready(node, ASK), peek, ready(node, Ask({"fetch_bytes": 1}))]
    decisions = await node.decide([*asks, ASK])
    assert [decision.applied for decision in decisions] == [1, 1, 0, 1]
    assert [isinstance(plan, PackedPlan) for plan in store.sent] == [True, False, False]


async def test_ask_that_no_quota_limits_needs_no_store() -> None:
    store = Store(Answer(()))
    node = admission(store)
    (decision,) = await node.decide([ready(node, Ask({"fetch_bytes": 1}, principal="alice"))])
    assert decision is ADMITTED[0]
    assert decision == Decision("admit", 0, True, 0, "local", None)
    assert not store.sent


@pytest.mark.parametrize(
    "ask",
    [
        replace(ASK, mode="record"),
        replace(ASK, mode="peek"),
        replace(ASK, mode="refund"),
        replace(ASK, id="x"),
        replace(ASK, recheck=True),
        replace(ASK, cluster_action=True),
    ],
)
async def test_any_other_ask_goes_the_readable_way(ask: Ask) -> None:
    assert admission(Store(Answer(()))).plain(ask) is None


@pytest.mark.parametrize(
    ("key", "entity", "quota"),
    [
        ("request_rate", EVERYONE, replace(RATE, shadow=True)),
        (
            "max_connection_creation_rate",
            Entity.of(listener=ANY),
            Quota("max_connection_creation_rate", 5, "sampled_rate", "delay"),
        ),
    ],
)
async def test_quotas_with_more_to_an_admission_go_the_readable_way(
    key: str, entity: Entity, quota: Quota
) -> None:
    node = admission(Store(Answer(())), snapshot=Snapshot().apply(1, [(key, entity, quota)]))
    assert node.plain(Ask({"requests": 1, "connections": 1}, principal="alice", listener="L")) is None
    assert node.plain(Ask({"mutations": 1}, principal="alice", listener="L")) is not None


class Halved(FactorSource):
    """A throttle factor of one half."""

    def on(self, _ask: Ask) -> float:
        return 0.5


async def test_throttle_factor_sends_asks_to_produce_the_readable_way() -> None:
    store = Store(Answer((ADMIT,)))
    produce = Quota("producer_byte_rate", 100, "sampled_rate", "delay")
    snapshot = Snapshot().apply(
        1, [("producer_byte_rate", EVERYONE, produce), ("request_rate", EVERYONE, RATE)]
    )
    node = admission(store, factor=Halved(), snapshot=snapshot)
    await node.decide([ready(node, Ask({"produce_bytes": 1}, principal="alice"))])
    await node.decide([ready(node, ASK)])
    scaled, plain = store.sent
    assert not isinstance(scaled, PackedPlan)
    assert scaled.charges[0].applied.quota.limit == 50  # type: ignore[attr-defined]
    assert isinstance(plain, PackedPlan)


async def test_bound_caller_goes_the_readable_way() -> None:
    store = Store(Answer((ADMIT,)))
    node = admission(store)
    await node.decide([ready(node, ASK)], Caller("key", bound_to=(Binding.parse("client-id=etl"),)))
    (plan,) = store.sent
    assert plan.charges[0].enforcement == "deny"  # type: ignore[attr-defined]


async def test_changed_quotas_make_plain_asks_invalid_and_are_in_force_all_the_same() -> None:
    store = Store(Answer((ADMIT,)))
    snapshots = [SNAPSHOT, SNAPSHOT.apply(2, [("request_rate", EVERYONE, replace(RATE, limit=7))])]
    node = admission(store)
    node._snapshot = lambda: snapshots[0]
    plain = ready(node, ASK)
    assert plain.quotas.edition is node.edition
    del snapshots[0]
    assert plain.quotas.edition is not node.edition
    await node.decide([plain])
    (plan,) = store.sent
    assert plan.charges[0].applied.quota.limit == 7  # type: ignore[attr-defined]


async def test_plain_asks_do_not_keep_quotas_that_are_no_longer_in_force() -> None:
    node = admission(Store(Answer((ADMIT,))))
    snapshots = [SNAPSHOT]
    node._snapshot = lambda: snapshots[-1]
    kept = [ready(node, ASK)]
    former = weakref.ref(node._matches_in_force())
    snapshots[:] = [SNAPSHOT.apply(2, [("request_rate", EVERYONE, replace(RATE, limit=7))])]
    kept.append(ready(node, ASK))
    assert [plain.quotas.edition is node.edition for plain in kept] == [False, True]
    gc.collect()
    assert former() is None


async def test_unexpected_error_of_an_answer_reaches_its_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    node = admission(Store(Answer((ADMIT,))))

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(node._metrics, "count_admission", fail)
    with pytest.raises(ZeroDivisionError):
        await node.decide([ready(node, ASK)])


async def test_single_ask_can_be_decided_by_callback() -> None:
    node = admission(Store(Answer((ADMIT,))))
    made: asyncio.Future[Decision | Exception] = asyncio.get_running_loop().create_future()
    node.begin(ready(node, ASK), ANYONE, made.set_result)
    assert await made is ADMITTED[1]
    gone: asyncio.Future[Decision | Exception] = asyncio.get_running_loop().create_future()
    node.begin(ASK, Caller(is_gone=lambda: True), gone.set_result)
    assert isinstance(await gone, CallerGoneError)


async def test_late_answer_of_a_plain_ask_is_logged_in_full() -> None:
    logs = Recorded()
    node = admission(Store(OF_ALL["admitted"]), logs)
    node._log_late((ready(node, ALL).planned,), 0, packed(OF_ALL["admitted"]))
    ((ask, _, answer, decision, verdicts),) = logs.heard
    assert ask is ALL
    assert answer == OF_ALL["admitted"]
    assert decision == ADMITTED[3]
    assert isinstance(verdicts, tuple)
    assert [verdict.outcome for verdict in verdicts] == ["admit"] * 3


def test_asks_with_the_same_quotas_share_their_bytes_and_the_cache_is_bounded() -> None:
    quotas = {Entity.of(user=f"{n}"): replace(RATE, limit=n) for n in range(1_000)}
    matches = Matches({"request_rate": {EVERYONE: RATE, **quotas}}, MatchingRules())
    plain = PlainAsks(matches, b"s" * 32, 100_000)
    asks = [plain.of(replace(ASK, principal=name)) for name in ("alice", "bob")]
    assert len(plain._shared) == 1
    assert len({id(ask.quotas.of_units) for ask in asks if ask is not None}) == 1
    for n in range(1_000):
        plain.of(replace(ASK, principal=f"{n}"))
    assert 20 < len(plain._shared) < 200
