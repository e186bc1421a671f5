"""A standalone Spark cluster on loopback: a master and a worker, each a program."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

import pyspark

from tests.ports import HOST, free_port
from tests.programs import end
from tests.service import eventually
from tests.spark.java import NO_CODE, QUICK_START
from workers.spark.session import _choose_java, _restored_environment

HOME: Final = Path(pyspark.__file__).parent
DEFAULTS: Final = {
    "spark.sql.shuffle.partitions": "2",
    "spark.executor.memory": "700m",
    "spark.executor.extraJavaOptions": QUICK_START,
    "spark.driver.defaultJavaOptions": QUICK_START,
    "spark.ui.enabled": "false",
    **NO_CODE,
}


class Cluster(NamedTuple):
    """A running cluster: its URL, and the environment for programs that use it."""

    master: str
    environment: Mapping[str, str]


@contextmanager
def running(folder: Path) -> Iterator[Cluster]:
    """A cluster whose executors run a Python that has the packages of jobs, but not this code."""
    (folder / "conf").mkdir()
    defaults = "".join(f"{name} {value}\n" for name, value in DEFAULTS.items())
    (folder / "conf" / "spark-defaults.conf").write_text(defaults)
    port = free_port()
    master = f"spark://{HOST}:{port}"
    with _restored_environment():
        _choose_java(folder)
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("QUOTAGATE_")},
            "SPARK_HOME": str(HOME),
            "SPARK_LOCAL_IP": HOST,
            "SPARK_LOCAL_DIRS": str(folder / "scratch"),
            "SPARK_CONF_DIR": str(folder / "conf"),
            "SPARK_DAEMON_MEMORY": "300m",
            "SPARK_DAEMON_JAVA_OPTS": QUICK_START,
            "PYSPARK_PYTHON": str(bare_python(folder)),
        }
    environment.pop("PYTHONPATH", None)
    place = ("--host", HOST, "--webui-port", "0")
    with (
        started("master.Master", folder, environment, *place, "--port", str(port)),
        started(
            "worker.Worker", folder, environment, *place, "--cores", "2", "--memory", "800m",
            "--work-dir", str(folder / "work"), master,
        ),
    ):  # fmt: skip
        eventually(lambda: "Successfully registered" in said(folder, "worker.Worker"), within_s=60)
        yield Cluster(master, environment)


@contextmanager
def started(name: str, folder: Path, environment: Mapping[str, str], *options: str) -> Iterator[None]:
    """One of Spark's programs."""
    command: list[str | Path] = [HOME / "bin" / "spark-class", f"org.apache.spark.deploy.{name}", *options]
    with (folder / f"{name}.log").open("w") as log:
        program = subprocess.Popen(command, env=environment, cwd=folder, stdout=log, stderr=log)
    try:
        eventually(lambda: "Started daemon" in said(folder, name) or program.poll() is not None, within_s=60)
        assert program.poll() is None, said(folder, name)
        yield
    finally:
        end(program)


def said(folder: Path, name: str) -> str:
    return (folder / f"{name}.log").read_text(errors="replace")


def bare_python(folder: Path) -> Path:
    """A Python with the installed packages, but without this code."""
    packages = folder / "packages"
    packages.mkdir()
    for package in Path(HOME.parent).iterdir():
        if package.suffix != ".pth" and "quotagate" not in package.name:
            (packages / package.name).symlink_to(package)
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{packages}" exec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    return python
