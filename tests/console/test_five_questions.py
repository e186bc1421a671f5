"""A newcomer's five questions, each answered by at most three clicks after the key is given."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

from tests import logged
from tests.console.conftest import PUSHED, Console
from tests.logged import Logged
from tests.service import Service, eventually, running
from tests.stores import Server
from workers.jobs.__main__ import Processes
from workers.jobs.command import main as job

MOST_CLICKS = 3
QUOTA = "producer_ids_rate"
BEFORE, LIMIT, ASKS = 40, 10, 30
"""Somebody has lowered the limit from 40 to 10; then a principal asked 30 times, each with a new id."""
REASON = "one load held half of the ids: OPS-4711"


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def written(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).isoformat()


@dataclass(frozen=True)
class Story:
    """The node, and what happened: a stretch of throttled asks began between two instants, and goes on."""

    node: Service
    from_ms: int
    to_ms: int


def put(node: Service, reason: str, limit: int) -> None:
    answer = node.http.put("/v1/quotas/user=*", json={QUOTA: limit}, headers={"X-Reason": reason})
    answer.raise_for_status()


def ask(node: Service, number: int) -> str:
    decision: str = node.ask(principal="nightly-load", usage={"producer_ids": [number]})["decision"]
    return decision


def go_on(node: Service, ended: Event) -> None:
    """Ask with new ids, each of which is refused."""
    number = ASKS
    while not ended.wait(0.2):
        number += 1
        ask(node, number)


def newest_entry_ms(node: Service) -> int:
    series = node.http.get("/v1/overview").json()["series"]
    return int(series[-1]["at_ms"]) if series else 0


def throttled(node: Service) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = node.http.get("/v1/overview").json()["throttled"]
    return found


@pytest.fixture(scope="module")
def story(store: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    work = tmp_path_factory.mktemp("deployment")
    log, reports = work / "log", work / "reports"
    reports.mkdir()
    settings = {
        **PUSHED,
        **logged.settings(log),
        "QUOTAGATE_REPORTS": str(reports),
    }
    with ExitStack() as stack:
        catalog = f"sqlite:///{work / 'catalog.db'}"
        first, second = (
            stack.enter_context(running(store_url=store.url, database_url=catalog, environment=settings))
            for _ in range(2)
        )
        both = Logged((first, second), log)
        stack.enter_context(logged.workers(both, PUSHED))
        put(first, "the start", BEFORE)
        put(first, REASON, LIMIT)
        disks = [
            {"broker": name, "dir": "/data", "total_bytes": 1_000, "available_bytes": free}
            for name, free in (("1", 700), ("2", 50), ("3", 400))
        ]
        first.http.post("/v1/volumes", json={"volumes": disks, "complete": True}).raise_for_status()
        quiet_ms = eventually(lambda: newest_entry_ms(second))
        answers = [ask(first, number) for number in range(ASKS)]
        assert answers == ["admit"] * LIMIT + ["throttle"] * (ASKS - LIMIT)
        asked_ms = now_ms()
        eventually(lambda: now_ms() > asked_ms + 1)
        ended = Event()
        stack.callback(ended.set)
        Thread(target=go_on, args=(first, ended), daemon=True).start()
        eventually(lambda: throttled(second))
        seen_ms = now_ms()
        eventually(lambda: sum(row["at_ms"] <= asked_ms for row in both.decisions()) == ASKS)
        what_if(work, log, reports / "twice", to_ms=asked_ms + 1)
        yield Story(second, quiet_ms, seen_ms)
        ended.set()


def what_if(work: Path, log: Path, report: Path, *, to_ms: int) -> None:
    """Replay the asks with twice the limit."""
    quotas = work / "twice.yaml"
    quotas.write_text(json.dumps({"quotas": {"user=*": {QUOTA: 2 * LIMIT}}}), encoding="utf-8")
    words = ["--log", str(log), "--quotas", str(quotas), "--to", written(to_ms), "--out", str(report)]
    assert job(Processes(), ["whatif", *words]) == 0


@pytest.fixture(scope="module")
def node(story: Story) -> Service:
    """The node whose console is open; the other one decides."""
    return story.node


class Newcomer:
    """Has given the key, sees the overview, and clicks."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.clicks = 0

    def click(self, place: Locator) -> None:
        self.clicks += 1
        assert self.clicks <= MOST_CLICKS
        place.click()

    @property
    def throttled(self) -> Locator:
        """The row of the principal among the buckets that are throttled most."""
        return self.page.locator("#busiest-rows tr", has_text="user=nightly-load")

    def to_quota(self) -> None:
        """Open the page of the quotas that set the limit."""
        self.click(self.throttled.get_by_role("link"))
        self.click(self.page.locator("#bucket-rows").get_by_role("link"))


