"""Dashboard, scrapes and alerts, against what a real node shows and a real Prometheus makes of it."""

from __future__ import annotations

import json
import math
import re
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
import yaml

from app.admission.counts import Counts
from app.admission.exposition import Exposition
from tests.deploy.files import ROOT
from tests.deploy.watching import (
    ALERTS,
    DASHBOARD,
    Watched,
    alert_expressions,
    dashboard_expressions,
    labels_of,
    panels,
    strangers,
    watched,
)
from tests.service import eventually
from tests.tools import need

FOLDER: Final = ROOT / "examples/prometheus"
CASES: Final = FOLDER / "alerts_test.yml"
HOST: Final = "127.0.0.13"


@pytest.fixture(scope="module")
def seen() -> Iterator[Watched]:
    with watched() as found:
        yield found


@pytest.fixture(scope="module")
def scrape(seen: Watched) -> str:
    """What it showed when it had just counted; gauges of what is quiet go after two minutes."""
    return seen.text()


def promtool(*words: str | Path, text: str | None = None) -> subprocess.CompletedProcess[str]:
    command: list[str | Path] = [need("promtool"), *words]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=False)


# What a node shows


def test_the_node_has_shown_every_metric_that_there_is(scrape):
    """Otherwise the tests below would show less than they say."""
    shown = labels_of(scrape)
    for family in Exposition(Counts()).collect():
        name = {"counter": f"{family.name}_total", "histogram": f"{family.name}_bucket"}.get(
            family.type, family.name
        )
        assert name in shown, f"{name} has no sample"


def test_prometheus_has_nothing_to_say_about_the_metrics(scrape):
    checked = promtool("check", "metrics", text=scrape)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


@pytest.mark.parametrize("place", [*dashboard_expressions(), *alert_expressions()])
def test_an_expression_asks_for_metrics_and_labels_that_are_there(place, scrape):
    expression = {**dashboard_expressions(), **alert_expressions()}[place]
    assert strangers(expression, labels_of(scrape)) == []


@pytest.mark.parametrize(
    ("expression", "unknown"),
    [
        ("rate(quotagate_decision_total[5m])", ["quotagate_decision_total"]),
        ('quotagate_rate{user="a"}', ["quotagate_rate{user}"]),
        ("sum by (quota, user) (quotagate_rate)", ["user"]),
    ],
)
def test_a_metric_or_a_label_that_is_not_there_is_found(expression, unknown, scrape):
    assert strangers(expression, labels_of(scrape)) == unknown


def test_the_dashboard_shows_every_metric(scrape):
    asked = " ".join(dashboard_expressions().values())
    families = {re.sub("_(bucket|sum|count)$", "", name) for name in labels_of(scrape)}
    assert {name for name in families if not re.search(rf"\b{name}(_bucket)?\b", asked)} == set()


# The dashboard by itself


def test_panels_have_their_own_place_and_say_what_they_show():
    everything = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in everything}) == len(everything)
    taken: dict[tuple[int, int], str] = {}
    for panel in everything:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24, panel["title"]
        for cell in (
            (x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])
        ):
            assert taken.setdefault(cell, panel["title"]) == panel["title"], (
                f"{panel['title']} lies on {taken[cell]}"
            )
    assert len({panel["title"] for panel in everything}) == len(everything)
    for panel in panels():
        assert panel["description"], panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]


