"""Fair turns for parsing: the order of connections, and the length of a turn."""

from __future__ import annotations

import asyncio
from typing import Final

from app.http.server.parsing import ParsingTurns
from tests.waiting import until

PARSING_S: Final = 0.001


class Clock:
    """Time that passes only while something is parsed, however busy the machine is."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Connection:
    """Parses pieces of a tenth of a turn each, and notes its name for each."""

    def __init__(self, source: str, pieces: int, did: list[str], clock: Clock) -> None:
        self.source = source
        self._clock = clock
        self.aborted = False
        self._pieces = pieces
        self._did = did

    def parse(self, until: float) -> bool:
        while self._pieces and self._clock() < until:
            self._pieces -= 1
            self._did.append(self.source)
            self._clock.now += PARSING_S / 10
        return bool(self._pieces)

    def abort(self) -> None:
        self.aborted = True


class Broken(Connection):
    """A connection whose parsing fails."""

    def parse(self, until: float) -> bool:
        raise RuntimeError("broken")


async def test_source_with_many_connections_does_not_delay_another() -> None:
    clock, did = Clock(), list[str]()
    turns = ParsingTurns(PARSING_S, clock=clock)
    for _ in range(50):
        turns.add(Connection("flood", 20, did, clock))
    turns.add(Connection("other", 20, did, clock))
    await until(lambda: len(did) == 1_020)
    last = len(did) - did[::-1].index("other")
    assert did[:last].count("flood") <= 40, "of a thousand pieces"


async def test_loop_goes_on_between_turns() -> None:
    clock, did = Clock(), list[str]()
    turns = ParsingTurns(PARSING_S, clock=clock)
    turns.add(Connection("one", 1_000, did, clock))
    went_on = 0
    while len(did) < 1_000:
        before = len(did)
        await asyncio.sleep(0)
        went_on += 1
        assert len(did) - before <= 11
    assert went_on >= 90


async def test_connection_that_fails_is_closed_and_others_go_on() -> None:
    clock, did = Clock(), list[str]()
    turns = ParsingTurns(PARSING_S, clock=clock)
    broken = Broken("one", 1, did, clock)
    turns.add(broken)
    turns.add(Connection("one", 5, did, clock))
    await until(lambda: len(did) == 5)
    assert broken.aborted
