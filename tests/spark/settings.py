"""Prints the settings of the session that a job would have, as JSON."""

from __future__ import annotations

import json
import sys

from workers.jobs.command import command_line
from workers.jobs.progress import Silent
from workers.spark.__main__ import Spark
from workers.spark.runner import SparkRunner

if __name__ == "__main__":
    driver = Spark()
    arguments = command_line(driver).parse_args(["audit", "--out", "unused", *sys.argv[1:]])
    with driver.runner(arguments, Silent(), 0) as runner:
        assert isinstance(runner, SparkRunner)
        settings = dict(runner.context.getConf().getAll())
        print(json.dumps({**settings, "url of the UI": runner.context.uiWebUrl}))
