"""One Spark session for all tests of jobs: starting Java takes longer than most of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from tests.spark.java import NO_CODE, quick_start
from workers.spark.session import spark_session


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    with spark_session("tests", "local[2]", "1g", quick_start()) as session:
        session.conf.set("spark.sql.shuffle.partitions", "3")
        for name, setting in NO_CODE.items():
            session.conf.set(name, setting)
        yield session
