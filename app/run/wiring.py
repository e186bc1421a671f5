"""Wires the parts of one API process, and opens and closes them in order."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Final

import structlog

import app
from app.admission.admission import Admission
from app.admission.buckets import Buckets
from app.admission.cluster.gatherer import ClusterGatherer
from app.admission.gathering.circuit import Circuit
from app.admission.gathering.slices import Slices
from app.admission.log.decision_log import DecisionLog
from app.admission.metrics.metrics import Metrics
from app.admission.overview.overview import DeploymentOverview
from app.admission.overview.publisher import Publisher
from app.admission.overview.shadow_publisher import ShadowPublisher
from app.admission.throttle_factor.caller_clock import CallerClock, CallerTime
from app.admission.throttle_factor.throttling import Throttling
from app.catalog.catalog import Catalog
from app.catalog.errors import CatalogUnavailableError, DeploymentMismatchError
from app.catalog.history import HistoryRetention
from app.catalog.keys import Keys
from app.catalog.serial import POLL_S
from app.decision_log.stream import LogStream
from app.domain.ladder import MatchingRules
from app.domain.quota import Defaults
from app.http.access.access import Access
from app.http.app import Front, create_app
from app.http.check_question import Sources
from app.http.routes import buckets
from app.http.routes.health import Readiness
from app.http.routes.keys import router as keys_router
from app.http.routes.overview import ShownStore
from app.http.routes.overview import router as overview_router
from app.http.routes.quotas import router
from app.http.routes.quotas_shadow import router as quotas_shadow_router
from app.http.routes.reports import router as reports_router
from app.http.routes.volumes import router as volumes_router
from app.http.server.connections import Connections
from app.http.server.intake import Intake
from app.node.errors import StartError
from app.node.own_name import own_name
from app.node.settings import Settings
from app.node.shortage import shortage_of, started_threads
from app.node.store_url import is_cluster, primary_of
from app.node.tasks import end
from app.run import envoy
from app.run.traces import traces_by
from app.store.cluster import ClusterStore
from app.store.port import Memory, StoreError
from app.store.redis import RedisStore
from app.store.samples import SampleSeries
from app.store.shadow_counts import ShadowCounts
from app.store.volumes import VolumeRecord

log = structlog.get_logger("quotagate")

THREADS: Final = 4
"""Threads for pages of metrics and large bodies, so that neither holds the event loop."""

CALL_TIMEOUT_S: Final = 0.5
"""The timeout of a store call, if two store budgets are not longer; decisions stop waiting earlier."""
LISTEN_WITHIN_S: Final = 10.0
"""Without a catalog a node listens after this time, so that its readiness can say so."""


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


async def _until_available(open_it: Callable[[], Awaitable[None]]) -> None:
    """Open something of the catalog, however long it is away."""
    is_logged = False
    while True:
        try:
            return await open_it()
        except CatalogUnavailableError as away:
            if not is_logged:
                log.warning("the catalog is away, so the node waits for its quotas", why=str(away))
                is_logged = True
            await asyncio.sleep(POLL_S)


def _report_fault(fail: Callable[[str], None], task: asyncio.Task[None]) -> None:
    """Report why a task failed, if it did."""
    if not task.cancelled() and (fault := task.exception()):
        fail(str(fault))


def _shown(error: StoreError) -> str:
    """The word of readiness for a store that does not decide; all missing rights have one word."""
    return "missing_right" if error.reason == "permission" else error.reason


def _shown_store(primary: str, memory: Memory | None, circuit: Circuit | ClusterGatherer) -> ShownStore:
    """A primary as the overview shows it."""
    faults = [_shown(circuit.error)] if circuit.error else []
    used, most = memory if memory is not None else (None, None)
    return ShownStore(primary, used, most, faults or [fault.name for fault in circuit.faults])


async def _start_threads() -> None:
    """Start all threads that this process will need, since later none may be available."""
    loop = asyncio.get_running_loop()
    loop.set_default_executor(started_threads(THREADS, "work"))
    with contextlib.suppress(OSError):  # without a thread, libuv ends the process at its first look-up
        await loop.getaddrinfo("localhost", None)


def build(
    settings: Settings,
    counts: Path | None = None,
    stopping: Callable[[], bool] = lambda: False,
    connections: Connections | None = None,
    fail: Callable[[str], None] = lambda _why: None,
    envoy_listener: socket.socket | None = None,
) -> Front:
    """Return the app of one API process, not open yet.

    Args:
        counts: the folder with the metrics of sibling processes; None without siblings.
        stopping: whether the process is stopping.
        connections: the connections of the process, for a metric of refused ones.
        fail: called with the reason if the process cannot go on, though it listens already.
        envoy_listener: the bound socket of the port for Envoy.
    """
    if settings.redis_url is None or settings.admin_key is None:
        raise ValueError("the store's URL and the admin key must be set")
    mapping = envoy.check(settings)
    sequential = settings.combine_delays == "sequential"
    by_callers = settings.clock == "caller"
    budget_s = settings.store_budget_ms / 1000
    logged: DecisionLog
    admission: Admission
    has_opened = False

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
    name = own_name()
    logged = DecisionLog(
        stream,
        which=settings.log,
        node=name,
        secret=lambda: catalog.hash_secret,
        now_ms=throttling.now_ms,
        plain_ids=settings.log_ids == "plain",
        away=away,
    )
    traces = traces_by(os.environ)
    metrics = Metrics(
        counts,
        catalog_away=lambda: not catalog.reachable,
        draining=stopping,
        waiting=lambda: admission.waiting,
        volumes=throttling.status,
        log_dropped=lambda: logged.dropped,
        log_status=lambda: logged.log_status,
        store_memory=lambda: store.memory,
        samples_dropped=lambda: publisher.dropped,
        spans_dropped=dict if traces is None else traces.dropped,
    )
    samples = SampleSeries.at(settings.redis_url)
    publisher = Publisher(
        samples,
        node=name,
        version=app.__version__,
        totals=metrics.totals,
        throttled=metrics.throttled,
        away=away,
    )
    shadow_counts = ShadowCounts(samples.client)
    shadow_publisher = ShadowPublisher(shadow_counts, node=name, tally=metrics.shadows, away=away)
    overview = DeploymentOverview(samples, away=away)
    primary = primary_of(settings.redis_url)
    slices = Slices()
    intake = Intake()
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
        recorder=logged,
        mark=store.mark if isinstance(store, RedisStore) and not by_callers else None,
        spans=None if traces is None else traces.spans,
    )
    callers = CallerClock(admission, time) if time else None
    keys = Keys(catalog.database)
    history = HistoryRetention(catalog.database, settings.history_retention_ms)
    access = Access(
        settings.admin_key.get_secret_value(),
        settings.open_to,
        lambda: keys.ring,
        allowed_hosts=settings.allowed_hosts,
        failed=metrics.count_refusal,
        is_starting=lambda: not has_opened,
    )
    if connections is not None:
        connections.refused = metrics.count_refused_connection

    def was_reset(bucket: str, quotas: list[str], who: str, order: int | None) -> None:
        logged.changed("reset", bucket, {"quotas": quotas}, None, who=who, order=order)

    def ready() -> Readiness:
        error, faults = admission.circuit.error, admission.circuit.faults
        return Readiness(
            snapshot=has_opened,
            store=_shown(error) if error else ", ".join(fault.name for fault in faults) or "ok",
            catalog="ok" if catalog.reachable else "away",
            throttle_factor=throttling.at().factor,
            stopping=stopping(),
            unknown_settings=settings.unknown_variables,
        )

    def stores() -> list[ShownStore]:
        circuit = admission.circuit
        if isinstance(circuit, ClusterGatherer):
            return [
                _shown_store(
                    f"[{host}]:{port}" if ":" in host else f"{host}:{port}", each.store.memory, each.circuit
                )
                for (host, port), each in sorted(circuit.primaries.items())
            ]
        return [_shown_store(primary, store.memory, circuit)]

    def count_short(error: OSError) -> None:
        if resource := shortage_of(error):
            metrics.count_shortage(resource, error)

    envoy_port = None
    if settings.envoy_port is not None:
        envoy_port = envoy.port(
            mapping, callers or admission, access, metrics, lambda: ready().can_decide, intake
        )

    async def open_all(stack: contextlib.AsyncExitStack) -> None:
        """Open everything; the catalog as soon as it can be reached."""
        nonlocal has_opened
        stack.push_async_callback(store.close)
        await _until_available(catalog.open)
        stack.push_async_callback(catalog.close)
        await _until_available(keys.open)
        stack.push_async_callback(keys.close)
        history.open()
        stack.push_async_callback(history.close)
        stack.push_async_callback(record.close)
        await throttling.open()
        stack.push_async_callback(throttling.close)
        await stack.enter_async_context(metrics.written())
        stack.push_async_callback(samples.close)
        stack.push_async_callback(overview.close)
        stack.push_async_callback(publisher.close)
        stack.push_async_callback(shadow_publisher.close)
        stack.push_async_callback(stream.close)
        await logged.open()
        stack.push_async_callback(logged.close)
        if traces is not None:
            stack.push_async_callback(traces.close)
        stack.push_async_callback(admission.close)
        await admission.open()
        if (away := admission.circuit.error) and away.reason in {"cluster", "no_cluster"}:
            raise StartError(f"QUOTAGATE_REDIS_URL: {away}")
        publisher.open()
        shadow_publisher.open()
        await stack.enter_async_context(
            envoy.serving(settings, envoy_port, envoy_listener, connections or Connections(), count_short)
        )
        # All objects made so far stay, so the garbage collector need not scan them again and again.
        gc.collect()
        gc.freeze()
        stack.callback(gc.unfreeze)
        has_opened = True
        log.info("api started", catalog_version=catalog.snapshot.version, clock=settings.clock)

    @contextlib.asynccontextmanager
    async def lifespan(_app: object) -> AsyncIterator[None]:
        await _start_threads()
        async with contextlib.AsyncExitStack() as stack:
            opening = asyncio.create_task(open_all(stack), name="open the node")
            stack.push_async_callback(end, opening)
            await asyncio.wait({opening}, timeout=LISTEN_WITHIN_S)
            if opening.done():
                try:
                    opening.result()
                except DeploymentMismatchError as refused:
                    log.error("the catalog belongs to another deployment", why=str(refused))  # noqa: TRY400  no traceback
                    raise
            else:
                log.warning("the node listens, but is not ready: it has no quotas yet")
                opening.add_done_callback(partial(_report_fault, fail))
            yield
        log.info("api stopped")

    front = create_app(
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
            quotas_shadow_router(catalog, access, shadow_counts),
            keys_router(keys, access),
            buckets.router(
                Buckets(admission.circuit, lambda: catalog.snapshot, rules, admission.local.reset),
                access,
                callers.now_ms if callers else None,
                was_reset,
            ),
            volumes_router(throttling, catalog, access, time),
            overview_router(overview, access, stores, lambda: throttling.at().factor),
            reports_router(settings.reports and settings.reports.resolve(), access),
        ],
        ready=ready,
        metrics=metrics,
        slices=slices,
        intake=intake,
        leases=admission.leases,
        time=time,
        lifespan=lifespan,
    )
    front.short = count_short
    if envoy_port is not None:
        front.drained = envoy_port.drain
    return front
