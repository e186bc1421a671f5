"""The circuit in front of the store: when it opens and closes, and how often it examines the store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from app.admission.gathering import circuit
from app.admission.gathering.circuit import SETTLED_S, Circuit
from app.admission.metrics.metrics import Metrics
from app.store.encoding import answers_of
from app.store.port import (
    NONE_KNOWN,
    Answer,
    AnswersCallback,
    Fault,
    LiveLayer,
    Plan,
    ShortageError,
    StoreError,
)
from tests.waiting import until

PLAN = Plan("admit", ())


class Store:
    """A fake store that fails as the test sets it, and reports each examination."""

    def __init__(self) -> None:
        self.error: StoreError | None = None
        self.call_error: StoreError | None = None
        self.surprise: Exception | None = None
        self.faults: tuple[Fault, ...] = ()
        self.calls = 0
        self.silent: float | None = None
        self.given_up: list[str] = []
        self.forgotten: list[bytes] = []
        self.examined: asyncio.Queue[None] = asyncio.Queue()

    lost: Callable[[StoreError], None]

    def silent_since(self) -> float | None:
        return self.silent

    def give_up(self, error: StoreError) -> None:
        self.given_up.append(error.reason)

    def ask(self, plans: Sequence[Any], done: AnswersCallback) -> None:
        self.calls += 1
        self._fail()
        asyncio.get_running_loop().call_soon(done, self.call_error or [Answer(()) for _ in plans])

    async def forget(self, keys: Sequence[bytes], known_ms: Mapping[bytes, int] = NONE_KNOWN) -> None:
        self.forgotten += keys
        if self.error is not None:
            raise self.error

    async def live_layers(self, key: bytes, now_ms: int, ttl_ms: int) -> list[LiveLayer]:
        if self.error is not None:
            raise self.error
        return [LiveLayer(len(key), now_ms - ttl_ms, 0)]

    async def examine(self) -> tuple[Fault, ...]:
        self.examined.put_nowait(None)
        self._fail()
        return self.faults

    def _fail(self) -> None:
        if failed := self.surprise or self.error:
            raise failed

    async def close(self) -> None: ...


def shortage() -> ShortageError:
    return ShortageError("descriptors", "too many open files")


async def test_shortage_opens_no_circuit_and_is_examined_again_at_once():
    store, metrics = Store(), RecordedMetrics()
    store.error = shortage()
    circuit = Circuit(store, metrics)
    await circuit.start()
    for _ in range(3):  # not only every 5 s
        await store.examined.get()
    assert circuit.error is None
    assert metrics.reasons == []
    assert not any(away for away, _ in metrics.states)
    store.error = None
    await until(lambda: not circuit._is_short)
    await circuit.stop()


async def test_shortage_closes_an_open_circuit_since_nothing_is_known_of_the_store():
    store, metrics = Store(), RecordedMetrics()
    store.error = StoreError("connection")
    circuit = Circuit(store, metrics)
    await circuit.start()
    assert circuit.error is not None
    store.error = shortage()
    await until(lambda: circuit.error is None)
    store.error = StoreError("connection")
    await until(lambda: circuit.error is not None)
    await circuit.stop()


class RecordedMetrics(Metrics):
    """Keeps the observed calls, failures and states."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[int] = []
        self.seconds: list[float] = []
        self.reasons: list[str] = []
        self.states: list[tuple[bool, list[str]]] = []

    def observe_call(self, asks: int, seconds: float) -> None:
        self.calls.append(asks)
        self.seconds.append(seconds)

    def count_failure(self, reason: str) -> None:
        self.reasons.append(reason)

    def set_store_state(self, *, away: bool, faults: Sequence[str]) -> None:
        self.states.append((away, list(faults)))


class Watched:
    """A started circuit, its store and its metrics."""

    def __init__(self) -> None:
        self.store, self.metrics = Store(), RecordedMetrics()
        self.circuit = Circuit(self.store, self.metrics)
        self.pauses: list[float] = []

    def away(self) -> bool:
        return self.circuit.error is not None

    async def until_examined(self) -> None:
        """Wait for the end of the next examination."""
        await self.store.examined.get()
        await asyncio.sleep(0)


