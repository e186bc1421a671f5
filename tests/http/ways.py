"""A connection in memory to a node of its own, by either protocol: the hot one, or uvicorn's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_network
from typing import Any, Final

import uvicorn
from fastapi import APIRouter
from uvicorn.server import ServerState

from app.admission.admission import Admission as RealAdmission
from app.admission.gathering.slices import Slices
from app.admission.metrics.metrics import Metrics
from app.admission.port import Decider
from app.admission.throttle_factor.caller_clock import CallerClock
from app.catalog.snapshot import Snapshot
from app.domain.entity import ANY, Entity
from app.domain.ladder import MatchingRules
from app.domain.quota import Quota
from app.http.access.access import Access, Ring
from app.http.access.slowdown import Slowdown
from app.http.app import create_app
from app.http.check_question import Sources
from app.http.routes.health import Readiness
from app.http.server.connections import Connections
from app.http.server.drain import DrainState
from app.http.server.hot_protocol import HotProtocol, HttpPort
from app.http.server.parsing import ParsingTurns
from app.http.server.protocol import PARSING_S, Protocol
from app.http.wire import Clock
from app.store.port import NONE_KNOWN, Answer, AnswersCallback, ChargeResult, Fault, LiveLayer, StoreError
from tests.http.conftest import ADMIN, Admission
from tests.packed import packed

DATE: Final = (b"date", b"Mon, 23 Nov 2026 00:00:00 GMT")
QUIET_ITERATIONS: Final = 8
"""A node that sends nothing in so many iterations of the loop has nothing to send."""


class Line(asyncio.Transport):
    """The transport of one connection: keeps the bytes that are sent, and whether the node reads.

    Attributes:
        unread: how many bytes of answers the caller has not read.
        fills_up: whether the next answer is too much for the caller.
    """

    def __init__(self, certificate: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self.sent = bytearray()
        self.writes = 0
        self.unread = 0
        self.fills_up = False
        self.reads = True
        self.has_ended = False
        self.has_aborted = False
        self._is_closing = False
        self._known = {"peername": ("127.0.0.1", 50_000), "sockname": ("127.0.0.1", 8080)}
        self._certificate = certificate
        self.protocol: asyncio.Protocol

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        assert isinstance(protocol, asyncio.Protocol)
        self.protocol = protocol

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._certificate if name == "peercert" else self._known.get(name, default)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self.has_ended
        if not self._is_closing:
            self.sent += data
            self.writes += 1
        if self.fills_up and not self.unread:
            self.unread = 2**20
            self.protocol.pause_writing()

    def write_eof(self) -> None:
        self.has_ended = True

    def can_write_eof(self) -> bool:
        return True

    def get_write_buffer_size(self) -> int:
        return self.unread

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            asyncio.get_running_loop().call_soon(self._lose)

    def abort(self) -> None:
        self.has_aborted = True
        self.close()

    def _lose(self) -> None:
        self.protocol.connection_lost(None)

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True


@dataclass
class Timer:
    """A timer that a test lets run out."""

    when: float
    what: Callable[..., object]
    arguments: tuple[Any, ...]
    is_cancelled: bool = False

    def cancel(self) -> None:
        self.is_cancelled = True


class Timers:
    """The running loop, with a clock that a test advances.

    Attributes:
        made: how many timers were set.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._now = 1_000.0
        self._timers: list[Timer] = []
        self.made = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)

    def time(self) -> float:
        return self._now

    def call_at(self, when: float, what: Callable[..., object], *arguments: Any) -> Timer:
        self.made += 1
        timer = Timer(when, what, arguments)
        self._timers.append(timer)
        return timer

    def call_later(self, delay: float, what: Callable[..., object], *arguments: Any) -> Timer:
        return self.call_at(self._now + delay, what, *arguments)

    def advance(self, seconds: float) -> None:
        """Let so much time pass, and each timer run out that is due by then."""
        until = self._now + seconds
        while due := [timer for timer in self._timers if not timer.is_cancelled and timer.when <= until]:
            first = min(due, key=lambda timer: timer.when)
            self._timers.remove(first)
            self._now = max(self._now, first.when)
            first.what(*first.arguments)
        self._now = until


class HeldStore:
    """A store that admits at once, or when a test says so.

    Attributes:
        unanswered: called to let the oldest call return; None if calls return at once.
    """

    lost: Callable[[StoreError], None]

    def __init__(self) -> None:
        self.unanswered: list[Callable[[], object]] | None = None
        self.asked = 0

    def ask(self, plans: Sequence[object], done: AnswersCallback) -> None:
        self.asked += len(plans)
        answers = [packed(Answer((ChargeResult("admit", observed=0.1, remaining=99.0),)))] * len(plans)
        if self.unanswered is None:
            asyncio.get_running_loop().call_soon(done, answers)
        else:
            self.unanswered.append(lambda: done(answers))

    def silent_since(self) -> None: ...

    def give_up(self, error: StoreError) -> None:
        raise AssertionError(f"it is never silent, but {error}")

    async def forget(self, keys: Sequence[bytes], known_ms: Mapping[bytes, int] = NONE_KNOWN) -> None:
        raise AssertionError(f"nobody empties buckets here, not even {keys}")

    async def live_layers(self, key: bytes, now_ms: int, ttl_ms: int) -> list[LiveLayer]:
        raise AssertionError((key, now_ms, ttl_ms))

    async def examine(self) -> tuple[Fault, ...]:
        return ()

    async def close(self) -> None: ...


