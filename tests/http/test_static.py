"""Static content: kept bytes and their ETags, pages without scripts of other hosts, and the root."""

from __future__ import annotations

import json
import re
from urllib.parse import urljoin

import pytest

from app.http.openapi import pages
from tests.http.conftest import Node

BROWSER = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
PATHS = ["/openapi.json", "/docs", "/redoc", "/console", *pages.FILES]


@pytest.mark.parametrize("path", PATHS)
async def test_static_content_has_an_etag_and_is_not_sent_twice(node: Node, path: str):
    first = await node.http.get(path)
    assert first.status_code == 200
    tag = first.headers["etag"]
    assert first.headers["cache-control"] == "no-cache"
    for known in (tag, f"W/{tag}", f'"x", {tag}', "*"):
        again = await node.http.get(path, headers={"If-None-Match": known})
        assert (again.status_code, again.content) == (304, b"")
        assert again.headers["etag"] == tag
    assert (await node.http.get(path, headers={"If-None-Match": '"x"'})).content == first.content
    head = await node.http.head(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == first.headers["content-length"]
    refused = await node.http.post(path)
    assert refused.status_code == 405
    assert refused.headers["allow"] == "GET, HEAD"


@pytest.mark.parametrize("path", ["/docs", "/redoc", "/console"])
async def test_page_policy_allows_no_foreign_code(node: Node, path: str):
    answer = await node.http.get(path)
    rules = dict(rule.split(" ", 1) for rule in answer.headers["content-security-policy"].split("; "))
    assert rules["default-src"] == "'none'"
    assert rules["connect-src"] == "'self'"
    assert rules["frame-ancestors"] == "'none'"
    for kind in ("script-src", "style-src"):
        assert all(re.fullmatch(r"'self'|'sha256-[^']+'", source) for source in rules[kind].split())
    assert not re.search(r"(src|href)=\"?(https?:)?//", answer.text)
    for script in re.findall(r"<script>(.*?)</script>", answer.text, re.DOTALL):
        assert pages.hash_of(script) in rules["script-src"]


async def test_root_redirects_browsers_to_the_console_and_lists_paths_for_others(node: Node):
    led = await node.http.get("/", headers=BROWSER)
    assert (led.status_code, led.headers["location"]) == (302, "console")
    assert led.headers["vary"] == "Accept"
    answer = await node.http.get("/", headers={"Accept": "*/*"})
    assert answer.status_code == 200
    places = answer.json()
    for path in (places["console"], places["openapi"], *places["docs"], places["ready"]):
        assert not path.startswith("/"), "a proxy may have removed a prefix"
        assert (await node.http.get(f"/{path}")).status_code == 200
    assert (await node.http.post("/", headers=BROWSER)).status_code == 405
    wrong = await node.http.get("/", headers={"Authorization": "Bearer x", **BROWSER})
    assert wrong.status_code == 401


async def test_the_document_is_made_once(node: Node):
    first, again = [(await node.http.get("/openapi.json")).content for _ in range(2)]
    assert first == again
    assert json.loads(first)["openapi"].startswith("3.1")


@pytest.mark.parametrize("path", ["/docs", "/redoc", "/console"])
async def test_slash_at_the_end_leads_to_the_page(node: Node, path: str):
    led = await node.http.get(f"{path}/")
    assert (led.status_code, led.headers["location"]) == (302, f"..{path}")
    assert (await node.http.head(f"{path}/")).status_code == 302
    assert (await node.http.post(f"{path}/")).status_code == 405


async def test_document_names_its_own_place_as_the_server(node: Node):
    [server] = (await node.http.get("/openapi.json")).json()["servers"]
    at = "https://host.example/quotagate/openapi.json"
    assert urljoin(at, server["url"]) == "https://host.example/quotagate/"
