"""The gRPC server: Envoy's rate-limit service, and gRPC's health checking, on a port of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import monotonic
from typing import Final

import structlog
from google.protobuf.message import DecodeError

from app.admission.errors import OverloadedError
from app.admission.metrics.metrics import Metrics
from app.admission.plan import PlannedAsk
from app.admission.port import Decider
from app.admission.throttle_factor.caller_clock import CallerClock
from app.domain.ask import Ask
from app.domain.caller import Caller
from app.domain.decision import Decision
from app.envoy.answer import OVER_LIMIT, response
from app.envoy.call import OVERLOADED, CallLimits, GrpcCall, Method, RefusedCallError, StatusCode, peer_of
from app.envoy.http2 import PARSING_S, Http2Connection
from app.envoy.mapping import DescriptorMapping
from app.envoy.protos.health_pb2 import HealthCheckRequest, HealthCheckResponse
from app.envoy.protos.ratelimit_pb2 import RateLimitResponse
from app.envoy.question import InvalidRequestError, QuestionReader
from app.http.access.access import Access
from app.http.peer import name_of
from app.http.problems import ProblemError, shortened
from app.http.server.connections import ClientConnection
from app.http.server.intake import Intake
from app.http.server.parsing import ParsingTurns

SERVICE: Final = "envoy.service.ratelimit.v3.RateLimitService"
METHOD: Final = f"/{SERVICE}/ShouldRateLimit"
HEALTH: Final = "grpc.health.v1.Health"

WITHIN_S: Final = 0.3
"""How long a request may wait in this node, as for a check: meanwhile Envoy holds a client's request."""
POLL_EVERY_S: Final = 0.25
"""How often the health of the process is checked for its watchers."""

LARGE: Final = 32 * 1024
"""A request with more bytes is read in a step for each descriptor."""

_DENIED: Final = {401: StatusCode.UNAUTHENTICATED, 403: StatusCode.PERMISSION_DENIED}
_NO_DETAIL: Final = Decision("admit", 0, False, 0, "local", None)
"""The decision on a request whose descriptors name nothing to limit."""

log: Final = structlog.get_logger("quotagate.envoy")


