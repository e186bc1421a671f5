"""Pictures of the console's views: three nodes, traffic, an outage, a full disk, and reports of the traffic.

Run ``python -m tests.console.pictures FOLDER``; it takes seven minutes.
"""

from __future__ import annotations

import base64
import os
import random
import struct
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from threading import Event, Thread
from typing import Any, Final

import numpy as np
from playwright.sync_api import Page, sync_playwright

from tests import logged, stores
from tests.console.conftest import PUSHED
from tests.service import Service, eventually, running
from tests.tools import DEBIAN, need
from workers.jobs.__main__ import Processes
from workers.jobs.command import main as job

PRINCIPALS: Final = {"checkout": 4, "search": 6, "nightly-load": 30, "reports": 2, "mobile": 2}
"""How many asks of each principal are in a batch."""
DISKS: Final = {"1": 66_600_000_000, "2": 8_600_000_000, "3": 44_000_000_000}
"""The free bytes of brokers, of 107 GB each; 10 GB are to stay free."""
PHASE_S: Final = 30.0
"""The time between two changes."""
OUTAGE_S: Final = 6.0
WATCHED_S: Final = 30.0
"""How long a bucket is watched before it is photographed."""
MOST_COLOURS: Final = 96
SIZES: Final = {"light": 1280, "dark": 1280, "narrow": 390}
"""The width of each kind of picture."""

DEFAULTS: Final = {
    "request_rate": {"limit": 60, "enforcement": "deny"},
    "producer_ids_rate": {"limit": 90},
    "producer_byte_rate": {"limit": 200_000},
    "controller_mutation_rate": {"limit": 1},
}
CHANGES: Final = (
    ("the nightly load at its start", {"request_rate": {"limit": 100, "enforcement": "deny"}}),
    (
        "it slowed down the checkout: OPS-4711",
        {
            "request_rate": {"limit": 25, "enforcement": "deny"},
            "request_percentage": {"limit": 20, "shadow": True},
        },
    ),
)
"""The changes of the quotas of ``user=nightly-load``, each with its reason."""
TWICE: Final = """
quotas:
  user=*:
    request_rate: {limit: 120, enforcement: deny}
    producer_ids_rate: {limit: 180}
    producer_byte_rate: {limit: 400000}
    controller_mutation_rate: {limit: 2}
  user=nightly-load:
    request_rate: {limit: 50, enforcement: deny}
"""
"""Twice each limit."""
FONTS: Final = """() => {
  const sheet = document.styleSheets[0];
  const rules = ["body, .uplot { font-family: DejaVu Sans }", "code, kbd { font-family: DejaVu Sans Mono }"];
  for (const rule of rules)
    sheet.insertRule(rule, sheet.cssRules.length);
}"""
"""A browser without a desktop has no fonts of its own for ``system-ui`` and ``ui-monospace``."""
KEYS: Final = (
    {"name": "gateway-1", "scopes": ["decide"], "bound_to": ["user=checkout", "user=search"]},
    {"name": "kafka-proxy", "scopes": ["decide", "account"]},
    {"name": "dashboard", "scopes": ["read"], "expires_ms": 1_900_000_000_000},
)


def ask_on(node: Service, ended: Event) -> None:
    """Send batches, more and fewer of them over time."""
    rng = random.Random(node.pid)
    while not ended.wait(rng.uniform(0.3, 0.6)):
        names = [name for name, rate in PRINCIPALS.items() for _ in range(rng.randrange(2 * rate))]
        node.http.post("/v1/decisions:batch", json={"asks": [ask_of(name, rng) for name in names]})


def push_on(node: Service, ended: Event) -> None:
    """Push the state of all disks again and again."""
    volumes = [
        {"broker": name, "dir": "/data", "total_bytes": 107_000_000_000, "available_bytes": free}
        for name, free in DISKS.items()
    ]
    while True:
        node.http.post("/v1/volumes", json={"volumes": volumes, "complete": True})
        if ended.wait(10):
            return


