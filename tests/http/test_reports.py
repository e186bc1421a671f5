"""Reports over HTTP: a process of its own reads them, and their names are never paths."""

from __future__ import annotations

import os
import time
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import quote

import pytest
from httpx import ASGITransport, AsyncClient

from app.http.access.access import Access
from app.http.openapi import reports as schema
from app.http.routes import reports as routes
from app.http.routes.reports import router
from app.node import reports
from tests.http.application import KEY, app_with, fields
from tests.report_folders import AUDIT, TABLES, made

NAME = "<img src=x onerror=alert(1)> %2e%2e?&#\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "reports").mkdir()
    return tmp_path / "reports"


def client(folder: Path | None) -> AsyncClient:
    app = app_with(router(folder, Access(KEY, ())))
    return AsyncClient(
        transport=ASGITransport(app),
        base_url="http://quotagate",
        headers={"authorization": f"Bearer {KEY}"},
    )


@pytest.fixture
async def http(folder: Path) -> AsyncIterator[AsyncClient]:
    async with client(folder) as one:
        yield one


async def test_reports_are_listed_and_shown(http: AsyncClient, folder: Path):
    report = made(folder, NAME, report={"log": "log", "from_ms": 1, "to_ms": 2}, tables=TABLES)
    os.utime(report, ns=(0, 1_763_719_742_123_456_789))
    listed = await http.get("/v1/reports")
    assert (listed.status_code, listed.headers["cache-control"]) == (200, "no-store")
    entry = {
        "name": NAME,
        "kind": "audit",
        "from_ms": 1,
        "to_ms": 2,
        "modified_ms": 1_763_719_742_123,
        "summary": AUDIT,
    }
    assert listed.json() == {"reports": [entry], "unreadable": 0, "more": False}
    shown = await http.get(f"/v1/reports/{quote(NAME, safe='')}")
    assert shown.json() == {**entry, "log": "log", **TABLES}


async def test_names_are_not_paths(http: AsyncClient, folder: Path):
    made(folder, "nightly")
    made(folder.parent, "outside")
    for name in ("..%2Foutside", "%2e%2e", "nightly%2F..", "%00", "nightly%00", "a" * 300, "%FF"):
        answer = await http.get(f"/v1/reports/{name}")
        assert answer.status_code == 404, name
        assert "outside" not in answer.text.replace("../outside", "")


async def test_report_that_cannot_be_shown_says_why(http: AsyncClient, folder: Path):
    made(folder, "broken", summary=b"{")
    answer = await http.get("/v1/reports/broken")
    assert answer.status_code == 404
    assert answer.headers["content-type"] == "application/problem+json"
    assert "summary.json is damaged" in answer.json()["detail"]


async def test_query_is_strict_and_methods_are_named(http: AsyncClient, folder: Path):
    assert fields(await http.get("/v1/reports?limit=5")) == ["/limit"]
    assert fields(await http.get("/v1/reports/nightly?x=1")) == ["/x"]
    answer = await http.post("/v1/reports", json={})
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET")


async def test_nothing_is_shown_without_the_scope_and_without_the_setting(folder: Path):
    async with client(folder) as http:
        assert (await http.get("/v1/reports", headers={"authorization": ""})).status_code == 401
    async with client(None) as http:
        for path in ("/v1/reports", "/v1/reports/nightly"):
            answer = await http.get(path)
            assert (answer.status_code, answer.json()["detail"]) == (404, schema.OFF)


async def test_missing_folder_is_503(folder: Path):
    async with client(folder / "away") as http:
        answer = await http.get("/v1/reports")
    assert (answer.status_code, answer.json()["detail"]) == (503, schema.UNREADABLE)


async def test_slow_disk_is_given_up(http: AsyncClient, folder: Path, monkeypatch: pytest.MonkeyPatch):
    """A module that sleeps is in the place of the reader."""
    (folder.parent / "sleeps.py").write_text("import time\ntime.sleep(600)\n", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", f"{folder.parent}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setattr(reports, "__name__", "sleeps")
    monkeypatch.setattr(routes, "READ_WITHIN_S", 0.2)
    answer = await http.get("/v1/reports")
    assert (answer.status_code, answer.json()["detail"]) == (503, schema.SLOW)


async def test_no_other_process_begins_while_one_waits_for_its_disk(
    http: AsyncClient, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    """A process that waits for a disk does not end when it is killed; here the kill itself is held back."""
    killed: list[Process] = []

    def kill(process: Process) -> None:
        killed.append(process)

    (folder.parent / "sleeps.py").write_text("import time\ntime.sleep(600)\n", encoding="utf-8")
    with monkeypatch.context() as hung:
        hung.setenv("PYTHONPATH", f"{folder.parent}:{os.environ.get('PYTHONPATH', '')}")
        hung.setattr(reports, "__name__", "sleeps")
        hung.setattr(routes, "READ_WITHIN_S", 0.2)
        hung.setattr(routes, "END_WITHIN_S", 0.1)
        hung.setattr(Process, "kill", kill)
        for _ in range(3):
            answer = await http.get("/v1/reports")
            assert (answer.status_code, answer.json()["detail"]) == (503, schema.SLOW)
    (process,) = killed
    process.kill()
    await process.wait()
    assert (await http.get("/v1/reports")).status_code == 200


async def test_this_process_does_not_parse(http: AsyncClient, folder: Path):
    """A parser holds Python's lock, also in a thread, so decisions would wait."""
    rows = b",".join([b"[1]"] * 4_000_000)
    made(
        folder, "huge", tables=b'{"tables":[{"name":"a","title":"b","columns":["c"],"rows":[' + rows + b"]}]}"
    )
    used_s = time.process_time()
    assert (await http.get("/v1/reports")).status_code == 200
    before_s, used_s = time.process_time() - used_s, time.process_time()
    answer = await http.get("/v1/reports/huge")
    here_s, used_s = time.process_time() - used_s, time.process_time()
    assert answer.json()["tables"][0]["count"] == 4_000_000
    reports.read_report(folder, "huge")
    parsing_s = time.process_time() - used_s
    assert here_s - before_s < parsing_s / 3
