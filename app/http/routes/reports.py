"""The routes of reports, which a process of its own reads, one at a time.

A pause of three times as long follows, but of two seconds at most. While a process waits for a disk that does
not answer, no other begins.
"""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from contextlib import suppress
from pathlib import Path
from typing import Final

import structlog
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from app.http.access.access import Access
from app.http.openapi import reports as schema
from app.http.problems import ProblemError, away
from app.http.query import Parameters
from app.http.routes.admin import admin_router
from app.http.strict import JSON
from app.node import reports

PATH: Final = "/v1/reports"
ONE: Final = "/v1/reports/{name}"

READ_WITHIN_S: Final = 30.0
"""A network disk that does not answer is given up after this time."""
END_WITHIN_S: Final = 5.0
MAX_NAME: Final = 255
"""The longest name of a file in bytes, on every usual filesystem."""
PAUSE_FACTOR: Final = 3.0
"""The pause after a reading, as a multiple of the time that it took."""
MAX_PAUSE_S: Final = 2.0

log = structlog.get_logger("quotagate.reports")


def router(folder: Path | None, access: Access) -> APIRouter:
    """Return the routes.

    Args:
        folder: has the reports; None if none are shown.
    """
    routes = admin_router("Reports", access)
    reading = asyncio.Lock()
    pauses_until = 0.0
    process: Process | None = None

    async def read(*name: str) -> Response:
        nonlocal pauses_until, process
        if folder is None:
            raise ProblemError(404, schema.OFF)
        loop = asyncio.get_running_loop()
        async with reading:
            if process is not None and process.returncode is None:  # killed, but it waits for a disk
                raise away(schema.SLOW)
            if (pause_s := pauses_until - loop.time()) > 0:
                await asyncio.sleep(pause_s)
            began = loop.time()
            process = await _started(folder, *name)
            try:
                body = await _output(process, folder)
            finally:
                await _end(process)
                pauses_until = loop.time() + min(PAUSE_FACTOR * (loop.time() - began), MAX_PAUSE_S)
        return Response(body, 200, {"Cache-Control": "no-store"}, JSON)

    @routes.get(PATH, **schema.LIST)
    async def get_reports(request: Request) -> Response:
        Parameters(request.scope["query_string"]).check()
        return await read()

    @routes.get(ONE, **schema.SHOW)
    async def get_report(request: Request, name: str) -> Response:
        Parameters(request.scope["query_string"]).check()
        if "\0" in name or len(name.encode(errors="replace")) > MAX_NAME:
            raise ProblemError(404, f"There is no report named {name}.")
        return await read(name)

    return routes


async def _started(folder: Path, *name: str) -> Process:
    """Return a process that reads the folder, or one report.

    Raises:
        ProblemError: 503 if no process can be started.
    """
    arguments = ("-P", "-m", reports.__name__, str(folder), *name)
    try:
        return await asyncio.create_subprocess_exec(
            sys.executable, *arguments, stdin=DEVNULL, stdout=PIPE, stderr=PIPE
        )
    except OSError as error:  # no process, descriptor or memory is left
        log.warning("no process can be started to read a report", why=error.strerror)
        raise away(schema.UNREADABLE) from None


async def _output(process: Process, folder: Path) -> bytes:
    """Return the output of a process that reads.

    Raises:
        ProblemError: 404 without such a report, 503 if the folder cannot be read.
    """
    try:
        async with asyncio.timeout(READ_WITHIN_S):
            output, why = await process.communicate()
    except TimeoutError:
        raise away(schema.SLOW) from None
    if process.returncode == reports.REFUSED:
        raise ProblemError(404, output.decode(errors="replace"))
    if process.returncode:
        lines = why.decode(errors="replace").splitlines() or [f"exit code {process.returncode}"]
        log.warning("reports cannot be read", folder=str(folder), why=lines[-1])
        raise away(schema.UNREADABLE)
    return output


async def _end(process: Process) -> None:
    """End a process that still runs: its caller is gone, or it takes too long."""
    if process.returncode is not None:
        return
    with suppress(ProcessLookupError):
        process.kill()
    with suppress(TimeoutError):  # one that waits for a disk ends with the disk's answer
        async with asyncio.timeout(END_WITHIN_S):
            await process.wait()
