"""Clients of redis-py for a store, which never retry: for one server, or for a primary behind sentinels.

The blocking clients, and the connections of ``dial``, are opened by ``app.store.sockets``.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, Final, NamedTuple, Self, cast

import redis
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.connection import AbstractConnection, UnixDomainSocketConnection
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.connection import URL_QUERY_ARGUMENT_PARSERS
from redis.driver_info import DriverInfo
from redis.exceptions import ResponseError
from redis.sentinel import SentinelManagedConnection

from app.node.shortage import started_threads
from app.node.store_url import (
    REDIS_PORT,
    SENTINEL_SCHEMES,
    Options,
    SentinelAddress,
    is_cluster,
    place_of,
    scheme_of,
    sentinel_address,
    single_url,
)
from app.node.url import read_hosts
from app.store.keys import shared_key
from app.store.sockets import Sockets

CONNECT_WITHIN_S: Final = 0.5

MAX_CONNECTIONS: Final = 4

SPARES: Final = 4
"""Spare sockets for each primary: its two connections, for examinations and calls, can be lost twice."""

DRIVER: Final = DriverInfo()
"""The greeting of redis-py names this driver; it is made once, because making it reads a file."""

Keywords = dict[str, Any]


@contextmanager
def _nameless(connection: Any) -> Iterator[str]:
    """Let redis-py greet without naming the connection, because the store's user may lack that right."""
    name, connection.client_name = connection.client_name, None
    try:
        yield name
    finally:
        connection.client_name = name


async def _greet(connection: Any) -> None:
    """Greet the store, and name the connection if that is allowed; the name only helps operators."""
    with _nameless(connection) as name:
        await connection.on_connect()
    with suppress(ResponseError):
        await connection.send_command("CLIENT", "SETNAME", name, check_health=False)
        await connection.read_response()


def _greet_blocking(connection: Any) -> None:
    """As ``_greet``, on a connection that blocks its thread."""
    with _nameless(connection) as name:
        connection.on_connect()
    with suppress(ResponseError):
        connection.send_command("CLIENT", "SETNAME", name, check_health=False)
        connection.read_response()


class _LoopUnixConnection(UnixDomainSocketConnection):
    """A connection to a Unix socket that greets once; redis-py's class greets while it connects too."""

    async def _connect(self) -> None:
        async with asyncio.timeout(self.socket_connect_timeout):
            self._reader, self._writer = await asyncio.open_unix_connection(path=self.path)


class SentinelClient(Redis):
    """A client of the primary that sentinels name; closing it closes the connections to the sentinels too."""

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        """Close all connections."""
        await super().aclose(close_connection_pool)
        await cast("Any", self.connection_pool).sentinel_manager.aclose()


class BlockingSentinelClient(redis.Redis):
    """As ``SentinelClient``, for a thread that may block."""

    def close(self) -> None:
        """Close all connections."""
        super().close()
        cast("Any", self.connection_pool).sentinel_manager.close()


def client_of(url: str, timeout_s: float, *, connect_within_s: float = CONNECT_WITHIN_S) -> Redis:
    """A client that never retries: decisions have a budget, and the next call connects again.

    Behind sentinels each new connection asks them for the primary, so a failover is followed.
    """
    options = {
        **_options(timeout_s, connect_within_s),
        "redis_connect_func": _greet,
        "retry": Retry(NoBackoff(), 0),
    }
    if scheme_of(url) in SENTINEL_SCHEMES:
        address = sentinel_address(url)
        of_sentinels, of_primary = _of_both(address, options)
        manager = cast("Any", Sentinel)(address.sentinels, sentinel_kwargs=of_sentinels, **of_primary)
        client: Redis = manager.master_for(address.name, SentinelClient)
        return client
    if is_cluster(url):
        return cast("Redis", _cluster_client_of(url, options))
    pool = BlockingConnectionPool.from_url(url, max_connections=MAX_CONNECTIONS, timeout=timeout_s, **options)
    if scheme_of(url) == "unix":
        pool.connection_class = _LoopUnixConnection
    # closing the client then closes the pool too
    return Redis.from_pool(pool)


def is_clustered(client: Redis) -> bool:
    """Whether a client connects to a cluster."""
    return isinstance(cast("Any", client), RedisCluster)


def shared_key_of(client: Redis, name: str) -> str:
    """The key of a value that a store has once, for the store of a client."""
    return shared_key(name, clustered=is_clustered(client))


@contextmanager
def _heard_by(heard: Callable[[], None]) -> Iterator[None]:
    """Report that a reply was read within the block; an error of the store is a reply too."""
    try:
        yield
    except ResponseError:
        heard()
        raise
    heard()


