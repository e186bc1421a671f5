"""Hostile texts in each place of each answer, in each view: also where the service admits no such text.

The answers are those of the OpenAPI document's examples, with hostile texts in place of theirs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest
from playwright.sync_api import Page, Route, expect

from tests.console.conftest import Console
from tests.console.markup import HOSTILE, TEXTS, expect_no_markup
from tests.service import eventually

PATHS: Final = json.loads(Path("openapi/openapi.json").read_text(encoding="utf-8"))["paths"]
ALL: Final = " ".join(TEXTS)
MORE: Final[dict[str, Any]] = {
    "/v1/quotas": {
        "quotas": [
            {
                "entity": "user=alice",
                "quotas": {"request_rate": {"limit": 5, "enforcement": "deny", "shadow": True}},
                "bounds": {"request_rate": {"text": "never more than 5"}},
                "version": 17,
            }
        ]
    },
    "/v1/volumes": {"drill": {"who": "admin", "factor": 0.5, "until_ms": 2**52}},
    "/v1/overview": {"stores": [{"primary": "a", "memory_bytes": 1, "max_bytes": 2, "faults": ["full"]}]},
    "/v1/reports": {"reports": [{"name": "a", "kind": "whatif", "from_ms": None, "to_ms": None}]},
}
"""Parts of answers that the examples do not have."""


def has_text(value: object) -> bool:
    if isinstance(value, dict | list):
        return any(map(has_text, value.values() if isinstance(value, dict) else value))
    return isinstance(value, str)


def spoiled(value: Any, text: str) -> Any:
    """The value with this text in place of all its texts; fields keep their names."""
    if isinstance(value, dict):
        return {field: spoiled(each, text) for field, each in value.items()}
    if isinstance(value, list):
        return [spoiled(each, text) for each in value]
    return text if isinstance(value, str) else value


def hostile(answer: dict[str, Any]) -> dict[str, Any]:
    """The answer with all texts in each of its fields; a list of objects has one for each text."""
    return {
        field: [spoiled(value[place % len(value)], text) for place, text in enumerate((*TEXTS, ALL))]
        if isinstance(value, list) and has_text(value)
        else spoiled(value, ALL)
        for field, value in answer.items()
    }


def answered(route: Route) -> None:
    """Answer with the hostile form of the documented example."""
    path = route.request.url.partition("?")[0].partition("/console")[0].split("/", 3)[3]
    name = f"/{path}"
    if name.startswith("/v1/reports/"):
        name = "/v1/reports/{name}"
    responses = PATHS[name][route.request.method.lower()]["responses"]
    example = next(responses[status] for status in ("200", "201") if status in responses)["content"]
    found = example["application/json"]["example"]
    route.fulfill(json=hostile({**found, **MORE.get(name, {})}))


def refused(route: Route) -> None:
    """Answer with a problem of hostile texts."""
    problem = {"detail": ALL, "errors": [{"field": text, "message": text} for text in TEXTS]}
    route.fulfill(status=422, json=problem)


def opened_quota(page: Page) -> None:
    page.locator("#quota-rows tr").last.click()
    expect(page.locator("#history li")).to_have_count(len(TEXTS) + 1)
    page.locator("#ladder li").first.wait_for()
    page.locator("#shadow-rows button").last.click()


def explained(page: Page) -> None:
    page.fill("#who [name=principal]", ALL)
    page.press("#who [name=principal]", "Enter")


def watched(page: Page) -> None:
    page.fill("#which [name=bucket]", ALL)
    page.press("#which [name=bucket]", "Enter")


def made_key(page: Page) -> None:
    page.locator("#key-rows tr").last.get_by_role("button", name="Rotate").click()
    expect(page.locator("#rotation-title")).to_contain_text("<script>")
    page.click("#rotation-no")
    page.fill("#key-name", "any")
    page.press("#key-name", "Enter")
    expect(page.locator("#secret-title")).to_contain_text("<script>")


def opened_report(page: Page) -> None:
    page.locator("#report-rows tr").last.click()


DEEDS: Final = {
    "overview": None,
    "quotas": opened_quota,
    "effective": explained,
    "buckets": watched,
    "health": None,
    "volumes": None,
    "keys": made_key,
    "reports": opened_report,
}


def expect_texts(console: Console, place: str, texts: tuple[str, ...]) -> None:
    """Each text comes to be shown in an element, as it is."""
    missing = "([id, texts]) => texts.filter((text) => !byId(id).textContent.includes(text))"
    eventually(lambda: console.page.evaluate(missing, [place, texts]) == [])
    expect_no_markup(console)


@pytest.mark.parametrize("view", DEEDS)
def test_no_text_of_an_answer_is_markup(console: Console, view: str):
    page = console.page
    page.route("**/v1/**", answered)
    page.route("**/health/ready", answered)
    console.view(view)
    if deed := DEEDS[view]:
        deed(page)
    expect_texts(console, view, TEXTS)
    page.evaluate("lookAtState()")
    expect_texts(console, "state", TEXTS)


@pytest.mark.parametrize("view", DEEDS)
def test_no_text_of_a_problem_is_markup(console: Console, view: str):
    page = console.page
    page.route("**/v1/**", refused)
    page.route("**/metrics", refused)
    console.view(view)
    if deed := {"effective": explained, "buckets": watched}.get(view):
        deed(page)
    expect_texts(console, "problem", TEXTS)


def test_names_of_brokers_and_disks_are_text_in_three_views(console: Console):
    volumes = [
        {"broker": text, "dir": text, "total_bytes": 1_000, "available_bytes": place}
        for place, text in enumerate(HOSTILE)
    ]
    node = console.unlocked().node
    body = {"volumes": volumes, "complete": True}
    eventually(lambda: node.http.post("/v1/volumes", json=body).is_success)  # the store may be busy
    console.view("volumes")
    expect_texts(console, "volumes", HOSTILE)
    console.view("overview")
    expect(console.page.locator("#disk-rows meter")).to_have_count(20)
    expect_no_markup(console)
    console.view("health")  # which reads all names in the node's metrics
    expect(console.page.locator("#health-list")).to_contain_text("Clock corrections")
    expect(console.page.locator("#problem")).to_be_hidden()
    none = {"volumes": [], "complete": True}
    eventually(lambda: node.http.post("/v1/volumes", json=none).is_success)
