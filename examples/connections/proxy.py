"""A TCP proxy that holds what KIP-612 says an acceptor holds: Quotagate is asked for every new connection."""
# ruff: noqa: INP001  an example is a file to read and run, not a package

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import math
import signal
import socket
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal, NamedTuple

import httpx

LONGEST_HOLD_MS: Final = 1_000
QUIET_S: Final = 1.0
"""The pause after a failed ask: an outage costs other connections the time of one ask in a second."""
OVERLOADED: Final = "urn:quotagate:overloaded"
"""The type of the problem in the answer of an overloaded Quotagate."""
LONGEST_SHED_MS: Final = 3_000
CONNECT_WITHIN_S: Final = 5.0
REMEMBERED: Final = 10_000
"""How many waiting addresses are remembered."""
CHUNK: Final = 65_536
LOG: Final = logging.getLogger("connections")


class Step(NamedTuple):
    """The action on a new connection, the name of its counter, and the wait before it."""

    act: Literal["pipe", "hold", "close"]
    counted: str
    wait_ms: int = 0


def next_step(decision: object, throttle_ms: object, *, rechecked: bool) -> Step:
    """The step of an acceptor after an answer, by KIP-612.

    Raises:
        ValueError: the values are no answer.
    """
    if not isinstance(throttle_ms, int) or throttle_ms < 0:
        raise ValueError(f"throttle_ms is {throttle_ms!r}")
    match decision:
        case "admit":
            return Step("pipe", "admitted")
        case "delay":
            # "The Acceptor thread will wait for the delay duration before accepting new connections."
            return Step("pipe", "delayed", throttle_ms)
        case "throttle" if not rechecked:
            # "… by an amount of time that brings the rate within the limit or 1 second, whichever is
            # earliest."
            return Step("hold", "throttled", min(throttle_ms, LONGEST_HOLD_MS))
        case "throttle" | "reject":
            # "After the delay, if the per-IP quota is still violated, the connection will be cleaned up."
            return Step("close", "rejected")
    raise ValueError(f"decision is {decision!r}")


def shed_step(retry_after: str | None, *, rechecked: bool) -> Step:
    """The step after an ask that a busy Quotagate shed: the connection waits once; this is no outage."""
    if rechecked:
        return Step("close", "closed_shed")
    seconds = int(retry_after) if retry_after and retry_after.isdecimal() else 1
    return Step("hold", "shed", min(1_000 * seconds, LONGEST_SHED_MS))


WITHOUT_ANSWER: Final = {"admit": Step("pipe", "admitted_away"), "close": Step("close", "closed_away")}
AWAY: Final = "what becomes of a connection while Quotagate is down, slow or not to be understood"


