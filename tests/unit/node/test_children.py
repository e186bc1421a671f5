"""Children that die: the pause before each restart, and the log."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from itertools import accumulate, chain
from pathlib import Path

from structlog.testing import capture_logs

from app.node.children import PAUSES_S, Child
from tests.waiting import until

SHORT = ["true"]


class Pauses:
    """A pause that returns at once and notes its length, up to a number of pauses."""

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
    """The clock's readings at the start and the death of children with these lifetimes."""
    return list(accumulate(chain.from_iterable((0.0, life) for life in seconds)))


async def kept(child: Child, pauses: Pauses) -> list[tuple[float, int]]:
    """Keep a child running through these pauses; return the logged pause and exit code of each death."""
    with capture_logs() as logged:
        await child.start()
        child.keep()
        async with asyncio.timeout(60):
            await pauses.enough.wait()
        await child.stop()
    deaths = [entry for entry in logged if entry["event"] == "child died, restarting"]
    assert {entry["child"] for entry in deaths} == {child.name}
    return [(entry["pause_s"], entry["code"]) for entry in deaths]


async def test_first_restart_is_immediate_and_pauses_grow():
    pauses = Pauses(len(PAUSES_S) + 2)
    deaths = await kept(Child("short", SHORT, clock=lambda: 0.0, pause=pauses), pauses)
    assert pauses.asked == [0.0, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 30.0, 30.0]
    assert deaths == [(pause_s, 0) for pause_s in pauses.asked]


async def test_child_that_lived_a_minute_restarts_at_once():
    pauses = Pauses(6)
    clock = iter(lives(0, 59.9, 0, 60, 0, 3_600))
    deaths = await kept(Child("old", SHORT, clock=lambda: next(clock), pause=pauses), pauses)
    assert [pause_s for pause_s, _ in deaths] == [0.0, 0.5, 1.0, 0.0, 0.5, 0.0]


async def test_child_that_cannot_be_started_is_retried(tmp_path: Path):
    """Two starts fail because an inherited descriptor is closed, as they would without memory."""
    folder = os.open(tmp_path, os.O_RDONLY)
    lent = os.dup2(folder, folder + 500)  # a number that nothing else gets meanwhile
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
    events = [entry["event"] for entry in logged]
    assert events.count("child could not be started") == 2
    assert pauses.asked == [0.0, 0.5, 1.0, 2.0, 5.0]


async def test_restart_that_fails_is_tried_again(tmp_path: Path):
    """An inherited descriptor is closed meanwhile."""
    folder = os.open(tmp_path, os.O_RDONLY)
    lent = os.dup2(folder, folder + 501)  # a number that nothing else gets meanwhile
    pauses = Pauses(2)

    async def pause(seconds: float) -> None:
        os.dup2(folder, lent)
        await pauses(seconds)

    child = Child("lender", SHORT, pass_fds=(lent,), clock=lambda: 0.0, pause=pause)
    await child.start()
    first = child.pid
    os.close(lent)
    with capture_logs() as logged:
        await child.restart()
        await pauses.enough.wait()
        await child.stop()
    os.close(lent)
    assert [entry["event"] for entry in logged].count("child could not be started") == 1
    assert child.pid != first


async def test_stop_does_not_wait_for_a_pause():
    asked = asyncio.Event()

    async def pause(_seconds: float) -> None:
        asked.set()
        await asyncio.Event().wait()

    child = Child("short", SHORT, clock=lambda: 0.0, pause=pause)
    await child.start()
    child.keep()
    await asked.wait()
    async with asyncio.timeout(60):
        await child.stop()


async def test_child_that_is_stopped_twice_gets_one_signal(tmp_path: Path):
    heard = tmp_path / "heard"
    loop = f"trap 'echo TERM >> {heard}' TERM; echo > {heard}.ready; while :; do sleep 0.01; done"
    child = Child("busy", ["sh", "-c", loop], stop_within_s=60)
    await child.start()
    await until(Path(f"{heard}.ready").exists)
    first = asyncio.create_task(child.stop())
    await until(heard.exists)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    child.stop_within_s = 0.5
    await child.stop()
    assert heard.read_text(encoding="utf-8") == "TERM\n"