class RateLimitService:
    """Answers Envoy's requests.

    Args:
        admission: under the caller's clock a ``CallerClock``, whose newest time the asks get.
    """

    def __init__(
        self, admission: Decider, access: Access, mapping: DescriptorMapping, metrics: Metrics
    ) -> None:
        now_ms = admission.now_ms if isinstance(admission, CallerClock) else None
        self._admission = admission
        self._access = access
        self._reader = QuestionReader(mapping, now_ms, metrics.count_unusable_descriptor)
        self._metrics = metrics

    async def answer(self, call: GrpcCall, body: bytes) -> bytes:
        """Answer one request.

        Raises:
            RefusedCallError: the request gets a status in place of an answer, and nothing was charged.
        """
        unmapped = 0
        came_at = monotonic()
        try:
            caller, allow = self._caller(call, came_at)
            asks = await self._read(body)
            allowed = [
                allow(ask, f"/descriptors/{place}/entries")
                for place, ask in enumerate(asks)
                if ask is not None
            ]
            unmapped = len(asks) - len(allowed)
            decision, parts = await self._decided(allowed, caller, _within_s(call))
        except InvalidRequestError as error:
            raise RefusedCallError(StatusCode.INVALID_ARGUMENT, shortened(str(error))) from None
        except ProblemError as problem:
            if problem.wait_s:
                await asyncio.sleep(problem.wait_s)
            code = _DENIED.get(problem.status, StatusCode.UNKNOWN)
            raise RefusedCallError(code, str(problem.detail)) from None
        except OverloadedError as error:
            self._metrics.count_shed(error.cause)
            raise RefusedCallError(StatusCode.UNAVAILABLE, OVERLOADED) from None
        except Exception:
            log.exception("a request failed", path=METHOD)
            raise RefusedCallError(
                StatusCode.INTERNAL, "The request failed; the log has the reason."
            ) from None
        waiting = iter(parts)
        answer = response(decision, [None if ask is None else next(waiting) for ask in asks])
        is_over = decision.decision != "admit"
        self._metrics.count_envoy_request("over_limit" if is_over else "ok", unmapped)
        return answer.SerializeToString()

    def refuse_large(self) -> bytes:
        """Refuse a request that is too large to be read: after an error, Envoy would let the visitor in."""
        self._metrics.count_unusable_descriptor("message_too_large")
        self._metrics.count_envoy_request("over_limit")
        return RateLimitResponse(overall_code=OVER_LIMIT).SerializeToString()

    async def _read(self, body: bytes) -> Sequence[Ask | None]:
        """Return the ask of each descriptor; other work runs between the descriptors of a large request.

        Raises:
            InvalidRequestError: as for ``QuestionReader.read``.
        """
        asks = []
        for ask in self._reader.read(body):
            asks.append(ask)
            if len(body) > LARGE:
                await asyncio.sleep(0)
        return asks

    async def _decided(
        self, asks: Sequence[Ask], caller: Caller, within_s: float
    ) -> tuple[Decision, Sequence[PlannedAsk]]:
        if not asks:
            return _NO_DETAIL, ()
        if len(asks) == 1:
            (one,) = await self._admission.decide(asks, caller, within_s)
            assert one.decision is not None
            return one.decision, (one,)
        return await self._admission.decide_atomically(asks, caller, within_s)

    def _caller(self, call: GrpcCall, came_at: float) -> tuple[Caller, Callable[[Ask, str], Ask]]:
        """Return the caller, and a function that confines an ask to its bounds.

        Raises:
            ProblemError: it may not ask for decisions.
        """
        access = self._access
        head = call.head()
        grant = access.require(head, "decide")
        sender = access.sender(grant, head)
        caller = Caller(
            grant.name,
            sender.turn,
            grant.bound_to,
            came_at,
            call.is_gone,
            grant.created_ms,
            sender.traceparent,
        )
        if grant.is_unrestricted:
            return caller, _as_it_is
        return caller, partial(access.confine, grant)


