"""A person's actions in the console, and their effect on the service."""

from __future__ import annotations

import re

import httpx
import pytest
from playwright.sync_api import Route, expect

from tests.console.conftest import Console
from tests.service import eventually


def quotas(console: Console, entity: str) -> dict[str, object] | None:
    answer = console.node.http.get(f"/v1/quotas/{entity}")
    found: dict[str, object] | None = answer.json()["quotas"] if answer.is_success else None
    return found


def test_page_needs_no_key_but_its_content_does(console: Console):
    console.says("This needs a key")
    assert console.rows("quota-rows") == []
    assert console.page.evaluate("document.activeElement.id") == "key"
    console.page.fill("#key", "wrong")
    console.page.keyboard.press("Enter")
    console.says("The key is not valid")
    console.node.put("user=seen", request_rate=1)
    console.unlocked()
    assert any("user=seen" in row for row in console.rows("quota-rows"))
    expect(console.page.locator("#problem")).to_be_hidden()
    assert console.page.evaluate("localStorage.getItem('key')") is None  # it ends with the tab


def test_console_runs_no_foreign_code(console: Console):
    answer = httpx.get(f"{console.node.url}/console", timeout=60)
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert not re.search(r"(src|href)=\"(https?:)?//", answer.text)
    console.node.put("user=%3Cimg%20src%3Dx%20onerror%3Dalert%281%29%3E", request_rate=1)
    console.unlocked()
    console.page.fill("#search-text", "<img")
    expect(console.page.locator("#quota-rows tr")).to_have_count(1)
    assert console.page.locator("#quota-rows img").count() == 0


def test_search_by_entity_by_type_and_by_a_part_of_a_name(console: Console):
    for name in ("carol", "caroline", "dave"):
        console.node.put(f"user={name}", request_rate=7)
    console.node.put("user=carol,client-id=etl", consumer_byte_rate=5)
    console.node.put("ip=*", connection_creation_rate=3)
    console.unlocked()
    search, rows = console.page.locator("#search-text"), console.page.locator("#quota-rows tr")
    search.fill("carol")  # typing filters the loaded rows
    expect(rows).to_have_count(3)
    search.fill("user=carol")
    search.press("Enter")  # asks the service
    expect(rows).to_have_count(2)
    search.fill("user=carol, client-id")
    search.press("Enter")
    expect(rows).to_have_count(1)
    search.fill("ip=*")
    search.press("Enter")
    expect(rows).to_have_text([re.compile("connection_creation_rate 3")])


def test_quota_is_created_changed_and_deleted(console: Console):
    page = console.unlocked().page
    page.click("#new")
    page.fill("#edit-entity", "user=erin")
    page.fill("#edit-rows input", "5.5")
    page.fill("#edit-reason", "für den Test")
    page.select_option("#edit-rows select", "producer_ids_rate")
    page.click("text=Save")
    console.says("/producer_ids_rate")  # the service's own words, with the field
    assert quotas(console, "user=erin") is None
    page.fill("#edit-rows input", "5")
    page.click("#edit-add")
    page.locator("#edit-rows select").nth(1).select_option("request_rate")
    page.locator("#edit-rows input").nth(1).fill('{"limit": 100, "enforcement": "deny"}')
    page.click("text=Save")
    page.wait_for_selector("#history li:has-text('für den Test')")
    assert quotas(console, "user=erin") == {
        "producer_ids_rate": {"limit": 5},
        "request_rate": {"limit": 100, "enforcement": "deny"},
    }
    page.once("dialog", lambda dialog: dialog.accept())
    page.click("#edit-delete")
    expect(page.locator("#history li").first).to_contain_text("Deleted by admin")
    assert quotas(console, "user=erin") is None
    page.click("#edit-close")
    expect(page.locator("#editor")).to_be_hidden()


def test_concurrent_change_is_not_overwritten(console: Console):
    console.node.put("user=frank", request_rate=1)
    page = console.unlocked().page
    page.click("text=user=frank")
    page.wait_for_selector("#history li")
    console.node.put("user=frank", request_rate=2)
    page.fill("#edit-rows input", "3")
    page.click("text=Save")
    console.says("A condition does not hold")
    assert quotas(console, "user=frank") == {"request_rate": {"limit": 2}}


def test_effective_limits_show_the_ladder_and_lead_to_the_bucket(console: Console):
    console.node.put("user=*", request_rate=100)
    console.node.put("user=grace", request_rate={"limit": 20, "enforcement": "deny"})
    for _ in range(3):
        console.node.ask(principal="grace", usage={"requests": 1})
    page = console.unlocked().view("effective").page
    page.fill("#who [name=principal]", "grace")
    page.press("#who [name=principal]", "Enter")
    page.wait_for_selector("article h3:has-text('request_rate: 20')")
    found = page.locator("#explained .ladder li.found")
    expect(found).to_have_text(["user=grace 20decides"])
    expect(found).to_have_attribute("aria-current", "true")
    expect(page.locator("#explained .ladder")).to_contain_text("user=* 100not reached")
    page.click("article a:has-text('user=grace')")
    page.wait_for_selector("#bucket-rows:has-text('request_rate')")


def test_a_bucket_is_watched_and_reset(console: Console):
    console.node.put("user=heidi", producer_ids_rate=3)
    page = console.unlocked().view("buckets").page
    page.fill("#which [name=bucket]", "user=heidi")
    page.press("#which [name=bucket]", "Enter")
    observed = page.locator("#bucket-rows tr", has_text="producer_ids_rate").locator("td").nth(3)
    expect(observed).to_have_text("0")
    console.node.ask(principal="heidi", usage={"producer_ids": [1, 2, 3]})
    expect(observed).to_have_text("3")  # by itself
    assert console.node.ask(principal="heidi", usage={"producer_ids": [4]})["decision"] == "throttle"
    page.once("dialog", lambda dialog: dialog.accept())
    page.click("#reset")
    expect(observed).to_have_text("0")
    assert console.node.ask(principal="heidi", usage={"producer_ids": [4]})["decision"] == "admit"


