"""The overview in the browser: its numbers are those of the deployment, in curves and tables."""

from __future__ import annotations

import re
from contextlib import closing
from itertools import accumulate, pairwise
from operator import sub
from typing import Any

import pytest
import redis
from msgspec import msgpack
from playwright.sync_api import Locator, Route, expect

from app.store.samples import COUNTED, LATENCY_S, ProcessSample
from tests.console.conftest import Console
from tests.service import Service, eventually

DENY = {"limit": 1e-6, "algorithm": "token_bucket", "burst": 10, "enforcement": "deny"}
OUTCOMES = ("admit", "delay", "throttle", "reject")
TITLES = ("Decisions a second", "Time to decide", "Decided without the store", "Asks that wait")


def overview(console: Console, query: str = "") -> dict[str, Any]:
    found: dict[str, Any] = console.node.http.get(f"/v1/overview{query}").json()
    return found


def shown(console: Console) -> Console:
    """The overview with the admin key, drawn."""
    console.unlocked().view("overview")
    expect(console.page.locator("figure")).to_have_count(4)
    return console


def figure(console: Console, title: str) -> Locator:
    return console.page.locator("figure", has=console.page.locator("figcaption", has_text=title))


def table_of(console: Console, title: str) -> list[list[str]]:
    """The rows of a curve's table, newest first; it has the moment in which it is opened."""
    summary = figure(console, title).locator("summary")
    summary.press("Enter")
    rows = figure(console, title).locator("details tbody tr")
    rows.first.wait_for()
    found: list[list[str]] = rows.evaluate_all(
        "rows => rows.map(row => [...row.cells].map(cell => cell.innerText))"
    )
    summary.press("Enter")
    return found


def until_counted(console: Console, asks: int) -> None:
    """Wait until the page has so many asks of this test's node, which began with none that count."""
    console.page.wait_for_function(
        f"() => entries.slice(1).reduce((sum, entry) => sum + decided(entry), 0) >= {asks}"
    )


def asked_since(console: Console) -> int:
    """How many asks the entries of the page have, the first one apart."""
    found: int = console.page.evaluate("entries.slice(1).reduce((sum, entry) => sum + decided(entry), 0)")
    return found


def computed(node: Service, times: list[int]) -> dict[int, list[list[float | None]]]:
    """The numbers of all four curves at each time (ms) but the first, since the time before it.

    They come from the samples in the store, in which the node is the only process.
    """
    with closing(redis.Redis.from_url(node.store_url)) as client:
        read: Any = client.xrange("qg1:overview:seconds")
    by_time = {
        1000 * int(fields[b"at"]): msgpack.decode(fields[b"sample"], type=ProcessSample) for _, fields in read
    }
    assert len({sample.node for sample in by_time.values()}) == 1
    bounds_ms = [*(1000 * bound for bound in LATENCY_S), 2000 * LATENCY_S[-1]]
    curves: dict[int, list[list[float | None]]] = {}
    for begin, end in pairwise(times):
        before, after = by_time[begin], by_time[end]
        seconds = (end - begin) / 1000
        new = dict(zip(COUNTED, map(sub, after.counts, before.counts), strict=True))
        decided = sum(new[outcome] for outcome in OUTCOMES)
        slower = list(accumulate(map(sub, after.latency, before.latency)))
        curves[end] = [
            [new[outcome] / seconds for outcome in OUTCOMES],
            [bound_of(percent, slower, bounds_ms) for percent in (50, 99)],
            [100 * new[name] / decided if decided else None for name in ("fallback", "local")],
            [after.queue_asks, new["shed"] / seconds],
        ]
    return curves


def bound_of(percent: int, reached: list[int], bounds_ms: list[float]) -> float | None:
    """The least bound that so many percent of the decisions did not exceed; `reached`: how many each has."""
    within = (
        bound for bound, count in zip(bounds_ms, reached, strict=True) if 100 * count >= percent * reached[-1]
    )
    return next(within) if reached[-1] else None


def test_numbers_behind_each_curve_are_those_of_the_samples_in_the_store(console: Console):
    console.node.put("user=mallory", request_rate=DENY)
    shown(console)
    before = asked_since(console)
    for _ in range(30):
        console.node.ask(principal="mallory", usage={"requests": 1})
    console.node.ask(principal="nobody", usage={"requests": 1})
    until_counted(console, before + 31)
    times, drawn = console.page.evaluate(
        "[entries.map((entry) => entry.at_ms), CHARTS.map((chart) => chart.rows)]"
    )
    curves = computed(console.node, times)
    for place, rows in enumerate(drawn):
        known = {round(1000 * row[0]): row[1:] for row in rows}
        assert [known[at] for at in curves] == [pytest.approx(curve[place]) for curve in curves.values()]
    throttled, local = (
        sum(values) for values in zip(*((c[0][2], c[2][1] or 0) for c in curves.values()), strict=True)
    )
    assert throttled > 0
    assert local > 0, "no quota applied to one ask"
    for place, title in enumerate(TITLES):
        rows = table_of(console, title)
        texts = console.page.evaluate(
            "place => CHARTS[place].rows.map((row) => [clock(row[0]), "
            "...row.slice(1).map((_, line) => textOf(CHARTS[place], row, line))])",
            place,
        )
        assert [row for row in texts if row in rows] == rows[::-1], "the table has what is drawn"


