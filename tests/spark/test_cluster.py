"""Jobs on a real cluster, which has Spark and their packages, and gets their code from the caller."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.spark import cluster
from tests.spark.cluster import Cluster
from tests.spark.java import QUICK_START
from workers.generate.traffic import Traffic
from workers.generate.write_log import Order, write_log
from workers.spark.session import ROOT, packed

START_MS = 1_772_323_200_000


@pytest.fixture(scope="module")
def spark_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster.running(tmp_path_factory.mktemp("cluster")) as found:
        yield found


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("log")
    traffic = Traffic(seed=4, events=200, rate=5.0, principals=20)
    write_log(Order(traffic, START_MS, bytes(32), 1), folder / "log", folder / "truth")
    return folder / "log"


def run(command: list[str | Path], cluster: Cluster, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        env=cluster.environment,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def test_executors_do_not_have_the_code(spark_cluster: Cluster, tmp_path: Path):
    python = spark_cluster.environment["PYSPARK_PYTHON"]
    assert run([python, "-c", "import mmh3, pandas, pyarrow"], spark_cluster, tmp_path).returncode == 0
    found = run([python, "-c", "import workers"], spark_cluster, tmp_path)
    assert "No module named 'workers'" in found.stderr


def test_job_ships_its_code(spark_cluster: Cluster, log: Path, tmp_path: Path):
    options = ("--master", spark_cluster.master, "--memory", "600m", f"--java={QUICK_START}")
    done = run(
        [sys.executable, "-m", "app.run.cli", "spark", "audit", "--log", log, "--out", "report", *options],
        spark_cluster,
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("All bounds held: 200 decisions, ")
    assert (tmp_path / "report" / "report.html").is_file()


def test_spark_submit_starts_a_job(spark_cluster: Cluster, log: Path, tmp_path: Path):
    """With the archive from the documentation."""
    archive = packed(tmp_path)
    command: list[str | Path] = [
        cluster.HOME / "bin" / "spark-submit", "--master", spark_cluster.master, "--driver-memory", "600m",
        "--py-files", archive, ROOT / "workers" / "spark" / "__main__.py",
        "audit", "--log", log, "--out", tmp_path / "report",
    ]  # fmt: skip
    done = run(command, spark_cluster, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "All bounds held: 200 decisions, " in done.stdout
    assert (tmp_path / "report" / "report.html").is_file()


def test_archive_has_only_code(tmp_path: Path):
    with zipfile.ZipFile(packed(tmp_path)) as archive:
        names = archive.namelist()
    assert {"app/__init__.py", "app/domain/digest.py", "workers/spark/__main__.py"} < set(names)
    assert {Path(name).suffix for name in names} == {".py"}