def test_everything_can_be_done_with_the_keyboard(console: Console):
    console.node.put("user=judy", request_rate=1)
    page = console.unlocked().page
    page.keyboard.press("Escape")
    page.keyboard.press("3")
    expect(page.locator("#effective")).to_be_visible()
    assert page.evaluate("document.activeElement.name") == "principal"
    page.keyboard.type("1judy")  # the view does not change while typing
    expect(page.locator("#effective")).to_be_visible()
    page.keyboard.press("Escape")
    page.keyboard.press("2")
    page.keyboard.press("Escape")
    page.keyboard.press("/")
    page.keyboard.type("judy")
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")  # Find, New, and the one row that is left
    page.keyboard.press("Enter")
    expect(page.locator("#edit-entity")).to_have_value("user=judy")
    page.keyboard.press("Control+A")
    page.keyboard.type("9")
    held: list[Route] = []

    def hold(route: Route) -> None:
        held.append(route)

    page.route("**/v1/quotas?*", hold)
    with page.expect_request("**/v1/quotas?*"):  # asked for once the change is written
        page.keyboard.press("Enter")
    assert quotas(console, "user=judy") == {"request_rate": {"limit": 9}}
    page.focus("#tab-quotas")
    held.pop().continue_()
    page.unroute("**/v1/quotas?*", hold)
    expect(page.locator("#history li")).to_have_count(2)
    page.keyboard.press("ArrowLeft")  # the late list does not move the focus back
    expect(page.locator("#overview")).to_be_visible()
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#reports")).to_be_visible()


def test_dark_and_light(console: Console):
    page = console.page
    ground = "getComputedStyle(document.body).backgroundColor"
    page.emulate_media(color_scheme="light")
    light = page.evaluate(ground)
    page.emulate_media(color_scheme="dark")
    assert page.evaluate(ground) != light
    page.click("#scheme")  # a choice by hand outlives a reload
    assert page.evaluate(ground) == light
    page.reload()
    assert page.evaluate(ground) == light


def test_health_shows_when_the_store_is_unreachable_and_back(console: Console, store):
    page = console.unlocked().view("health").page
    page.wait_for_selector("#state.ok")
    store.kill()
    try:
        eventually(lambda: console.node.http.get("/health/ready").json()["store"] != "ok")
        page.wait_for_selector("#state.bad:has-text('store connection')")
        page.wait_for_selector("#health-list:has-text('connection')")
    finally:
        store.start()
        store.until_it_answers()
    page.wait_for_selector("#state.ok")


@pytest.mark.parametrize("width", [360, 800])
def test_it_fits_a_narrow_window(console: Console, width):
    page = console.unlocked().page
    page.set_viewport_size({"width": width, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_volumes_show_the_factor_and_how_full_each_disk_is(console: Console):
    console.node.http.delete("/v1/volumes:drill")
    full = {"broker": "2", "dir": "/data<b>", "total_bytes": 10 * 1024**3, "available_bytes": 50}
    well = {"broker": "1", "dir": "/data", "total_bytes": 10 * 1024**3, "available_bytes": 5 * 1024**3}
    unknown = {"broker": "3", "dir": "/data", "total_bytes": None, "available_bytes": None}
    pushed = console.node.http.post("/v1/volumes", json={"volumes": [full, well, unknown]})
    assert pushed.status_code == 200
    page = console.unlocked().page
    page.locator("h1").click()
    page.keyboard.press("6")
    rows = page.locator("#volume-rows tr")
    expect(rows).to_have_count(3)
    expect(rows.nth(0)).to_contain_text("50 %")
    expect(rows.nth(0)).to_contain_text("5 GiB")
    expect(rows.nth(1)).to_contain_text("violating")
    expect(rows.nth(1)).to_contain_text("50 B")
    expect(rows.nth(2)).to_contain_text("unknown")
    assert page.locator("#volume-rows b").count() == 0
    assert page.locator("#volume-rows meter").count() == 2
    labels = [page.locator("#volume-rows meter").nth(n).get_attribute("aria-label") for n in (0, 1)]
    assert labels == [
        "/data of broker 1 is used to 50 %; 100 B must be free",
        "/data<b> of broker 2 is used to 99.9 %; 100 B must be free",
    ]
    bar, mark = (rows.nth(0).locator(each).bounding_box() for each in ("meter", ".limit"))
    assert bar is not None
    assert mark is not None
    assert mark["x"] == pytest.approx(bar["x"] + bar["width"], abs=1)  # 100 bytes of 10 GiB
    said = page.locator("#factor-list")
    expect(said).to_contain_text(re.compile("Throttle factor\\s*0"))
    expect(said).to_contain_text("violation: /data<b> of broker 2 has 50 of 10,737,418,240 bytes left")
    expect(said).to_contain_text(re.compile("Valid\\s*[1-5] min"))
    expect(page.locator("#drill")).to_be_empty()

    console.node.http.post("/v1/volumes:drill", json={"factor": 0.25, "for_ms": 600_000})
    expect(page.locator("#drill")).to_have_text("Drill by admin: factor 0.25, whatever the volumes say")
    expect(said).to_contain_text(re.compile(r"0\.25 for \d+ min"))
    console.node.http.delete("/v1/volumes:drill")
    expect(page.locator("#drill")).to_be_empty()
    console.node.http.post("/v1/volumes", json={"volumes": [], "complete": True})
    expect(page.locator("#volume-rows")).to_contain_text("Let an agent on each broker push its disks")
