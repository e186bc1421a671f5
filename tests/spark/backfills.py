"""Runs the job `backfill` in the tests' own Spark session, and opens its output."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from app.backfill.assertions import AssertionFolder
from workers.spark.__main__ import command_line
from workers.spark.assertions import write_assertions
from workers.spark.folder import OutputFolder


def arguments(**given: Any) -> argparse.Namespace:
    """The parsed command line, with some values replaced."""
    parsed = command_line().parse_args(["backfill", "--out", "unused"])
    return argparse.Namespace(**{**vars(parsed), **given})


def made(spark: SparkSession, out: Path, at_ms: int | None = None, **given: Any) -> AssertionFolder:
    """Run the job, and open its output."""
    making = OutputFolder(spark, str(out))
    with making:
        write_assertions(spark, arguments(**given), at_ms, None, making)
    return AssertionFolder.open(str(out))
