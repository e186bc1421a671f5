"""The console and the documents below a path of a host that serves another application at `/`."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect

from tests.console import decoy as decoys
from tests.console.conftest import PUSHED, Console
from tests.console.decoy import Decoy
from tests.ports import free_port
from tests.programs import end
from tests.report_folders import TABLES, made
from tests.service import Service, eventually, running
from tests.stores import Server
from tests.tools import need

PREFIXES: Final = ("/quotagate/", "/ops/tools/quota-gate/")
NGINX: Final = """
events {}
http {
    access_log off;
    client_body_temp_path b; proxy_temp_path p; fastcgi_temp_path f; uwsgi_temp_path u; scgi_temp_path s;
    map $request_uri $path_of_quotagate { "~^/ops/tools/quota-gate(?<rest>/.*)$" $rest; }
    server {
        listen 127.0.0.1:PORT;
        location / { proxy_pass http://127.0.0.1:DECOY; }
        location /quotagate/ { proxy_pass http://127.0.0.1:NODE/; }
        location /ops/tools/quota-gate/ { proxy_pass http://127.0.0.1:NODE$path_of_quotagate; }
        # A proxy that sends people without a session to a login page.
        location /guarded/ { proxy_pass http://127.0.0.1:NODE/; }
        location /guarded/v1/ { return 302 /login; }
    }
}
"""


@dataclass(frozen=True)
class Host:
    """One host name, with the other application at `/`."""

    url: str
    decoy: Decoy
    node: Service


@pytest.fixture(scope="module")
def node(store: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A node that shows a report."""
    folder = tmp_path_factory.mktemp("reports")
    made(folder, "nightly", report={"log": "log", "from_ms": 1, "to_ms": 2}, tables=TABLES)
    with running(store_url=store.url, environment={**PUSHED, "QUOTAGATE_REPORTS": str(folder)}) as one:
        yield one


@pytest.fixture(scope="module")
def proxied(node: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    folder: Path = tmp_path_factory.mktemp("nginx")
    port = free_port()
    with decoys.running() as decoy:
        text = NGINX.replace("PORT", str(port)).replace("DECOY", str(decoy.port))
        (folder / "nginx.conf").write_text(text.replace("NODE", str(node.address[1])), encoding="utf-8")
        nginx = subprocess.Popen(
            [
                *(str(need("nginx")), "-p", ".", "-c", "nginx.conf", "-e", "stderr"),
                *("-g", "daemon off; master_process off; pid nginx.pid;"),
            ],
            cwd=folder,
            stdin=subprocess.DEVNULL,
        )
        url = f"http://127.0.0.1:{port}"

        def is_up() -> bool:
            assert nginx.poll() is None
            try:
                return httpx.get(f"{url}/quotagate/health/ready", timeout=30, trust_env=False).is_success
            except httpx.TransportError:
                return False

        try:
            eventually(is_up)
            yield Host(url, decoy, node)
        finally:
            end(nginx)


@pytest.fixture
def host(proxied: Host) -> Host:
    proxied.decoy.heads.clear()
    return proxied


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    context = browser.new_context()
    context.set_default_timeout(60_000)
    yield context
    context.close()


def opened(context: BrowserContext, url: str) -> Page:
    page = context.new_page()
    page.goto(url)
    return page


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("end_", ["", "/", "/console", "/console/", "/console#health"])
def test_browser_lands_at_the_console_below_the_prefix(
    context: BrowserContext, host: Host, prefix: str, end_: str
):
    page = opened(context, host.url + prefix.rstrip("/") + end_)
    assert page.url.startswith(f"{host.url}{prefix}console#")
    expect(page.locator("#state")).to_have_text("this node: ready")
    assert host.decoy.heads == []


@pytest.mark.parametrize("page_name", ["docs", "redoc"])
@pytest.mark.parametrize("end_", ["", "/"])
def test_documents_below_the_prefix_load_their_files_there(
    context: BrowserContext, host: Host, page_name: str, end_: str
):
    page = opened(context, f"{host.url}/quotagate/{page_name}{end_}")
    shown = {"docs": "#page .opblock-summary", "redoc": "#page h2:has-text('Decide one ask')"}[page_name]
    page.locator(shown).first.wait_for()
    assert page.url == f"{host.url}/quotagate/{page_name}"
    assert host.decoy.heads == []


def look_at_the_overview(page: Page) -> None:
    expect(page.locator("#curves figure")).to_have_count(4)
    with page.expect_response(lambda answer: "resolution=minute" in answer.url) as day:
        page.check("input[value=minute]")
    assert day.value.ok
    with page.expect_response(lambda answer: "resolution=second" in answer.url) as lately:
        page.check("input[value=second]")
    assert lately.value.ok
    expect(page.locator("#disk-factor")).to_contain_text("Throttle factor")


def change_quotas(page: Page, node: Service, entity: str) -> None:
    """Make a shadow quota, make it live, undo that, follow the ladder to the bucket, and delete all."""
    page.click("#new")
    page.fill("#edit-entity", entity)
    page.fill("#edit-rows input", '{"limit": 7, "shadow": true}')
    page.fill("#edit-reason", "a try")
    page.click("#editor button.strong")
    page.wait_for_selector(f"#quota-rows tr[data-entity='{entity}']")
    page.click("#shadow-rows button")
    page.click("#promote-yes")
    expect(page.locator("#history li")).to_have_count(2)
    assert node.http.get(f"/v1/quotas/{entity}").json()["quotas"] == {"request_rate": {"limit": 7}}
    page.click("#history .undo")
    expect(page.locator("#history li")).to_have_count(3)
    expect(page.locator("#ladder li.found")).to_contain_text(entity)
    page.click("#ladder a")
    watch_a_bucket(page, entity)
    page.click("#tab-quotas")
    page.click("#edit-delete")
    eventually(lambda: node.http.get(f"/v1/quotas/{entity}").status_code == 404)


def watch_a_bucket(page: Page, bucket: str) -> None:
    expect(page.locator("#watched")).to_contain_text(f"{bucket}, as of")
    page.locator("#levels canvas").wait_for()
    with page.expect_response("**/v1/buckets:reset") as reset:
        page.click("#reset")
    assert reset.value.ok


def manage_keys(page: Page) -> None:
    page.fill("#key-name", "gateway")
    page.press("#key-name", "Enter")
    page.click("#secret-close")
    row = page.locator("#key-rows tr[data-key=gateway]")
    row.get_by_role("button", name="Rotate").click()
    page.click("#rotation-form .strong")
    page.click("#secret-close")
    expect(row).to_contain_text("rotated")
    row.get_by_role("button", name="Revoke").click()
    expect(row).to_have_count(0)


def read_a_report(page: Page) -> None:
    page.locator("#report-rows tr", has_text="nightly").click()
    expect(page.locator("#report h2")).to_have_text("audit nightly")
    expect(page.locator("#report canvas")).to_have_count(1)


def explain_limits(page: Page) -> None:
    page.fill("#who [name=principal]", "seen")
    page.click("#who button")
    page.click("#explained article:has-text('request_rate') a")
    watch_a_bucket(page, "user=seen")


@pytest.mark.parametrize("prefix", PREFIXES)
def test_everything_that_a_person_does_in_the_console_stays_below_the_prefix(
    context: BrowserContext, host: Host, prefix: str
):
    host.node.put("user=seen", request_rate=5)
    page = opened(context, f"{host.url}{prefix}")
    complaints: list[str] = []
    page.on("console", lambda said: complaints.append(said.text) if said.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("dialog", lambda dialog: dialog.accept())
    console = Console(page, host.node)
    context.on("request", lambda request: console.asked.append(request.url))
    console.unlocked()
    assert any("user=seen" in row for row in console.rows("quota-rows"))
    change_quotas(page, host.node, f"user=made-{PREFIXES.index(prefix)}")
    for view, deed in {
        "overview": look_at_the_overview,
        "effective": explain_limits,
        "keys": manage_keys,
        "reports": read_a_report,
    }.items():
        deed(console.view(view).page)
    console.view("health")
    expect(page.locator("#health-list")).to_contain_text("ready")
    console.view("volumes")
    expect(page.locator("#volume-rows")).to_contain_text("No disk is known yet")
    assert host.decoy.heads == []
    assert [text for text in complaints if "Failed to load resource" not in text] == []
    asked = {url.removeprefix(f"{host.url}{prefix}").partition("?")[0] for url in console.asked}
    assert asked >= {"v1/overview", "v1/quotas:history", "v1/quotas:shadow", "v1/reports/nightly"}
    assert [url for url in asked if "://" in url] == []


NAMES: Final = (
    *("..", "../..", "../../../login", "user=../../../login", "%2e%2e/%2E%2e/%2e./login", "\\..\\..\\login"),
    *("//evil", "/login", "user=a/../../../../login?x=", "user=%252e%252e%252f..%252f..%252f..%252flogin"),
    *("..;/..;/..;/login", "http://127.0.0.1/login", ".%2e\t/../../login"),
)


@pytest.mark.parametrize("name", NAMES)
def test_name_that_a_person_types_leads_nowhere_else(context: BrowserContext, host: Host, name: str):
    page = opened(context, f"{host.url}/quotagate/console")
    Console(page, host.node).unlocked()
    page.click("#new")
    page.fill("#edit-entity", name)
    page.fill("#edit-rows input", "7")
    page.click("#editor button.strong")
    page.wait_for_selector("#problem:not([hidden])")
    page.evaluate("(path) => ask(path).catch((error) => error.message)", f"v1/quotas/{name}")
    for path in ("/login", "//127.0.0.1/login", "../login", "v1/../../login", "https://127.0.0.1/login"):
        refusal = page.evaluate("(path) => ask(path).catch((error) => error.message)", path)
        assert refusal == "This name leads to another place than Quotagate."
    assert host.decoy.heads == []


def test_stored_name_that_has_dots_and_slashes_is_not_sent(context: BrowserContext, host: Host):
    """Anybody with the scope write can make it; nginx resolves the dots before it chooses an application."""
    host.node.put("user=a%2F..%2F..%2F..%2F..%2Flogin", request_rate=5)
    page = opened(context, f"{host.url}/quotagate/console")
    Console(page, host.node).unlocked()
    page.click("#quota-rows tr:has-text('login')")
    page.wait_for_selector("#history li")
    page.fill("#edit-rows input", "7")
    page.click("#editor button.strong")
    page.wait_for_selector("#problem:has-text('another place')")
    assert host.decoy.heads == []


def test_redirect_of_a_proxy_does_not_take_the_key_along(context: BrowserContext, host: Host):
    page = opened(context, f"{host.url}/guarded/console")
    page.fill("#key", host.node.admin_key)
    page.keyboard.press("Enter")
    page.wait_for_selector("#problem:has-text('Quotagate does not answer')")
    assert not any(host.node.admin_key in head for head in host.decoy.heads)


def test_other_application_finds_no_key_in_storage(context: BrowserContext, host: Host):
    page = opened(context, f"{host.url}/quotagate/console")
    Console(page, host.node).unlocked()
    page.click("#scheme")
    stolen = opened(context, f"{host.url}/other").evaluate(
        "JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie])"
    )
    assert host.node.admin_key not in stolen
    assert '"scheme"' not in stolen, "the other application may keep something under this name"


@pytest.mark.parametrize("page_name", ["docs", "docs/"])
@pytest.mark.parametrize("prefix", PREFIXES)
def test_operation_tried_in_the_document_is_sent_below_the_prefix(
    context: BrowserContext, host: Host, prefix: str, page_name: str
):
    page = opened(context, f"{host.url}{prefix}{page_name}")
    tried(page, host.node.admin_key)
    assert host.decoy.heads == []


def test_operation_tried_without_a_prefix_works(context: BrowserContext, host: Host):
    tried(opened(context, f"{host.node.url}/docs"), host.node.admin_key)


def test_operation_tried_behind_a_redirecting_proxy_keeps_the_key(context: BrowserContext, host: Host):
    page = opened(context, f"{host.url}/guarded/docs")
    tried(page, host.node.admin_key, status="Undocumented")
    assert not any(host.node.admin_key in head for head in host.decoy.heads)


def tried(page: Page, key: str, status: str = "200") -> None:
    """Give the key to Swagger UI and run one operation."""
    page.click("button.authorize")
    page.fill(".auth-container input", key)
    page.click(".auth-btn-wrapper button.authorize")
    page.click(".auth-btn-wrapper button.btn-done")
    operation = page.locator(".opblock-get", has=page.locator("[data-path='/v1/keys']"))
    operation.locator(".opblock-summary-control").click()
    operation.locator("button.try-out__btn").click()
    operation.locator("button.execute").click()
    expect(operation.locator(".live-responses-table .response-col_status").last).to_contain_text(status)


@pytest.mark.parametrize("prefix", PREFIXES)
def test_addresses_in_answers_lead_below_the_prefix(host: Host, prefix: str):
    """The client of a generator, or any other, that reads the document and follows addresses."""
    base = f"{host.url}{prefix}"
    names = ["user=bob", "ip=2001%3Adb8%3A%3A1", "user=carol,client-id=etl"]
    if prefix == PREFIXES[1]:  # nginx decodes the path where proxy_pass has one
        names += ["user=a%2Fb", "user=%2A", "user=%3A%20%3F"]
    with httpx.Client(headers={"Authorization": f"Bearer {host.node.admin_key}"}, trust_env=False) as http:
        places: dict[str, Any] = http.get(base, headers={"Accept": "application/json"}).json()
        near = httpx.URL(base)
        for place in (places["console"], places["openapi"], *places["docs"], places["ready"]):
            assert http.get(near.join(place)).is_success
        document = near.join(places["openapi"])
        [server] = http.get(document).json()["servers"]
        api = document.join(server["url"])
        assert str(api) == base
        for entity in names:
            put = http.put(api.join(f"v1/quotas/{entity}"), json={"request_rate": 1})
            assert put.status_code == 201, put.text
            found = http.get(put.url.join(put.headers["Location"]))
            assert found.json()["entity"] == put.json()["entity"] == entity
            assert http.delete(put.url).is_success
    assert host.decoy.heads == []