def ask_of(principal: str, rng: random.Random) -> dict[str, Any]:
    """An ask; mobile gets a new producer id now and then, and reports makes topics."""
    usage: dict[str, object] = {"requests": 1, "request_time_ms": rng.randrange(2, 20)}
    if principal == "mobile":
        newest = int(time.monotonic() / 5)
        usage |= {"producer_ids": [rng.randrange(newest - 30, newest)], "produce_bytes": 9_000}
    if principal == "reports" and rng.random() < 0.3:
        usage = {"mutations": rng.randrange(1, 5)}
    return {"principal": principal, "client_id": f"{principal}-{rng.randrange(3)}", "usage": usage}


@contextmanager
def deployment() -> Iterator[Service]:
    """A node of three, after traffic with an outage of the store; a disk is full, and the traffic goes on."""
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        log, reports = home / "log", home / "reports"
        reports.mkdir()
        store = stack.enter_context(stores.server("valkey"))
        environment = {
            **PUSHED,
            **logged.settings(log),
            "QUOTAGATE_VOLUME_MIN_AVAILABLE_BYTES": "10000000000",
            "QUOTAGATE_REPORTS": str(reports),
        }
        catalog = f"sqlite:///{home / 'catalog.db'}"
        nodes = [
            stack.enter_context(running(store_url=store.url, database_url=catalog, environment=environment))
            for _ in range(3)
        ]
        first = nodes[0]
        both = logged.Logged((first, nodes[1]), log)
        stack.enter_context(logged.workers(both, PUSHED))
        first.put("user=*", **DEFAULTS)
        first.put("user=checkout,client-id=*", request_rate={"limit": 40, "enforcement": "deny"})
        first.put("ip=*", connection_creation_rate=20)
        for key in KEYS:
            first.http.post("/v1/keys", json=key).raise_for_status()
        ended = Event()
        stack.callback(ended.set)
        for node in nodes:
            Thread(target=ask_on, args=(node, ended), daemon=True).start()
        from_ms = 0
        for reason, quotas in CHANGES:
            time.sleep(PHASE_S)
            from_ms = time.time_ns() // 1_000_000
            headers = {"X-Reason": reason}
            first.http.put("/v1/quotas/user=nightly-load", json=quotas, headers=headers).raise_for_status()
        time.sleep(PHASE_S)
        until_ms = time.time_ns() // 1_000_000
        eventually(lambda: any(row["at_ms"] > until_ms for row in both.decisions()))
        store.hold()
        time.sleep(OUTAGE_S)
        store.go_on()
        Thread(target=push_on, args=(first, ended), daemon=True).start()
        (home / "twice.yaml").write_text(TWICE, encoding="utf-8")
        since, until = (datetime.fromtimestamp(ms / 1000, UTC).isoformat() for ms in (from_ms, until_ms))
        for name, words in {
            "audit": [],
            "whatif": ["--quotas", str(home / "twice.yaml"), "--from", since],
            "recommend": [],
        }.items():
            out = str(reports / ("twice" if name == "whatif" else f"{name}-1"))
            job(Processes(), [name, "--log", str(log), "--to", until, "--out", out, *words])
        yield first
        ended.set()


def quota_page(page: Page) -> None:
    page.click("#tab-quotas")
    page.click("#quota-rows tr[data-entity='user=nightly-load']")
    page.wait_for_timeout(WATCHED_S * 1000)  # a shadow quota's curve begins when it is watched


def report(name: str) -> Callable[[Page], None]:
    """Open a report."""

    def opened(page: Page) -> None:
        page.click("#tab-reports")
        page.click(f"#report-rows tr[data-report='{name}']")
        page.wait_for_selector(f"#report h2:has-text('{name}')")

    return opened


def bucket(name: str, quota: str) -> Callable[[Page], None]:
    """Watch a bucket for a while."""

    def watched(page: Page) -> None:
        page.click("#tab-buckets")
        page.fill("#which [name=bucket]", name)
        page.select_option("#which [name=quota]", quota)
        page.click("#which button")
        page.wait_for_timeout(WATCHED_S * 1000)

    return watched


def effective(page: Page) -> None:
    page.click("#tab-effective")
    page.fill("#who [name=principal]", "checkout")
    page.fill("#who [name=client_id]", "checkout-1")
    page.click("#who button")
    page.wait_for_selector("#explained article")


def rotation(page: Page) -> None:
    page.click("#tab-keys")
    page.click("#key-rows tr[data-key='gateway-1'] button")


