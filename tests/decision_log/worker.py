"""The worker as a child program, with its limits and times as JSON."""

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

from app.run import logs
from app.run.children import stop_asked
from app.run.settings import Settings
from tests.programs import end
from workers.decision_log.drain import Limits
from workers.decision_log.run import Times, run

ROOT = Path(__file__).parents[2]


def main() -> None:
    """What the child does."""
    asyncio.run(_work())


async def _work() -> None:
    logs.configure()
    url, folder, told = sys.argv[1:]
    await _run(url, folder, stop_asked(), json.loads(told))


async def _run(url: str, folder: Path | str, stop: asyncio.Event, told: dict[str, Any]) -> None:
    settings = Settings(redis_url=url, log_url=str(folder), log="all", **told.get("settings", {}))
    limits, times = Limits(**told.get("limits", {})), Times(**told.get("times", {}))
    await run(settings, stop, limits=limits, times=times)


@contextmanager
def inside(url: str, folder: Path | str, **told: Any) -> Iterator[list[Any]]:
    """A worker in a thread of this program, which starts sooner: what it says; it is stopped at the end."""
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()
    with ThreadPoolExecutor(1) as pool, capture_logs() as said:
        done = pool.submit(loop.run_until_complete, _run(url, folder, stop, told))
        try:
            yield said
        finally:
            loop.call_soon_threadsafe(stop.set)
            done.result(30)
            pool.submit(loop.run_until_complete, loop.shutdown_default_executor()).result(30)
            loop.close()
    assert not [line for line in said if line["log_level"] in {"error", "critical"}]


def start(url: str, folder: Path | str, log: Path | None = None, **told: Any) -> subprocess.Popen[bytes]:
    """Start one; what it says goes on after what others have said in that file."""
    command = [sys.executable, "-c", "from tests.decision_log import worker; worker.main()"]
    output = log.open("ab") if log else None
    try:
        return subprocess.Popen([*command, url, str(folder), json.dumps(told)], cwd=ROOT, stderr=output)
    finally:
        if output:
            output.close()


@contextmanager
def running(
    url: str, folder: Path | str, log: Path | None = None, **told: object
) -> Iterator[subprocess.Popen[bytes]]:
    """A running worker; stopped at the end as an operator does, or killed if it does not end by that."""
    worker = start(url, folder, log, **told)
    try:
        yield worker
    finally:
        end(worker)
