"""Reports in the browser: real ones of jobs with their numbers, and hostile ones as plain text."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.console.conftest import PUSHED, Console
from tests.console.markup import HOSTILE, expect_no_markup
from tests.jobs.logs import SECRET
from tests.report_folders import made
from tests.service import Service, eventually, running
from tests.stores import Server
from workers.generate.traffic import Traffic
from workers.generate.write_log import Order, write_log
from workers.jobs.__main__ import Processes
from workers.jobs.command import main as job

TRAFFIC = Traffic(seed=1, events=3_000)
BEGIN_MS = 1_772_323_200_000

TIGHTER = """
quotas:
  user=*:
    request_rate: {limit: 3, enforcement: deny}
"""


CLICK = "name => [...byId('report-rows').rows].find((row) => row.dataset.report === name).click()"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Reports of jobs over a log of generated traffic."""
    work = tmp_path_factory.mktemp("jobs")
    log, found = str(work / "log"), work / "reports"
    write_log(Order(TRAFFIC, BEGIN_MS, SECRET, programs=1), Path(log), work / "truth")
    (work / "quotas.yaml").write_text(TIGHTER, encoding="utf-8")
    more = {"audit": [], "whatif": ["--quotas", str(work / "quotas.yaml")], "recommend": []}
    for name, words in more.items():
        assert job(Processes(), [name, "--log", log, "--out", str(found / f"a-{name}"), *words]) == 0
    return found


@pytest.fixture(scope="module")
def node(store: Server, folder: Path) -> Iterator[Service]:
    with running(store_url=store.url, environment={**PUSHED, "QUOTAGATE_REPORTS": str(folder)}) as one:
        yield one


@pytest.fixture
def page(console: Console) -> Page:
    page = console.unlocked().view("reports").page
    page.wait_for_selector("#report-rows tr")
    return page


@pytest.fixture
def hostile(folder: Path) -> Iterator[Path]:
    """For the reports of one test."""
    before = {path.name for path in folder.iterdir()}
    yield folder
    for path in folder.iterdir():
        if path.name not in before:
            path.unlink() if path.is_symlink() else shutil.rmtree(path)


def opened(page: Page, name: str) -> None:
    page.locator("#report-rows tr").filter(has=page.locator("code", has_text=name)).first.click()
    expect(page.locator("#report h2")).to_contain_text(name)


def name_of(text: str) -> str:
    """The text as a name of a folder, which has no slash; reports do not begin with `_`."""
    return f"r{text}".replace("/", "\u2215")


def summary(folder: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / name / "summary.json").read_text(encoding="utf-8"))
    return found


def tabulated(page: Page, place: int) -> list[list[str]]:
    """The table of a curve, newest first."""
    figure = page.locator("#report figure").nth(place)
    figure.locator("summary").press("Enter")
    rows = figure.locator("details tbody tr")
    rows.first.wait_for()
    found: list[list[str]] = rows.evaluate_all(
        "rows => rows.map(row => [...row.cells].map(cell => cell.innerText))"
    )
    return found


def test_audit_is_drawn_with_its_numbers(page: Page, folder: Path):
    expect(page.locator("#report-rows tr")).to_have_count(3)
    opened(page, "a-audit")
    expect(page.locator("#report")).to_contain_text("all bounds held, 3,000 decisions")
    expect(page.locator("#report figure")).to_have_count(1)
    rows = tabulated(page, 0)
    counts = [int(cell.replace(",", "")) for row in rows for cell in row[1:]]
    assert sum(counts) == summary(folder, "a-audit")["decisions"] == 3_000
    tables = page.evaluate("ask('v1/reports/a-audit')")["tables"]
    assert [table["title"] for table in tables][1:] == page.locator("#report h3").all_inner_texts()
    totals = page.locator("#report [aria-label=Totals] tbody tr")
    assert totals.all_inner_texts()[0] == "decisions\t3,000"


def test_whatif_is_drawn_with_its_numbers(page: Page, folder: Path):
    found = summary(folder, "a-whatif")
    row = page.locator("#report-rows tr", has_text="a-whatif")
    expect(row).to_contain_text(f"{found['newly_refused']:,} asks newly refused")
    opened(page, "a-whatif")
    decisions = page.locator("#report [aria-label=Decisions] tbody tr").all_inner_texts()
    expected = [f"{name}\t{found['before'][name]:,}\t{found['after'][name]:,}" for name in found["after"]]
    assert decisions == expected
    usage = page.locator("#report figcaption").first.inner_text()
    assert usage.startswith("request_rate of ")
    refused = sum(int(row[2].replace(",", "")) for row in tabulated(page, 1))
    (table,) = [
        table
        for table in page.evaluate("ask('v1/reports/a-whatif')")["tables"]
        if table["name"] == "principals"
    ]
    touched = {row[0]: row[5] for row in table["rows"]}
    assert refused == touched[usage.removeprefix("request_rate of ")] > 0


def test_recommendation_is_drawn_with_its_limits(page: Page, folder: Path):
    opened(page, "a-recommend")
    limits = page.locator("#report [aria-label^=Limits] tbody tr")
    yaml = (folder / "a-recommend" / "quotas.yaml").read_text(encoding="utf-8")
    first = limits.first.locator("td").all_inner_texts()
    assert f"{first[1]}: " in yaml
    assert first[2].replace(",", "") in yaml


