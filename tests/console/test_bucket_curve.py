"""A bucket over time in the browser: its level against its limit, and the waits of its callers."""

from __future__ import annotations

from itertools import accumulate, count
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.console.conftest import Console
from tests.service import eventually

LEVEL = "[...levels.values()].map((chart) => ({lines: chart.lines, rows: chart.rows.map((row) => [...row])}))"

KEEP_BANDS = """() => {
  window.bands = [];
  const draws = drawLevel;
  drawLevel = (bucket, ...more) => {
    draws(bucket, ...more);
    const chart = levels.get(bucket.quota);
    bands.push({
      live: bucket.live_layers, remembered: bucket.remembered_ids,
      tops: chart.plot.data.slice(-4).map((values) => values.at(-1)),
      texts: [4, 5, 6, 7].map((line) => textOf(chart, chart.rows.at(-1), line)),
    });
  };
}"""
"""Keeps from now on the bands of each drawing, with the API's answer that it drew."""


def watching(console: Console, bucket: str) -> Page:
    page = console.unlocked().view("buckets").page
    page.fill("#which [name=bucket]", bucket)
    page.press("#which [name=bucket]", "Enter")
    page.locator("#levels canvas").first.wait_for()
    return page


def tops(*levels: int) -> dict[str, int]:
    """The tops of the bands of the four layers, stacked."""
    return {f"layer {place}": level for place, level in enumerate(levels, 1)}


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
            {"charged ids": 0, "limit": 3, "remembered ids": 0} | tops(0, 0, 0, 0),
            {"charged ids": 2, "limit": 3, "remembered ids": 2} | tops(2, 2, 2, 2),
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


def test_layers_are_stacked_bands(console: Console):
    layers = {"interval_ms": 1_500, "ttl_ms": 6_000}
    console.node.put("user=olivia", producer_ids_rate={"limit": 1_000, "layers": layers})
    page = watching(console, "user=olivia")
    page.evaluate(KEEP_BANDS)
    fresh = count()

    def kept() -> list[dict[str, Any]]:
        """Ask for a new id; return the drawn bands, once a fifth and another layer lived at once."""
        console.node.ask(principal="olivia", usage={"producer_ids": [next(fresh)]})
        page.evaluate("look()")
        bands: list[dict[str, Any]] = page.evaluate("bands")
        met = any(len(each["live"]) > 1 and each["live"][-1]["number"] > 4 for each in bands)
        return bands if met else []

    for each in eventually(kept):
        ids = [0, 0, 0, 0]
        for layer in each["live"]:  # as the API shows them
            ids[(layer["number"] - 1) % 4] = layer["ids"]
        assert each["tops"] == list(accumulate(ids))
        assert each["tops"][-1] == each["remembered"]
        assert each["texts"] == [str(one) if one else "–" for one in ids]
    assert page.evaluate("[...levels.values()][0].plot.bands.map(({ series }) => series)") == [
        [6, 5],
        [7, 6],
        [8, 7],
    ]


def test_waits_of_callers_are_marks(console: Console):
    console.node.put("user=peggy", producer_ids_rate=1)
    page = watching(console, "user=peggy")
    eventually(lambda: page.evaluate("waitsSince") < 2**53 - 1)
    fresh = count()

    def marked() -> bool:
        """Ask for a new id, which only the store throttles; whether a wait is drawn."""
        console.node.ask(principal="peggy", usage={"producer_ids": [next(fresh)]})
        return bool(page.evaluate("[...levels.values()][0].rows.some((row) => row[3] !== null)"))

    eventually(marked)
    summary = page.locator("#levels summary")
    summary.press("Enter")
    expect(page.locator("#levels details tbody")).to_contain_text("1 h")
    expect(page.locator("#levels details thead")).to_have_text(
        "Atcharged idslimitmean waitremembered idslayer 1layer 2layer 3layer 4"
    )


def test_another_bucket_has_another_curve(console: Console):
    console.node.put("user=quinn", request_rate=5, producer_ids_rate=5)
    console.node.put("user=rupert", request_rate=5)
    page = watching(console, "user=quinn")
    expect(page.locator("#levels figure")).to_have_count(2)
    page.fill("#which [name=bucket]", "user=rupert")
    page.press("#which [name=bucket]", "Enter")
    expect(page.locator("#levels figcaption")).to_have_text(["request_rate of user=rupert"])
