"""A bucket over time in the browser: its level against its limit, and the waits of its callers."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.console.conftest import Console
from tests.service import eventually

LEVEL = "[...levels.values()].map((chart) => ({lines: chart.lines, rows: chart.rows.map((row) => [...row])}))"


def watching(console: Console, bucket: str) -> Page:
    page = console.unlocked().view("buckets").page
    page.fill("#which [name=bucket]", bucket)
    page.press("#which [name=bucket]", "Enter")
    page.locator("#levels canvas").first.wait_for()
    return page


def newest(page: Page) -> dict[str, Any]:
    """The newest values of the only curve, by line; nobody waited."""
    (curve,) = page.evaluate(LEVEL)
    found = dict(zip(curve["lines"], curve["rows"][-1][1:], strict=True))
    assert found.pop("mean wait") is None
    return found


@pytest.mark.parametrize(
    ("quota", "usage", "before", "after"),
    [
        (
            {
                "request_rate": {
                    "limit": 1e-6,
                    "algorithm": "token_bucket",
                    "burst": 10,
                    "enforcement": "deny",
                }
            },
            {"requests": 4},
            {"tokens": 10, "burst": 10},
            {"tokens": 6, "burst": 10},
        ),
        (
            {"producer_ids_rate": 3},
            {"producer_ids": [1, 2]},
            {"charged ids": 0, "limit": 3, "remembered ids": 0},
            {"charged ids": 2, "limit": 3, "remembered ids": 2},
        ),
        (
            {"request_rate": {"limit": 2, "samples": 2, "sample_ms": 3_600_000}},
            {"requests": 3_600},
            {"rate": 0, "limit": 2},
            {"rate": 1, "limit": 2},
        ),
    ],
    ids=["tokens", "ids", "rate"],
)
def test_level_is_that_of_the_bucket_against_its_limit(
    console: Console, request: pytest.FixtureRequest, quota: Any, usage: Any, before: Any, after: Any
):
    name = request.node.callspec.id
    console.node.put(f"user={name}", **quota)
    page = watching(console, f"user={name}")
    assert newest(page) == pytest.approx(before)
    assert console.node.ask(principal=name, usage=usage)["decision"] == "admit"
    eventually(lambda: newest(page) == pytest.approx(after, rel=1e-2))
    label = page.locator("#levels .plot").get_attribute("aria-label")
    assert label is not None
    assert label.startswith(f"{next(iter(quota))} of user={name}, newest: ")


def test_waits_of_callers_are_marks(console: Console):
    console.node.put("user=peggy", producer_ids_rate=1)
    page = watching(console, "user=peggy")
    eventually(lambda: page.evaluate("waitsSince") < 2**53 - 1)
    for number in (1, 2):
        console.node.ask(principal="peggy", usage={"producer_ids": [number]})
    marks = "[...levels.values()][0].rows.filter((row) => row[3] !== null)"
    eventually(lambda: page.evaluate(marks))
    summary = page.locator("#levels summary")
    summary.press("Enter")
    expect(page.locator("#levels details tbody")).to_contain_text("1 h")
    expect(page.locator("#levels details thead")).to_have_text("Atcharged idslimitmean waitremembered ids")


def test_another_bucket_has_another_curve(console: Console):
    console.node.put("user=quinn", request_rate=5, producer_ids_rate=5)
    console.node.put("user=rupert", request_rate=5)
    page = watching(console, "user=quinn")
    expect(page.locator("#levels figure")).to_have_count(2)
    page.fill("#which [name=bucket]", "user=rupert")
    page.press("#which [name=bucket]", "Enter")
    expect(page.locator("#levels figcaption")).to_have_text(["request_rate of user=rupert"])