def test_reports_are_opened_with_the_keyboard(console: Console):
    page = console.unlocked().page
    page.focus("#tab-quotas")
    page.keyboard.press("8")
    page.locator("#report-rows button").first.focus()
    page.keyboard.press("ArrowDown")
    name = page.evaluate("document.activeElement.textContent")
    page.keyboard.press("Enter")
    expect(page.locator("#report h2")).to_contain_text(name)
    expect(page.locator("#report h2")).to_be_focused()
    expect(page.locator("#report-rows [aria-current=true]")).to_have_count(1)


def test_hostile_report_is_text(console: Console, hostile: Path):
    findings = [{"principal": text, "findings": [text]} for text in HOSTILE]
    odd: list[object] = [None, 5, [], {"findings": {}}, "text", {"principal": {"a": 1}, "findings": [None]}]
    columns = ["at_ms", *HOSTILE]
    tables = [
        {
            "name": text,
            "title": text,
            "columns": [text, "at_ms", "x_ms"],
            "rows": [[text, text, text]],
            "count": 9,
        }
        for text in HOSTILE
    ]
    tables += [
        {
            "name": "curve",
            "title": HOSTILE[0],
            "columns": columns,
            "rows": [[1_000, *HOSTILE], [2_000, 1], ["x"], []],
        },
        {"name": "none", "title": HOSTILE[1], "columns": columns, "rows": []},
        {"name": "no columns", "title": HOSTILE[2], "columns": [], "rows": [[1, 2]]},
        {"name": "far", "title": "far", "columns": ["a", "at_ms"], "rows": [[1e300, 1e300], [-0.5, -1]]},
    ]
    text = json.dumps({"log": HOSTILE[0], "from_ms": 1, "to_ms": 2**53})
    audit = {"decisions": HOSTILE[0], "verdicts": 1, "findings": [*findings, *odd]}
    made(hostile, "hostile", summary=audit, report=text.encode(), tables={"tables": tables})
    page = console.unlocked().view("reports").page
    opened(page, "hostile")
    expect(page.locator("#report figure")).to_have_count(1)
    expect(page.locator("#report h3", has_text="far")).to_have_count(1)
    for each in HOSTILE:
        expect(page.locator("#report li code", has_text=each).first).to_be_visible()
    expect_no_markup(console)


@pytest.mark.parametrize(
    "summary_",
    [
        {"newly_refused": "<b>x</b>", "newly_admitted": [], "before": 1},
        {"newly_refused": None, "other": {}},
        {"outliers": None, "entities": {"a": 1}},
        {"as_of_ms": "<b>x</b>"},
        {"verdicts": 1, "findings": "text"},
        {"verdicts": 1},
        {},
        {"<b>x</b>": "<img src=x onerror=window.hit=1>", "__proto__": {"x": 1}},
    ],
)
def test_summary_of_any_form_is_shown(console: Console, hostile: Path, summary_: dict[str, object]):
    made(hostile, "odd", summary=summary_)
    page = console.unlocked().view("reports").page
    opened(page, "odd")
    expect(page.locator("#report pre")).to_have_count(1)
    expect_no_markup(console)


def test_names_of_reports_are_never_markup_nor_paths(console: Console, hostile: Path):
    texts = (*HOSTILE, "\x01\x07\x1b[31m\r\n\t\x7f\x85")
    for text in texts:
        made(hostile, name_of(text))
    made(hostile, "%2e%2e%2f%2e%2e%2fhealth")
    made(hostile, os.fsdecode(b"bytes\xff\xfe"))
    page = console.unlocked().view("reports").page
    expect(page.locator("#report-rows tr")).to_have_count(3 + len(texts) + 1)  # JSON has no such bytes
    for text in texts:
        name = name_of(text)
        page.evaluate(
            "name => [...byId('report-rows').rows].find((row) => row.dataset.report === name).click()", name
        )
        expect(page.locator("#report h2 code")).to_have_text(name)
    page.locator("#report-rows tr", has_text="%2e%2e%2f%2e%2e%2fhealth").click()
    console.says("This name leads to another place than Quotagate")
    expect_no_markup(console)


def test_report_that_has_vanished_says_so(console: Console, hostile: Path):
    report = made(hostile, "short-lived")
    page = console.unlocked().view("reports").page
    row = page.locator("#report-rows tr", has_text="short-lived")
    expect(row).to_have_count(1)
    shutil.rmtree(report)
    row.click()
    console.says("There is no report named short-lived")


def test_folders_that_cannot_be_shown_are_counted(console: Console, hostile: Path):
    made(hostile, "broken", summary=b"{")
    (hostile / "linked").symlink_to("a-audit")
    page = console.unlocked().view("reports").page
    expect(page.locator("#report-notes")).to_contain_text("1 folders cannot be shown")
    expect(page.locator("#report-rows tr")).to_have_count(3)


def test_empty_states_say_what_to_do(console: Console):
    page = console.unlocked().page
    page.route(
        "**/v1/reports", lambda route: route.fulfill(json={"reports": [], "unreadable": 0, "more": False})
    )
    console.view("reports")
    expect(page.locator("#no-reports")).to_contain_text("quotagate audit --out FOLDER/audit-1")
    expect(page.locator("#report-list")).to_be_hidden()
    page.unroute("**/v1/reports")
    page.route("**/v1/reports", lambda route: route.fulfill(status=404, json={"detail": "off"}))
    console.view("keys").view("reports")
    expect(page.locator("#no-reports")).to_contain_text("Set QUOTAGATE_REPORTS to a folder")
    expect(page.locator("#problem")).to_be_hidden()


def test_reports_fit_a_narrow_window(page: Page):
    page.set_viewport_size({"width": 360, "height": 800})
    for name in ("a-audit", "a-whatif", "a-recommend"):
        opened(page, name)
        eventually(lambda: page.evaluate("document.documentElement.scrollWidth") <= 360)
