"""Runs the worker in a child process or a thread, with limits and times of the test's choice."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from structlog.testing import capture_logs

from app.node import logs
from app.node.children import stop_event
from app.node.settings import Settings
from tests.programs import end
from workers.decision_log.drain import Limits
from workers.decision_log.run import Times, run

ROOT = Path(__file__).parents[2]


def main() -> None:
    """Run in the child process."""
    asyncio.run(_work())


async def _work() -> None:
    logs.configure()
    url, folder, options = sys.argv[1:]
    await _run(url, folder, stop_event(), json.loads(options))


async def _run(url: str, folder: Path | str, stop: asyncio.Event, options: dict[str, Any]) -> None:
    settings = Settings(redis_url=url, log_url=str(folder), log="all", **options.get("settings", {}))
    limits, times = Limits(**options.get("limits", {})), Times(**options.get("times", {}))
    await run(settings, stop, limits=limits, times=times)


@contextmanager
def inside(url: str, folder: Path | str, **options: Any) -> Iterator[list[Any]]:
    """Run a worker in a thread, which starts faster; yields its log lines, and stops it at the end."""
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()
    with ThreadPoolExecutor(1) as pool, capture_logs() as lines:
        done = pool.submit(loop.run_until_complete, _run(url, folder, stop, options))
        try:
            yield lines
        finally:
            loop.call_soon_threadsafe(stop.set)
            done.result(30)
            pool.submit(loop.run_until_complete, loop.shutdown_default_executor()).result(30)
            loop.close()
    assert not [line for line in lines if line["log_level"] in {"error", "critical"}]


def start(url: str, folder: Path | str, log: Path | None = None, **options: Any) -> subprocess.Popen[bytes]:
    """Start a worker in a child process, which appends its log lines to the file."""
    command = [sys.executable, "-c", "from tests.decision_log import worker; worker.main()"]
    output = log.open("ab") if log else None
    try:
        return subprocess.Popen([*command, url, str(folder), json.dumps(options)], cwd=ROOT, stderr=output)
    finally:
        if output:
            output.close()


@contextmanager
def running(
    url: str, folder: Path | str, log: Path | None = None, **options: object
) -> Iterator[subprocess.Popen[bytes]]:
    """A running worker. It is stopped at the end like a service, and killed if it does not end."""
    worker = start(url, folder, log, **options)
    try:
        yield worker
    finally:
        end(worker)
