"""The keys in the browser: they are made, rotated and revoked, and a secret is shown once."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest
from playwright.sync_api import Page, Route, expect

from app.domain.grant import PERMISSIONS
from tests.console.conftest import Console
from tests.service import eventually


def keys(console: Console) -> dict[str, dict[str, Any]]:
    return {key["name"]: key for key in console.node.http.get("/v1/keys").json()["keys"]}


def statuses(console: Console, secret: str) -> tuple[int, int]:
    """The answers to a read and to an ask with a key."""
    headers = {"authorization": f"Bearer {secret}"}
    with httpx.Client(base_url=console.node.url, headers=headers, timeout=60, trust_env=False) as client:
        read = client.get("/v1/quotas").status_code
        ask = client.post("/v1/decisions", json={"principal": "acme", "usage": {"requests": 1}}).status_code
    return read, ask


@pytest.fixture
def page(console: Console) -> Page:
    return console.unlocked().view("keys").page


def made(page: Page, name: str, **fields: str) -> str:
    """Create a key with the form; returns its secret."""
    page.fill("#key-name", name)
    for field, text in fields.items():
        page.fill(f"#key-{field}", text)
    page.press("#key-name", "Enter")
    return taken(page)


def taken(page: Page) -> str:
    """The secret that is shown; afterwards it is nowhere in the page."""
    secret = page.input_value("#secret[open] #secret-text")
    assert re.fullmatch(r"qg_\S{43}", secret)
    assert page.evaluate("document.activeElement.id") == "secret-text", "it is selected, to be copied"
    page.click("#secret-close")
    expect(page.locator("#secret-text")).to_have_value("")
    assert secret not in page.content()
    return secret


def test_scopes_of_the_form_are_those_of_the_service(page: Page):
    scopes = page.locator("#key-new [name=scope]").evaluate_all("boxes => boxes.map((box) => box.value)")
    assert tuple(scopes) == PERMISSIONS


def test_key_is_made_with_its_scopes_bindings_and_end(console: Console, page: Page):
    secret = made(page, "gate-1", bound="user=acme*\n\n ip=10.0.0.* ", expires="2049-05-04T12:30")
    key = keys(console)["gate-1"]
    assert (key["scopes"], key["bound_to"]) == (["decide"], ["user=acme*", "ip=10.0.0.*"])
    assert key["expires_ms"] == page.evaluate("new Date('2049-05-04T12:30').getTime()")
    row = page.locator("#key-rows tr[data-key=gate-1]")
    expect(row).to_contain_text("user=acme*")
    expect(row).to_contain_text("expires 5/4/49")
    eventually(lambda: statuses(console, secret) == (403, 200))
    page.uncheck("#key-new [value=decide]")
    page.check("#key-new [value=read]")
    reader = made(page, "reader")
    assert keys(console)["reader"]["scopes"] == ["read"]
    eventually(lambda: statuses(console, reader) == (200, 403))


def test_refusals_name_the_field(console: Console, page: Page):
    page.fill("#key-name", "-odd-")
    page.press("#key-name", "Enter")
    console.says("/name")
    page.fill("#key-name", "odd")
    page.fill("#key-bound", "nobody")
    page.press("#key-name", "Enter")
    console.says("/bound_to/0")
    page.fill("#key-bound", "user=a")
    page.check("#key-new [value=admin]")
    page.press("#key-name", "Enter")
    console.says("is valid with the scopes")
    assert "odd" not in keys(console)
    expect(page.locator("#secret")).to_be_hidden()


def test_key_is_rotated_and_the_one_before_lives_on(console: Console, page: Page):
    old = made(page, "rotating")
    row = page.locator("#key-rows tr[data-key=rotating]")
    row.get_by_role("button", name="Rotate").click()
    page.keyboard.press("Escape")
    assert keys(console)["rotating"]["rotated_ms"] is None
    row.get_by_role("button", name="Rotate").press("Enter")
    page.select_option("#rotation-grace", "86400000")
    page.click("#rotation-form .strong")
    new = taken(page)
    assert new != old
    key = keys(console)["rotating"]
    assert key["former_until_ms"] - key["rotated_ms"] == 86_400_000
    expect(row).to_contain_text("the key before is valid until")
    eventually(lambda: statuses(console, new)[1] == statuses(console, old)[1] == 200)


def test_key_is_revoked_after_a_question(console: Console, page: Page):
    secret = made(page, "revoked")
    row = page.locator("#key-rows tr[data-key=revoked]")
    page.once("dialog", lambda dialog: dialog.dismiss())
    row.get_by_role("button", name="Revoke").click()
    assert "revoked" in keys(console)
    page.once("dialog", lambda dialog: dialog.accept())
    row.get_by_role("button", name="Revoke").click()
    expect(row).to_have_count(0)
    assert "revoked" not in keys(console)
    eventually(lambda: statuses(console, secret) == (401, 401))


def test_secret_is_shown_in_any_view_and_not_lost_by_escape(page: Page, console: Console):
    held: list[Route] = []

    def keep(route: Route) -> None:
        if route.request.method == "POST":
            held.append(route)
        else:
            route.continue_()

    page.route("**/v1/keys", keep)
    page.fill("#key-name", "late")
    page.press("#key-name", "Enter")
    eventually(lambda: page.evaluate("1") and held)
    console.view("health")
    held[0].continue_()
    expect(page.locator("#secret")).to_be_visible()
    for _ in range(3):
        page.keyboard.press("Escape")
    taken(page)


def test_reader_sees_no_keys(console: Console):
    answer = console.node.http.post("/v1/keys", json={"name": "only-reads", "scopes": ["read"]})
    secret = answer.json()["key"]
    eventually(lambda: statuses(console, secret) == (200, 403))
    console.page.fill("#key", secret)
    console.page.keyboard.press("Enter")
    console.view("keys")
    console.says("The key lacks the scope admin")
    assert console.rows("key-rows") == []


def test_empty_list_says_what_to_do(console: Console):
    page = console.unlocked().page
    page.route("**/v1/keys", lambda route: route.fulfill(json={"keys": []}))
    console.view("keys")
    expect(page.locator("#key-rows")).to_contain_text("Create one for each program")


def test_keys_fit_a_narrow_window(console: Console, page: Page):
    made(page, "n" * 64, bound=f"user={'x' * 200}")
    page.set_viewport_size({"width": 360, "height": 800})
    eventually(lambda: page.evaluate("document.documentElement.scrollWidth") <= 360)
