"""Dashboard, scrapes and alerts are tested with a real node's metrics and a real Prometheus."""

from __future__ import annotations

import json
import math
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
import yaml

from app.admission.metrics.counts import Counts
from app.admission.metrics.exposition import Exposition
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
from tests.ports import free_port
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
    """The metrics right after the node counted everything: gauges of idle series disappear in two minutes."""
    return seen.text()


def promtool(*words: str | Path, text: str | None = None) -> subprocess.CompletedProcess[str]:
    command: list[str | Path] = [need("promtool"), *words]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=False)


# The metrics of a node


def test_node_shows_every_metric(scrape):
    """Otherwise the tests below would prove less than their names say."""
    shown = labels_of(scrape)
    for family in Exposition(Counts()).collect():
        name = {"counter": f"{family.name}_total", "histogram": f"{family.name}_bucket"}.get(
            family.type, family.name
        )
        assert name in shown, f"{name} has no sample"


def test_prometheus_finds_no_fault_in_the_metrics(scrape):
    checked = promtool("check", "metrics", text=scrape)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


@pytest.mark.parametrize("place", [*dashboard_expressions(), *alert_expressions()])
def test_expression_uses_existing_metrics_and_labels(place, scrape):
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
def test_unknown_metric_or_label_is_found(expression, unknown, scrape):
    assert strangers(expression, labels_of(scrape)) == unknown


def test_dashboard_shows_every_metric(scrape):
    asked = " ".join(dashboard_expressions().values())
    families = {re.sub("_(bucket|sum|count)$", "", name) for name in labels_of(scrape)}
    assert {name for name in families if not re.search(rf"\b{name}(_bucket)?\b", asked)} == set()


# The dashboard


def test_panels_do_not_overlap_and_have_descriptions():
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


def test_dashboard_works_with_any_prometheus():
    """It names no data source: the user chooses one at import."""
    dashboard = json.loads(DASHBOARD.read_text())
    variables = {variable["name"]: variable for variable in dashboard["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    sources = [found["datasource"] for found in [*panels(), *variables.values()] if "datasource" in found]
    assert all(source == {"type": "prometheus", "uid": "${datasource}"} for source in sources)
    assert len(sources) == len(panels()) + len(variables) - 1
    assert DASHBOARD.read_text().count('"uid"') == len(sources) + 1, "the dashboard's own"


# Alerts


def test_configuration_and_rules_are_valid():
    for words in (("config", "--lint-fatal", FOLDER / "prometheus.yml"), ("rules", "--lint-fatal", ALERTS)):
        checked = promtool("check", *words)
        assert checked.returncode == 0, checked.stdout + checked.stderr


def test_each_alert_says_what_happened_and_what_to_do():
    for group in yaml.safe_load(ALERTS.read_text())["groups"]:
        for rule in group["rules"]:
            assert rule["labels"]["severity"] in {"critical", "warning", "info"}
            assert rule["annotations"].keys() == {"summary", "description", "action"}
            assert rule["alert"].startswith("Quotagate")


def test_alerts_fire_when_they_should_and_only_then():
    tested = promtool("test", "rules", CASES)
    assert tested.returncode == 0, tested.stdout + tested.stderr


@pytest.mark.parametrize("instead", ["vector(1)", "vector(1) > 1"], ids=["always", "never"])
def test_alert_that_fires_always_or_never_is_found(instead, tmp_path):
    """So each alert has a case in which it fires, and one in which it does not."""
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
    """Prometheus with the configuration of the examples, which scrapes one node several times a second."""
    with tempfile.TemporaryDirectory(prefix="qg-prometheus-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        text = (FOLDER / "prometheus.yml").read_text()
        configuration = yaml.safe_load(text.replace("15s", "200ms"))
        (job,) = configuration["scrape_configs"]
        del job["dns_sd_configs"]
        job["static_configs"] = [{"targets": [f"{target[0]}:{target[1]}"]}]
        (folder / "prometheus.yml").write_text(yaml.safe_dump(configuration))
        (folder / "alerts.yml").write_text(ALERTS.read_text())
        port = free_port()
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
            with httpx.Client(base_url=f"http://{HOST}:{port}", timeout=60, trust_env=False) as http:
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
    """The current values of an expression."""
    answer = http.post("/api/v1/query", data={"query": expression})
    found: dict[str, Any] = answer.json()
    assert found["status"] == "success", f"{expression}: {found}"
    return [float(sample["value"][1]) for sample in found["data"]["result"]]


def test_real_prometheus_has_values_for_every_panel(seen):
    """Each expression has a numeric value, and the alert on the store's configuration is pending."""
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
