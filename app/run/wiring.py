"""Wires the parts of one API process, and opens and closes them in order."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Final

import structlog

from app.admission.admission import Admission
from app.admission.buckets import Buckets
from app.admission.caller_clock import CallerClock, CallerTime
from app.admission.decision_log import DecisionLog
from app.admission.metrics import Metrics
from app.admission.slices import Slices
from app.admission.throttling import Throttling
from app.catalog.catalog import Catalog
from app.catalog.errors import DeploymentMismatchError
from app.catalog.keys import Keys
from app.decision_log.stream import LogStream
from app.domain.ladder import MatchingRules
from app.domain.quota import Defaults
from app.http import buckets, leases
from app.http.access import Access
from app.http.app import Front, create_app
from app.http.check_question import Sources
from app.http.connections import Connections
from app.http.health import Readiness
from app.http.keys import router as keys_router
from app.http.quotas import router
from app.http.volumes import router as volumes_router
from app.node.errors import StartError
from app.node.own_name import own_name
from app.node.settings import Settings
from app.node.store_url import is_cluster
from app.run import envoy
from app.store.cluster import ClusterStore
from app.store.redis import RedisStore
from app.store.volumes import VolumeRecord

log = structlog.get_logger("quotagate")

CALL_TIMEOUT_S: Final = 0.5
"""A store call fails after this time, or after two budgets if that is longer; decisions give up before."""


def defaults(settings: Settings) -> Defaults:
    """The defaults for fields that a quota does not set."""
    return Defaults(
        samples=settings.samples,
        sample_ms=settings.sample_ms,
        window_ms=settings.producer_id_window_ms,
        layers=settings.producer_id_layers,
        max_ids=settings.max_ids_per_principal,
        max_debt_ms=settings.max_debt_ms,
    )


def build(
    settings: Settings,
    counts: Path | None = None,
    stopping: Callable[[], bool] = lambda: False,
    connections: Connections | None = None,
) -> Front:
    """Return the app of one API process, not open yet.

    Args:
        counts: the folder with the metrics of sibling processes; None without siblings.
        stopping: whether the process is shutting down.
        connections: those of the process, for a metric of what they shed.
    """
    if settings.redis_url is None or settings.admin_key is None:
        raise ValueError("the store's URL and the admin key must be set")
    mapping = envoy.check(settings)
    sequential = settings.combine_delays == "sequential"
    by_callers = settings.clock == "caller"
    budget_s = settings.store_budget_ms / 1000
    logged: DecisionLog
    admission: Admission

    def away() -> bool:
        return admission.circuit.error is not None

    catalog = Catalog(
        settings.catalog_url,
        defaults(settings),
        settings.hash_secret,
        changed=lambda what, before, after, who, version: logged.changed(
            "quota", what, before, after, who=who, version=version
        ),
    )
    clustered = is_cluster(settings.redis_url)
    store: RedisStore | ClusterStore = (ClusterStore if clustered else RedisStore)(
        settings.redis_url,
        caller_clock=by_callers,
        sequential=sequential,
        logged=settings.log != "off",
        max_ids=settings.max_ids_per_principal,
        timeout_s=max(CALL_TIMEOUT_S, 2 * budget_s),
    )
    record = VolumeRecord.at(settings.redis_url, timeout_s=CALL_TIMEOUT_S)
    time = CallerTime() if by_callers else None
    throttling = Throttling(
        record,
        settings.volume_rules,
        time,
        changed=lambda before, after: logged.changed("factor", "throttle_factor", before, after),
        away=away,
    )
    stream = LogStream.at(settings.redis_url)
    logged = DecisionLog(
        stream,
        which=settings.log,
        node=own_name(),
        secret=lambda: catalog.hash_secret,
        now_ms=throttling.now_ms,
        plain_ids=settings.log_ids == "plain",
        away=away,
    )
    metrics = Metrics(
        counts,
        catalog_away=lambda: not catalog.reachable,
        waiting=lambda: admission.waiting,
        volumes=throttling.status,
        logged=logged,
        store_memory=lambda: store.memory,
    )
    slices = Slices()
    rules = MatchingRules(settings.inter_broker_listener, settings.ipv6_prefix)
    admission = Admission(
        store,
        lambda: catalog.snapshot,
        rules=rules,
        secret=lambda: catalog.hash_secret,
        sequential=sequential,
        budget_s=budget_s,
        metrics=metrics,
        queue_s=settings.queue_ms / 1000,
        slices=slices,
        factor=throttling,
        logs=logged,
        mark=store.mark if isinstance(store, RedisStore) and not by_callers else None,
    )
    callers = CallerClock(admission, time) if time else None
    keys = Keys(catalog.database)
    access = Access(
        settings.admin_key.get_secret_value(),
        settings.open_to,
        lambda: keys.ring,
        allowed_hosts=settings.allowed_hosts,
        failed=metrics.count_refusal,
    )
    if connections is not None:
        connections.shed = metrics.count_shed

    def was_reset(bucket: str, quotas: list[str], who: str, order: int | None) -> None:
        logged.changed("reset", bucket, {"quotas": quotas}, None, who=who, order=order)

    def ready() -> Readiness:
        error, faults = admission.circuit.error, admission.circuit.faults
        return Readiness(
            snapshot=catalog.snapshot.version >= 0,
            store=error.reason if error else ", ".join(fault.name for fault in faults) or "ok",
            catalog="ok" if catalog.reachable else "away",
            throttle_factor=throttling.at().factor,
            stopping=stopping(),
        )

    @contextlib.asynccontextmanager
    async def lifespan(_app: object) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(store.close)
            try:
                await catalog.open()
            except DeploymentMismatchError as refused:
                log.error("the catalog belongs to another deployment", why=str(refused))  # noqa: TRY400  no traceback
                raise
            stack.push_async_callback(catalog.close)
            await keys.open()
            stack.push_async_callback(keys.close)
            stack.push_async_callback(record.close)
            await throttling.open()
            stack.push_async_callback(throttling.close)
            await stack.enter_async_context(metrics.written())
            stack.push_async_callback(stream.close)
            await logged.open()
            stack.push_async_callback(logged.close)
            stack.push_async_callback(admission.close)
            await admission.open()
            if (away := admission.circuit.error) and away.reason in {"cluster", "no_cluster"}:
                raise StartError(f"QUOTAGATE_REDIS_URL: {away}")
            await stack.enter_async_context(
                envoy.serving(
                    settings,
                    mapping,
                    callers or admission,
                    access,
                    metrics,
                    lambda: ready().can_decide,
                    shared=counts is not None,
                )
            )
            # What there is now stays, so the collector need not look at it again and again.
            gc.collect()
            gc.freeze()
            stack.callback(gc.unfreeze)
            log.info("api started", catalog_version=catalog.snapshot.version, clock=settings.clock)
            yield
        log.info("api stopped")

    return create_app(
        admission=callers or admission,
        access=access,
        clock=settings.clock,
        sources=Sources(
            settings.check_principal_header,
            settings.check_client_header,
            settings.check_ip_header,
            settings.trusted_proxies,
        ),
        routers=[
            router(catalog, access, rules, throttling.limit_now, timed=by_callers),
            keys_router(keys, access),
            buckets.router(
                Buckets(admission.circuit, lambda: catalog.snapshot, rules, admission.local.reset),
                access,
                callers.now_ms if callers else None,
                was_reset,
            ),
            leases.router(admission.leases, access, settings.clock, time, metrics.count_shed),
            volumes_router(throttling, catalog, access, time),
        ],
        ready=ready,
        metrics=metrics,
        slices=slices,
        lifespan=lifespan,
    )
