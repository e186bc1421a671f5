"""Children that die: how long the supervisor waits before each restart, and what it says."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from itertools import accumulate, chain
from pathlib import Path

from structlog.testing import capture_logs

from app.run.children import PAUSES_S, Child

SHORT = ["true"]


class Pauses:
    """Takes the pauses that it is asked for as taken, up to so many."""

    def __init__(self, many: int) -> None:
        self.asked: list[float] = []
        self.enough = asyncio.Event()
        self._many = many

    async def __call__(self, seconds: float) -> None:
        self.asked.append(seconds)
        if len(self.asked) == self._many:
            self.enough.set()
            await asyncio.Event().wait()


def lives(*seconds: float) -> Sequence[float]:
    """What a clock says at the start and at the death of children that live so long one after the other."""
    return list(accumulate(chain.from_iterable((0.0, life) for life in seconds)))


async def kept(child: Child, pauses: Pauses) -> list[tuple[float, int]]:
    """Keep a child through so many deaths; the pause and exit code of each, as the log has them."""
    with capture_logs() as logged:
        await child.start()
        child.keep()
        async with asyncio.timeout(60):
            await pauses.enough.wait()
        await child.stop()
    said = [entry for entry in logged if entry["event"] == "a child died and is started again"]
    assert {entry["child"] for entry in said} == {child.name}
    return [(entry["pause_s"], entry["code"]) for entry in said]


async def test_the_first_restart_is_at_once_and_the_pause_grows():
    pauses = Pauses(len(PAUSES_S) + 2)
    said = await kept(Child("short", SHORT, clock=lambda: 0.0, pause=pauses), pauses)
    assert pauses.asked == [0.0, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 30.0, 30.0]
    assert said == [(pause_s, 0) for pause_s in pauses.asked]


async def test_a_child_that_lived_well_is_started_again_at_once():
    pauses = Pauses(6)
    clock = iter(lives(0, 59.9, 0, 60, 0, 3_600))
    said = await kept(Child("old", SHORT, clock=lambda: next(clock), pause=pauses), pauses)
    assert [pause_s for pause_s, _ in said] == [0.0, 0.5, 1.0, 0.0, 0.5, 0.0]


async def test_a_child_that_cannot_be_started_is_tried_again(tmp_path: Path):
    """Its inherited descriptor is gone for two starts, which fail like those of a machine without memory."""
    folder = os.open(tmp_path, os.O_RDONLY)
    lent = os.dup2(folder, folder + 500)  # a number that nothing else is given meanwhile
    pauses = Pauses(5)

    async def pause(seconds: float) -> None:
        if len(pauses.asked) == 1:
            os.close(lent)
        if len(pauses.asked) == 3:
            os.dup2(folder, lent)
        await pauses(seconds)

    with capture_logs() as logged:
        child = Child("lender", SHORT, pass_fds=(lent,), clock=lambda: 0.0, pause=pause)
        await child.start()
        child.keep()
        await pauses.enough.wait()
        await child.stop()
    os.close(lent)
    said = [entry["event"] for entry in logged]
    assert said.count("a child could not be started") == 2
    assert pauses.asked == [0.0, 0.5, 1.0, 2.0, 5.0]


async def test_a_stop_does_not_wait_for_a_pause():
    asked = asyncio.Event()

    async def pause(_seconds: float) -> None:
        asked.set()
        await asyncio.Event().wait()

    child = Child("short", SHORT, clock=lambda: 0.0, pause=pause)
    await child.start()
    child.keep()
    await asked.wait()
    async with asyncio.timeout(20):
        await child.stop()
