"""Puts the parts of one API together, and opens and closes them in order."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, Final

import structlog
from starlette.types import ASGIApp

from app.admission.admission import Admission
from app.admission.metrics import Metrics
from app.catalog import schema
from app.catalog.catalog import Catalog
from app.domain.ladder import Rules
from app.domain.quota import Defaults
from app.http.access import Access
from app.http.app import create_app
from app.http.check import Sources
from app.http.health import Readiness
from app.http.quotas import router
from app.run.errors import CannotStart
from app.run.settings import Settings
from app.store.port import StoreError
from app.store.redis import RedisStore

log = structlog.get_logger("quotagate")

OLDEST_STORE: Final = (7, 0)
CALL_TIMEOUT_S: Final = 0.5
"""After this a call's connection is given up and the next call connects anew; decisions gave up before."""


def migrate(database_url: str) -> None:
    """Bring a catalog's tables to the newest schema."""
    schema.upgrade(database_url)


def defaults(settings: Settings) -> Defaults:
    """What a quota that does not say is given."""
    return Defaults(
        samples=settings.samples,
        sample_ms=settings.sample_ms,
        window_ms=settings.producer_id_window_ms,
        layers=settings.producer_id_layers,
        max_ids=settings.max_ids_per_principal,
    )


def build(
    settings: Settings, counts: Path | None = None, stopping: Callable[[], bool] = lambda: False
) -> ASGIApp:
    """The app of one API process, not open yet.

    Args:
        counts: where its siblings leave their metrics; None without siblings.
        stopping: whether the process has been told to end.
    """
    if settings.redis_url is None or settings.admin_key is None:
        raise ValueError("serve and up give the store's URL and the admin key")
    sequential = settings.combine_delays == "sequential"
    catalog = Catalog(settings.catalog_url, defaults(settings), settings.hash_secret)
    store = RedisStore(
        settings.redis_url,
        caller_clock=settings.clock == "caller",
        sequential=sequential,
        max_ids=settings.max_ids_per_principal,
        timeout_s=CALL_TIMEOUT_S,
    )
    metrics = Metrics(counts)
    admission = Admission(
        store,
        lambda: catalog.snapshot,
        rules=Rules(settings.inter_broker_listener, settings.ipv6_prefix),
        secret=lambda: catalog.hash_secret,
        sequential=sequential,
        budget_s=settings.store_budget_ms / 1000,
        metrics=metrics,
    )
    access = Access(settings.admin_key.get_secret_value(), settings.open_to)

    def ready() -> Readiness:
        return Readiness(
            snapshot=catalog.snapshot.version >= 0,
            store=store.trouble or "ok",
            catalog="ok" if catalog.reachable else "away",
            stopping=stopping(),
        )

    @contextlib.asynccontextmanager
    async def lifespan(_app: object) -> AsyncIterator[None]:
        await _check(store)
        await catalog.open()
        async with metrics.written():
            log.info("open", catalog_version=catalog.snapshot.version, clock=settings.clock)
            yield
            await admission.close()
        await catalog.close()
        await store.close()
        log.info("closed")

    return create_app(
        admission=admission,
        access=access,
        clock=settings.clock,
        sources=_sources(settings),
        routers=[router(catalog, access)],
        ready=ready,
        metrics=metrics,
        lifespan=lifespan,
    )


def _sources(settings: Settings) -> Sources:
    """Where a check finds who asks."""
    return Sources(
        settings.check_principal_header,
        settings.check_client_header,
        settings.check_ip_header,
        settings.trusted_proxies,
    )


async def _check(store: RedisStore) -> None:
    """Say what is wrong with the store; an unreachable one may come back, a cluster will not do."""
    try:
        server = await store.server()
    except StoreError as error:
        log.warning("the store is away; quotas answer by on_store_failure", reason=error.reason)
        return
    if server.get("cluster_enabled"):
        raise CannotStart("QUOTAGATE_REDIS_URL: a cluster of stores is not supported; give a single primary")
    for wrong in _faults(server):
        log.warning("the store is not as it should be", fault=wrong)


def _faults(server: Mapping[str, Any]) -> list[str]:
    version = tuple(int(part) for part in str(server.get("redis_version", "0.0")).split(".")[:2])
    faults = []
    if version < OLDEST_STORE:
        faults.append(f"version {server.get('redis_version')}: 7.0 or later is needed")
    if server.get("maxmemory_policy", "noeviction") != "noeviction":
        faults.append(f"maxmemory-policy {server['maxmemory_policy']}: evicted buckets are forgotten limits")
    return faults
