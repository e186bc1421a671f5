"""The job `backfill` as tests run it: in the tests' own Spark, into a folder that is then opened."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from app.run.assertions import Folder
from workers.spark import backfill
from workers.spark.__main__ import command_line
from workers.spark.folder import Folder as Making


def arguments(**given: Any) -> argparse.Namespace:
    """What the command line would be read as."""
    parsed = command_line().parse_args(["backfill", "--out", "unused"])
    return argparse.Namespace(**{**vars(parsed), **given})


def made(spark: SparkSession, out: Path, at_ms: int | None = None, **given: Any) -> Folder:
    """Run the job, and open what it leaves."""
    making = Making(spark, str(out))
    with making:
        backfill.backfill(spark, arguments(**given), at_ms, None, making)
    return Folder.open(str(out))
