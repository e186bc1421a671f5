"""The gRPC server: Envoy's rate-limit service, and gRPC's health checking, on a port of their own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, Final, NamedTuple

import grpc
import structlog

from app.admission.caller_clock import CallerClock
from app.admission.errors import OverloadedError
from app.admission.metrics import Metrics
from app.admission.port import Decider, InFull
from app.domain.ask import Ask
from app.domain.caller import Caller
from app.domain.decision import Decision
from app.envoy.answer import response
from app.envoy.mapping import DescriptorMapping
from app.envoy.peer import scope_of
from app.envoy.protos.health_pb2 import HealthCheckRequest, HealthCheckResponse
from app.envoy.question import InvalidRequestError, QuestionReader
from app.http.access import Access
from app.http.problems import ProblemError, shortened

SERVICE: Final = "envoy.service.ratelimit.v3.RateLimitService"
METHOD: Final = f"/{SERVICE}/ShouldRateLimit"
HEALTH: Final = "grpc.health.v1.Health"

WITHIN_S: Final = 0.3
"""How long a request may wait in this node, as for a check: meanwhile Envoy holds a client's request."""
MAX_BODY: Final = 256 * 1024
"""The largest request in bytes; Envoy makes them of headers, of which it takes 60 KiB."""
MAX_CALLS: Final = 8_192
"""How many requests may be in the process at a time; further ones are shed."""
LOOK_EVERY_S: Final = 0.25
"""How often the health of the process is looked at for those who watch it."""
FINISH_WITHIN_S: Final = 5.0
"""How long calls in flight may take at shutdown."""

_OPTIONS: Final = (
    ("grpc.max_receive_message_length", MAX_BODY),
    ("grpc.max_send_message_length", -1),
    # A connection whose other end is gone is noticed; a caller may ask for signs of life likewise.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
)
_DENIED: Final = {401: grpc.StatusCode.UNAUTHENTICATED, 403: grpc.StatusCode.PERMISSION_DENIED}
_NO_DETAIL: Final = Decision("admit", 0, False, 0, "local", None)
"""The decision on a request whose descriptors name nothing to limit."""

log: Final = structlog.get_logger("quotagate.envoy")

Context = Any  # grpcio has no types


class ServerCertificates(NamedTuple):
    """PEM files for TLS, as the HTTP API has them; with a CA, callers need a client certificate."""

    cert: Path
    key: Path
    client_ca: Path | None


class RefusedCallError(Exception):
    """A call is answered with a status other than OK; ``outcome`` is the label of the metric."""

    def __init__(self, code: grpc.StatusCode, detail: str) -> None:
        super().__init__(detail)
        self.code = code
        self.outcome = code.name.lower()