class HealthService:
    """gRPC's health checking: it serves while the process can decide.

    Args:
        is_ready: whether the process can decide, and is not stopping.
    """

    def __init__(self, is_ready: Callable[[], bool]) -> None:
        self._is_ready = is_ready
        self._is_draining = False
        self._is_over = False
        self._was_ready = True
        self._watching = 0
        self._changed = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    def drain(self) -> None:
        """Say at once that the process serves no more."""
        self._is_draining = True
        self._change()

    def end(self) -> None:
        """End the calls of the watchers."""
        self._is_over = True
        self._change()

    async def check(self, _call: GrpcCall, body: bytes) -> bytes:
        """Answer once.

        Raises:
            RefusedCallError: there is no such service.
        """
        status = self._status(_service(body))
        if status == HealthCheckResponse.SERVICE_UNKNOWN:
            raise RefusedCallError(StatusCode.NOT_FOUND, "there is no such service")
        return HealthCheckResponse(status=status).SerializeToString()

    async def watch(self, call: GrpcCall, body: bytes) -> None:
        """Answer now, and whenever the health changes."""
        service = _service(body)
        call.release()
        last = None
        self._watching += 1
        try:
            while not self._is_over:
                status = self._status(service)
                if status != last:
                    last = status
                    call.send_message(HealthCheckResponse(status=status).SerializeToString())
                if self._timer is None:
                    self._poll_later()
                await self._changed.wait()
        finally:
            self._watching -= 1

    def _poll_later(self) -> None:
        self._was_ready = self._is_ready()
        self._timer = asyncio.get_running_loop().call_later(POLL_EVERY_S, self._poll)

    def _poll(self) -> None:
        """Poll for a change; one timer serves all watchers."""
        self._timer = None
        if self._is_ready() != self._was_ready:
            self._change()
        if self._watching and not self._is_over:
            self._poll_later()

    def _change(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _status(self, service: str) -> HealthCheckResponse.ServingStatus:
        if service not in ("", SERVICE, HEALTH):
            return HealthCheckResponse.SERVICE_UNKNOWN
        is_serving = self._is_ready() and not self._is_draining
        return HealthCheckResponse.SERVING if is_serving else HealthCheckResponse.NOT_SERVING


class EnvoyPort:
    """Makes the protocol of each connection to the port, and closes them all gracefully.

    Args:
        intake: counts the bytes of requests that are not answered.
    """

    def __init__(
        self, service: RateLimitService, health: HealthService, intake: Intake, metrics: Metrics
    ) -> None:
        self._health = health
        self._intake = intake
        self._shed = metrics.count_shed
        self._limits = limits = CallLimits(intake, metrics.count_shed)
        self._turns = ParsingTurns(PARSING_S)
        self.connections: set[Http2Connection] = set()
        self._is_empty = asyncio.Event()
        self._is_stopping = False
        calls = (limits.calls, "envoy_calls")
        self._methods: Mapping[bytes, Method] = {
            METHOD.encode(): Method(
                service.answer, metrics.count_envoy_request, *calls, service.refuse_large
            ),
            f"/{HEALTH}/Check".encode(): Method(health.check, _uncounted, *calls),
            f"/{HEALTH}/Watch".encode(): Method(health.watch, _uncounted, limits.watches, "envoy_watches"),
        }

    def connect(self, connection: ClientConnection) -> Http2Connection:
        """Return the protocol of a new connection."""
        made = Http2Connection(
            connection,
            self._call,
            turns=self._turns,
            intake=self._intake,
            shed=self._shed,
            ended=self._ended,
        )
        self.connections.add(made)
        return made

    def drain(self) -> None:
        """Say that the process serves no more; connections and calls go on."""
        self._health.drain()

    async def stop(self, within_s: float) -> None:
        """Close all connections: gracefully within so many seconds, then at once."""
        self._is_stopping = True
        self._health.end()
        await asyncio.sleep(0)  # the watchers get their last answer first
        for connection in tuple(self.connections):
            connection.leave()
        try:
            if self.connections:
                await asyncio.wait_for(self._is_empty.wait(), within_s)
        except TimeoutError:
            for connection in tuple(self.connections):
                connection.abort()

    def _ended(self, connection: Http2Connection) -> None:
        self.connections.discard(connection)
        if self._is_stopping and not self.connections:
            self._is_empty.set()

    def _call(self, connection: Http2Connection, number: int) -> GrpcCall:
        if not connection.peer:
            certificate = connection.transport.get_extra_info("peercert")
            name = name_of(certificate) if certificate else None
            connection.peer = peer_of(connection.client.address, name, METHOD)
        return GrpcCall(connection, number, self._methods, self._limits, connection.peer)


def _uncounted(_outcome: str) -> None:
    """Count nothing: the metric is about the rate-limit service."""


def _service(body: bytes) -> str:
    """Return the service that a health check asks about.

    Raises:
        RefusedCallError: the message is not a health check.
    """
    try:
        return HealthCheckRequest.FromString(body).service
    except DecodeError:
        detail = "the message is not a HealthCheckRequest"
        raise RefusedCallError(StatusCode.INVALID_ARGUMENT, detail) from None


def _within_s(call: GrpcCall) -> float:
    """Return how long a request may wait in this node: no longer than its caller does (``grpc-timeout``)."""
    if call.deadline is None:
        return WITHIN_S
    return min(WITHIN_S, max(call.deadline - asyncio.get_running_loop().time(), 0.0))


def _as_it_is(ask: Ask, _field: str) -> Ask:
    return ask
