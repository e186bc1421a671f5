"""docker-compose.yml is valid and consistent, and uses settings that exist."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import pytest
import redis
import yaml

from app.node import settings
from app.run.serve import FINISH_WITHIN_S
from tests.deploy.arrangement import valkey
from tests.deploy.files import (
    COMPOSE,
    ROOT,
    SECRETS,
    MissingVariableError,
    compose,
    dockerfile,
    image_command,
    image_environment,
    last_stage,
)
from workers.jobs.__main__ import Processes
from workers.jobs.command import command_line

BIN = Path(sys.prefix) / "bin"
NGINX = ROOT / "examples/compose/nginx.conf"
PROMETHEUS = ROOT / "examples/prometheus/prometheus.yml"
GRAFANA = ROOT / "examples/grafana/provisioning"

Compose = dict[str, Any]


def loose_ends(found: Compose) -> Iterator[str]:
    """The wrong references from one part of a compose file to another."""
    services = found["services"]
    for name, service in services.items():
        for other, how in service.get("depends_on", {}).items():
            if other not in services:
                yield f"{name} depends on {other}"
            elif how["condition"] == "service_completed_successfully" and "restart" in services[other]:
                yield f"{name} waits for the end of {other}, which never ends"
            elif how["condition"] == "service_healthy" and not has_health_check(services[other]):
                yield f"{name} waits for the health of {other}"
            elif service.get("profiles") != services[other].get("profiles") and services[other].get(
                "profiles"
            ):
                yield f"{name} depends on {other}, which a profile leaves out"
        for network in set(service.get("networks", [])) - {"default", *found.get("networks", {})}:
            yield f"{name} is in network {network}"
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            if source.startswith(".") and not (ROOT / source).exists():
                yield f"{name} mounts {source}"
            elif not source.startswith(".") and source not in found.get("volumes", {}):
                yield f"{name} mounts volume {source}"
        for config in service.get("configs", []):
            if config["source"] not in found.get("configs", {}):
                yield f"{name} is given config {config['source']}"
    used = {volume.split(":")[0] for service in services.values() for volume in service.get("volumes", [])}
    yield from (f"nobody uses volume {name}" for name in set(found.get("volumes", {})) - used)
    joined = {network for service in services.values() for network in service.get("networks", [])}
    yield from (f"nobody is in network {name}" for name in set(found.get("networks", {})) - joined)


def has_health_check(service: Compose) -> bool:
    """Whether a container has a health check, its own or our image's."""
    own = service.get("healthcheck", {})
    return not own.get("disable") and ("test" in own or "build" in service)