class Acceptor:
    """The acceptor of one listener: it decides, holds and carries connections, and counts them."""

    def __init__(self, options: argparse.Namespace, quotagate: httpx.AsyncClient) -> None:
        self.options = options
        self.quotagate = quotagate
        self.counts: Counter[str] = Counter()
        self.connections: set[asyncio.Task[None]] = set()
        self.held: set[asyncio.Task[None]] = set()
        self.open: set[asyncio.Task[None]] = set()
        self.turn = asyncio.Lock()
        self.recheck_turn = asyncio.Lock()
        self.told_to_wait: dict[str, tuple[float, str]] = {}
        self.ask_again_at = 0.0

    async def accept(self, listening: socket.socket) -> None:
        """Accept for ever; while one connection is decided, others wait in the kernel's backlog."""
        while True:
            try:
                client, address = await asyncio.get_running_loop().sock_accept(listening)
            except OSError as error:  # out of file descriptors, or the client is gone already
                LOG.warning("cannot accept: %s", error)
                await asyncio.sleep(0.1)
                continue
            self.counts["accepted"] += 1
            decided = asyncio.Event()
            ip = address[0].partition("%")[0]  # without an IPv6 zone
            task = asyncio.create_task(self._connection(client, ip, decided))
            self.connections.add(task)
            task.add_done_callback(self.connections.discard)
            await decided.wait()

    async def finish(self, within_s: float) -> None:
        """Close connections that are not forwarded yet; give the others this time to end by themselves."""
        for task in self.connections - self.open:
            task.cancel()
        if self.open:
            await asyncio.wait(self.open, timeout=within_s)
        for task in self.connections:
            task.cancel()
        await asyncio.gather(*self.connections, return_exceptions=True)

    def report(self) -> None:
        """Log the numbers of held and open connections, and all counters, in one line."""
        there_is = {"held": len(self.held), "open": len(self.open)}
        LOG.info(" ".join(f"{name}={n}" for name, n in {**there_is, **self.counts}.items()))

    async def _connection(self, client: socket.socket, ip: str, decided: asyncio.Event) -> None:
        """The life of a connection; however it ends, its socket is closed."""
        with client:
            try:
                step = self._known(ip) or await self._decide(ip, rechecked=False)
            finally:
                decided.set()
            if step.act == "hold":
                self.counts[step.counted] += 1
                step = await self._hold(ip, step.wait_ms)
            self.counts[step.counted] += 1
            if step.act == "pipe":
                with _listed(self.open):
                    await self._pipe(client)

    def _known(self, ip: str) -> Step | None:
        """The hold of an address that has to wait: to ask before its time would be useless."""
        until, counted = self.told_to_wait.get(ip, (0.0, ""))
        left_s = until - time.monotonic()
        return Step("hold", counted, math.ceil(left_s * 1000)) if left_s > 0 else None

    async def _hold(self, ip: str, wait_ms: int) -> Step:
        """Hold the unread socket of an address that has to wait, then ask again; others need not wait."""
        if len(self.held) >= self.options.hold:
            return Step("close", "closed_full")
        with _listed(self.held):
            await asyncio.sleep(wait_ms / 1000)
            async with self.recheck_turn:  # one re-check at a time, so every second turn is a newcomer's
                return await self._decide(ip, rechecked=True)

    async def _decide(self, ip: str, *, rechecked: bool) -> Step:
        """Take a turn, which lasts until the listener may take the next connection."""
        async with self.turn:
            step = await self._ask(ip, rechecked=rechecked)
            if step.act == "hold":
                self._remember(ip, step)
            else:
                self.counts["blocked_ms"] += step.wait_ms
                await asyncio.sleep(step.wait_ms / 1000)
            return step

    def _remember(self, ip: str, step: Step) -> None:
        if len(self.told_to_wait) >= REMEMBERED:
            self.told_to_wait.clear()  # each of these addresses is asked for once more
        self.told_to_wait[ip] = (time.monotonic() + step.wait_ms / 1000, step.counted)

    async def _ask(self, ip: str, *, rechecked: bool) -> Step:
        """The step by Quotagate's answer; without a usable answer, the step of --when-away."""
        if time.monotonic() < self.ask_again_at:
            return WITHOUT_ANSWER[self.options.when_away]
        self.counts["rechecked" if rechecked else "asked"] += 1
        place = {"ip": ip, "broker": self.options.broker, "listener": self.options.listener}
        ask = {**place, "usage": {"connections": 1}, "recheck": rechecked}
        try:
            async with asyncio.timeout(self.options.ask_within):
                reply = await self.quotagate.post("/v1/decisions", json=ask)
            if reply.status_code == httpx.codes.SERVICE_UNAVAILABLE and reply.json()["type"] == OVERLOADED:
                return shed_step(reply.headers.get("Retry-After"), rechecked=rechecked)
            answer = reply.raise_for_status().json()
            return next_step(answer["decision"], answer["throttle_ms"], rechecked=rechecked)
        except (httpx.HTTPError, OSError, ValueError, LookupError, TypeError) as error:
            LOG.warning("no answer, so %s for %g s: %r", self.options.when_away, QUIET_S, error)
            self.counts["unanswered"] += 1
            self.ask_again_at = time.monotonic() + QUIET_S
            return WITHOUT_ANSWER[self.options.when_away]

    async def _pipe(self, client: socket.socket) -> None:
        """Carry bytes both ways until both sides have ended; an error on one side ends both at once."""
        try:
            async with asyncio.timeout(CONNECT_WITHIN_S):
                from_target, to_target = await asyncio.open_connection(*self.options.to)
        except OSError as error:
            LOG.warning("cannot reach the target: %r", error)
            self.counts["target_away"] += 1
            return
        from_client, to_client = await asyncio.open_connection(sock=client)
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(_carry(from_client, to_target))
                both.create_task(_carry(from_target, to_client))
            for writer in (to_target, to_client):
                writer.close()
                await writer.wait_closed()
        except* OSError:
            self.counts["broken"] += 1
        finally:
            to_target.transport.abort()
            to_client.transport.abort()


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Forward bytes with backpressure, and then the end of the stream."""
    while some := await reader.read(CHUNK):
        writer.write(some)
        await writer.drain()
    writer.write_eof()


@contextlib.contextmanager
def _listed(tasks: set[asyncio.Task[None]]) -> Iterator[None]:
    """Keep the current task in a set during the block."""
    task = asyncio.current_task()
    assert task is not None
    tasks.add(task)
    try:
        yield
    finally:
        tasks.discard(task)


async def serve(options: argparse.Namespace) -> None:
    """Accept until a signal says to end."""
    key = options.key_file.read_text(encoding="utf-8").strip() if options.key_file else None
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    host, _ = options.listen
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server(options.listen, family=family, backlog=socket.SOMAXCONN) as listening:
        listening.setblocking(False)
        # Idle connections end before a stopping node ends them (QUOTAGATE_DRAIN_MS).
        limits = httpx.Limits(max_connections=100, keepalive_expiry=1)
        async with httpx.AsyncClient(
            base_url=options.quotagate, headers=headers, trust_env=False, limits=limits
        ) as quotagate:
            acceptor = Acceptor(options, quotagate)
            accepting = asyncio.create_task(acceptor.accept(listening))
            loop = asyncio.get_running_loop()
            loop.add_signal_handler(signal.SIGUSR1, acceptor.report)
            for ending in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(ending, accepting.cancel)
            LOG.info("accepting on port %d", listening.getsockname()[1])
            with contextlib.suppress(asyncio.CancelledError):
                await accepting
            listening.close()
            await acceptor.finish(options.grace)
            acceptor.report()


def main() -> None:
    """Read the command line and serve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--listen", type=endpoint, required=True, metavar="HOST:PORT")
    parser.add_argument("--to", type=endpoint, required=True, metavar="HOST:PORT")
    parser.add_argument("--broker", help="the broker it is in front of")
    parser.add_argument("--listener", help="the name of its listener")
    parser.add_argument("--quotagate", default="http://127.0.0.1:8080", metavar="URL")
    parser.add_argument("--key-file", type=Path, help="a key with the scope decide, where one is needed")
    parser.add_argument("--when-away", choices=tuple(WITHOUT_ANSWER), default="admit", help=AWAY)
    parser.add_argument("--ask-within", type=float, default=3.0, help="seconds to wait for an answer")
    parser.add_argument("--hold", type=int, default=1_000, help="so many held connections at most")
    parser.add_argument("--grace", type=float, default=5.0, help="seconds for open connections at the end")
    logging.basicConfig(format="%(message)s")
    LOG.setLevel(logging.INFO)
    asyncio.run(serve(parser.parse_args()))


def endpoint(text: str) -> tuple[str, int]:
    """A host, an IPv6 address in brackets, and a port."""
    host, _, port = text.rpartition(":")
    return host.strip("[]"), int(port)


if __name__ == "__main__":
    main()