@asynccontextmanager
async def watching(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Watched]:
    """A circuit whose pauses last until a call fails or the test lets them end."""
    watched = Watched()
    pause = watched.circuit._pause

    async def remembered(seconds: float) -> bool:
        watched.pauses.append(seconds)
        return await pause(3600)

    async def slept(seconds: float) -> None:
        watched.pauses.append(seconds)
        await asyncio.sleep(0)

    monkeypatch.setattr(watched.circuit, "_pause", remembered)
    monkeypatch.setattr(circuit, "sleep", slept)
    await watched.circuit.start()
    await watched.until_examined()
    yield watched
    await watched.circuit.stop()


@pytest.fixture
async def watched(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Watched]:
    async with watching(monkeypatch) as one:
        yield one


async def test_slow_examination_is_a_failure_if_the_connection_was_lost_meanwhile(watched: Watched):
    """Otherwise calls would wait until the next regular examination."""

    class SlowStore(Store):
        async def examine(self) -> tuple[Fault, ...]:
            await answers_of(circuit_, [PLAN])
            self.lost(StoreError("connection"))
            raise StoreError("timeout")

    store = SlowStore()
    circuit_ = Circuit(store, watched.metrics)
    circuit_._working_since -= SETTLED_S
    assert not await circuit_._examine()
    assert circuit_.error is not None
    assert store.given_up == ["timeout"]


async def test_closed_circuit_passes_calls_and_counts_them(watched: Watched):
    assert await answers_of(watched.circuit, [PLAN, PLAN]) == [Answer(()), Answer(())]
    await until(lambda: watched.metrics.calls == [2])
    assert watched.circuit.error is None
    assert watched.metrics.states == [(False, [])]


async def test_time_of_a_call_is_that_from_its_begin_to_its_end(watched: Watched):
    loop = asyncio.get_running_loop()
    began = loop.time()
    await answers_of(watched.circuit, [PLAN])
    most = loop.time() - began
    await until(lambda: bool(watched.metrics.seconds))
    [seconds] = watched.metrics.seconds
    assert 0 <= seconds <= most


async def test_failed_call_opens_circuit_and_successful_examination_closes_it(watched: Watched):
    watched.store.call_error = StoreError("connection")  # a connection was cut, and the store is there
    with pytest.raises(StoreError, match="connection"):
        await answers_of(watched.circuit, [PLAN])
    while watched.away():
        await watched.until_examined()
    assert watched.metrics.reasons == ["connection"]
    assert watched.metrics.states == [(False, []), (True, []), (False, [])]


async def test_circuit_passes_removal_of_buckets_only_while_closed(watched: Watched):
    await watched.circuit.forget([b"one", b"two"])
    watched.store.error = StoreError("connection")
    for key in (b"three", b"four"):  # the first failure opens the circuit
        with pytest.raises(StoreError, match="connection"):
            await watched.circuit.forget([key])
    assert watched.store.forgotten == [b"one", b"two", b"three"]
    assert watched.metrics.calls == []  # only calls for asks count


async def test_failed_look_at_layers_does_not_open_the_circuit(watched: Watched):
    assert await watched.circuit.live_layers(b"key", 5_000, 4_000) == [LiveLayer(3, 1_000, 0)]
    watched.store.error = StoreError("response")
    with pytest.raises(StoreError, match="response"):
        await watched.circuit.live_layers(b"key", 5_000, 4_000)
    assert watched.circuit.error is None
    with pytest.raises(StoreError, match="response"):
        await answers_of(watched.circuit, [PLAN])
    watched.store.error = None
    with pytest.raises(StoreError, match="response"):  # of the open circuit
        await watched.circuit.live_layers(b"key", 5_000, 4_000)


async def test_open_circuit_makes_no_call(watched: Watched):
    watched.store.error = StoreError("read_only")
    for _ in range(5):
        with pytest.raises(StoreError, match="read_only"):
            await answers_of(watched.circuit, [PLAN])
    assert watched.store.calls == 1
    await until(lambda: watched.metrics.calls == [1])


async def test_store_is_examined_at_once_after_a_failure_and_then_with_growing_pauses(watched: Watched):
    watched.store.error = StoreError("connection")
    with pytest.raises(StoreError):
        await answers_of(watched.circuit, [PLAN])
    for _ in range(6):
        await watched.until_examined()
    watched.store.error = None
    while watched.away():
        await watched.until_examined()
    well, *away = watched.pauses
    assert well == circuit.EXAMINE_EVERY_S
    if away[-1] == circuit.EXAMINE_EVERY_S:
        away.pop()
    assert away[:3] == [0.05, 0.1, 0.25]
    assert set(away[3:]) == {0.25}
    assert len(away) >= 6


