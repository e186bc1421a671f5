"""The express lane: ordinary requests to hot routes, answered by the connection itself.

An ordinary request is a whole HTTP/1.1 request to the plain path of a hot route, with a body of known size.
The lane calls the same methods of the route as plain ASGI does, and sends the same bytes, but it makes no
task, no messages and no timers for a request. There are two steps:

1. Uvicorn's parser reads the request, as it reads every other one, and ``app.http.protocol`` checks it. Only
   the answer is made here.
2. The connection remembers the heads that came that way. A segment that is one of them, byte for byte, with a
   whole body behind it, is not parsed again: a parser between two requests would find the same again. The
   API key in it is still checked against the keys in force.

An answer to a known head waits for the end of the turn of the event loop (``app.http.outbox``), or for
whatever happens on the connection before that.

Everything else goes the long way through ASGI: other routes, chunked or oversized bodies, ``Expect``, offers
of an upgrade, other versions of HTTP. Requests of one connection are answered one after the other, whichever
way each of them goes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from contextvars import Context, copy_context
from functools import partial
from typing import Any, Final, NamedTuple, cast

import structlog
from starlette.types import Receive, Scope
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from app.http.access import Sender
from app.http.hot import (
    JSON,
    JSON_LINES,
    READY_ANSWERS,
    SENDER,
    Answer,
    Fields,
    PlainRoute,
    ReadyAnswer,
    Result,
    is_gone_of,
    length_line,
    lines_of,
)
from app.http.outbox import Outbox
from app.http.protocol import Protocol

MAX_HEAD: Final = 2_048
"""The longest head that is remembered, in bytes; those of gateways and clients have a few hundred."""
MAX_REMEMBERED: Final = 8_192
"""How much a connection remembers, by ``_cost``. A caller that varies its heads makes only itself slower:
no head is remembered for another connection, and no connection can push out those of others."""
MIN_COST: Final = 512
FIELD_COST: Final = 160
"""About what a remembered head and each of its fields cost besides its bytes, which are there three times."""

_HEAD_END: Final = b"\r\n\r\n"
_EXTRAORDINARY: Final = frozenset({b"expect", b"transfer-encoding", b"upgrade"})
_NEVER_AWAITED: Final = asyncio.Event()

log = structlog.get_logger("quotagate.http")
Making = Coroutine["asyncio.Future[Any] | None", None, Answer | None]


class KnownHead(NamedTuple):
    """A head that was read once, by the parser.

    Attributes:
        size: how long it is with its body, in bytes.
    """

    head: bytes
    size: int
    route: PlainRoute
    scope: Scope
    sender: Sender


class KnownCycle(RequestResponseCycle):
    """A connection's requests with known heads, one after the other, where it expects one that was parsed."""

    def __init__(self, *, keep_alive: bool) -> None:
        self.disconnected = False
        self.keep_alive = keep_alive
        self.message_event = _NEVER_AWAITED
        self.more_body = False
        self.response_complete = False


