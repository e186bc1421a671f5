"""Clients of redis-py for a store, which never retry: for one server, or for a primary behind sentinels."""

from __future__ import annotations

from typing import Any, Final, cast

import redis
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.connection import URL_QUERY_ARGUMENT_PARSERS

from app.node.store_url import (
    REDIS_PORT,
    SENTINEL_SCHEMES,
    Options,
    SentinelAddress,
    hosts_of,
    is_cluster,
    place_of,
    scheme_of,
    sentinel_address,
    single_url,
)
from app.store.keys import shared_key

CONNECT_WITHIN_S: Final = 0.5

MAX_CONNECTIONS: Final = 4

Keywords = dict[str, Any]


class SentinelClient(Redis):
    """A client of the primary that sentinels name; closing it closes the connections to the sentinels too."""

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        """Close all connections."""
        await super().aclose(close_connection_pool)
        await cast("Any", self.connection_pool).sentinel_manager.aclose()


class BlockingSentinelClient(redis.Redis):
    """The same for a thread that may block."""

    def close(self) -> None:
        """Close all connections."""
        super().close()
        cast("Any", self.connection_pool).sentinel_manager.close()


def client_of(url: str, timeout_s: float, *, connect_within_s: float = CONNECT_WITHIN_S) -> Redis:
    """A client that never retries: decisions have a budget, and the next call connects again.

    Behind sentinels each new connection asks them for the primary, so a failover is followed.
    """
    options = {**_options(timeout_s, connect_within_s), "retry": Retry(NoBackoff(), 0)}
    if scheme_of(url) in SENTINEL_SCHEMES:
        its = sentinel_address(url)
        of_sentinels, of_primary = _of_both(its, options)
        manager = cast("Any", Sentinel)(its.sentinels, sentinel_kwargs=of_sentinels, **of_primary)
        client: Redis = manager.master_for(its.name, SentinelClient)
        return client
    if is_cluster(url):
        return cast("Redis", _cluster_client_of(url, options))
    # closing the client then closes the pool too
    return Redis.from_pool(
        BlockingConnectionPool.from_url(url, max_connections=MAX_CONNECTIONS, timeout=timeout_s, **options)
    )


def is_clustered(client: Redis) -> bool:
    """Whether a client is that of a cluster."""
    return isinstance(cast("Any", client), RedisCluster)


def shared_key_of(client: Redis, name: str) -> str:
    """The key of something that there is once, in the store of a client."""
    return shared_key(name, clustered=is_clustered(client))


def blocking_client_of(url: str, timeout_s: float) -> redis.Redis:
    """A client that blocks its thread and never retries."""
    options = {**_options(timeout_s, CONNECT_WITHIN_S), "retry": redis.retry.Retry(NoBackoff(), 0)}
    if scheme_of(url) in SENTINEL_SCHEMES:
        its = sentinel_address(url)
        of_sentinels, of_primary = _of_both(its, options)
        manager = cast("Any", redis.Sentinel)(its.sentinels, sentinel_kwargs=of_sentinels, **of_primary)
        client: redis.Redis = manager.master_for(its.name, BlockingSentinelClient)
        return client
    return redis.Redis.from_url(url, **options)


def _of_both(its: SentinelAddress, options: Keywords) -> tuple[Keywords, Keywords]:
    """The options of connections to sentinels and to the primary."""
    tls: Keywords = {"ssl": True} if its.tls else {}
    return (
        {**tls, **options, **_read(its.sentinel_options)},
        {**tls, **options, **_read(its.options)},
    )


def _read(options: Options) -> Keywords:
    """Options as redis-py reads them in its own URLs."""
    return {
        name: cast("Any", URL_QUERY_ARGUMENT_PARSERS.get(name, str))(text) for name, text in options.items()
    }


def _cluster_client_of(url: str, options: Keywords) -> RedisCluster:
    """A client that finds the primary of each key, and after a failure looks for it once more."""
    hosts = hosts_of(place_of(url), REDIS_PORT)
    return RedisCluster.from_url(
        single_url(url, *hosts[0]),
        startup_nodes=[ClusterNode(*host) for host in hosts],
        require_full_coverage=False,
        **{**options, "retry": Retry(NoBackoff(), 2)},
    )


def _options(timeout_s: float, connect_within_s: float) -> Keywords:
    return {
        "socket_timeout": timeout_s,
        "socket_connect_timeout": min(timeout_s, connect_within_s),
        "client_name": "quotagate",
    }
