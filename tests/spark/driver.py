"""Runs jobs on the tests' own Spark session: starting Java takes longer than most of them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager

from pyspark.sql import SparkSession

from workers.jobs.progress import Progress
from workers.spark.__main__ import Spark
from workers.spark.runner import SparkRunner


class OnSpark(Spark):
    """The driver for Spark, with a session that is there."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark

    @contextmanager
    def runner(
        self, _arguments: argparse.Namespace, progress: Progress, _rows: int, /
    ) -> Iterator[SparkRunner]:
        """A runner on the session."""
        yield SparkRunner(self._spark, progress)