SNAPSHOT: Final = Snapshot().apply(
    1, [("request_rate", Entity.of(user=ANY), Quota("request_rate", 100, "sampled_rate", "delay"))]
)


def real(store: HeldStore) -> RealAdmission:
    """The real admission with one quota."""
    return RealAdmission(
        store,
        lambda: SNAPSHOT,
        rules=MatchingRules(),
        secret=lambda: b"s" * 32,
        sequential=False,
        budget_s=1_000.0,
        metrics=Metrics(),
        slices=Slices(clock=lambda: 0.0),
    )


class InMemory:
    """The parts of a node whose connections are in memory.

    Args:
        hot: whether its connections begin with the hot protocol.
        decider: decides asks; by default the fake admission.
    """

    def __init__(self, *, hot: bool, clock: Clock = "store", decider: Decider | None = None) -> None:
        self.admission, self.metrics = Admission(), Metrics()
        self.ring: Ring = {}
        self.now_ms = 0
        self.access = Access(
            ADMIN,
            [ip_network("127.0.0.0/8")],
            lambda: self.ring,
            failed=self.metrics.count_refusal,
            now_ms=lambda: self.now_ms,
        )
        app = create_app(
            admission=decider or (CallerClock(self.admission) if clock == "caller" else self.admission),
            access=self.access,
            clock=clock,
            sources=Sources(),
            routers=[APIRouter()],
            ready=lambda: Readiness(snapshot=True),
            metrics=self.metrics,
            slices=Slices(clock=lambda: 0.0),  # work is never deferred, however slow the machine is
        )
        self.drain = DrainState()
        port = HttpPort(app.hot, app.outbox, self.drain, ParsingTurns(PARSING_S), app.handed_over)
        self.routes = app.hot
        self._make: Any = port if hot else port.general
        self._config = uvicorn.Config(app, log_config=None, ws="none", access_log=False, proxy_headers=False)
        self._config.load()

    def protocol(self, state: ServerState, loop: Timers) -> HotProtocol | Protocol:
        """A new connection's protocol."""
        connection = Connections().accept("127.0.0.1", "http", loop.time())
        protocol: HotProtocol | Protocol = self._make(self._config, state, {}, loop, connection=connection)
        return protocol

    def forget(self) -> None:
        """Forget earlier asks, and callers with wrong keys: their answers would be slow."""
        self.access._slowdown = Slowdown()
        self.admission.asked.clear()
        self.admission.callers.clear()


class Connection:
    """One connection to a node: to a new node unless one is given.

    Args:
        certificate: the fields of the client's TLS certificate.
    """

    def __init__(
        self,
        node: InMemory | None = None,
        *,
        hot: bool = True,
        certificate: Mapping[str, Any] | None = None,
    ) -> None:
        self.node = node or InMemory(hot=hot)
        self.admission = self.node.admission
        self.state = ServerState()
        self.state.default_headers = [DATE]
        self.loop = Timers()
        self.line = Line(certificate)
        self.line.protocol = self.node.protocol(self.state, self.loop)
        self.line.protocol.connection_made(self.line)

    @property
    def protocol(self) -> HotProtocol | Protocol:
        """The present protocol."""
        protocol = self.line.protocol
        assert isinstance(protocol, HotProtocol | Protocol)
        return protocol

    def was_handed_over(self) -> bool:
        """Whether uvicorn's protocol serves it."""
        return isinstance(self.protocol, Protocol)

    async def send(self, *pieces: bytes) -> bytes:
        """Deliver these pieces, each once the node reads and has nothing left to send; return all answers."""
        for piece in pieces:
            await self.settle()
            for _ in range(100_000):
                if self.line.reads or self.line.is_closing():
                    break
                await asyncio.sleep(0)
            if not self.line.is_closing():
                self.protocol.data_received(piece)
        return await self.settle()

    async def deliver(self, piece: bytes) -> bytes:
        """Deliver a piece although the node does not read: it was under way already."""
        self.protocol.data_received(piece)
        return await self.settle()

    async def settle(self) -> bytes:
        """Wait until nothing more is sent, and return everything that was."""
        quiet = 0
        while quiet < QUIET_ITERATIONS:
            size = len(self.line.sent)
            await asyncio.sleep(0)
            quiet = quiet + 1 if len(self.line.sent) == size else 0
        return bytes(self.line.sent)

    def end(self) -> None:
        """Lose the connection."""
        if not self.line.is_closing():
            self.line.close()


class Both:
    """Two equal nodes, except that only one's connections begin with the hot protocol.

    Args:
        ring: the API keys besides the admin's.
    """

    def __init__(self, ring: Ring | None = None, clock: Clock = "store") -> None:
        self.hot, self.other = (InMemory(hot=hot, clock=clock) for hot in (True, False))
        for node in (self.hot, self.other):
            node.ring = ring or {}

    async def answer(self, *pieces: bytes, certificate: Mapping[str, Any] | None = None) -> bytes:
        """Send the same to both, over new connections; check that the answers are equal, and return them."""
        answers, closed = [], []
        for node in (self.hot, self.other):
            node.forget()
            connection = Connection(node, certificate=certificate)
            answers.append(await connection.send(*pieces))
            closed.append(connection.line.is_closing())
            connection.end()
            await asyncio.sleep(0)
        assert answers[0] == answers[1], pieces
        assert closed[0] == closed[1], pieces
        assert self.hot.admission.asked == self.other.admission.asked
        counts, expected = self.hot.metrics._counts, self.other.metrics._counts
        assert counts.access_failures == expected.access_failures
        assert counts.shed == expected.shed
        return answers[0]