class RateLimitService:
    """Answers Envoy's requests.

    Args:
        admission: under the caller's clock a ``CallerClock``, whose newest time is that of the asks.
    """

    def __init__(
        self, admission: Decider, access: Access, mapping: DescriptorMapping, metrics: Metrics
    ) -> None:
        now_ms = admission.now_ms if isinstance(admission, CallerClock) else None
        self._admission = admission
        self._access = access
        self._reader = QuestionReader(mapping, now_ms)
        self._metrics = metrics
        self._calls = 0

    async def should_rate_limit(self, body: bytes, context: Context) -> bytes:
        """Answer one request."""
        came_at = monotonic()
        self._calls += 1
        try:
            return await self._answered(body, context, came_at)
        except RefusedCallError as refusal:
            self._metrics.count_envoy_request(refusal.outcome)
            await context.abort(refusal.code, str(refusal))
            raise  # abort does not return
        finally:
            self._calls -= 1

    async def _answered(self, body: bytes, context: Context, came_at: float) -> bytes:
        """Return the answer to a request.

        Raises:
            RefusedCallError: it gets a status in place of an answer, and nothing was charged.
        """
        unmapped = 0
        try:
            self._require_room()
            caller, allow = self._caller(context, came_at)
            asks = self._reader.read(body)
            allowed = [
                allow(ask, f"/descriptors/{place}/entries")
                for place, ask in enumerate(asks)
                if ask is not None
            ]
            unmapped = len(asks) - len(allowed)
            decision, parts = await self._decided(allowed, caller, _within_s(context))
        except InvalidRequestError as error:
            raise RefusedCallError(grpc.StatusCode.INVALID_ARGUMENT, shortened(str(error))) from None
        except ProblemError as problem:
            if problem.wait_s:
                await asyncio.sleep(problem.wait_s)
            code = _DENIED.get(problem.status, grpc.StatusCode.UNKNOWN)
            raise RefusedCallError(code, str(problem.detail)) from None
        except OverloadedError as error:
            self._metrics.count_shed(error.cause)
            raise RefusedCallError(
                grpc.StatusCode.UNAVAILABLE, "The node is overloaded; nothing was charged."
            ) from None
        except Exception:
            log.exception("a request failed", path=METHOD)
            raise RefusedCallError(
                grpc.StatusCode.INTERNAL, "The request failed; the log has the reason."
            ) from None
        waiting = iter(parts)
        answer = response(decision, [None if ask is None else next(waiting) for ask in asks])
        is_over = decision.decision != "admit"
        self._metrics.count_envoy_request("over_limit" if is_over else "ok", unmapped)
        return answer.SerializeToString()

    def _require_room(self) -> None:
        if self._calls > MAX_CALLS:
            raise OverloadedError("envoy_calls")

    async def _decided(
        self, asks: Sequence[Ask], caller: Caller, within_s: float
    ) -> tuple[Decision, Sequence[InFull]]:
        if not asks:
            return _NO_DETAIL, ()
        if len(asks) == 1:
            one = await self._admission.decide_in_full(asks[0], caller, within_s)
            return one.decision, (one,)
        return await self._admission.decide_together(asks, caller, within_s)

    def _caller(self, context: Context, came_at: float) -> tuple[Caller, Callable[[Ask, str], Ask]]:
        """Return who calls, and what returns an ask as this caller may ask it.

        Raises:
            ProblemError: it may not ask for decisions.
        """
        access = self._access
        scope = scope_of(context.peer(), context.invocation_metadata() or (), context.auth_context(), METHOD)
        grant = access.require(scope, "decide")
        sender = access.sender(grant, scope)
        caller = Caller(grant.name, sender.turn, grant.bound_to, came_at)
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
        self._is_over = False

    def end(self) -> None:
        """Let those who watch go: a server does not stop while they wait."""
        self._is_over = True

    async def check(self, request: HealthCheckRequest, context: Context) -> HealthCheckResponse:
        """Answer once."""
        status = self._status(request.service)
        if status == HealthCheckResponse.SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, "there is no such service")
        return HealthCheckResponse(status=status)

    async def watch(
        self, request: HealthCheckRequest, _context: Context
    ) -> AsyncIterator[HealthCheckResponse]:
        """Answer now, and whenever it changes."""
        last = None
        while not self._is_over:
            status = self._status(request.service)
            if status != last:
                last = status
                yield HealthCheckResponse(status=status)
            await asyncio.sleep(LOOK_EVERY_S)

    def _status(self, service: str) -> HealthCheckResponse.ServingStatus:
        if service not in ("", SERVICE, HEALTH):
            return HealthCheckResponse.SERVICE_UNKNOWN
        return HealthCheckResponse.SERVING if self._is_ready() else HealthCheckResponse.NOT_SERVING


@asynccontextmanager
async def serving(
    service: RateLimitService,
    health: HealthService,
    address: tuple[str, int],
    certificates: ServerCertificates | None,
    *,
    shared: bool = False,
) -> AsyncIterator[int]:
    """Serve on an address, and yield the port.

    Args:
        shared: other processes of this node listen on the same port.

    Raises:
        OSError: it cannot listen there.
    """
    server = grpc.aio.server(options=[*_OPTIONS, ("grpc.so_reuseport", int(shared))])
    server.add_generic_rpc_handlers(
        (
            grpc.method_handlers_generic_handler(
                SERVICE, {"ShouldRateLimit": grpc.unary_unary_rpc_method_handler(service.should_rate_limit)}
            ),
            grpc.method_handlers_generic_handler(
                HEALTH,
                {
                    "Check": grpc.unary_unary_rpc_method_handler(health.check, **_HEALTH_MESSAGES),
                    "Watch": grpc.unary_stream_rpc_method_handler(health.watch, **_HEALTH_MESSAGES),
                },
            ),
        )
    )
    host, number = address
    place = f"{f'[{host}]' if ':' in host else host}:{number}"
    try:
        if certificates is None:
            port = server.add_insecure_port(place)
        else:
            port = server.add_secure_port(place, credentials(certificates))
    except RuntimeError as error:
        raise OSError(str(error)) from None
    await server.start()
    try:
        yield port
    finally:
        health.end()
        await server.stop(FINISH_WITHIN_S)


def credentials(certificates: ServerCertificates) -> Any:
    """Return the certificates as grpcio takes them."""
    cert, key, client_ca = certificates
    return grpc.ssl_server_credentials(
        [(key.read_bytes(), cert.read_bytes())],
        root_certificates=client_ca.read_bytes() if client_ca is not None else None,
        require_client_auth=client_ca is not None,
    )


_HEALTH_MESSAGES: Final[dict[str, Any]] = {
    "request_deserializer": HealthCheckRequest.FromString,
    "response_serializer": HealthCheckResponse.SerializeToString,
}


def _within_s(context: Context) -> float:
    """Return how long a request may wait in this node: no longer than its caller does (``grpc-timeout``)."""
    left_s = context.time_remaining()
    return WITHIN_S if left_s is None else min(WITHIN_S, max(left_s, 0.0))


def _as_it_is(ask: Ask, _field: str) -> Ask:
    return ask
