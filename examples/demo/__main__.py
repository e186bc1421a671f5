"""`make demo`: Quotagate between nginx and a site, with people, a Kafka client, an operator and an outage.

Without nginx the demo says so in one line, and people ask `/v1/check` themselves, as nginx would for them.
A newcomer sees the same decisions without installing anything.
"""
# ruff: noqa: INP001  an example is files to read and run, not a package

from __future__ import annotations

import argparse
import asyncio
import math
import os
import signal
import sys
import tempfile
import termios
import time
import tty
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import httpx
import redis.asyncio
from rich.console import Console

from app.node.children import stop_event
from examples.demo.arrangement import ADDRESS, Arrangement, DidNotStart, arrange
from examples.demo.callers import Caller, gather
from examples.demo.screen import Screen

LASTS_S: Final = 40.0
"""The length of the demo: a quota is raised after 10 s, and the store hangs for 3 s after 20 s."""
NEXT: Final = """
What to try next:
  make run              the same Quotagate, to stay: http://127.0.0.1:8080, every route at /docs
  README.md             what to ask it with curl
  examples/README.md    the configuration of nginx that the demo runs; those of Envoy and Caddy
  docs/failures.md      what callers see while the store, or anything else, is away"""


def rate(limit: int, **more: str) -> dict[str, Any]:
    """A limit of requests a second, as a token bucket, which limits from the first second."""
    return {"request_rate": {"algorithm": "token_bucket", "limit": limit, "burst": limit, **more}}


QUOTAS: Final = {
    "user=*": rate(5),
    "user=bob": rate(20),
    f"ip={ADDRESS}": rate(3, on_store_failure="throttle"),
    "user=etl": {"producer_ids_rate": {"limit": 5, "window_ms": 10_000}},
}


async def demo(seconds: float, screen: Screen) -> None:
    """Run the demo, with everything that it starts."""
    async with AsyncExitStack() as stack:
        await unless_ended(stack, play(stack, seconds, screen))


async def unless_ended(stack: AsyncExitStack, story: Coroutine[Any, Any, None]) -> None:
    """Play to the end, or until SIGINT, SIGTERM or q; until the stack ends the keyboard is ours."""
    asked = stop_event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, asked.set)  # the terminal is closed
    stack.enter_context(ended_by_q(asked))
    playing = asyncio.create_task(story)
    ending = asyncio.create_task(asked.wait())
    await asyncio.wait({playing, ending}, return_when=asyncio.FIRST_COMPLETED)
    ending.cancel()
    playing.cancel()
    with suppress(asyncio.CancelledError):
        await playing


async def play(stack: AsyncExitStack, seconds: float, screen: Screen) -> None:
    """Have everybody ask while the story goes on; the started programs end with the stack."""
    screen.say("Quotagate starts, and nginx where there is one; q or Ctrl-C ends it all")
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="quotagate-demo-")))
    there = await arrange(stack, folder)
    key = (there.home / "admin.key").read_text(encoding="ascii").strip()
    http = httpx.AsyncClient(
        base_url=there.quotagate, headers={"Authorization": f"Bearer {key}"}, trust_env=False
    )
    operator = await stack.enter_async_context(http)
    for entity, quotas in QUOTAS.items():
        screen.quotas[entity] = await put(operator, entity, quotas)
    callers = await gather(stack, there)
    pace = seconds / LASTS_S if math.isfinite(seconds) else 1
    ends_at = time.monotonic() + seconds
    try:
        async with asyncio.timeout(seconds), asyncio.TaskGroup() as tasks:
            for one in callers:
                tasks.create_task(one.keep_asking())
            tasks.create_task(screen.show(there, callers, ends_at))
            tasks.create_task(story(there, operator, screen, callers, pace))
    except TimeoutError:
        pass  # it is over
    finally:
        screen.sum_up(callers)


async def story(
    there: Arrangement, operator: httpx.AsyncClient, screen: Screen, callers: Sequence[Caller], pace: float
) -> None:
    """Play the scripted events; each text about answers reports real answers."""
    alice, *_, etl = callers
    await until(lambda: alice.recent)
    screen.note(f"the first decision: alice, {alice.recent[0][1].words}")

    await asyncio.sleep(10 * pace)
    before = alice.counts.copy()
    screen.quotas["user=alice"] = await put(operator, "user=alice", rate(20))
    screen.note("an operator raises alice: PUT /v1/quotas/user=alice, 20 a second")
    await asyncio.sleep(5 * pace)
    screen.note(f"alice: {share(before)} admitted before, {share(alice.counts - before)} since")

    await asyncio.sleep(5 * pace)
    async with hanging_store(there):
        screen.note("the store hangs (SIGSTOP)")
        await until(lambda: etl.source == "fallback")
        screen.note("in blue: the fallback answers, by each quota's on_store_failure")
        await asyncio.sleep(max(3 * pace, 1))
    goes_on = time.monotonic()
    screen.note("the store goes on (SIGCONT)")
    await until(lambda: etl.source == "store")
    screen.note(f"the store answers again, {time.monotonic() - goes_on:.1f} s later")


async def put(operator: httpx.AsyncClient, entity: str, quotas: object) -> Mapping[str, Any]:
    """Set an entity's quotas through the API; return the quotas in the answer."""
    answer = (await operator.put(f"/v1/quotas/{entity}", json=quotas)).raise_for_status()
    found: Mapping[str, Any] = answer.json()["quotas"]
    return found


async def until(holds: Callable[[], object]) -> None:
    while not holds():  # noqa: ASYNC110  what is looked at is counted elsewhere, for the screen
        await asyncio.sleep(0.02)


def share(counts: Mapping[str, int]) -> str:
    return f"{counts['admitted']} of {sum(counts.values())}"


@asynccontextmanager
async def hanging_store(there: Arrangement) -> AsyncIterator[None]:
    """Stop the embedded store, and resume it after the block; the store itself gives its process id."""
    async with redis.asyncio.Redis(unix_socket_path=str(there.home / "store.sock")) as store:
        pid = (await store.info("server"))["process_id"]
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextmanager
def ended_by_q(asked: asyncio.Event) -> Iterator[None]:
    """The key q asks for the end, where there is a keyboard."""
    if not sys.stdin.isatty():
        yield
        return
    loop, keyboard = asyncio.get_running_loop(), sys.stdin.fileno()

    def pressed() -> None:
        if b"q" in os.read(keyboard, 100):
            asked.set()

    before = termios.tcgetattr(keyboard)
    tty.setcbreak(keyboard)
    loop.add_reader(keyboard, pressed)
    try:
        yield
    finally:
        loop.remove_reader(keyboard)
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description="Quotagate at work, live.")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--seconds", type=float, default=LASTS_S, help="how long; all that happens fits in")
    length.add_argument(
        "--forever", dest="seconds", action="store_const", const=math.inf, help="until q or Ctrl-C"
    )
    screen = Screen(Console(highlight=False))
    try:
        asyncio.run(demo(parser.parse_args().seconds, screen))
    except DidNotStart as error:
        sys.exit(str(error))
    screen.say(NEXT)


if __name__ == "__main__":
    main()
