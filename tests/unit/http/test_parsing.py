"""Fair turns for parsing: who parses next, and for how long."""

from __future__ import annotations

import asyncio
from time import perf_counter
from typing import Final

from app.http.parsing import ParsingTurns
from tests.waiting import until

TURN_S: Final = 0.001


class Connection:
    """Parses pieces that take some time each, and notes its name for each."""

    def __init__(self, source: str, pieces: int, did: list[str]) -> None:
        self.source = source
        self.aborted = False
        self._pieces = pieces
        self._did = did

    def parse(self, until: float) -> bool:
        while self._pieces and perf_counter() < until:
            self._pieces -= 1
            self._did.append(self.source)
            began = perf_counter()
            while perf_counter() < began + TURN_S / 10:
                pass
        return bool(self._pieces)

    def abort(self) -> None:
        self.aborted = True


class Broken(Connection):
    """Fails."""

    def parse(self, until: float) -> bool:
        raise RuntimeError("broken")


async def test_source_with_many_connections_does_not_delay_another() -> None:
    turns, did = ParsingTurns(TURN_S), list[str]()
    for _ in range(50):
        turns.add(Connection("flood", 20, did))
    turns.add(Connection("other", 20, did))
    await until(lambda: did.count("other") == 20)
    assert did.count("flood") <= 200, "of a thousand pieces"
    await until(lambda: did.count("flood") == 1_000)


async def test_loop_goes_on_between_turns() -> None:
    turns, did = ParsingTurns(TURN_S), list[str]()
    turns.add(Connection("one", 1_000, did))
    went_on = 0
    while len(did) < 1_000:
        before = len(did)
        await asyncio.sleep(0)
        went_on += 1
        assert len(did) - before <= 10
    assert went_on >= 100


async def test_connection_that_fails_is_closed_and_others_go_on() -> None:
    turns, did = ParsingTurns(TURN_S), list[str]()
    broken = Broken("one", 1, did)
    turns.add(broken)
    turns.add(Connection("one", 5, did))
    await until(lambda: len(did) == 5)
    assert broken.aborted
