"""The job `backfill`: the content of every bucket at a moment, from the log or from a foreign history.

The arguments are here; ``assertions`` computes the result with Spark.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Final

from app.domain.digest import secret_of
from app.domain.quota import LAYER_POLICIES, Layers
from workers.spark.errors import JobUsageError

FORMATS: Final = ("parquet", "json")
WINDOWS: Final = (1_000, 2_073_600_000)

DESCRIPTION: Final = """\
Compute what every principal's filter and windows should hold at a moment, so that a quota starts warm, or a
lost store can be restored: `quotagate backfill load OUT` loads the result into the store.

From the decision log: producer ids, and with QUOTAGATE_LOG=all rates and token buckets too. From a foreign
history, with --history: who used which producer id when. There a use is charged if no layer holds the id,
by exact sets.

examples:
  quotagate spark backfill --out assertions
  quotagate spark backfill --out assertions --at 2026-11-21T10:00:00Z
  quotagate spark backfill --out assertions --history uses.json --format json --time-column seen_at
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the backfill."""
    parser.description = DESCRIPTION
    parser.add_argument("--out", required=True, help="output folder of the assertions; must not exist yet")
    parser.add_argument(
        "--at", metavar="INSTANT", help="the moment (ISO 8601); default: the time of the last row"
    )
    parser.add_argument(
        "--from", dest="from_", metavar="INSTANT", help="ignore earlier rows; default: use all"
    )
    history = parser.add_argument_group("a foreign history")
    history.add_argument("--history", metavar="URL", help="files or a folder to read instead of the log")
    history.add_argument(
        "--format",
        choices=FORMATS,
        help="format of the history; JSON has one object a line, or an array; default: by the file name",
    )
    for name in ("principal", "id", "time"):
        history.add_argument(f"--{name}-column", default=name, help="taken literally; default: %(default)s")
    history.add_argument(
        "--window-ms",
        type=int,
        default=os.environ.get("QUOTAGATE_PRODUCER_ID_WINDOW_MS", "3600000"),
        help="window of the quota that will count the ids; default: QUOTAGATE_PRODUCER_ID_WINDOW_MS, "
        "%(default)s",
    )
    history.add_argument(
        "--layers",
        default=os.environ.get("QUOTAGATE_PRODUCER_ID_LAYERS", "layered"),
        help="layers of that quota: layered, kip936, timed, or INTERVAL_MS/TTL_MS; default: %(default)s",
    )


def run(arguments: argparse.Namespace) -> int:
    """Write the assertions; returns 0."""
    from workers.spark.assertions import (
        write_assertions,  # Spark is slow to import, and --help does not need it
    )
    from workers.spark.folder import OutputFolder
    from workers.spark.log import format_instant, parse_instant
    from workers.spark.progress import progress_bar
    from workers.spark.session import spark_session

    if not arguments.log and not arguments.history:
        raise JobUsageError("--log, QUOTAGATE_LOG_URL or --history must be the URL of a log or of a history")
    at_ms, from_ms = parse_instant("--at", arguments.at), parse_instant("--from", arguments.from_)
    if at_ms is not None and from_ms is not None and from_ms > at_ms:
        raise JobUsageError(f"--from: {arguments.from_} is after --at {arguments.at}")
    layers_of(arguments.layers, arguments.window_ms)  # report wrong arguments before Java starts
    deployment_secret()
    began = time.monotonic()
    with spark_session("quotagate backfill", arguments.master, arguments.memory, arguments.java) as spark:
        folder = OutputFolder(spark, arguments.out, overwrite=arguments.overwrite)
        with progress_bar(spark, "backfill"), folder:
            written = write_assertions(spark, arguments, at_ms, from_ms, folder)
    print(  # noqa: T201  the result
        f"{written.assertions:,} assertions as of {format_instant(written.at_ms)} in {arguments.out}"
        f" ({time.monotonic() - began:.0f} s)\n"
        + ("" if written.rates else "without rates and token buckets: they need a log of QUOTAGATE_LOG=all\n")
        + f"next: quotagate backfill load {arguments.out}"
    )
    return 0


def deployment_secret() -> bytes:
    """The deployment's secret from the environment; empty if it is not set."""
    secret = os.environ.get("QUOTAGATE_HASH_SECRET")
    try:
        return secret_of(secret) if secret else b""
    except ValueError as error:
        raise JobUsageError(f"QUOTAGATE_HASH_SECRET: {error}") from None


def layers_of(text: str, window_ms: int) -> Layers:
    """The layers of a policy's name, or of two numbers.

    >>> layers_of("300000/900000", 900_000)
    Layers(interval_ms=300000, ttl_ms=900000, policy=None)

    Raises:
        JobUsageError: the text or the window is invalid.
    """
    if not WINDOWS[0] <= window_ms <= WINDOWS[1]:
        raise JobUsageError(f"--window-ms: must be from {WINDOWS[0]} to {WINDOWS[1]}")
    if text in LAYER_POLICIES:
        return Layers.named(text, window_ms)
    interval, _, ttl = text.partition("/")
    if interval.isdecimal() and ttl.isdecimal() and 0 < int(interval) <= int(ttl) <= 4 * int(interval):
        return Layers(int(interval), int(ttl))
    raise JobUsageError(
        f"--layers: {text!r} must be one of {', '.join(LAYER_POLICIES)}, or INTERVAL_MS/TTL_MS with one to "
        "four intervals"
    )
