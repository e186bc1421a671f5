"""One Spark for all tests of jobs: starting a Java takes longer than most of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from tests.spark.java import QUICK_START
from workers.spark.session import started


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    with started("tests", "local[2]", "1g", QUICK_START) as session:
        session.conf.set("spark.sql.shuffle.partitions", "3")
        # a few thousand rows are done before their code is compiled
        session.conf.set("spark.sql.codegen.wholeStage", "false")
        session.conf.set("spark.sql.codegen.factoryMode", "NO_CODEGEN")
        yield session
