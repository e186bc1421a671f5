"""Large answers leave a few at a time, so that decisions do not wait for all of them."""

from __future__ import annotations

import asyncio

from app.http.server.static import AT_ONCE, IterationLimit

CALLERS = 25


async def test_a_few_pass_in_each_iteration_of_the_loop_and_all_in_order():
    limit, passed = IterationLimit(), []

    async def call(number: int) -> None:
        await limit.wait()
        passed.append(number)

    async with asyncio.TaskGroup() as group:
        for number in range(CALLERS):
            group.create_task(call(number))
        while len(passed) < CALLERS:
            before = len(passed)
            await asyncio.sleep(0)
            assert len(passed) - before <= AT_ONCE
    assert passed == list(range(CALLERS))
    await limit.wait()


async def test_caller_that_gives_up_keeps_no_place():
    limit = IterationLimit(1)
    await limit.wait()
    waiting = asyncio.create_task(limit.wait())
    await asyncio.sleep(0)
    waiting.cancel()
    async with asyncio.timeout(60):
        await limit.wait()