class LaneProtocol(Protocol):
    """One connection, with the lane.

    Args:
        routes: the hot routes by path.
        outbox: for answers to known heads, one for all connections of a process.
    """

    def __init__(
        self, *arguments: Any, routes: Mapping[str, PlainRoute], outbox: Outbox, **keywords: Any
    ) -> None:
        super().__init__(*arguments, **keywords)
        self._outbox = outbox
        # What only uvicorn's own way through ASGI can do.
        plain = not (self.config.access_log or self.root_path or self.limit_concurrency)
        self._routes: Mapping[str, PlainRoute] = routes if plain else {}
        self._heads: dict[bytes, KnownHead] = {}
        self._cost = 0
        self._starting: RequestResponseCycle | None = None
        self._is_receiving = False
        self._known_cycle = KnownCycle(keep_alive=not self._drain.has_begun)
        self._asked: KnownHead | None = None
        """The newest request with a known head."""
        self._is_undisturbed = False
        """Whether nothing has happened on the connection since that request, but its answer."""
        self._default_headers: Fields = ()
        self._default_lines = b""

    def data_received(self, data: bytes) -> None:
        """Answer a whole request with a known head; else parse what arrived."""
        known = self._asked
        is_between = self._is_undisturbed and self._known_cycle.response_complete
        if is_between and known is not None and data.startswith(known.head):  # like the request before
            head = known.head
        else:
            head = data[: data.find(_HEAD_END, 0, MAX_HEAD) + len(_HEAD_END)]
            known = self._heads.get(head)
            is_between = is_between or self._is_between_requests()
        if known is not None and known.size == len(data) and is_between:
            if known.route.access.renew(known.sender):
                self._unset_keepalive_if_required()  # the answer takes as long as it takes
                self._is_undisturbed = True
                self._asked = known
                self.cycle = self._answering = self._known_cycle
                self._known_cycle.response_complete = False
                body, (_, _, route, scope, sender) = data[len(head) :], known
                if not route.begin(scope, body, sender, self._is_gone, self._finish_known):
                    answer = route.reply_whole(scope, body, sender, self._is_gone)
                    Answering(answer, self._known_cycle, self).go_on()
                return
            self._forget()
        begun, is_scheduled = self._begun, self._starting is not None
        self._disturb()
        self._is_receiving = True
        super().data_received(data)
        self._is_receiving = False
        if self._starting is not None and not is_scheduled:
            cycle = self._starting
            self._start()
            if is_between and self._begun == begun + 1:
                self._remember(head, len(data) - len(head), cycle)

    def shutdown(self) -> None:
        """Close when the answer has been sent."""
        self._disturb()
        super().shutdown()

    def drain(self) -> None:
        """Close with the next answer."""
        self._disturb()
        self._known_cycle.keep_alive = False
        super().drain()

    def timeout_keep_alive_handler(self) -> None:
        """Close, perhaps."""
        self._disturb()
        super().timeout_keep_alive_handler()

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Notice that no request follows."""
        self._disturb()
        return super().eof_received()

    def pause_writing(self) -> None:
        """Notice that the caller does not read."""
        self._disturb()
        super().pause_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Answer nothing more."""
        self._is_undisturbed = False
        super().connection_lost(exc)
        self._known_cycle.disconnected = True
        self._forget()

    # Known heads

    def _is_between_requests(self) -> bool:
        return (
            not (
                self._in_request
                or self._unparsed
                or self._is_ending()
                or self.flow.write_paused
                or self.transport.is_closing()
            )
            and self._is_idle()
        )

    def _remember(self, head: bytes, size: int, cycle: RequestResponseCycle) -> None:
        """Remember the head of a request that was all that came."""
        scope = cast("Scope", cycle.scope)
        sender = scope.get(SENDER)
        whole = not self._in_request and size == self._announced_size and head.endswith(_HEAD_END)
        if sender is None or not whole or head in self._heads:
            return
        cost = MIN_COST + 3 * len(head) + FIELD_COST * len(scope["headers"])
        if cost > MAX_REMEMBERED:
            return
        if self._cost + cost > MAX_REMEMBERED:
            self._forget()
        self._cost += cost
        kept = {name: scope[name] for name in ("path", "query_string", "headers")}
        self._heads[head] = KnownHead(head, len(head) + size, self._routes[scope["path"]], kept, sender)

    def _forget(self) -> None:
        self._heads.clear()
        self._cost = 0

    def _finish_known(self, result: Result) -> None:
        """Send the answer to the newest request with a known head, as ``_finish_begun`` does."""
        cycle, asked = self._known_cycle, self._asked
        answer: Answer | None = READY_ANSWERS.get(id(result))
        if answer is None and asked is not None:
            answer = asked.route.finish(result, asked.scope)
        if answer is None or cycle.disconnected or cycle.response_complete:
            return
        if not (self._is_undisturbed and cycle.keep_alive) or self._final_response is not None:
            self._send(cycle, answer)
            return
        # What ``finish`` would do, if nothing waits on the connection.
        self._outbox.add(self.transport, self._bytes_of(answer, keep_alive=True), self.loop)
        cycle.response_complete = True
        self.server_state.total_requests += 1
        now = self._connection.idle_since = self.loop.time()
        self._due = now + self.timeout_keep_alive
        self._is_timed = True
        if self.timeout_keep_alive_task is None:  # else it runs out before this and looks again
            self._wait_until(self._due)

    def _disturb(self) -> None:
        """Send the answers so far: something else happens on the connection."""
        if self._is_undisturbed:
            self._is_undisturbed = False
            self._outbox.flush()

    def _is_gone(self) -> bool:
        return self._known_cycle.disconnected

    # Requests that were parsed

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if not self._is_ordinary(cast("Scope", cycle.scope)):
            super()._start_asgi_task(cycle, app)
            return
        self._begin_answer(cycle)
        self._starting = cycle
        if not self._is_receiving:  # one request in each turn of the loop, as if each had a task
            self.loop.call_soon(self._start)

    def _is_ordinary(self, scope: Scope) -> bool:
        route = self._routes.get(scope["path"])
        if route is None or b"%" in scope["raw_path"] or scope["http_version"] != "1.1":
            return False
        size = 0
        for name, value in scope["headers"]:
            if name in _EXTRAORDINARY:
                return False
            if name == b"content-length":
                size = int(value)
        return route.is_ordinary(scope["method"], size)

    def _start(self) -> None:
        """Answer the request whose turn it is, now that what arrived with it was parsed."""
        cycle, self._starting = self._starting, None
        if cycle is None:
            return
        scope = cast("Scope", cycle.scope)
        route = self._routes[scope["path"]]
        if cycle.more_body or cycle.disconnected:
            Answering(route.reply(scope, cast("Receive", cycle.receive)), cycle, self).go_on()
            return
        self.flow.resume_reading()  # as receiving the body would
        try:
            sender = scope[SENDER] = route.identify(scope)
        except Exception as error:  # noqa: BLE001  it is logged, or is an answer
            Answering(route.failed(error, scope), cycle, self).go_on()
            return
        body, is_gone = bytes(cycle.body), is_gone_of(scope)
        if not route.begin(scope, body, sender, is_gone, partial(self._finish_begun, cycle)):
            Answering(route.reply_whole(scope, body, sender, is_gone), cycle, self).go_on()

    def _finish_begun(self, cycle: RequestResponseCycle, result: Result) -> None:
        """Send the answer to a request for which its route has called back."""
        scope = cast("Scope", cycle.scope)
        answer = self._routes[scope["path"]].finish(result, scope)
        if answer is not None and not cycle.disconnected and not cycle.response_complete:
            self._send(cycle, answer)

    # Answers

    def _send(self, cycle: RequestResponseCycle, answer: Answer) -> None:
        """Send an answer, once the earlier ones were read."""
        if self.flow.write_paused:
            Answering(_after(self.flow.drain(), answer), cycle, self).go_on()
        else:
            self.finish(cycle, answer)

    def finish(self, cycle: RequestResponseCycle, answer: Answer) -> None:
        """Send an answer, and continue with the next request."""
        self._disturb()
        self.transport.write(self._bytes_of(answer, keep_alive=cycle.keep_alive))
        cycle.response_complete = True
        cycle.message_event.set()
        if not cycle.keep_alive:
            self.transport.close()
        self.on_response_complete()

    def _bytes_of(self, answer: Answer, *, keep_alive: bool) -> bytes:
        """Return an answer as uvicorn sends it, with its own fields first."""
        if not isinstance(answer, ReadyAnswer):
            status, headers, body = answer
            lines = JSON_LINES if headers is JSON else lines_of(headers)
            return self._joined(status, lines + length_line(body), body, keep_alive=keep_alive)
        if not keep_alive:
            return self._joined(200, answer.lines, answer.body, keep_alive=False)
        fields = self.server_state.default_headers
        if answer.fields is not fields:
            answer.sent = self._joined(200, answer.lines, answer.body, keep_alive=True)
            answer.fields = fields
        return answer.sent

    def _joined(self, status: int, lines: bytes, body: bytes, *, keep_alive: bool) -> bytes:
        fields = self.server_state.default_headers
        if fields is not self._default_headers:  # they are others each second
            self._default_headers, self._default_lines = fields, lines_of(fields)
        end = b"\r\n" if keep_alive else b"connection: close\r\n\r\n"
        return b"".join((STATUS_LINE[status], self._default_lines, lines, end, body))


