"""One question to one Kafka broker over a connection of its own, answered or explained within its time."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from kafka import errors
from kafka.net.manager import KafkaConnectionManager
from kafka.net.selector import NetworkSelector
from kafka.net.transport import KafkaSSLTransport, KafkaTCPTransport

RECEIVE_AT_MOST: Final = 100_000_000
"""Bytes of an answer, as kafka-python's clients have it; its connections alone would take 1 MB."""


class Unanswered(Exception):
    """A broker did not answer; the text says why in a few words."""


class TooOld(Unanswered):
    """The broker knows none of the versions that the question has."""


def ask(server: str, configuration: Mapping[str, Any], questions: Sequence[Any], within_s: float) -> Any:
    """What a broker answers to the first question that it knows; blocks no longer than that.

    kafka-python's clients are no use for this. They would learn the whole cluster's addresses first, from a
    broker drawn by lot and waited for to the end; take every broker for as old as that one; put off whoever
    failed once for up to 30 s; and go on in a thread of theirs when they could not begin. So this drives the
    connection underneath them, in the caller's thread, and takes it down again.
    """
    ends = time.monotonic() + within_s
    net = NetworkSelector(**configuration)
    own = {"bootstrap_servers": [server], "receive_message_max_bytes": RECEIVE_AT_MOST}
    manager = _Connections(net, **{**configuration, **own})

    async def exchange() -> Any:
        (broker,) = manager.cluster.bootstrap_brokers()
        connection = manager.get_connection(
            broker.node_id, timeout_ms=within_s * 1000, refresh_metadata_on_err=False
        )
        for question in questions:
            try:
                return await connection.send_request(question, request_timeout_ms=within_s * 1000)
            except errors.IncompatibleBrokerVersion:
                continue
        raise TooOld

    answer = manager.call_soon(exchange)
    try:
        while not answer.is_done and (left := ends - time.monotonic()) > 0:
            net.poll(timeout_ms=left * 1000, future=answer)
        in_time = answer.is_done
    finally:
        manager.close()
        net.close()
    if not in_time:
        raise Unanswered(late(within_s))
    if answer.exception is None:
        return answer.value
    # Whatever the library stumbled over is this broker's trouble alone.
    error = answer.exception
    raise error if isinstance(error, Unanswered) else Unanswered(_why(error, within_s)) from None


class _Connections(KafkaConnectionManager):  # type: ignore[misc]  # it has no types
    """Closes a socket also when nothing came of it; kafka-python leaves that to the garbage collector."""

    async def _build_transport(self, node: Any, timeout_at: float) -> Any:
        # It may block: the thread has nothing else to do.
        opened = socket.create_connection((node.host, node.port), timeout=_left(timeout_at))
        tls = {name: value for name, value in self.config.items() if name.startswith("ssl_")}
        try:
            opened.setblocking(False)
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self.ssl_enabled:
                transport = _Tls(self._net, opened, host=node.host, **tls)
            else:
                transport = _Plain(self._net, opened, host=node.host)
        except BaseException:
            opened.close()
            raise
        try:
            await transport.handshake()
        except BaseException as error:  # also when the time is over and this is given up
            transport.abort(error)
            raise
        return transport


class _LastWords:
    """Hears what a broker said before it hung up, such as that it refuses a login; kafka-python drops it."""

    def _sock_recv(self) -> tuple[bytes, Exception | None]:
        received, error = super()._sock_recv()  # type: ignore[misc]  # the transport's
        return received, (None if received else error)


class _Plain(_LastWords, KafkaTCPTransport):  # type: ignore[misc]
    pass


class _Tls(_LastWords, KafkaSSLTransport):  # type: ignore[misc]
    pass


def _left(ends: float) -> float:
    return max(0.001, ends - time.monotonic())


def late(within_s: float) -> str:
    """Why an ask has no answer whose time is over."""
    return f"no answer within {within_s:.1f} s"


def _why(error: Exception, within_s: float) -> str:
    """In a few words, and never with what was sent."""
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
