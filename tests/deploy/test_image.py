"""The Dockerfile: its linter, the files that it copies, and the installed package, which runs on its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests import stores
from tests.deploy.files import (
    DOCKERFILE,
    ROOT,
    copied,
    dockerfile,
    image_environment,
    image_health_check,
    is_sent,
    last_stage,
)
from tests.service import running
from workers.spark.session import PACKAGES

BIN = Path(sys.prefix) / "bin"
UV = ROOT / ".tools/bin/uv"
SPARK_DOCKERFILE = ROOT / "examples/spark/Dockerfile"


def lint(file: Path) -> subprocess.CompletedProcess[str]:
    command: list[str | Path] = [BIN / "hadolint", "--no-color", "--failure-threshold", "style", file]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_linter_finds_nothing(tmp_path):
    """Not even a remark on style, and no rule is disabled."""
    linted = lint(DOCKERFILE)
    assert (linted.returncode, linted.stdout) == (0, "")
    assert "hadolint ignore" not in DOCKERFILE.read_text()
    careless = tmp_path / "Dockerfile"
    careless.write_text(DOCKERFILE.read_text().replace("USER 10001", "USER root"))
    assert "DL3002" in lint(careless).stdout


def test_image_has_no_root_and_no_build_tools():
    final = last_stage()
    assert final["FROM"] == "${PYTHON}"
    assert int(final["USER"]) > 0
    assert final["CMD"] == '["quotagate", "serve"]'
    assert final["COPY"] == "--from=build /venv /venv"
    folder = image_environment()["QUOTAGATE_HOME"]
    assert final["RUN"].endswith(f"install --directory --owner=quotagate --mode=0700 {folder}")
    assert f"useradd --system --uid {final['USER']} " in final["RUN"]


def test_packages_from_a_registry_are_pinned_by_hash():
    installs = [
        step.rest for step in dockerfile() if step.name == "RUN" and " install --no-cache-dir" in step.rest
    ]
    assert [("--require-hashes" in line, "--no-deps ." in line) for line in installs] == [
        (True, False),
        (False, True),
    ]


def test_build_argument_adds_envoys_service_or_traces():
    """The only difference is another list of requirements."""
    arguments = [step.rest for step in dockerfile() if step.name == "ARG"]
    assert arguments == ["PYTHON=python:3.11.15-slim-trixie", "REQUIREMENTS=requirements.txt"]
    pages = [(ROOT / "docs" / page).read_text() for page in ("kubernetes.md", "traces.md")]
    documented = set(re.findall(r"REQUIREMENTS=([\w.-]+)", "".join(pages)))
    lists = {path for path in copied() if path.startswith("requirements")}
    assert lists == {"requirements.txt", *documented}
    assert documented == {"requirements-envoy.txt", "requirements-otel.txt"}
    for package, extra in (("h2", "envoy"), ("opentelemetry-sdk", "otel")):
        listed = (ROOT / f"requirements-{extra}.txt").read_text()
        assert re.search(rf"^{package}==", listed, re.MULTILINE)


def test_image_for_kubernetes_has_the_packages_of_the_jobs(tmp_path):
    """It is Spark's image with the packages that jobs import. Only a container engine could build it."""
    linted = lint(SPARK_DOCKERFILE)
    assert (linted.returncode, linted.stdout) == (0, "")
    text = SPARK_DOCKERFILE.read_text()
    pinned = re.findall(r"(\w+)==([\d.]+)", text)
    names = {name for name, _ in pinned}
    assert jobs_import(names, tmp_path / "all")
    assert not [name for name in names if jobs_import(names - {name}, tmp_path / f"all-but-{name}")]
    requirements = (ROOT / "requirements-spark.txt").read_text()
    for name, version in [*pinned, ("pyspark", re.findall(r"BASE=\S+:(\S+)", text)[0])]:
        assert f"\n{name}=={version} " in requirements
    copied_here = dict(re.findall(r"^COPY (\S+) (\S+)$", text, re.MULTILINE))
    assert copied_here.keys() == {*PACKAGES}
    assert all(is_sent(path) for path in copied_here)
    (home,) = re.findall(r"^ENV PYTHONPATH=(\S+)$", text, re.MULTILINE)
    assert copied_here == {path: f"{home}/{path}" for path in PACKAGES}
    assert f"local://{home}/workers/spark/__main__.py" in (ROOT / "docs/pipeline.md").read_text()


