"""A refresh, and an answer that comes late or never, leave the user focus, input, and reasons."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from playwright.sync_api import Dialog, Page, Request, Route, expect

from tests.console.conftest import Console
from tests.service import eventually

SHADOW = {"limit": 2, "shadow": True}
OVERVIEW = "**/v1/overview?*"


def hold(page: Page, url: str) -> list[Route]:
    """The requests for a URL from now on, which wait until the test answers them."""
    held: list[Route] = []

    def keep(route: Route) -> None:
        held.append(route)

    page.route(url, keep)
    return held


def first_of(page: Page, held: list[Route]) -> Route:
    """The first held request, once it is there."""
    eventually(lambda: page.evaluate("1") and held)  # events come while the page is asked
    return held[0]


def settle(page: Page) -> None:
    """Wait until the page has taken all answers that it got before."""
    page.evaluate("ask('health/ready')")


def refresh(page: Page, url: str) -> None:
    """Wait until the page has taken an answer that it asked for after this call."""
    for _ in range(2):
        with page.expect_response(url):
            pass
    settle(page)


def opened(console: Console, *names: str, **quota: Any) -> Page:
    """The page of the first of these users; each has a quota."""
    for name in names:
        console.node.put(f"user={name}", request_rate=quota or 5)
    page = console.unlocked().page
    page.click(f"#quota-rows tr[data-entity='user={names[0]}']")
    page.wait_for_selector("#history li")
    return page


def of_a_proxy(status: int) -> Callable[[Route], None]:
    """Answers with a page of a proxy."""

    def answer(route: Route) -> None:
        route.fulfill(status=status, content_type="text/html", body="<p>a proxy</p>")

    return answer


def rate(console: Console, name: str) -> float:
    limit: float = console.node.http.get(f"/v1/quotas/user={name}").json()["quotas"]["request_rate"]["limit"]
    return limit


def test_refresh_keeps_focus_and_a_click_that_has_begun(console: Console):
    page = opened(console, "ada", **SHADOW)
    button = page.locator("#shadow-rows button")
    button.focus()
    refresh(page, "**/v1/quotas:shadow?*")
    expect(button).to_be_focused()
    button.hover()
    page.mouse.down()
    refresh(page, "**/v1/quotas:shadow?*")
    page.mouse.up()
    expect(page.locator("#promote")).to_be_visible()
    refresh(page, "**/v1/quotas:shadow?*")
    page.click("#promote-no")
    expect(button).to_be_focused()


def test_focus_and_click_stay_with_their_row_when_rows_change_places(console: Console):
    throttled = [
        {"bucket": f"user={name}", "quota": "request_rate", "since_ms": 1, "asks": 5, "throttle_ms": 10}
        for name in ("ada", "bob", "cyd")
    ]
    page = console.page

    def with_throttled(route: Route) -> None:
        found = console.node.http.get("/v1/overview").json()
        route.fulfill(json=found | {"throttled": throttled})

    page.route(OVERVIEW, with_throttled)
    console.unlocked().view("overview")
    ada = page.locator("#busiest-rows a", has_text="user=ada")
    ada.focus()
    throttled.reverse()
    expect(page.locator("#busiest-rows a").first).to_have_text("user=cyd")
    expect(ada).to_be_focused()
    ada.hover()
    page.mouse.down()
    throttled.reverse()
    refresh(page, OVERVIEW)
    expect(page.locator("#busiest-rows a").first).to_have_text("user=cyd")
    page.mouse.up()
    expect(page.locator("#which [name=bucket]")).to_have_value("user=ada")


def test_ladder_is_that_of_the_newest_caller(console: Console):
    console.node.put("user=*", request_rate=100)
    console.node.put("user=ada", request_rate=5)
    page = console.unlocked().page
    held = hold(page, "**/v1/quotas:effective?principal=ada")
    page.click("#quota-rows tr[data-entity='user=ada']")
    late = first_of(page, held)
    page.click("#quota-rows tr[data-entity='user=*']")
    expect(page.locator("#ladder-hint")).to_be_visible()
    with page.expect_response("**/v1/quotas:effective?*"):
        late.continue_()
    settle(page)
    expect(page.locator("#ladder")).to_be_empty()

    held.clear()
    console.view("effective")
    for name in ("ada", "bob"):
        page.fill("#who [name=principal]", name)
        page.press("#who [name=principal]", "Enter")
    late = first_of(page, held)
    expect(page.locator("#explained")).to_contain_text("user=bob")
    with page.expect_response("**/v1/quotas:effective?principal=ada"):
        late.continue_()
    settle(page)
    expect(page.locator("#explained")).to_contain_text("user=bob")
    console.node.http.delete("/v1/quotas/user=*")


def test_late_answer_to_save_leaves_the_page_that_was_opened_meanwhile(console: Console):
    page = opened(console, "ada", "bob")
    held = hold(page, "**/v1/quotas/user=ada")
    page.fill("#edit-rows input", "9")
    page.click("text=Save")
    saved = first_of(page, held)
    page.press("#edit-rows input", "Enter")
    page.once("dialog", lambda dialog: dialog.accept())
    page.click("#quota-rows tr[data-entity='user=bob']")
    page.fill("#edit-rows input", "77")
    with page.expect_response("**/v1/quotas?*"):  # the list is read when the change is made
        saved.continue_()
    settle(page)
    assert rate(console, "ada") == 9
    assert len(held) == 1, "it was saved once"
    expect(page.locator("#edit-title")).to_have_text("user=bob")
    expect(page.locator("#edit-rows input")).to_have_value("77")
    expect(page.locator("#edit-rows input")).to_be_focused()


def test_change_is_made_even_if_the_list_cannot_be_read_after_it(console: Console):
    page = opened(console, "ada")
    page.route("**/v1/quotas?*", lambda route: route.abort())
    for limit in (7, 8):
        page.fill("#edit-rows input", str(limit))
        page.click("text=Save")
        console.says("Quotagate does not answer")
        page.wait_for_function("limit => editing.quotas.request_rate.limit === limit", arg=limit)
        assert rate(console, "ada") == limit


def test_reason_of_a_refused_action_stays(console: Console):
    console.node.put("user=ada", request_rate=5)
    console.node.ask(principal="ada", usage={"requests": 1})
    page = console.unlocked().view("buckets").page
    page.fill("#which [name=bucket]", "user=ada")
    page.press("#which [name=bucket]", "Enter")
    page.route("**/v1/buckets:reset", lambda route: route.fulfill(status=503, json={"detail": "no room"}))
    page.once("dialog", lambda dialog: dialog.accept())
    page.click("#reset")
    console.says("no room")
    refresh(page, "**/v1/buckets?*")
    expect(page.locator("#problem")).to_have_text("no room")


def test_late_failure_of_a_view_that_was_left_is_not_said(console: Console):
    page = console.unlocked().page
    held = hold(page, "**/v1/volumes")
    console.view("volumes")
    late = first_of(page, held)
    console.view("effective")  # which does not refresh, so nothing takes the failure away
    with page.expect_response("**/v1/volumes"):
        late.fulfill(status=503, json={"detail": "late"})
    settle(page)
    expect(page.locator("#problem")).to_be_hidden()


def test_answer_that_never_comes_is_given_up_and_asked_for_one_at_a_time(console: Console):
    page = console.unlocked().page
    page.evaluate(
        "const limit = AbortSignal.timeout; AbortSignal.timeout = () => limit.call(AbortSignal, 2500)"
    )
    waiting, most, ended = 0, 0, 0

    def begin(request: Request) -> None:
        nonlocal waiting, most
        waiting += request.url.endswith("/v1/volumes")
        most = max(most, waiting)

    def end(request: Request) -> None:
        nonlocal waiting, ended
        waiting -= request.url.endswith("/v1/volumes")
        ended += request.url.endswith("/v1/volumes")

    page.on("request", begin)
    page.on("requestfailed", end)
    hold(page, "**/v1/volumes")
    console.view("volumes")
    console.says("Quotagate does not answer")
    eventually(lambda: page.evaluate("1") and ended >= 2)
    assert most == 1
    page.unroute("**/v1/volumes")
    expect(page.locator("#factor-list")).to_contain_text("Throttle factor")
    expect(page.locator("#problem")).to_be_hidden()


def test_state_of_the_node_needs_no_key_and_says_what_answers_instead(console: Console):
    page = console.page
    keys: list[str | None] = []

    def note(request: Request) -> None:
        if "/health/" in request.url:
            keys.append(request.headers.get("authorization"))

    page.on("request", note)
    console.unlocked().view("health")
    expect(page.locator("#state")).to_have_text("this node: ready")
    expect(page.locator("#health-list")).to_contain_text("Clock corrections")
    assert set(keys) == {None}
    said = {502: "502 Bad Gateway", 200: "Something else than Quotagate answers."}
    for status, text in said.items():
        page.route("**/health/ready", of_a_proxy(status))
        page.evaluate("lookAtState()")
        expect(page.locator("#state")).to_have_text(f"this node: {text}")


def test_unsaved_quotas_are_not_discarded_without_a_question(console: Console):
    page = opened(console, "ada", "bob")
    questions: list[str] = []
    is_yes = False

    def answer(dialog: Dialog) -> None:
        questions.append(dialog.message)
        dialog.accept() if is_yes else dialog.dismiss()

    page.on("dialog", answer)
    page.fill("#edit-rows input", "77")
    page.keyboard.press("Escape")
    page.keyboard.press("1")
    expect(page.locator("#overview")).to_be_visible()
    page.keyboard.press("Escape")
    console.view("quotas")
    page.click("#edit-close")
    page.click("#quota-rows tr[data-entity='user=bob']")
    page.focus("#edit-close")
    page.keyboard.press("Escape")
    expect(page.locator("#edit-rows input")).to_have_value("77")
    assert questions == ["Discard the changes of user=ada?"] * 3
    is_yes = True
    page.click("#quota-rows tr[data-entity='user=bob']")
    expect(page.locator("#edit-title")).to_have_text("user=bob")
    page.click("#edit-close")
    expect(page.locator("#quota-page")).to_be_hidden()
    assert len(questions) == 4, "nothing was unsaved"