@pytest.fixture
def newcomer(console: Console) -> Newcomer:
    console.page.fill("#key", console.node.admin_key)
    console.page.press("#key", "Enter")
    return Newcomer(console.page)


def test_who_is_throttled_now_and_by_which_limit(newcomer: Newcomer) -> None:
    expect(newcomer.page.locator("#busiest-rows tr")).to_have_count(1)
    cells = newcomer.throttled.locator("td")
    expect(cells.nth(0)).to_have_text("user=nightly-load")
    expect(cells.nth(1)).to_have_text(QUOTA)
    newcomer.click(newcomer.throttled.get_by_role("link"))
    bucket = newcomer.page.locator("#bucket-rows tr")
    expect(bucket).to_have_count(1)
    expect(bucket.locator("td").nth(0)).to_have_text(QUOTA)
    expect(bucket.locator("td").nth(1)).to_have_text(str(LIMIT))
    expect(bucket.locator("td").nth(2)).to_have_text("user=*")


def test_since_when(newcomer: Newcomer, story: Story) -> None:
    said = newcomer.throttled.locator("td").nth(2).inner_text()
    (bucket,) = throttled(story.node)
    assert story.from_ms <= bucket["since_ms"] <= story.to_ms
    assert said.startswith(newcomer.page.evaluate("at => clock(at / 1000)", bucket["since_ms"]))


def test_change_before_it(newcomer: Newcomer, story: Story) -> None:
    newcomer.to_quota()
    expect(newcomer.page.locator("#edit-title")).to_have_text("user=*")
    newest = newcomer.page.locator("#history li").first
    change = story.node.http.get("/v1/quotas:history?entity=user=*").json()["changes"][0]
    assert change["at_ms"] <= story.to_ms
    at = newcomer.page.evaluate("at => when(at)", change["at_ms"])
    expect(newest).to_contain_text(f"Changed by admin, {at}")
    expect(newest).to_contain_text(REASON)
    expect(newest.locator("tbody").locator("th, td")).to_have_text([QUOTA, str(BEFORE), str(LIMIT)])


def test_twice_the_limit_would_have_helped(newcomer: Newcomer) -> None:
    newcomer.to_quota()
    expect(newcomer.page.locator("#quota-page")).to_contain_text("quotagate whatif --quotas twice.yaml")
    newcomer.click(newcomer.page.locator("#whatifs").get_by_role("link", name="twice"))
    quota = newcomer.page.locator("#report tr[aria-current=true]")
    expect(quota).to_be_in_viewport()
    refused = (ASKS - LIMIT, ASKS - 2 * LIMIT)
    expect(quota.locator("td")).to_have_text(["user=*", QUOTA, *map(str, (LIMIT, 2 * LIMIT, *refused))])


def test_disk_that_stops_producers(newcomer: Newcomer) -> None:
    expect(newcomer.page.locator("#faults")).to_contain_text("Producers are stopped: a disk is too full")
    expect(newcomer.page.locator("#disk-factor")).to_contain_text("/data of broker 2 has 50 of 1,000 bytes")
    marked = newcomer.page.locator("#disk-rows tr", has_text="violating")
    expect(marked).to_have_count(1)
    expect(marked.locator("td").nth(0)).to_have_text("2")
