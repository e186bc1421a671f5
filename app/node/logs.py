"""Logs on stderr: one JSON line per event, or coloured text at a terminal."""

from __future__ import annotations

import logging
import sys
from typing import Any

import structlog
from structlog.typing import EventDict


def configure(level: int = logging.INFO) -> None:
    """Send structlog and the standard library's loggers (uvicorn, Alembic) through one renderer."""
    before: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    # Tracebacks without local variables, which may hold a request's headers and so its key.
    if sys.stderr.isatty():
        render: list[Any] = [structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)]
    else:
        frames = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
        render = [
            structlog.processors.ExceptionRenderer(frames),
            structlog.processors.JSONRenderer(ensure_ascii=False),
        ]

    output = logging.StreamHandler(sys.stderr)
    output.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*before, structlog.stdlib.ExtraAdder(), _uncoloured],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *render],
        )
    )
    root = logging.getLogger()
    root.handlers = [output]
    root.setLevel(level)
    # httpx logs every request, and the supervisor polls readiness.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    logging.getLogger("alembic.runtime.plugins").setLevel(logging.WARNING)

    structlog.configure(
        processors=[*before, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        cache_logger_on_first_use=True,
    )


def _uncoloured(_logger: Any, _method: str, event: EventDict) -> EventDict:
    """Drop the second copy of uvicorn's message, which is coloured for terminals."""
    event.pop("color_message", None)
    return event