def test_throttled_most_leads_to_the_bucket(console: Console):
    console.node.put("user=ivan", producer_ids_rate=1)
    shown(console)
    for number in (1, 2):
        console.node.ask(principal="ivan", usage={"producer_ids": [number]})
    row = console.page.locator("#busiest-rows tr", has_text="user=ivan")
    expect(row).to_contain_text("1 h")
    row.locator("a").click()
    expect(console.page.locator("#buckets")).to_be_visible()
    console.page.wait_for_selector("#bucket-rows:has-text('producer_ids_rate')")


def test_buckets_throttled_for_long_are_a_fault_that_leads_to_them(console: Console):
    console.node.put("user=ivan", producer_ids_rate=1)
    since_ms = 1_763_719_740_000
    long = [
        {"quota": "producer_ids_rate", "bucket": name, "since_ms": since_ms}
        for name in ("user=ivan", f"#{'0' * 32}", *(f"user={number}" for number in range(5)))
    ]
    page = console.page
    listed = [long]

    def with_long(route: Route) -> None:
        route.fulfill(json=overview(console) | {"throttled_long": listed[0]})

    page.route("**/v1/overview?*", with_long)
    shown(console)
    fault = page.locator("#faults li", has_text="Throttled for half an hour or longer")
    expect(fault).to_contain_text(
        f"user=ivan by producer_ids_rate since {page.evaluate('at => shortly(at)', since_ms)}; #000"
    )
    expect(fault).to_contain_text("and 2 more. The callers keep asking for more than their limits.")
    expect(fault.locator("a")).to_have_count(4)  # a digest leads nowhere
    # A screen reader hears it again only if other buckets are listed.
    page.evaluate("byId('faults').firstChild.dataset.seen = 1")
    listed[0] = [each | {"since_ms": since_ms + 60_000} for each in long]
    for _ in range(2):  # the page asks again once it has shown an answer
        with page.expect_response("**/v1/overview?*"):
            pass
    expect(page.locator("#faults [data-seen]")).to_have_count(1)
    listed[0] = long[:1]
    expect(page.locator("#faults [data-seen]")).to_have_count(0)
    fault.locator("a").click()
    expect(page.locator("#which [name=bucket]")).to_have_value("user=ivan")
    page.wait_for_selector("#bucket-rows:has-text('producer_ids_rate')")


def test_lost_samples_are_a_gap_and_not_a_zero(console: Console, store):
    shown(console)
    store.hold()
    try:
        console.page.wait_for_selector("#faults:has-text('newest samples are lost')")
        expect(console.page.locator("#faults")).to_contain_text("Look whether it hangs")
        assert console.page.evaluate("CHARTS[0].rows.at(-1).slice(1).every((value) => value === null)")
        label = figure(console, "Decisions a second").locator(".plot").get_attribute("aria-label")
        assert label == "Decisions a second, newest: admit –, delay –, throttle –, reject –"
    finally:
        store.go_on()
    expect(console.page.locator("#faults")).not_to_contain_text("newest samples are lost")
    rows = console.page.evaluate("CHARTS[0].rows")
    gaps = [place for place, row in enumerate(rows[:-1]) if row[1] is None]
    assert gaps, "the gap stays, with the next entry after it"
    assert rows[gaps[-1] + 1][1] is not None


def test_nodes_stores_and_disks(console: Console):
    volume = {"broker": "1", "dir": "/data", "total_bytes": 1000, "available_bytes": 50}
    console.node.http.post("/v1/volumes", json={"volumes": [volume], "complete": True})
    page = shown(console).page
    node, version = page.locator("#node-rows tr").first.locator("td").all_inner_texts()[:2]
    (known,) = overview(console)["nodes"]
    assert (node, version) == (known["node"], known["version"])
    (primary,) = overview(console)["stores"]
    row = page.locator("#store-rows tr")
    expect(row).to_have_count(1)
    expect(row).to_contain_text(primary["primary"])
    expect(row.locator("meter")).to_have_attribute("aria-label", re.compile(r"uses \d+ % of its memory"))
    expect(page.locator("#disk-rows meter")).to_have_attribute(
        "aria-label", "/data of broker 1 is used to 95 %; 100 B must be free"
    )
    bar, mark = (page.locator(f"#disk-rows {each}").bounding_box() for each in ("meter", ".limit"))
    assert bar is not None
    assert mark is not None
    assert mark["x"] == pytest.approx(bar["x"] + 0.9 * bar["width"], abs=1)
    expect(page.locator("#disk-factor")).to_contain_text("Throttle factor 0: violation")
    expect(page.locator("#faults")).to_contain_text("Producers are stopped: a disk is too full")
    console.node.http.post("/v1/volumes", json={"volumes": [], "complete": True})
    expect(page.locator("#disk-rows")).to_contain_text("Let an agent on each broker push its disks")
    expect(page.locator("#faults")).not_to_contain_text("Producers are stopped")


