"""Logs on stderr: one JSON line per event, or coloured text at a terminal; unsafe characters are escaped."""

from __future__ import annotations

import logging
import sys
from io import StringIO
from typing import Any, TextIO

import structlog
from structlog.typing import EventDict, ExcInfo

from app.terminal import plain, plain_json, plain_text, styled


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
        render: list[Any] = [_plain_values, structlog.dev.ConsoleRenderer(exception_formatter=_traceback)]
    else:
        frames = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
        render = [
            structlog.processors.ExceptionRenderer(frames),
            structlog.processors.JSONRenderer(ensure_ascii=False),
            _plain_json,
        ]

    output = logging.StreamHandler(styled(sys.stderr))
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


def _plain_json(_logger: Any, _method: str, line: str) -> str:
    return plain_json(line)


def _plain_values(_logger: Any, _method: str, event: EventDict) -> EventDict:
    return {name: plain(value) if isinstance(value, str) else value for name, value in event.items()}


def _traceback(output: TextIO, raised: ExcInfo) -> None:
    """Write a traceback whose messages, which may quote a caller, are escaped."""
    text = StringIO()
    structlog.dev.plain_traceback(text, raised)
    output.write(plain_text(text.getvalue()))
