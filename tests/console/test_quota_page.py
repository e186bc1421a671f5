"""The page of an entity's quotas in the browser: history with undo, shadow quotas, the ladder of a caller."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any
from urllib.parse import quote

import pytest
from playwright.sync_api import Locator, expect

from tests.console.conftest import Console
from tests.console.markup import HOSTILE, expect_no_markup
from tests.service import eventually

CLICK = "name => [...byId('quota-rows').rows].find((row) => row.dataset.entity === name).click()"


def opened(console: Console, entity: str) -> Locator:
    """The page of an entity."""
    console.unlocked().page.click(f"#quota-rows tr[data-entity='{entity}']")
    return console.page.locator("#quota-page")


def put(console: Console, entity: str, reason: str, **quotas: object) -> None:
    headers = {"X-Reason": reason} if reason else {}
    console.node.http.put(f"/v1/quotas/{entity}", json=quotas, headers=headers).raise_for_status()


def value(console: Console, entity: str) -> dict[str, Any] | None:
    answer = console.node.http.get(f"/v1/quotas/{entity}")
    found: dict[str, Any] | None = answer.json()["quotas"] if answer.is_success else None
    return found


def newest(console: Console, entity: str) -> dict[str, Any]:
    found: dict[str, Any] = console.node.http.get("/v1/quotas:history", params={"entity": entity}).json()
    return dict(found["changes"][0])


def test_history_has_who_when_why_and_both_values(console: Console):
    put(console, "user=olga", "the start", request_rate=5, producer_byte_rate=7)
    put(console, "user=olga", "", request_rate={"limit": 9, "enforcement": "deny"}, producer_byte_rate=7)
    page = opened(console, "user=olga")
    items = page.locator("#history li")
    expect(items).to_have_count(2)
    at = console.page.evaluate("at => when(at)", newest(console, "user=olga")["at_ms"])
    expect(items.nth(0)).to_contain_text(f"Changed by admin, {at}")
    expect(items.nth(0)).to_contain_text("no reason was given")
    expect(items.nth(1)).to_contain_text("Created by admin")
    expect(items.nth(1)).to_contain_text("the start")
    changed = items.nth(0).locator("tbody tr")
    expect(changed).to_have_count(1)  # the other quota stayed as it was
    expect(changed.locator("th, td")).to_have_text(["request_rate", "5", '9 {"enforcement":"deny"}'])
    created = items.nth(1).locator("tbody tr")
    expect(created).to_have_text(
        [re.compile("request_rate.*none.*5"), re.compile("producer_byte_rate.*none.*7")]
    )
    expect(page.get_by_role("button", name="Undo")).to_have_count(1)  # of the newest change alone


def test_undo_takes_the_last_change_back_and_forth(console: Console):
    put(console, "user=pia", "the start", request_rate=5)
    put(console, "user=pia", "much more", request_rate=50, producer_ids_rate=3)
    changed = newest(console, "user=pia")
    page = opened(console, "user=pia")
    page.get_by_role("button", name="Undo").click()
    expect(page.locator("#history li")).to_have_count(3)
    assert value(console, "user=pia") == {"request_rate": {"limit": 5}}
    undone = newest(console, "user=pia")
    assert undone["reason"].startswith("undo of the change of 2")
    assert (undone["before"], undone["after"]) == (changed["after"], changed["before"])
    console.page.fill("#edit-reason", "it was right after all")
    page.get_by_role("button", name="Undo").click()
    expect(page.locator("#history li")).to_have_count(4)
    assert value(console, "user=pia") == {"request_rate": {"limit": 50}, "producer_ids_rate": {"limit": 3}}
    assert newest(console, "user=pia")["reason"] == "it was right after all"


def test_undo_of_creation_and_of_deletion(console: Console):
    put(console, "user=quinn", "", request_rate=5)
    page = opened(console, "user=quinn")
    page.get_by_role("button", name="Undo").click()
    expect(page.locator("#history li").first).to_contain_text("Deleted")
    assert value(console, "user=quinn") is None
    page.get_by_role("button", name="Undo").click()
    expect(page.locator("#history li")).to_have_count(3)
    assert value(console, "user=quinn") == {"request_rate": {"limit": 5}}
    expect(console.page.locator("#edit-rows input")).to_have_value("5")


def test_undo_does_not_overwrite_a_change_of_somebody_else(console: Console):
    put(console, "user=rosa", "", request_rate=1)
    put(console, "user=rosa", "", request_rate=2)
    page = opened(console, "user=rosa")
    undo = page.get_by_role("button", name="Undo")
    expect(undo).to_be_visible()
    put(console, "user=rosa", "", request_rate=3)
    undo.click()
    console.says("A condition does not hold")
    assert value(console, "user=rosa") == {"request_rate": {"limit": 3}}


def test_older_changes_are_loaded(console: Console):
    for limit in range(1, 106):
        put(console, "user=sven", f"number {limit}", request_rate=limit)
    page = opened(console, "user=sven")
    expect(page.locator("#history li")).to_have_count(100)
    page.locator("#older").click()
    expect(page.locator("#history li")).to_have_count(105)
    expect(page.locator("#older")).to_be_hidden()
    expect(page.locator("#history li").last).to_contain_text("Created")
    expect(page.get_by_role("button", name="Undo")).to_have_count(1)


def test_shadow_quota_is_watched_and_made_live(console: Console):
    shadow = {"limit": 2, "shadow": True}
    put(console, "user=tara", "a trial", producer_ids_rate=shadow, request_rate=1000)
    page = opened(console, "user=tara")
    expect(page.locator("#no-shadows")).to_be_hidden()
    for number in range(5):
        console.node.ask(principal="tara", usage={"producer_ids": [number]})
    row = page.locator("#shadow-rows tr")
    expect(row).to_have_count(1)
    cells = row.locator("td")
    expect(cells.nth(3)).to_have_text("5")  # by itself
    expect(cells.nth(5)).to_have_text("3 (60\u00a0%)")
    counted = console.node.http.get("/v1/quotas:shadow", params={"entity": "user=tara"}).json()["shadows"][0]
    assert (counted["admit"], counted["throttle"]) == (2, 3)
    figure = page.locator("figure")
    figure.locator("summary").press("Enter")
    expect(figure.locator("tbody tr").first).to_be_visible()
    drawn = console.page.evaluate("shadowReads.map((read) => asksOf(read.shadows[0]))")
    assert drawn[-1] == 5
    rates, times = console.page.evaluate(
        "[shadowRates('producer_ids_rate'), shadowReads.map((read) => read.now_ms)]"
    )
    asks = sum(
        rate[1] * (after - before) / 1_000
        for rate, (before, after) in zip(rates, pairwise(times), strict=True)
    )
    assert asks == pytest.approx(drawn[-1] - drawn[0])

    row.get_by_role("button").click()
    dialog = console.page.locator("#promote")
    expect(dialog).to_contain_text(
        "of 5 asks, a limit of 2 (deny) would have refused 3 (60\u00a0%) and delayed 0."
    )
    expect(dialog).to_contain_text("which is shorter than its window of 1 h")
    console.page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    expect(page).to_be_visible()  # Escape closed the dialog alone
    row.get_by_role("button").press("Enter")
    reason = console.page.locator("#promote-reason").input_value()
    assert re.fullmatch(
        r"promoted from shadow: producer_ids_rate would have refused 3 and delayed 0 of 5 asks in .+", reason
    )
    console.page.keyboard.press("Enter")  # a key that is held down does not confirm it
    expect(dialog).to_be_hidden()
    expect(row.get_by_role("button")).to_be_focused()
    console.page.keyboard.press("Enter")
    console.page.press("#promote-reason", "Enter")
    expect(page.locator("#history li").first).to_contain_text(reason)
    assert value(console, "user=tara") == {"producer_ids_rate": {"limit": 2}, "request_rate": {"limit": 1000}}
    expect(page.locator("#no-shadows")).to_be_visible()
    assert console.node.ask(principal="tara", usage={"producer_ids": [9]})["decision"] == "throttle"


def test_promotion_does_not_overwrite_a_change_of_somebody_else(console: Console):
    put(console, "user=uwe", "", request_rate={"limit": 2, "shadow": True})
    page = opened(console, "user=uwe")
    page.locator("#shadow-rows").get_by_role("button").click()
    put(console, "user=uwe", "", request_rate={"limit": 3, "shadow": True})
    console.page.click("#promote-yes")
    console.says("A condition does not hold")
    assert value(console, "user=uwe") == {"request_rate": {"limit": 3, "shadow": True}}


def test_refusal_is_not_wiped_out_by_the_refresh_of_shadow_quotas(console: Console):
    put(console, "user=vera", "", request_rate={"limit": 2, "shadow": True})
    page = opened(console, "user=vera")
    expect(page.locator("#shadow-rows tr")).to_have_count(1)
    console.page.fill("#edit-rows input", "-5")
    console.page.click("text=Save")
    console.says("/request_rate")
    reads = console.page.evaluate("shadowReads.length")
    console.page.wait_for_function(f"() => shadowReads.length > {reads + 1}")
    console.says("/request_rate")


def test_ladder_of_a_caller_is_drawn_as_steps(console: Console):
    put(console, "user=*", "", request_rate=100)
    put(console, "user=will,client-id=*", "", request_rate=10)
    page = opened(console, "user=*")
    expect(page.locator("#ladder-hint")).to_be_visible()  # a default has no caller of its own
    console.page.fill("#ladder-of [name=principal]", "will")
    console.page.fill("#ladder-of [name=client_id]", "etl")
    console.page.press("#ladder-of [name=client_id]", "Enter")
    ladder = page.locator("#ladder article", has_text="request_rate").locator("li")
    expect(ladder).to_have_count(8)
    expect(ladder.nth(1)).to_have_text("user=will,client-id=* 10decides")
    expect(ladder.nth(5)).to_have_text("user=* 100not reached")
    lefts = ladder.evaluate_all("steps => steps.map(step => step.getBoundingClientRect().left)")
    assert lefts == sorted(set(lefts)), "each step is further to the right"
    console.page.click("#edit-close")
    page = opened(console, "user=will,client-id=*")
    console.page.fill("#ladder-of [name=client_id]", "etl")
    console.page.click("#ladder-of button")
    page.locator("#ladder a").click()
    expect(console.page.locator("#buckets")).to_be_visible()
    expect(console.page.locator("#which [name=bucket]")).to_have_value("user=will,client-id=etl")
    console.node.http.delete("/v1/quotas/user=*")


def test_names_and_reasons_are_never_markup(console: Console):
    urls = {text: f"/v1/quotas/user={quote(text, safe='')}" for text in HOSTILE}
    for text, url in urls.items():
        reason = text.encode() if text.isprintable() and text == text.strip() else b"x"
        shadow = {"request_rate": {"limit": 1, "shadow": True}}
        console.node.http.put(url, json=shadow, headers=[(b"X-Reason", reason)]).raise_for_status()
    page = console.unlocked().page
    for text, url in urls.items():
        entity = console.node.http.get(url).json()["entity"]
        page.evaluate(
            "name => [...byId('quota-rows').rows].find((row) => row.dataset.entity === name).click()", entity
        )
        expect(page.locator("#edit-title")).to_have_text(entity)
        expect(page.locator("#shadow-rows button")).to_have_count(1)
        expect(page.locator("#ladder li").first).to_contain_text(entity)
        assert page.input_value("#ladder-of [name=principal]") == text
        expect(page.locator("#history li")).to_have_count(1)
        page.click("#shadow-rows button")
        expect(page.locator("#promote-title")).to_contain_text(entity)
        expect_no_markup(console)
        page.click("#promote-yes")
        expect(page.locator("#history li")).to_have_count(2)
        page.get_by_role("button", name="Undo").click()
        expect(page.locator("#history li")).to_have_count(3)
        expect_no_markup(console)
        console.node.http.delete(url)


def test_quota_page_fits_a_narrow_window(console: Console):
    put(console, f"user={'x' * 200}", "y" * 200, request_rate={"limit": 2, "shadow": True})
    opened(console, f"user={'x' * 200}")
    expect(console.page.locator("#shadow-rows tr")).to_have_count(1)
    expect(console.page.locator("#ladder li").first).to_be_visible()
    console.page.set_viewport_size({"width": 360, "height": 800})
    eventually(lambda: console.page.evaluate("document.documentElement.scrollWidth") <= 360)
