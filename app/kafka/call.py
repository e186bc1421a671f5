"""One request to one Kafka broker, over its own connection and within a time limit."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from kafka import errors
from kafka.net.manager import KafkaConnectionManager
from kafka.net.selector import NetworkSelector
from kafka.net.transport import KafkaSSLTransport, KafkaTCPTransport

from app.kafka.errors import BrokerSilentError, BrokerTooOldError

MAX_RESPONSE: Final = 100_000_000
"""Bytes of a response, as in kafka-python's clients; the default of its connections is 1 MB."""


def ask(server: str, configuration: Mapping[str, Any], requests: Sequence[Any], within_s: float) -> Any:
    """Return a broker's response to the first of the requests that it supports; block at most ``within_s``.

    kafka-python's clients do not fit. They first fetch the addresses of the whole cluster from a random
    broker, and wait for that without our time limit. They assume that every broker has that broker's version.
    After one failure they wait for up to 30 s. If they cannot connect, they leave a thread running. So this
    drives the connection below them, in the caller's thread, and closes it afterwards.

    Raises:
        BrokerSilentError: no response in time, no connection, or a refused login.
        BrokerTooOldError: the broker supports none of the requests.
    """
    ends = time.monotonic() + within_s
    net = NetworkSelector(**configuration)
    own = {"bootstrap_servers": [server], "receive_message_max_bytes": MAX_RESPONSE}
    manager = _Connections(net, **{**configuration, **own})

    async def exchange() -> Any:
        (broker,) = manager.cluster.bootstrap_brokers()
        connection = manager.get_connection(
            broker.node_id, timeout_ms=within_s * 1000, refresh_metadata_on_err=False
        )
        for request in requests:
            try:
                return await connection.send_request(request, request_timeout_ms=within_s * 1000)
            except errors.IncompatibleBrokerVersion:
                continue
        raise BrokerTooOldError

    answer = manager.call_soon(exchange)
    try:
        while not answer.is_done and (left := ends - time.monotonic()) > 0:
            net.poll(timeout_ms=left * 1000, future=answer)
        in_time = answer.is_done
    finally:
        manager.close()
        net.close()
    if not in_time:
        raise BrokerSilentError(late(within_s))
    if answer.exception is None:
        return answer.value
    # Any error of the library concerns only this broker.
    error = answer.exception
    raise (
        error if isinstance(error, BrokerSilentError) else BrokerSilentError(_why(error, within_s))
    ) from None


class _Connections(KafkaConnectionManager):  # type: ignore[misc]  # it has no types
    """Closes the socket of a failed connection too; kafka-python leaves that to the garbage collector."""

    async def _build_transport(self, node: Any, timeout_at: float) -> Any:
        # This may block: the thread has nothing else to do.
        opened = socket.create_connection((node.host, node.port), timeout=_left(timeout_at))
        tls = {name: value for name, value in self.config.items() if name.startswith("ssl_")}
        try:
            opened.setblocking(False)
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self.ssl_enabled:
                transport = _Tls(self._net, opened, host=node.host, **tls)
            else:
                transport = _Plaintext(self._net, opened, host=node.host)
        except BaseException:
            opened.close()
            raise
        try:
            await transport.handshake()
        except BaseException as error:  # even if the time is over
            transport.abort(error)
            raise
        return transport


class _FinalResponse:
    """Keeps the last bytes of a broker that hung up, such as a refused login; kafka-python drops them."""

    def _sock_recv(self) -> tuple[bytes, Exception | None]:
        received, error = super()._sock_recv()  # type: ignore[misc]  # the transport's
        return received, (None if received else error)


class _Plaintext(_FinalResponse, KafkaTCPTransport):  # type: ignore[misc]
    pass


class _Tls(_FinalResponse, KafkaSSLTransport):  # type: ignore[misc]
    pass


def _left(ends: float) -> float:
    return max(0.001, ends - time.monotonic())


def late(within_s: float) -> str:
    """Why a request got no response in time."""
    return f"no answer within {within_s:.1f} s"


def _why(error: Exception, within_s: float) -> str:
    """The reason in a few words; it never quotes the request."""
    if isinstance(error, errors.RequestTimedOutError | errors.KafkaTimeoutError | TimeoutError):
        return late(within_s)
    if isinstance(error, OSError):
        return f"no connection: {error.strerror or error}"
    text = " ".join(str(argument) for argument in error.args) or type(error).__name__
    if isinstance(error, errors.SaslAuthenticationFailedError | errors.UnsupportedSaslMechanismError):
        return f"refuses the login: {text.removeprefix('SaslAuthenticationFailedError: ')}"
    if isinstance(error, errors.KafkaConnectionError):
        return f"no connection: {text}"
    return f"{type(error).__name__}: {text}"
