"""A TCP proxy that enforces a byte rate for each principal: it decides about every line from leases."""
# ruff: noqa: INP001  an example is a file to read and run, not a package

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
from collections import Counter

from quotagate_client import AsyncClient, AsyncLeased, QuotagateError

CHUNK = 65_536
HELLO_WITHIN_S = 5.0
AWAY_S = 1.0
LOG = logging.getLogger("leases")


class Proxy:
    """Forwards lines. A connection that is over its principal's rate is not read from until it may go on.

    Attributes:
        counts: lines and bytes that were forwarded, and how often a line ``waited``.
    """

    def __init__(self, client: AsyncClient, host: str, port: int, lease_ms: int) -> None:
        self.counts: Counter[str] = Counter()
        self._client = client
        self._to = (host, port)
        self._lease_ms = lease_ms
        self._work: dict[str, AsyncLeased] = {}
        self._leases = contextlib.AsyncExitStack()
        self._open: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward one connection. Its first line names the principal; a real proxy would authenticate it."""
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        task.add_done_callback(self._open.discard)
        try:
            async with asyncio.timeout(HELLO_WITHIN_S):
                principal = (await reader.readline()).decode().strip()
                work = await self._work_of(principal)
                _, out = await asyncio.open_connection(*self._to)
        except (OSError, ValueError, TimeoutError) as error:
            LOG.warning("a connection could not be served: %r", error)
            writer.close()
            return
        try:
            await self._forward(reader, out, work)
        except (OSError, ValueError) as error:
            LOG.warning("the connection of %r ended: %r", principal, error)
        except asyncio.CancelledError:  # the proxy ends
            writer.transport.abort()
            out.transport.abort()
        finally:
            writer.close()
            out.close()

    async def _forward(
        self, reader: asyncio.StreamReader, out: asyncio.StreamWriter, work: AsyncLeased
    ) -> None:
        rest = b""
        take = work.take  # the hot path: one call for each line, without the event loop
        while chunk := await reader.read(CHUNK):
            lines = (rest + chunk).splitlines(keepends=True)
            rest = b"" if lines[-1].endswith(b"\n") else lines.pop()
            passed = 0
            for place, line in enumerate(lines):
                if not take(len(line)):
                    out.writelines(lines[passed:place])
                    passed = place
                    await self._ask(work, len(line))
            out.writelines(lines[passed:])
            self.counts["lines"] += len(lines)
            self.counts["bytes"] += sum(map(len, lines))
            await out.drain()

    async def _ask(self, work: AsyncLeased, size: int) -> None:
        """Wait until a line may pass.

        Raises:
            ValueError: the line is too large ever to pass.
        """
        while True:
            self.counts["waited"] += 1
            try:
                decision = await work.decide(size)
            except QuotagateError as error:
                # Visible choice: while Quotagate is away, nothing passes. Return here to let everything pass.
                LOG.warning("QUOTAGATE IS DOWN: %r", error)
                await asyncio.sleep(AWAY_S)
                continue
            if decision.may_go_ahead:
                return
            if decision.decision == "reject":
                raise ValueError(f"a line of {size} bytes never passes")
            await asyncio.sleep(decision.throttle_ms / 1000)

    async def _work_of(self, principal: str) -> AsyncLeased:
        """Return the leased work of a principal, which all of its connections share."""
        if not principal:
            raise ValueError("the first line must name the principal")
        if principal not in self._work:
            work = self._client.leased(
                principal=principal, usage={"produce_bytes": 1}, lease_ms=self._lease_ms
            )
            self._work[principal] = work
            await self._leases.enter_async_context(work)
        return self._work[principal]

    @property
    def calls(self) -> int:
        """How many calls Quotagate saw."""
        return sum(work.calls for work in self._work.values())

    async def aclose(self) -> None:
        """End the connections, and give back the unspent units of all leases."""
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)
        await self._leases.aclose()

    def __str__(self) -> str:
        return " ".join(f"{name}={count}" for name, count in [*self.counts.items(), ("calls", self.calls)])


async def main(arguments: argparse.Namespace) -> None:
    """Serve until SIGINT or SIGTERM; print the counters then, and on SIGUSR1."""
    host, _, port = arguments.to.rpartition(":")
    here, _, listen = arguments.listen.rpartition(":")
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    async with AsyncClient(arguments.url, key=os.environ.get("QUOTAGATE_KEY")) as client:
        proxy = Proxy(client, host, int(port), arguments.lease_ms)
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
        loop.add_signal_handler(signal.SIGUSR1, lambda: print(proxy, flush=True))  # noqa: T201  its counters
        server = await asyncio.start_server(proxy.serve, here, int(listen), limit=CHUNK)
        print("listening on {}:{}".format(*server.sockets[0].getsockname()[:2]), flush=True)  # noqa: T201
        await stop.wait()
        server.close()
        await proxy.aclose()
        print(proxy, flush=True)  # noqa: T201


if __name__ == "__main__":
    logging.basicConfig(format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--listen", default="127.0.0.1:9300", help="HOST:PORT; default: %(default)s")
    parser.add_argument("--to", default="127.0.0.1:9301", help="HOST:PORT; default: %(default)s")
    parser.add_argument("--url", default="http://127.0.0.1:8080", help="of Quotagate; default: %(default)s")
    parser.add_argument("--lease-ms", type=int, default=500, help="default: %(default)s")
    asyncio.run(main(parser.parse_args()))