class _HeardConnection(redis.connection.AbstractConnection):
    """A connection that is opened by ``Sockets`` and reports each reply by calling ``heard``."""

    def __init__(self, *, sockets: Sockets, heard: Callable[[], None], **options: Any) -> None:
        self._sockets = sockets
        self._heard = heard
        cast("Any", super()).__init__(**options)

    def read_response(self, *arguments: Any, **options: Any) -> Any:
        """Read a reply, as redis-py does."""
        with _heard_by(self._heard):
            return cast("Any", super()).read_response(*arguments, **options)


class _TcpConnection(_HeardConnection, redis.Connection):
    """A TCP connection."""

    def open_socket(self) -> socket.socket:
        """Connect, and greet nobody.

        Raises:
            OSError: nobody listens there, or this process is short of something.
        """
        opened = self._sockets.connect(self.host, self.port, self.socket_connect_timeout)
        if self.socket_keepalive:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in self.socket_keepalive_options.items():
                opened.setsockopt(socket.IPPROTO_TCP, option, value)
        opened.settimeout(self.socket_timeout)
        return opened

    def _connect(self) -> socket.socket:
        return self.open_socket()


class _TlsConnection(redis.SSLConnection, _TcpConnection):
    """The same with TLS."""

    def __init__(self, **options: Any) -> None:
        self._tls_options = options
        super().__init__(**options)

    def tls(self) -> ssl.SSLContext:
        """The TLS context."""
        return self._sockets.tls(self._tls_options)

    def _wrap_socket_with_ssl(self, sock: socket.socket) -> ssl.SSLSocket:
        return self.tls().wrap_socket(sock, server_hostname=self.host)


class _SentinelTcpConnection(SentinelManagedConnection, _TcpConnection):
    """A connection to the primary that sentinels name."""


class _SentinelTlsConnection(SentinelManagedConnection, _TlsConnection):
    """The same with TLS."""


class _UnixConnection(_HeardConnection, redis.UnixDomainSocketConnection):
    """A connection to a Unix socket."""

    def open_socket(self) -> socket.socket:
        """Connect, and greet nobody.

        Raises:
            OSError: nobody listens there, or this process is short of something.
        """
        opened = self._sockets.connect_unix(self.path, self.socket_connect_timeout)
        opened.settimeout(self.socket_timeout)
        return opened

    def _connect(self) -> socket.socket:
        return self.open_socket()