class Answering:
    """An answer in the making: runs its coroutine without a task, and sends the result.

    The coroutine may wait for futures, but must not ask for its task, as ``asyncio.timeout`` does.
    """

    __slots__ = ("_connection", "_context", "_cycle", "_making")

    def __init__(self, making: Making, cycle: RequestResponseCycle, connection: LaneProtocol) -> None:
        self._making = making
        self._cycle = cycle
        self._connection = connection
        self._context: Context | None = None

    def wait(self, future: asyncio.Future[Any] | None) -> None:
        """Go on when a future is done; without one, in the next turn of the loop."""
        if self._context is None:  # like a task, each has its own variables
            self._context = copy_context()
        if future is None:
            self._connection.loop.call_soon(self.go_on, context=self._context)
        else:
            future.add_done_callback(self.go_on, context=self._context)

    def go_on(self, _future: object = None) -> None:
        """Run the coroutine until it waits again, or send what it made."""
        try:
            waits_for = self._making.send(None)
        except StopIteration as done:
            answer: Answer | None = done.value
        except (Exception, asyncio.CancelledError):
            log.exception("a request failed")
            self._connection.transport.abort()
            return
        else:
            self.wait(waits_for)
            return
        if answer is None or self._cycle.disconnected:
            return
        flow = self._connection.flow
        if flow.write_paused:  # earlier answers are unread
            self._making = _after(flow.drain(), answer)
            self.go_on()
        else:
            self._connection.finish(self._cycle, answer)


async def _after(before: Coroutine[Any, Any, None], answer: Answer) -> Answer | None:
    await before
    return answer
