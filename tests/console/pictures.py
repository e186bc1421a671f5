"""Pictures of the overview for docs/console.md: three nodes, traffic, an outage and a full disk.

Run ``python -m tests.console.pictures FOLDER``; it takes three minutes.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from threading import Event, Thread
from typing import Final

from playwright.sync_api import Page, sync_playwright

from tests import stores
from tests.console.conftest import PUSHED
from tests.service import Service, running
from tests.tools import DEBIAN, need

NAMES: Final = ("checkout", "search", "nightly-load", "reports", "mobile")
RATES: Final = (4, 6, 30, 2, 3)
"""How many asks of each principal are in a batch."""
DISKS: Final = {"1": 62_000, "2": 8_000, "3": 41_000}
"""The free bytes of brokers, of 100,000 each; 10,000 are to stay free."""
TRAFFIC_S: Final = 130.0
VIEWS: Final = {"light": 1280, "dark": 1280, "narrow": 390}


def ask_on(node: Service, ended: Event) -> None:
    """Send batches, more and fewer of them over time."""
    rng = random.Random(node.pid)
    while not ended.wait(rng.uniform(0.05, 0.15)):
        names = [
            name for name, rate in zip(NAMES, RATES, strict=True) for _ in range(rng.randrange(2 * rate))
        ]
        node.http.post(
            "/v1/decisions:batch",
            json={"asks": [{"principal": name, "usage": {"requests": 1}} for name in names or ["search"]]},
        )


def photograph(page: Page, node: Service, folder: Path) -> None:
    """Write a picture of each kind."""
    page.goto(f"{node.url}/console")
    page.fill("#key", node.admin_key)
    page.press("#key", "Enter")
    for name, width in VIEWS.items():
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme="dark" if name == "dark" else "light")
        page.locator("canvas").nth(3).wait_for()
        page.wait_for_timeout(3_000)  # the curves are drawn again
        page.screenshot(path=folder / f"overview-{name}.png", full_page=True)


def main(folder: Path) -> None:
    """Make the pictures."""
    environment = {**PUSHED, "QUOTAGATE_VOLUME_MIN_AVAILABLE_BYTES": "10000"}
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        store = stack.enter_context(stores.server("valkey"))
        nodes = [
            stack.enter_context(
                running(
                    store_url=store.url,
                    database_url=f"sqlite:///{home / 'catalog.db'}",
                    environment=environment,
                )
            )
            for _ in range(3)
        ]
        nodes[0].put("user=*", request_rate={"limit": 60, "enforcement": "deny"}, producer_ids_rate=5)
        nodes[0].put("user=nightly-load", request_rate={"limit": 25, "enforcement": "deny"})
        volumes = [
            {"broker": name, "dir": "/data", "total_bytes": 100_000, "available_bytes": free}
            for name, free in DISKS.items()
        ]
        ended = Event()
        stack.callback(ended.set)
        for node in nodes:
            Thread(target=ask_on, args=(node, ended), daemon=True).start()
        time.sleep(TRAFFIC_S / 2)
        store.hold()
        time.sleep(6)
        store.go_on()
        time.sleep(TRAFFIC_S / 2 - 6)
        nodes[0].http.post("/v1/volumes", json={"volumes": volumes, "complete": True}).raise_for_status()
        fonts = {"FONTCONFIG_FILE": str(DEBIAN / "fonts.conf")} if (DEBIAN / "fonts.conf").exists() else {}
        play = stack.enter_context(sync_playwright())
        browser = play.chromium.launch(
            executable_path=need("chromium"),
            args=["--no-sandbox", "--disable-gpu"],
            env={**os.environ, **fonts},
        )
        photograph(browser.new_page(), nodes[0], folder)
        browser.close()
        ended.set()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