VIEWS: Final[dict[str, Callable[[Page], None]]] = {
    "overview": lambda page: page.locator("canvas").nth(3).wait_for(),
    "day": lambda page: page.check("input[value=minute]"),
    "quotas": lambda page: page.click("#tab-quotas"),
    "quota": quota_page,
    "effective": effective,
    "bucket-rate": bucket("user=nightly-load", "request_rate"),
    "bucket-tokens": bucket("user=reports", "controller_mutation_rate"),
    "bucket-ids": bucket("user=mobile", "producer_ids_rate"),
    "health": lambda page: page.click("#tab-health"),
    "volumes": lambda page: page.click("#tab-volumes"),
    "reports": lambda page: page.click("#tab-reports"),
    "audit": report("audit-1"),
    "whatif": report("twice"),
    "recommend": report("recommend-1"),
    "keys": lambda page: page.click("#tab-keys"),
    "rotation": rotation,
}
"""Opens each view, from the one before it."""


PIXELS: Final = """async (picture) => {
  const bitmap = await createImageBitmap(await (await fetch(`data:image/png;base64,${picture}`)).blob());
  const canvas = new OffscreenCanvas(bitmap.width, bitmap.height);
  const context = canvas.getContext("2d");
  context.drawImage(bitmap, 0, 0);
  const bytes = context.getImageData(0, 0, bitmap.width, bitmap.height).data;
  let text = "";
  for (let at = 0; at < bytes.length; at += 4096)
    text += String.fromCharCode(...bytes.subarray(at, at + 4096));
  return [bitmap.width, bitmap.height, btoa(text)];
}"""
"""The width, the height and the RGBA bytes of a picture, which the browser decodes."""


def small(page: Page, picture: bytes) -> bytes:
    """The picture as a PNG with a palette of few colours."""
    width, height, pixels = page.evaluate(PIXELS, base64.b64encode(picture).decode())
    colours = np.frombuffer(base64.b64decode(pixels), np.uint8).reshape(-1, 4)[:, :3].astype(np.int64)
    known, places, counts = np.unique(colours, axis=0, return_inverse=True, return_counts=True)
    palette = known[[counts.argmax()]]
    off = ((known - palette[0]) ** 2).sum(axis=1)
    while len(palette) < MOST_COLOURS:  # the next colour is the one that is furthest off, by its pixels
        palette = np.vstack([palette, known[(off * counts).argmax()]])
        off = np.minimum(off, ((known - palette[-1]) ** 2).sum(axis=1))
    nearest = ((known[:, None] - palette) ** 2).sum(axis=2).argmin(axis=1).astype(np.uint8)
    rows = nearest[places].reshape(height, width)
    parts = {
        b"IHDR": struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0),
        b"PLTE": palette.astype(np.uint8).tobytes(),
        b"IDAT": zlib.compress(np.insert(rows, 0, 0, axis=1).tobytes(), 9),
        b"IEND": b"",
    }
    chunks = (
        struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        for kind, content in parts.items()
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def photograph(page: Page, darkroom: Page, node: Service, folder: Path) -> None:
    """Write a picture of each view in each size; the other page makes it small."""
    page.goto(f"{node.url}/console")
    page.evaluate(FONTS)
    page.fill("#key", node.admin_key)
    page.press("#key", "Enter")
    for view, opened in VIEWS.items():
        for size, width in SIZES.items():
            page.set_viewport_size({"width": width, "height": 600})
            page.emulate_media(color_scheme="dark" if size == "dark" else "light")
            if size == "light":
                opened(page)
            page.wait_for_timeout(3_000)  # the curves are drawn again
            picture = page.screenshot(full_page=True)
            (folder / f"{view}-{size}.png").write_bytes(small(darkroom, picture))


def main(folder: Path) -> None:
    """Make the pictures."""
    with deployment() as node, sync_playwright() as play:
        fonts = {"FONTCONFIG_FILE": str(DEBIAN / "fonts.conf")} if (DEBIAN / "fonts.conf").exists() else {}
        browser = play.chromium.launch(
            executable_path=need("chromium"),
            args=["--no-sandbox", "--disable-gpu"],
            env={**os.environ, **fonts},
        )
        page = browser.new_page()
        page.set_default_timeout(120_000)
        photograph(page, browser.new_page(), node, folder)
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
