"""The console in a real browser: Debian's Chromium, driven by playwright, before a real node."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from playwright.sync_api import Browser, Page, Request, expect, sync_playwright

from tests import stores
from tests.service import Service, running
from tests.tools import DEBIAN, need

TIMEOUT_MS = 60_000
expect.set_options(timeout=TIMEOUT_MS)

PUSHED = {
    "QUOTAGATE_VOLUME_SOURCE": "push",
    "QUOTAGATE_VOLUME_MIN_AVAILABLE_BYTES": "100",
}
"""The tests push volumes."""


@dataclass
class Console:
    """An open page, the node behind it, and the errors in the browser's console."""

    page: Page
    node: Service
    complaints: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def unlocked(self) -> Console:
        """With the admin key given, and the quotas in view."""
        self.view("quotas")
        self.page.fill("#key", self.node.admin_key)
        self.page.keyboard.press("Enter")
        self.page.wait_for_selector("#quota-rows tr")
        return self

    def view(self, name: str) -> Console:
        self.page.click(f"#tab-{name}")
        return self

    def rows(self, table: str) -> list[str]:
        """The texts of a table's rows."""
        return self.page.locator(f"#{table} tr").all_inner_texts()

    def says(self, text: str) -> None:
        """Wait until the page shows a problem."""
        self.page.wait_for_selector(f"#problem:has-text({text!r})")


@pytest.fixture(scope="module")
def store() -> Iterator[stores.Server]:
    with stores.server("valkey") as server:
        yield server


@pytest.fixture(scope="module")
def node(store: stores.Server) -> Iterator[Service]:
    with running(store_url=store.url, environment=PUSHED) as one:
        yield one


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    fonts = {"FONTCONFIG_FILE": str(DEBIAN / "fonts.conf")} if (DEBIAN / "fonts.conf").exists() else {}
    arguments = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync"]
    with sync_playwright() as play:
        chromium = play.chromium.launch(
            executable_path=need("chromium"), args=arguments, env={**os.environ, **fonts}
        )
        yield chromium
        chromium.close()


@pytest.fixture
def console(browser: Browser, node: Service) -> Iterator[Console]:
    """A freshly opened page; at the end, the browser must have no errors and have contacted no other host."""
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    page.set_default_timeout(TIMEOUT_MS)
    one = Console(page, node)
    page.on("pageerror", lambda error: one.complaints.append(str(error)))
    page.on("console", lambda said: one.complaints.append(said.text) if said.type == "error" else None)

    def note(request: Request) -> None:
        one.asked.append(request.url)

    page.on("request", note)
    page.goto(f"{node.url}/console")
    yield one
    page.close()
    # A refusal that the page shows is also in the browser's own console.
    assert [text for text in one.complaints if "Failed to load resource" not in text] == []
    assert [url for url in one.asked if not url.startswith((node.url, "data:"))] == []
