"""The circuit before the store: when it opens, when it closes, and how often it looks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import pytest

from app.admission import circuit
from app.admission.circuit import Circuit
from app.store.port import Answer, Fault, Plan, StoreError

PLAN = Plan("admit", ())


class Store:
    """A store that does what it is told, and says when it is examined."""

    def __init__(self) -> None:
        self.error: StoreError | None = None
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

    async def decide(self, plans: Sequence[Plan]) -> list[Answer]:
        self.calls += 1
        self._fail()
        return [Answer(()) for _ in plans]

    async def forget(self, keys: Sequence[bytes]) -> None:
        self.forgotten += keys
        if self.error is not None:
            raise self.error

    async def examine(self) -> tuple[Fault, ...]:
        self.examined.put_nowait(None)
        self._fail()
        return self.faults

    def _fail(self) -> None:
        if failed := self.surprise or self.error:
            raise failed

    async def close(self) -> None: ...


class Counted:
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.calls: list[int] = []
        self.reasons: list[str] = []
        self.states: list[tuple[bool, list[str]]] = []

    def called(self, asks: int, seconds: float) -> None:
        assert seconds >= 0
        self.calls.append(asks)

    def failed(self, reason: str) -> None:
        self.reasons.append(reason)

    def store_is(self, *, away: bool, faults: Sequence[str]) -> None:
        self.states.append((away, list(faults)))


class Watched:
    """A circuit that is started, and what is behind and beside it."""

    def __init__(self) -> None:
        self.store, self.counted = Store(), Counted()
        self.circuit = Circuit(self.store, self.counted)
        self.pauses: list[float] = []

    def away(self) -> bool:
        return self.circuit.error is not None

    async def until_examined(self) -> None:
        """Through the end of the next examination."""
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


async def test_a_store_that_is_well_is_asked_and_counted(watched: Watched):
    assert await watched.circuit.decide([PLAN, PLAN]) == [Answer(()), Answer(())]
    assert watched.counted.calls == [2]
    assert watched.circuit.error is None
    assert watched.counted.states == [(False, [])]


async def test_one_failed_call_opens_it_and_one_good_examination_closes_it(watched: Watched):
    watched.store.error = StoreError("connection")
    with pytest.raises(StoreError, match="connection"):
        await watched.circuit.decide([PLAN])
    assert watched.away()
    watched.store.error = None  # a connection was cut, and the store is there
    await watched.until_examined()
    assert not watched.away()
    assert watched.counted.reasons == ["connection"]
    assert watched.counted.states == [(False, []), (True, []), (False, [])]


async def test_buckets_are_forgotten_through_it_while_it_is_closed(watched: Watched):
    await watched.circuit.forget([b"one", b"two"])
    watched.store.error = StoreError("connection")
    for key in (b"three", b"four"):  # the first failure opens it
        with pytest.raises(StoreError, match="connection"):
            await watched.circuit.forget([key])
    assert watched.store.forgotten == [b"one", b"two", b"three"]
    assert watched.counted.calls == []  # which are of asks


async def test_while_it_is_open_no_call_is_made(watched: Watched):
    watched.store.error = StoreError("read_only")
    for _ in range(5):
        with pytest.raises(StoreError, match="read_only"):
            await watched.circuit.decide([PLAN])
    assert watched.store.calls == 1
    assert watched.counted.calls == [1]


async def test_it_looks_at_once_and_then_with_growing_pauses(watched: Watched):
    watched.store.error = StoreError("connection")
    with pytest.raises(StoreError):
        await watched.circuit.decide([PLAN])
    for _ in range(6):
        await watched.until_examined()
    watched.store.error = None
    while watched.away():
        await watched.until_examined()
    well, *away = watched.pauses
    assert well == circuit.EXAMINE_EVERY_S
    if away[-1] == circuit.EXAMINE_EVERY_S:
        away.pop()
    assert away[:3] == list(circuit.PAUSES_S)
    assert set(away[3:]) == {circuit.PAUSES_S[-1]}
    assert len(away) >= 6


async def test_a_store_that_fails_its_calls_and_passes_its_examinations_is_damped(watched: Watched):
    for _ in range(4):
        watched.store.error = StoreError("response")
        with pytest.raises(StoreError):
            await watched.circuit.decide([PLAN])
        watched.store.error = None
        while watched.away():
            await watched.until_examined()
    paused = [pause for pause in watched.pauses if pause != circuit.EXAMINE_EVERY_S]
    assert paused == [*circuit.PAUSES_S, circuit.PAUSES_S[-1]][: len(paused)]
    assert len(paused) >= 3


async def test_what_nobody_foresaw_is_a_failure_too(watched: Watched):
    watched.store.surprise = ZeroDivisionError()
    with pytest.raises(StoreError, match="ZeroDivisionError"):
        await watched.circuit.decide([PLAN])
    await watched.until_examined()
    assert watched.away()
    watched.store.surprise = None
    while watched.away():
        await watched.until_examined()
    assert set(watched.counted.reasons) == {"unexpected"}


async def test_the_reason_is_the_newest_one(watched: Watched):
    watched.store.error = StoreError("connection")
    with pytest.raises(StoreError):
        await watched.circuit.decide([PLAN])
    watched.store.error = StoreError("loading")
    await watched.until_examined()
    with pytest.raises(StoreError, match="loading"):
        await watched.circuit.decide([PLAN])


async def test_a_store_that_is_away_at_the_start_does_not_hinder_it(monkeypatch: pytest.MonkeyPatch):
    counted = Counted()
    store = Store()
    store.error = StoreError("connection")
    late = Circuit(store, counted)
    await late.start()
    assert counted.states == [(True, [])]
    store.error = None
    async with asyncio.timeout(10):
        while late.error is not None:  # noqa: ASYNC110  the circuit tells nobody
            await asyncio.sleep(0.001)
    await late.stop()
    assert counted.states[-1] == (False, [])


async def test_what_is_wrong_with_the_set_up_is_known_until_it_is_mended(watched: Watched):
    watched.store.faults = (Fault("maxmemory_policy", "allkeys-lru evicts buckets"),)
    watched.circuit._failed.set()
    await watched.until_examined()
    assert [fault.name for fault in watched.circuit.faults] == ["maxmemory_policy"]
    assert watched.counted.states[-1] == (False, ["maxmemory_policy"])
    watched.store.faults = ()
    watched.circuit._failed.set()
    await watched.until_examined()
    assert watched.circuit.faults == ()


async def test_a_lost_connection_opens_the_circuit_until_an_examination_has_made_another(watched: Watched):
    watched.store.lost(StoreError("connection"))
    assert watched.away()
    await watched.until_examined()
    assert not watched.away()
    assert watched.counted.reasons == ["connection"]


async def test_an_examination_that_was_held_up_while_calls_were_answered_is_no_failure(watched: Watched):
    class HeldUp(Store):
        async def examine(self) -> tuple[Fault, ...]:
            if self.calls:
                raise StoreError("timeout")
            await circuit_.decide([PLAN])
            raise StoreError("timeout")

    store = HeldUp()
    circuit_ = Circuit(store, watched.counted)
    assert await circuit_._examine()
    assert circuit_.error is None
    assert not await circuit_._examine()
    assert circuit_.error is not None


async def test_silence_is_asked_of_the_store_and_giving_up_is_a_timeout(watched: Watched):
    watched.store.silent = 12.5
    assert watched.circuit.silent_since() == 12.5
    watched.circuit.give_up()
    assert watched.store.given_up == ["timeout"]