def jobs_import(packages: Iterable[str], folder: Path) -> bool:
    """Whether the jobs can be imported where only these packages are installed."""
    folder.mkdir()
    for each in Path(sysconfig.get_path("purelib")).iterdir():
        if each.name.partition(".")[0] in packages:
            (folder / each.name).symlink_to(each)
    modules = "workers.jobs.command, workers.jobs.audit.report"
    ran = subprocess.run(
        [sys.executable, "-S", "-c", f"import {modules}"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{folder}:{ROOT}"},
        check=False,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0 or "ModuleNotFoundError" in ran.stderr, ran.stderr
    return ran.returncode == 0


def test_builder_is_sent_only_what_is_copied():
    """Above all no .env and no Git history: a layer keeps every file it ever had."""
    for path in copied():
        assert (ROOT / path).exists(), path
        assert is_sent(path), path
    assert is_sent("app/store/lua/decide.lua")
    for path in (
        ".env",
        ".git/config",
        ".quotagate/admin.key",
        "tests/service.py",
        "app/run/__pycache__/cli.pyc",
    ):
        assert not is_sent(path), path


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the content of the wheel only, built from the files sent to the builder."""
    folder = tmp_path_factory.mktemp("image")
    source = folder / "source"
    source.mkdir()
    subprocess.run(["cp", "-r", *(ROOT / path for path in copied()), source], check=True)
    # Offline: `make` built this project with the same backend, so uv has it in its cache.
    command: list[str | Path] = [UV, "build", "--wheel", "--offline", "--quiet", "--out-dir", folder, source]
    built = subprocess.run(command, check=False, capture_output=True, text=True) if UV.exists() else None
    if built is None or built.returncode:
        reason = f"no wheel without a registry: {built.stderr if built else 'make puts uv into .tools'}"
        pytest.fail(reason) if os.environ.get("CI") == "true" else pytest.skip(reason)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(folder / "package")
    return folder / "package"


def test_package_runs_on_its_own(package, tmp_path):
    """Migration and API run from the wheel alone, which includes the scripts of the store and the catalog."""
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("QUOTAGATE_")},
        "PYTHONPATH": str(package),
        "QUOTAGATE_DATABASE_URL": f"sqlite:///{tmp_path}/catalog.db",
    }

    def run(*words: str) -> str:
        command = [sys.executable, "-P", *words]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True
        ).stdout

    assert run("-c", "import app; print(app.__file__)").strip() == str(package / "app/__init__.py")
    run("-m", "app.run.cli", "migrate")
    own = {"PYTHONPATH": str(package)}
    with (
        stores.running("valkey") as store,
        running(store_url=store, database_url=environment["QUOTAGATE_DATABASE_URL"], environment=own) as node,
    ):
        node.put("user=alice", request_rate=1)
        assert node.ask(principal="alice", usage={"requests": 1})["source"] == "store"


def test_health_check_passes_only_for_a_ready_api():
    program, *words = image_health_check()
    assert program == "python"

    def check(port: int) -> int:
        environment = {**os.environ, "QUOTAGATE_PORT": str(port), "http_proxy": "http://127.0.0.1:9"}
        command = [sys.executable, *words]
        return subprocess.run(command, env=environment, check=False, stderr=subprocess.DEVNULL).returncode

    with running() as node:
        port = node.address[1]
        assert check(port) == 0
    assert check(port) != 0
