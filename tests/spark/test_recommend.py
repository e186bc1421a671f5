"""A recommendation is the same on Spark, over files and over a data frame, as in processes."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from tests.jobs.abuse import AbusedTraffic
from tests.jobs.logs import SECRET
from tests.spark.driver import OnSpark
from workers.generate.write_log import Order, write_log
from workers.jobs import command
from workers.jobs.__main__ import Processes
from workers.spark import frames

TRAFFIC = AbusedTraffic(seed=5, events=2_000, rate=40, principals=40)
BEGIN_MS = 1_772_323_200_000 - 25_000  # the traffic goes on in the next hour


def test_drivers_give_the_same(spark: SparkSession, tmp_path: Path):
    log = tmp_path / "log"
    write_log(Order(TRAFFIC, BEGIN_MS, SECRET, programs=2), log, tmp_path / "truth")
    for name, driver in (("alone", Processes()), ("spark", OnSpark(spark))):
        assert command.main(driver, ["recommend", "--log", str(log), "--out", str(tmp_path / name)]) == 0
    frame = spark.read.option("recursiveFileLookup", "true").parquet(str(log))
    assert frame.rdd.getNumPartitions() > 1
    assert frames.run(frame, ["recommend", "--out", str(tmp_path / "frame")]) == 0
    alone = tmp_path / "alone"
    quotas = (alone / "quotas.yaml").read_text()
    assert "per-batch-0" in quotas
    for other in (tmp_path / "spark", tmp_path / "frame"):
        assert (other / "summary.json").read_text() == (alone / "summary.json").read_text()
        mine = (other / "quotas.yaml").read_text()
        assert mine.partition("\n")[2] == quotas.partition("\n")[2], "the first line names the log"
        for table in ("limits", "outliers"):
            assert pq.read_table(other / table).equals(pq.read_table(alone / table)), table
