"""Long work on the event loop: the work of one iteration of the loop, and the order of callers."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from itertools import pairwise

import pytest

from app.admission.gathering.slices import Slices, Work, step


class Time:
    """A clock that only the test's work moves."""

    def __init__(self) -> None:
        self.now = 0.0
        self.did: list[str] = []

    def __call__(self) -> float:
        return self.now

    def work(self, name: str, steps: int, *, step_s: float = 0.001) -> Work[str]:
        for _ in range(steps):
            self.now += step_s
            self.did.append(name)
            yield
        return name


@pytest.fixture
def time() -> Time:
    return Time()


async def test_short_work_is_done_at_once(time: Time) -> None:
    slices = Slices(0.01, time)
    running = asyncio.create_task(slices.run("a", time.work("a", 3)))
    await asyncio.sleep(0)
    assert running.done()
    assert await running == "a"


async def test_loop_turn_does_one_slice_and_new_callers_are_served_at_once(time: Time) -> None:
    slices = Slices(0.01, time)
    flood = [asyncio.create_task(slices.run("flood", time.work("flood", 50))) for _ in range(3)]
    await asyncio.sleep(0)
    done_by_turn = [len(time.did)]
    other = asyncio.create_task(slices.run("other", time.work("other", 2)))
    await asyncio.sleep(0)
    assert other.done()
    done_by_turn.append(len(time.did))
    while not all(task.done() for task in flood):
        await asyncio.sleep(0)
        done_by_turn.append(len(time.did))
    assert done_by_turn[0] == 10
    assert max(after - before for before, after in pairwise(done_by_turn)) <= 20
    assert time.did.index("other") <= 20
    assert time.did.count("flood") == 150


async def test_callers_with_work_waiting_take_turns(time: Time) -> None:
    slices = Slices(0.01, time)
    running = [asyncio.create_task(slices.run(name, time.work(name, 50))) for name in ("a", "a", "a", "b")]
    await running[3]
    assert time.did.count("a") <= 90
    await asyncio.gather(*running)


async def test_exception_of_work_is_raised_where_it_is_awaited(time: Time) -> None:
    def broken(steps: int) -> Generator[None, None, str]:
        yield from time.work("broken", steps)
        raise ValueError("broken")

    slices = Slices(0.01, time)
    with pytest.raises(ValueError, match="broken"):
        await slices.run("a", broken(1))
    with pytest.raises(ValueError, match="broken"):
        await slices.run("a", broken(40))
    assert await slices.run("a", step(lambda: 7)) == 7


async def test_cancelled_work_is_not_resumed(time: Time) -> None:
    slices = Slices(0.01, time)
    left = asyncio.create_task(slices.run("a", time.work("left", 1_000)))
    stays = asyncio.create_task(slices.run("b", time.work("stays", 30)))
    await asyncio.sleep(0)
    left.cancel()
    assert await stays == "stays"
    assert time.did.count("left") <= 20
    assert slices.waiting == 0


async def test_long_steps_count_by_their_time(time: Time) -> None:
    time.now = 1_000.0
    slices = Slices(0.01, time)
    await asyncio.gather(
        slices.run("long", time.work("long", 20, step_s=0.1)),
        slices.run("short", time.work("short", 200)),
    )
    last_short = len(time.did) - time.did[::-1].index("short")
    assert time.did[:last_short].count("long") <= 5  # as long as 500 short steps


async def test_short_work_of_several_callers_is_done_in_the_same_turn_of_the_loop(time: Time) -> None:
    time.now = 1_000.0
    slices = Slices(0.01, time)
    running = [asyncio.create_task(slices.run(name, time.work(name, 4))) for name in "abcd"]
    await asyncio.sleep(0)
    assert [task.done() for task in running] == [True, True, True, False]
    await asyncio.gather(*running)
