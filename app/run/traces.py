"""Traces in an API process, by OpenTelemetry's variables; only here the extra ``otel`` is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import structlog

from app.admission.spans import Sampling

if TYPE_CHECKING:
    from app.run.otlp import Traces

ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
PROTOCOL: Final = "http/protobuf"
MOST_WAITING: Final = "2048"
"""OpenTelemetry's default of ``OTEL_BSP_MAX_QUEUE_SIZE``."""

OFF: Final = "traces are off"

log: Final = structlog.get_logger("quotagate.traces")


def traces_by(environment: Mapping[str, str]) -> Traces | None:
    """Return the traces that OpenTelemetry's variables ask for; without any, load nothing and return None.

    A variable that is wrong turns traces off, never the node: all programs of a host may share it.
    """
    if not any(map(environment.get, ENDPOINTS)) or not _is_on(environment):
        return None
    protocol = next(filter(None, map(environment.get, PROTOCOLS)), PROTOCOL)
    if protocol != PROTOCOL:
        log.warning(OFF, why=f"{PROTOCOLS[-1]} must be {PROTOCOL}")
        return None
    try:
        from app.run.otlp import Traces
    except ModuleNotFoundError as missing:
        if missing.name is None or not missing.name.startswith("opentelemetry"):
            raise
        log.warning(OFF, why="they need the extra otel: pip install 'quotagate[otel]'")
        return None
    sampler, argument = map(environment.get, ("OTEL_TRACES_SAMPLER", "OTEL_TRACES_SAMPLER_ARG"))
    try:
        waiting = int(environment.get("OTEL_BSP_MAX_QUEUE_SIZE") or MOST_WAITING)
        made = Traces(Sampling.of(sampler or "", argument or ""), waiting)
    except (OSError, RuntimeError, ValueError) as wrong:
        log.warning(OFF, why=str(wrong))
        return None
    log.info("traces are on")
    return made


def _is_on(environment: Mapping[str, str]) -> bool:
    exporters = environment.get("OTEL_TRACES_EXPORTER") or "otlp"
    is_disabled = environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    return not is_disabled and "otlp" in map(str.strip, exporters.split(","))