def valid(file: Path) -> subprocess.CompletedProcess[str]:
    command: list[str | Path] = [BIN / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", file]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_file_is_valid_by_the_compose_specification(tmp_path):
    checked = valid(COMPOSE)
    assert checked.returncode == 0, checked.stdout
    typo = tmp_path / "docker-compose.yml"
    typo.write_text(COMPOSE.read_text().replace("depends_on:", "depend_on:", 1))
    assert valid(typo).returncode == 1


def test_parts_of_the_file_fit_together():
    assert list(loose_ends(compose())) == []


@pytest.mark.parametrize(
    ("old", "new", "end"),
    [
        ("valkey: {condition", "redis: {condition", "api depends on redis"),
        ("networks: [watch]", "networks: [watched]", "prometheus is in network watched"),
        ('"valkey:/data"', '"valkeys:/data"', "valkey mounts volume valkeys"),
        ("./examples/compose", "./examples/composed", "nginx mounts ./examples/composed/nginx.conf"),
        (
            "command: [quotagate, migrate]",
            "restart: always",
            "api waits for the end of migrate, which never ends",
        ),
        ("test: [CMD-SHELL", "tests: [CMD-SHELL", "api waits for the health of valkey"),
        ("{source: valkey,", "{source: valkeys,", "valkey is given config valkeys"),
        (
            "image: valkey/valkey:9.1.2",
            "profiles: [other]",
            "api depends on valkey, which a profile leaves out",
        ),
    ],
)
def test_wrong_reference_is_found(old, new, end):
    text = COMPOSE.read_text()
    assert old in text
    assert end in list(loose_ends(compose(text=text.replace(old, new, 1))))


def test_deployment_has_the_required_parts():
    """Two replicas behind nginx, workers, Valkey, PostgreSQL and a migration; all but the last restart."""
    services = compose()["services"]
    plain = {name for name, service in services.items() if "profiles" not in service}
    assert plain == {"nginx", "api", "workers", "migrate", "valkey", "postgres"}
    assert services["api"]["deploy"]["replicas"] == 2
    assert "ports" not in services["api"], "two replicas cannot have one port"
    assert services["api"]["depends_on"]["migrate"] == {"condition": "service_completed_successfully"}
    for name in plain - {"migrate"}:
        assert services[name]["restart"] == "unless-stopped", name
        assert has_health_check(services[name]) == (name != "workers"), name  # workers serve no requests
    log = services["workers"]["environment"]["QUOTAGATE_LOG_URL"]
    assert log == f"{image_environment()['QUOTAGATE_HOME']}/log"


def test_each_image_is_pinned_to_one_version():
    """A tag such as `18` may be another image next month."""
    services = compose()["services"].values()
    images = {service["image"] for service in services if "image" in service}
    images |= {step.rest.removeprefix("PYTHON=") for step in dockerfile() if step.rest.startswith("PYTHON=")}
    assert {re.split("[:/]", image)[-2] for image in images} == {
        "grafana",
        "nginx",
        "postgres",
        "prometheus",
        "python",
        "valkey",
    }
    for image in images:
        exact = r"\d+\.\d+" if image.startswith("postgres:") else r"v?\d+\.\d+\.\d+(-[a-z-]+)?"
        assert re.fullmatch(exact, image.partition(":")[2]), image


def test_no_password_is_in_a_programs_arguments():
    """Each user of a machine can read arguments. A health check becomes arguments too."""
    found = compose()
    for name, service in found["services"].items():
        words = [service.get(part) for part in ("command", "entrypoint")]
        words.append(service.get("healthcheck", {}).get("test"))
        text = json.dumps(words)
        assert not [secret for secret in SECRETS.values() if secret in text], name
    _, password = found["configs"]["valkey"]["content"].strip().splitlines()[-1].split()
    assert password == SECRETS["VALKEY_PASSWORD"]


def test_password_of_the_running_store_is_in_no_argument():
    with valkey() as url:
        with redis.Redis.from_url(url) as client:
            server = client.info("server")["process_id"]
            assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
            assert client.config_get("maxmemory") == {"maxmemory": str(1024**3)}
            assert client.config_get("append*") | {"appendonly": "yes", "appendfsync": "everysec"} == (
                client.config_get("append*")
            )
        arguments = Path(f"/proc/{server}/cmdline").read_bytes()
        assert b"valkey" in arguments
        assert SECRETS["VALKEY_PASSWORD"].encode() not in arguments
        stranger = redis.Redis.from_url(url.replace(SECRETS["VALKEY_PASSWORD"], "wrong"))
        with stranger, pytest.raises(redis.AuthenticationError):
            stranger.ping()


def test_nginx_waits_longer_than_an_ask_may_wait_in_a_replica():
    """Otherwise nginx would treat a busy replica as hung, and drop its answers."""
    waits = [float(s) for s in re.findall(r"proxy_read_timeout (\d+)s;", NGINX.read_text())]
    assert len(waits) == 3
    assert min(waits) > settings.Settings.model_fields["queue_ms"].default / 1000 + 2
    assert not re.search(r"non_idempotent|http_503", NGINX.read_text())


def test_no_port_is_published_beyond_this_machine():
    """An operator who wants more must name the address."""
    published = [port for service in compose()["services"].values() for port in service.get("ports", [])]
    assert published
    assert all(port.startswith("127.0.0.1:") for port in published)


@pytest.mark.parametrize("name", SECRETS)
def test_missing_secret_is_an_error(name):
    """No secret has a default, and no secret is in the file."""
    with pytest.raises(MissingVariableError, match=f"^{name}$"):
        compose({**SECRETS, name: ""})


def test_documented_commands_make_the_secrets(tmp_path):
    comment = "\n".join(re.findall(r"^# {3}(.*)$", COMPOSE.read_text(), re.MULTILINE))
    commands, _, rest = comment.partition("docker compose up\n")
    subprocess.run(["sh", "-euc", commands], cwd=tmp_path, check=True)
    made = dict(line.split("=", 1) for line in (tmp_path / ".env").read_text().splitlines())
    assert made.keys() == SECRETS.keys()
    assert len(set(made.values())) == len(made)
    assert all(re.fullmatch("[0-9a-f]{64}", secret) for secret in made.values())
    assert [line.split()[:3] for line in rest.splitlines()] == [
        ["docker", "compose", "run"],
        ["docker", "compose", "cp"],
    ]
    assert (tmp_path / ".env").stat().st_mode & 0o077 == 0


def test_documented_jobs_can_run():
    """Each job runs in the service that has the log's volume, and writes to this volume."""
    text = re.sub(r"\n# *", " ", COMPOSE.read_text())
    jobs = re.findall(r"run --rm workers quotagate (audit|backfill run) ([^`]*?)(?:`| docker)", text)
    assert [name for name, _ in jobs] == ["audit", "backfill run"]
    for name, options in jobs:
        arguments = command_line(Processes()).parse_args([name.split()[0], *options.split()])
        assert not Path(arguments.out).is_absolute()
    workers = compose()["services"]["workers"]
    home = image_environment()["QUOTAGATE_HOME"]
    assert last_stage()["WORKDIR"] == home
    assert workers["volumes"] == [f"log:{home}"]
    assert "entrypoint" not in workers, "the job's command would become its arguments"
    (brought,) = re.findall(r"compose cp workers:(\S+) ", text)
    assert brought == f"{home}/{jobs[0][1].split()[1]}"
    assert re.findall(r"run --rm workers quotagate backfill load (\S+)`", text) == [jobs[1][1].split()[1]]


def test_setting_that_an_audit_needs_is_set_on_each_node():
    for given, kept in (({}, "denied"), ({"QUOTAGATE_LOG": "all"}, "all")):
        found = compose({**SECRETS, **given})["services"]
        assert {found[name]["environment"]["QUOTAGATE_LOG"] for name in ("api", "workers")} == {kept}


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The environment without the settings of the user who runs the tests."""
    for name in [name for name in os.environ if name.startswith("QUOTAGATE_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", ["api", "migrate", "workers"])
def test_variables_are_settings_and_their_values_load(name, bare, monkeypatch):
    service = compose()["services"][name]
    for variable, value in {**image_environment(), **service["environment"]}.items():
        monkeypatch.setenv(variable, value)
    given = settings.load()
    assert settings.unknown_variables(settings.given_variables()) == []
    assert given.admin_key is not None
    assert (given.host, given.port) == ("0.0.0.0", 8080)
    assert given.redis_url == f"redis://:{SECRETS['VALKEY_PASSWORD']}@valkey:6379/0"
    assert given.catalog_url == f"postgresql://quotagate:{SECRETS['POSTGRES_PASSWORD']}@postgres/quotagate"


def test_variable_that_is_no_setting_is_found(bare, monkeypatch):
    monkeypatch.setenv("QUOTAGATE_REDIS", "redis://valkey")
    assert settings.unknown_variables(settings.given_variables()) == ["QUOTAGATE_REDIS"]


def test_only_the_network_of_prometheus_needs_no_key(bare, monkeypatch):
    """Callers through nginx have nginx's address, which must never be enough."""
    found = compose()
    monkeypatch.setenv("QUOTAGATE_OPEN_TO", found["services"]["api"]["environment"]["QUOTAGATE_OPEN_TO"])
    (subnet,) = found["networks"]["watch"]["ipam"]["config"]
    assert settings.load().open_to == (ip_network(subnet["subnet"]),)
    within = {name for name, service in found["services"].items() if "watch" in service.get("networks", [])}
    assert within == {"api", "prometheus", "grafana"}


@pytest.mark.parametrize("name", ["api", "migrate", "workers"])
def test_commands_exist(name):
    service = compose()["services"][name]
    program, *words = service.get("command", image_command())
    assert program == "quotagate"
    subprocess.run([BIN / program, *words, "--help"], check=True, stdout=subprocess.DEVNULL)


def test_stop_leaves_the_time_that_the_api_needs_to_finish():
    grace = compose()["services"]["api"]["stop_grace_period"]
    drain_s = settings.Settings.model_fields["drain_ms"].default / 1_000
    assert int(grace.removesuffix("s")) > drain_s + FINISH_WITHIN_S


def test_ports_and_paths_agree_with_the_mounted_files():
    """Prometheus and nginx call the port of the API, and Grafana calls the port of Prometheus."""
    services = compose()["services"]
    assert "listen 8080;" in NGINX.read_text()
    assert "server api:8080 resolve" in NGINX.read_text()
    assert services["nginx"]["ports"] == ["127.0.0.1:8080:8080"]
    (job,) = yaml.safe_load(PROMETHEUS.read_text())["scrape_configs"]
    (found,) = job["dns_sd_configs"]
    assert (found["names"], found["port"]) == (["api"], 8080)
    (source,) = yaml.safe_load((GRAFANA / "datasources/prometheus.yml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    (folder,) = yaml.safe_load((GRAFANA / "dashboards/quotagate.yml").read_text())["providers"]
    dashboard = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert dashboard.startswith(folder["options"]["path"] + "/")
    assert any(volume.split(":")[1] == dashboard for volume in services["grafana"]["volumes"])