async def test_store_that_fails_calls_but_passes_examinations_is_examined_with_pauses(watched: Watched):
    for _ in range(4):
        watched.store.call_error = StoreError("response")
        with pytest.raises(StoreError):
            await answers_of(watched.circuit, [PLAN])
        while watched.away():
            await watched.until_examined()
    paused = [pause for pause in watched.pauses if pause != circuit.EXAMINE_EVERY_S]
    assert paused == [0.05, 0.1, 0.25, 0.25][: len(paused)]
    assert len(paused) >= 3


async def test_unexpected_error_opens_circuit(watched: Watched):
    watched.store.surprise = ZeroDivisionError()
    with pytest.raises(StoreError, match="ZeroDivisionError"):
        await answers_of(watched.circuit, [PLAN])
    await watched.until_examined()
    assert watched.away()
    watched.store.surprise = None
    while watched.away():
        await watched.until_examined()
    assert set(watched.metrics.reasons) == {"unexpected"}


async def test_circuit_reports_the_newest_error(watched: Watched):
    watched.store.error = StoreError("connection")
    with pytest.raises(StoreError):
        await answers_of(watched.circuit, [PLAN])
    watched.store.error = StoreError("loading")
    await watched.until_examined()
    with pytest.raises(StoreError, match="loading"):
        await answers_of(watched.circuit, [PLAN])


async def test_circuit_starts_while_the_store_is_away(monkeypatch: pytest.MonkeyPatch):
    metrics = RecordedMetrics()
    store = Store()
    store.error = StoreError("connection")
    late = Circuit(store, metrics)
    await late.start()
    assert metrics.states == [(True, [])]
    store.error = None
    await until(lambda: late.error is None, every_s=0.001)
    await late.stop()
    assert metrics.states[-1] == (False, [])


async def test_store_fault_is_reported_until_it_is_corrected(watched: Watched):
    watched.store.faults = (Fault("maxmemory_policy", "allkeys-lru evicts buckets"),)
    watched.circuit._failed.set()
    await watched.until_examined()
    assert [fault.name for fault in watched.circuit.faults] == ["maxmemory_policy"]
    assert watched.metrics.states[-1] == (False, ["maxmemory_policy"])
    watched.store.faults = ()
    watched.circuit._failed.set()
    await watched.until_examined()
    assert watched.circuit.faults == ()


async def test_calls_wait_for_a_new_connection_after_a_lost_one(watched: Watched):
    watched.circuit._working_since -= SETTLED_S
    watched.store.call_error = StoreError("connection")
    under_way = asyncio.create_task(answers_of(watched.circuit, [PLAN]))
    await asyncio.sleep(0)
    watched.store.lost(StoreError("connection"))
    with pytest.raises(StoreError):
        await under_way
    assert not watched.away()
    watched.store.call_error = None
    assert len(await answers_of(watched.circuit, [PLAN])) == 1
    await watched.until_examined()
    assert not watched.away()
    assert watched.metrics.reasons == ["connection"]
    assert watched.store.given_up == []


async def test_failed_reconnection_opens_circuit_and_fails_waiting_calls(watched: Watched):
    watched.circuit._working_since -= SETTLED_S
    watched.store.lost(StoreError("connection"))
    watched.store.error = StoreError("connection")
    await watched.until_examined()
    assert watched.away()
    assert watched.store.given_up == ["connection"]


async def test_second_lost_connection_within_a_second_opens_circuit(watched: Watched):
    watched.circuit._working_since -= SETTLED_S
    watched.store.lost(StoreError("connection"))
    await watched.until_examined()
    watched.store.lost(StoreError("connection"))
    assert watched.away()
    await watched.until_examined()
    assert not watched.away()


async def test_slow_examination_is_no_failure_while_calls_are_answered(watched: Watched):
    class HeldUp(Store):
        async def examine(self) -> tuple[Fault, ...]:
            if self.calls:
                raise StoreError("timeout")
            await answers_of(circuit_, [PLAN])
            raise StoreError("timeout")

    store = HeldUp()
    circuit_ = Circuit(store, watched.metrics)
    assert await circuit_._examine()
    assert circuit_.error is None
    assert not await circuit_._examine()
    assert circuit_.error is not None


async def test_circuit_passes_silence_and_giving_up_through_to_the_store(watched: Watched):
    watched.store.silent = 12.5
    assert watched.circuit.silent_since() == 12.5
    watched.circuit.give_up(StoreError("timeout"))
    assert watched.store.given_up == ["timeout"]
