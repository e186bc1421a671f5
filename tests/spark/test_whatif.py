"""A what-if gives the same on Spark, over files and over a data frame, as in processes."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from tests.jobs.logs import asks
from tests.jobs.test_replay import Fresh
from tests.jobs.test_whatif import ALL
from tests.spark.driver import OnSpark
from workers.jobs import command, files
from workers.jobs.__main__ import Processes
from workers.spark import frames


def test_drivers_give_the_same(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("QUOTAGATE_MAX_DEBT", "PT2S")
    monkeypatch.setattr(files, "FEWEST_ROWS", 1)  # a task for each file
    made = Fresh()
    made.run(asks(4, ["a", "b", "c"]), 300, (0, 5, 40, 120, 900), 4)
    log, file = tmp_path / "log", tmp_path / "quotas.yaml"
    for number in range(3):
        made.write(log, made.rows[number::3], f"part-{number}")
    file.write_text(ALL.replace("request_rate: 5", "request_rate: {limit: 3, enforcement: deny}"))
    words = ["whatif", "--quotas", str(file)]
    for name, driver in (("alone", Processes()), ("spark", OnSpark(spark))):
        assert command.main(driver, [*words, "--log", str(log), "--out", str(tmp_path / name)]) == 0
    frame = spark.read.option("recursiveFileLookup", "true").parquet(str(log))
    assert frame.rdd.getNumPartitions() > 1
    assert frames.run(frame, [*words, "--out", str(tmp_path / "frame")]) == 0
    alone = tmp_path / "alone"
    for other in (tmp_path / "spark", tmp_path / "frame"):
        assert (other / "summary.json").read_text() == (alone / "summary.json").read_text()
        for table in ("principals", "quotas"):
            assert pq.read_table(other / table).equals(pq.read_table(alone / table)), table