class OpenedConnection(AbstractConnection):
    """A connection for an event loop, over a socket that is connected already.

    Args:
        tls: the context for TLS; None without.
        host: the name that the certificate must have.
        heard: called after each reply.
        options: as for a connection of redis-py.
    """

    def __init__(
        self,
        opened: socket.socket,
        tls: ssl.SSLContext | None,
        host: str,
        *,
        heard: Callable[[], None],
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._opened = opened
        self._tls = tls
        self._host = host
        self._heard = heard

    async def read_response(self, *arguments: Any, **options: Any) -> Any:
        """Read a reply, as redis-py does."""
        with _heard_by(self._heard):
            return await cast("Any", super()).read_response(*arguments, **options)

    async def _connect(self) -> None:
        if self._opened.family == socket.AF_UNIX:
            self._reader, self._writer = await asyncio.open_unix_connection(sock=self._opened)
        else:
            name = None if self._tls is None else self._host
            self._reader, self._writer = await asyncio.open_connection(
                sock=self._opened, ssl=self._tls, server_hostname=name
            )

    def _host_error(self) -> str:
        return self._host

    def repr_pieces(self) -> list[tuple[str, Any]]:
        """The parts of its representation in redis-py."""
        return [("host", self._host)]


_GREETING: Final = ("db", "username", "password", "client_name", "driver_info", "protocol", "heard")
"""The options that a greeting needs."""


def dial(client: redis.Redis, within_s: float) -> OpenedConnection:
    """Connect to the store of a blocking client, for an event loop that greets it; may block.

    Args:
        within_s: how long each reply to the greeting may take.

    Raises:
        RedisError, OSError: nobody listens there, or no sentinel knows the primary.
    """
    pool: Any = client.connection_pool
    unused = pool.connection_class(**pool.connection_kwargs)
    if isinstance(unused, SentinelManagedConnection):
        unused.host, unused.port = pool.get_master_address()
    opened = unused.open_socket()
    opened.setblocking(False)
    options = {name: pool.connection_kwargs[name] for name in _GREETING if name in pool.connection_kwargs}
    try:
        tls = unused.tls() if isinstance(unused, _TlsConnection) else None
    except BaseException:
        opened.close()
        raise
    return OpenedConnection(
        opened,
        tls,
        getattr(unused, "host", ""),
        socket_timeout=within_s,
        socket_connect_timeout=within_s,
        redis_connect_func=_greet,
        retry=Retry(NoBackoff(), 0),
        **options,
    )


class Reserve(NamedTuple):
    """The resources for connections to a store: sockets, and the threads that open them."""

    sockets: Sockets
    threads: ThreadPoolExecutor

    @classmethod
    def of(cls, url: str, threads: int) -> Self:
        """Return the reserve for the store at a URL.

        Raises:
            RuntimeError: a thread cannot be started.
        """
        return cls(_sockets_of(url), started_threads(threads, "examine the store"))

    def close(self) -> None:
        """Give everything back; threads end with their work."""
        self.threads.shutdown(wait=False, cancel_futures=True)
        self.sockets.close()


def _sockets_of(url: str) -> Sockets:
    """Sockets for the store at a URL; behind sentinels, there is a spare for each sentinel too."""
    if scheme_of(url) == "unix":
        return Sockets(SPARES, socket.AF_UNIX)
    hosts = place_of(url)
    sentinels = len(read_hosts(hosts, REDIS_PORT)) if scheme_of(url) in SENTINEL_SCHEMES else 0
    return Sockets(SPARES + sentinels, socket.AF_INET6 if hosts.startswith("[") else socket.AF_INET)


def blocking_client_of(
    url: str, timeout_s: float, sockets: Sockets, heard: Callable[[], None] = lambda: None
) -> redis.Redis:
    """A client that blocks its thread and never retries.

    Args:
        timeout_s: how long each reply may take.
        heard: called after each reply, of the greeting too; so is it by the connections of ``dial``.
    """
    options = {
        **_options(timeout_s, CONNECT_WITHIN_S),
        "redis_connect_func": _greet_blocking,
        "retry": redis.retry.Retry(NoBackoff(), 0),
        "sockets": sockets,
        "heard": heard,
    }
    if scheme_of(url) in SENTINEL_SCHEMES:
        address = sentinel_address(url)
        of_sentinels, of_primary = _of_both(address, options)
        manager = cast("Any", redis.Sentinel)([], **{**of_primary, "ssl": False})
        is_tls = of_sentinels.pop("ssl", False)
        manager.sentinels = [
            redis.Redis.from_pool(
                redis.ConnectionPool(
                    _TlsConnection if is_tls else _TcpConnection, host=host, port=port, **of_sentinels
                )
            )
            for host, port in address.sentinels
        ]
        client: redis.Redis = manager.master_for(
            address.name,
            BlockingSentinelClient,
            connection_class=_SentinelTlsConnection if address.tls else _SentinelTcpConnection,
        )
        return client
    class_ = {"unix": _UnixConnection, "rediss": _TlsConnection}.get(scheme_of(url), _TcpConnection)
    return redis.Redis.from_url(url, connection_class=class_, **options)


def _of_both(address: SentinelAddress, options: Keywords) -> tuple[Keywords, Keywords]:
    """The options of connections to sentinels and to the primary."""
    tls: Keywords = {"ssl": True} if address.tls else {}
    return (
        {**tls, **options, **_read(address.sentinel_options)},
        {**tls, **options, **_read(address.options)},
    )


def _read(options: Options) -> Keywords:
    """Options as redis-py reads them in its own URLs."""
    return {
        name: cast("Any", URL_QUERY_ARGUMENT_PARSERS.get(name, str))(text) for name, text in options.items()
    }


def _cluster_client_of(url: str, options: Keywords) -> RedisCluster:
    """A client that finds the primary of each key, and after a failure looks for it once more."""
    hosts = read_hosts(place_of(url), REDIS_PORT)
    greet = options.pop("redis_connect_func")
    client = RedisCluster.from_url(
        single_url(url, *hosts[0]),
        startup_nodes=[ClusterNode(*host) for host in hosts],
        require_full_coverage=False,
        **{**options, "retry": Retry(NoBackoff(), 2)},
    )
    # The client takes no such option, but passes its keywords on to each node that it finds.
    for keywords in (
        client.connection_kwargs,
        *(node.connection_kwargs for node in client.nodes_manager.startup_nodes.values()),
    ):
        keywords["redis_connect_func"] = greet
    return client


def _options(timeout_s: float, connect_within_s: float) -> Keywords:
    return {
        "socket_timeout": timeout_s,
        "socket_connect_timeout": min(timeout_s, connect_within_s),
        "client_name": "quotagate",
        "driver_info": DRIVER,
    }
