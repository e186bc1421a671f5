"""Programs that fork with a client in hand; each prints its result as JSON."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

import httpx

from quotagate_client import AsyncClient, Client, QuotagateError, Retries

URL: Final = os.environ.get("QUOTAGATE_URL", "")
KEY: Final = os.environ.get("QUOTAGATE_KEY", "")
BURST: Final = 200
FIRST: Final = 28
LEFT: Final = 72
"""The first lease is half of the burst; these units of it are left at the fork."""
WORKERS: Final = 4
ASK: Any = {"principal": "forked", "usage": {"requests": 1}}


class Child:
    """A forked child. It ends by `SystemExit`, so that it leaves all ``with`` of its parent."""

    def __init__(self, do: Callable[[], object]) -> None:
        self._reading, writing = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            os.close(self._reading)
            said = json.dumps(do())
            gc.collect()
            os.write(writing, said.encode())
            sys.exit(0)
        os.close(writing)

    def said(self) -> Any:
        """Its result, after it ended well."""
        with os.fdopen(self._reading, "rb") as pipe:
            content = pipe.read()
        assert os.waitpid(self.pid, 0)[1] == 0
        return json.loads(content)


@contextlib.contextmanager
def waiting(do: Callable[[], object]) -> Iterator[list[Child]]:
    """Four children, which begin when the block is left."""
    reading, writing = os.pipe()

    def begin() -> object:
        os.close(writing)
        os.read(reading, 1)
        return do()

    children = [Child(begin) for _ in range(4)]
    yield children
    os.close(writing)
    os.close(reading)


def renewal() -> object:
    """A child that only calls `take` gets leases, from a renewal thread of its own."""
    with Client(URL, key=KEY) as client:
        names: Any = {"principal": "renewal", "usage": {"requests": 1}}
        with client.leased(**names) as work:
            work.decide()

            def taken() -> list[str]:
                while not work.take():
                    threading.Event().wait(0.01)
                return [thread.name for thread in threading.enumerate() if thread.name == "quotagate leases"]

            return Child(taken).said()


# Connections


def connections() -> object:
    """Parent and children ask in turn, and all at once; each gets the answer to its own ask."""
    with Client(URL, key=KEY, timeout_s=60, retry=Retries(times=0)) as client:

        def principals() -> bool:
            for number in range(20):
                name = f"{os.getpid()}-{number}"
                answers = client.decide_batch([{"principal": name, "usage": {"requests": 1}, "detail": True}])
                assert [quota.bucket for quota in answers[0].quotas] == [f"user={name}"]
            return True

        said = [principals()]
        with waiting(principals) as children:
            said.append(principals())
        said += [principals(), *(child.said() for child in children)]
        return [*said, principals()]


def kept() -> object:
    """The parent's connection outlives a child that used the client, closed it, and ended."""
    lasting = httpx.Limits(keepalive_expiry=600)
    with Client(URL, key=KEY, http=lambda: httpx.Client(trust_env=False, limits=lasting)) as client:
        client.decide(**ASK)

        def use() -> int:
            client.decide(**ASK)
            client.close()
            return 0

        Child(use).said()
        client.decide(**ASK)
    return None


def lent() -> object:
    """A child refuses an HTTP client that was used before the fork; a function that makes one is called."""
    said = []
    with httpx.Client(trust_env=False) as http:
        client = Client(URL, key=KEY, http=http)
        unused = Client(URL, key=KEY, http=http)
        made = Client(URL, key=KEY, http=lambda: httpx.Client(trust_env=False))
        client.decide(**ASK)
        made.decide(**ASK)

        def use() -> list[str]:
            try:
                client.decide(**ASK)
            except QuotagateError as error:
                return [str(error), made.decide(**ASK).decision, unused.decide(**ASK).decision]
            return []

        said = Child(use).said()
        client.decide(**ASK)
        made.close()
    return said


def ids() -> object:
    """Parent and child draw different ids, also from a seeded random generator."""
    with Client(URL, key=KEY, dice=random.Random(7)) as client:
        child = Child(lambda: client.decide(**ASK).charged)
        return [client.decide(**ASK).charged, child.said()]


def busy() -> object:
    """At the fork a thread holds the locks: it waits for an answer that comes only after the child ended."""
    with Client(URL, key=KEY, timeout_s=600) as client, client.leased(**ASK) as work:
        asking = threading.Thread(target=work.decide)
        asking.start()
        sys.stdin.readline()  # the server has the ask

        def use() -> list[str]:
            client.close()
            with client.leased(**ASK) as own:
                return [work.decide().decision, own.decide().decision, client.decide(**ASK).decision]

        child = Child(use)
        said = child.said()
        print("answer", flush=True)
        asking.join()
        work.close()
        return said


# Event loops


def loops() -> object:
    """A client and its leased work live longer than the event loop that they were first used in."""
    client = AsyncClient(URL, key=KEY)
    names: Any = {"principal": "loops", "usage": {"requests": 1}, "lease_ms": 10_000}
    work = client.leased(**names)
    took = []

    async def run() -> str:
        decision = await client.decide(**ASK)
        took.append(work.take())
        assert (await work.decide(28)).source == "local"
        return decision.decision

    said = [asyncio.run(run()) for _ in range(3)]
    return {"said": said, "took": took}


def threads() -> object:
    """Two event loops in two threads share a client."""
    client = AsyncClient(URL, key=KEY)
    names: Any = {"principal": "threads", "usage": {"requests": 1}, "lease_ms": 10_000}
    work = client.leased(**names)
    both = threading.Barrier(2)
    admitted = []

    async def run() -> None:
        both.wait()
        spent = 0
        async with work:
            for _ in range(300):
                spent += (await work.decide()).may_go_ahead
                await client.decide(**ASK)
        await client.aclose()
        admitted.append(spent)

    running = [threading.Thread(target=lambda: asyncio.run(run())) for _ in range(2)]
    for one in running:
        one.start()
    for one in running:
        one.join()
    return admitted


def inside() -> object:
    """A child of a running event loop runs one of its own, and the parent goes on."""

    async def run() -> list[Any]:
        client = AsyncClient(URL, key=KEY)
        async with client, client.leased(principal="inside", usage={"requests": 1}) as work:
            await client.decide(**ASK)
            await work.decide()

            def use() -> None:
                async def ask() -> list[Any]:
                    return [
                        work.take(),
                        (await client.decide(**ASK)).decision,
                        (await work.decide()).decision,
                    ]

                with contextlib.suppress(
                    RuntimeError
                ):  # before Python 3.12 a child inherits the running loop
                    asyncio.get_running_loop()
                    asyncio._set_running_loop(None)
                print(json.dumps(asyncio.run(ask())), flush=True)
                os._exit(0)  # unwinding would run the parent's event loop here

            child = Child(use)
            await asyncio.to_thread(os.waitpid, child.pid, 0)
            return [(await client.decide(**ASK)).decision, (await work.decide()).decision]

    return asyncio.run(run())


def main(programs: dict[str, Any]) -> None:
    """Run the program that the command names."""
    signal.alarm(120)  # a program that waits for ever ends
    print(json.dumps(programs[sys.argv[1]]()), flush=True)


if __name__ == "__main__":
    main(globals())