def test_curves_outlive_small_steps_of_the_clock_and_a_long_loss_of_samples(console: Console):
    page = shown(console).page
    found = overview(console)
    newest_ms = found["series"][-1]["at_ms"]
    answer = found | {"series": [], "throttled": []}
    page.wait_for_function("newest => entries.at(-1).at_ms >= newest", arg=newest_ms)
    page.evaluate("follow(null, null)")  # it reads when this test says so
    page.route("**/v1/overview?*", lambda route: route.fulfill(json=answer))

    def given(now_ms: int) -> int:
        """How many entries the page has after an answer of this time."""
        answer["now_ms"] = now_ms
        left: int = page.evaluate("lookAtOverview(() => true).then(() => entries.length)")
        return left

    assert given(newest_ms - 30_000) > 1  # the clock went back a little
    assert given(0) > 1  # a node that has not read the store yet
    expect(page.locator("#faults")).not_to_contain_text("newest samples are lost")
    assert given(newest_ms + 3_600_000) == 1
    expect(page.locator("#faults")).to_contain_text("newest samples are lost")
    expect(page.locator("#busiest-rows")).to_have_text("Not known: the newest samples are lost.")
    expect(page.locator("#no-curves")).to_be_hidden()
    assert given(newest_ms - 3_600_000) == 0  # the store lost its state
    expect(page.locator("#no-curves")).to_be_visible()


def test_empty_day_says_what_to_do(console: Console):
    page = shown(console).page
    held = {
        "now_ms": 1_763_719_742_000,
        "nodes": [],
        "series": [],
        "latency_ms": [1],
        "throttled": [],
        "throttled_long": [],
        "stores": [],
    }
    page.route("**/v1/overview?resolution=minute*", lambda route: route.fulfill(json=held))
    page.check("input[value=minute]")
    expect(page.locator("#no-curves")).to_be_visible()
    expect(page.locator("#no-curves")).to_contain_text("quotagate decide")
    expect(page.locator("#curves")).to_be_hidden()
    expect(page.locator("#busiest-rows")).to_have_text("Nobody was throttled in the last 15 minutes.")
    expect(page.locator("#node-rows")).to_have_text("No node has counted yet.")


def test_curve_is_read_with_the_keyboard(console: Console):
    page = shown(console).page
    plot = figure(console, "Decisions a second").locator(".plot")
    page.wait_for_function("() => CHARTS[0].rows.length > 3")
    plot.focus()
    page.keyboard.press("Home")
    first = plot.locator(".u-legend .u-value").first
    eventually(lambda: first.inner_text() == page.evaluate("clock(CHARTS[0].rows[0][0])"))
    page.keyboard.press("ArrowRight")
    eventually(lambda: first.inner_text() == page.evaluate("clock(CHARTS[0].rows[1][0])"))
    second, ends = first.inner_text(), page.evaluate("CHARTS[0].ends")
    page.wait_for_function(f"() => CHARTS[0].ends > {ends + 5}")
    expect(first).to_have_text(second)


def test_curves_have_the_colours_of_the_scheme(console: Console):
    page = shown(console).page
    legend = "getComputedStyle(document.querySelectorAll('.u-marker')[1]).borderTopColor"
    page.emulate_media(color_scheme="light")
    eventually(lambda: page.evaluate(legend) == "rgb(34, 104, 74)")
    page.click("#scheme")
    eventually(lambda: page.evaluate(legend) == "rgb(108, 196, 154)")
    assert page.locator("canvas").count() == 4


@pytest.mark.parametrize("width", [360, 800])
def test_overview_fits_a_narrow_window(console: Console, width: int):
    page = shown(console).page
    page.set_viewport_size({"width": width, "height": 800})
    expect(page.locator("canvas")).to_have_count(4)
    eventually(lambda: page.evaluate("document.documentElement.scrollWidth") <= width)
    assert all(
        box["width"] <= width for box in (each.bounding_box() for each in page.locator("canvas").all()) if box
    )


def test_refused_key_is_not_asked_for_again_and_again(console: Console):
    console.says("This needs a key")
    page = console.page
    page.focus("#scheme")
    asked = len(console.asked)
    page.clock.install()
    page.clock.run_for(20_000)
    assert [url for url in console.asked[asked:] if "/v1/" in url] == []
    assert page.evaluate("document.activeElement.id") == "scheme"