def test_the_dashboard_goes_with_any_prometheus():
    """It names no source of its own: whoever imports it chooses one."""
    dashboard = json.loads(DASHBOARD.read_text())
    variables = {variable["name"]: variable for variable in dashboard["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    sources = [found["datasource"] for found in [*panels(), *variables.values()] if "datasource" in found]
    assert all(source == {"type": "prometheus", "uid": "${datasource}"} for source in sources)
    assert len(sources) == len(panels()) + len(variables) - 1
    assert DASHBOARD.read_text().count('"uid"') == len(sources) + 1, "the dashboard's own"


# Alerts by themselves


def test_the_configuration_and_the_rules_are_valid():
    for words in (("config", "--lint-fatal", FOLDER / "prometheus.yml"), ("rules", "--lint-fatal", ALERTS)):
        checked = promtool("check", *words)
        assert checked.returncode == 0, checked.stdout + checked.stderr


def test_every_alert_says_what_happened_and_what_to_do():
    for group in yaml.safe_load(ALERTS.read_text())["groups"]:
        for rule in group["rules"]:
            assert rule["labels"]["severity"] in {"critical", "warning", "info"}
            assert rule["annotations"].keys() == {"summary", "description", "action"}
            assert rule["alert"].startswith("Quotagate")


def test_alerts_fire_when_they_should_and_only_then():
    tested = promtool("test", "rules", CASES)
    assert tested.returncode == 0, tested.stdout + tested.stderr


@pytest.mark.parametrize("instead", ["vector(1)", "vector(1) > 1"], ids=["always", "never"])
def test_an_alert_that_fires_always_or_never_is_found(instead, tmp_path):
    """So each of them has a case in which it fires, and one in which it is silent."""
    rules = yaml.safe_load(ALERTS.read_text())
    for rule in (rule for group in rules["groups"] for rule in group["rules"]):
        rule["expr"] = instead
    (tmp_path / "alerts.yml").write_text(yaml.safe_dump(rules))
    (tmp_path / "alerts_test.yml").write_text(CASES.read_text())
    tested = promtool("test", "rules", tmp_path / "alerts_test.yml")
    assert tested.returncode != 0
    failed = set(re.findall(r'alertname=\\"(\w+)\\"', tested.stdout + tested.stderr))
    assert failed == alert_expressions().keys()


# A real Prometheus


@contextmanager
def prometheus(target: tuple[str, int]) -> Iterator[httpx.Client]:
    """Prometheus with the configuration of the examples, asking one node several times a second."""
    with tempfile.TemporaryDirectory(prefix="qg-prometheus-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        text = (FOLDER / "prometheus.yml").read_text()
        configuration = yaml.safe_load(text.replace("15s", "200ms"))
        (job,) = configuration["scrape_configs"]
        del job["dns_sd_configs"]
        job["static_configs"] = [{"targets": [f"{target[0]}:{target[1]}"]}]
        (folder / "prometheus.yml").write_text(yaml.safe_dump(configuration))
        (folder / "alerts.yml").write_text(ALERTS.read_text())
        with socket.create_server((HOST, 0)) as free:
            port = free.getsockname()[1]
        options = {
            "config.file": folder / "prometheus.yml",
            "storage.tsdb.path": folder / "state",
            "web.listen-address": f"{HOST}:{port}",
        }
        command: list[str | Path] = [
            need("prometheus"),
            *(f"--{key}={value}" for key, value in options.items()),
        ]
        with (folder / "log").open("wb") as log:
            server = subprocess.Popen(command, stderr=log, cwd=folder)
        try:
            with httpx.Client(base_url=f"http://{HOST}:{port}", timeout=30, trust_env=False) as http:
                eventually(lambda: is_ready(http) or server.poll() is not None, within_s=60)
                assert server.poll() is None, (folder / "log").read_text()
                yield http
        finally:
            server.kill()
            server.wait()


def is_ready(http: httpx.Client) -> bool:
    try:
        return http.get("/-/ready").is_success
    except httpx.HTTPError:
        return False


def evaluated(http: httpx.Client, expression: str) -> list[float]:
    """The values that an expression has now."""
    answer = http.post("/api/v1/query", data={"query": expression})
    found: dict[str, Any] = answer.json()
    assert found["status"] == "success", f"{expression}: {found}"
    return [float(sample["value"][1]) for sample in found["data"]["result"]]


@pytest.mark.timeout(120)
def test_a_real_prometheus_draws_every_panel(seen):
    """Each expression has a value that is a number; and the alert on the store's set-up is on its way."""
    with prometheus(seen.node.address) as http:

        def empty() -> list[str]:
            seen.load()
            return [
                place
                for place, expression in dashboard_expressions().items()
                if not any(map(math.isfinite, evaluated(http, expression)))
            ]

        eventually(lambda: not empty(), within_s=60)
        rules = http.get("/api/v1/rules").json()["data"]["groups"]
        assert {rule["health"] for group in rules for rule in group["rules"]} == {"ok"}
        states = {rule["name"]: rule["state"] for group in rules for rule in group["rules"]}
        assert states.keys() == alert_expressions().keys()
        assert states["QuotagateStoreFault"] in {"pending", "firing"}
        assert states["QuotagateDown"] == "inactive"
