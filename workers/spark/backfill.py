"""The job `backfill`: from the log, or a foreign history, what every bucket should hold at a moment."""

from __future__ import annotations

import argparse
import json
import os
import time
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

from app.domain.assertion import MANIFEST, VERSION
from app.domain.digest import fingerprint, secret_of
from app.domain.quota import LAYER_POLICIES, Layers
from workers.spark.refused import Refused, WrongUse

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from workers.spark.folder import Folder
    from workers.spark.log import Period

ROWS: Final = "assertions"
FORMATS: Final = ("log", "parquet", "json")
WINDOWS: Final = (1_000, 2_073_600_000)

ABOUT: Final = """\
Say what every principal's filter and windows should hold at a moment, so that a quota can start warm and a
lost store comes back: `quotagate backfill load OUT` puts it into the store.

From the decision log: producer ids, and with QUOTAGATE_LOG=all rates and token buckets too. From a foreign
history, with --history: who used which producer id when. A charge is then a use of an id that the layers had
forgotten or never seen, told exactly.

examples:
  quotagate spark backfill --out assertions
  quotagate spark backfill --out assertions --at 2026-11-21T10:00:00Z
  quotagate spark backfill --out assertions --history uses.json --format json --time-column seen_at
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the backfill takes."""
    parser.description = ABOUT
    parser.add_argument("--out", required=True, help="folder of the assertions, which must not be there yet")
    parser.add_argument("--at", metavar="INSTANT", help="the moment (ISO 8601); default: the last row's")
    parser.add_argument(
        "--from", dest="from_", metavar="INSTANT", help="leave out what is before; default: nothing"
    )
    history = parser.add_argument_group("a foreign history")
    history.add_argument("--history", metavar="URL", help="files or a folder, in place of the log")
    history.add_argument(
        "--format",
        choices=FORMATS[1:],
        help="of the history; JSON has an object on each line; default: by name",
    )
    for name in ("principal", "id", "time"):
        history.add_argument(f"--{name}-column", default=name, help=f"default: {name}")
    history.add_argument(
        "--window-ms",
        type=int,
        default=os.environ.get("QUOTAGATE_PRODUCER_ID_WINDOW_MS", "3600000"),
        help="of the quota that will count the ids; default: QUOTAGATE_PRODUCER_ID_WINDOW_MS, %(default)s",
    )
    history.add_argument(
        "--layers",
        default=os.environ.get("QUOTAGATE_PRODUCER_ID_LAYERS", "layered"),
        help="its layers: layered, kip936, timed, or INTERVAL_MS/TTL_MS; default: %(default)s",
    )


def run(arguments: argparse.Namespace) -> int:
    """Say it; 0."""
    from workers.spark import progress  # noqa: PLC0415  Spark takes a while to import, and --help does without
    from workers.spark.folder import Folder  # noqa: PLC0415
    from workers.spark.log import instant, spelled  # noqa: PLC0415
    from workers.spark.session import started  # noqa: PLC0415

    if not arguments.log and not arguments.history:
        raise WrongUse(
            "--log or QUOTAGATE_LOG_URL says where the decision log is, --history where another is"
        )
    at_ms, from_ms = instant("--at", arguments.at), instant("--from", arguments.from_)
    if at_ms is not None and from_ms is not None and from_ms > at_ms:
        raise WrongUse(f"--from: {arguments.from_} is after --at {arguments.at}")
    layers_of(arguments.layers, arguments.window_ms)  # what is wrong is told before a Java starts
    _secret()
    began = time.monotonic()
    with started("quotagate backfill", arguments.master, arguments.memory, arguments.java) as spark:
        folder = Folder(spark, arguments.out, overwrite=arguments.overwrite)
        with progress.shown(spark, "backfill"), folder:
            said = backfill(spark, arguments, at_ms, from_ms, folder)
    print(  # noqa: T201  the answer
        f"{said['assertions']:,} assertions as of {spelled(said['at_ms'])} in {arguments.out}"
        f" ({time.monotonic() - began:.0f} s)\n"
        + (f"{said['without']}\n" if said["without"] else "")
        + f"next: quotagate backfill load {arguments.out}"
    )
    return 0


def backfill(
    spark: SparkSession, arguments: argparse.Namespace, at_ms: int | None, from_ms: int | None, folder: Folder
) -> dict[str, Any]:
    """Write the assertions, and last what they are."""
    from workers.spark.log import Period  # noqa: PLC0415

    secret = _secret()
    period = Period(from_ms, None if at_ms is None else at_ms + 1)
    without = ""
    made_by = fingerprint(secret) if secret else None
    if arguments.history:
        at_ms, found = _of_history(spark, arguments, period, at_ms, secret)
    else:
        at_ms, found, without, made_by = _of_log(spark, arguments, period, at_ms, made_by)
    folder.table(ROWS, found)
    files = _files(spark, folder)
    manifest = {
        "version": VERSION,
        "name": uuid4().hex,
        "at_ms": at_ms,
        "secret": made_by,
        "files": files,
    }
    folder.text(MANIFEST, json.dumps(manifest, indent=1))
    return {"assertions": sum(file["rows"] for file in files), "at_ms": at_ms, "without": without}


def _secret() -> bytes:
    """The deployment's secret; empty if it is not known."""
    given = os.environ.get("QUOTAGATE_HASH_SECRET")
    try:
        return secret_of(given) if given else b""
    except ValueError as wrong:
        raise WrongUse(f"QUOTAGATE_HASH_SECRET: {wrong}") from None


def layers_of(text: str, window_ms: int) -> Layers:
    """The layers of a name, or of two numbers.

    >>> layers_of("300000/900000", 900_000)
    Layers(interval_ms=300000, ttl_ms=900000, policy=None)

    Raises:
        WrongUse: there are none such.
    """
    if not WINDOWS[0] <= window_ms <= WINDOWS[1]:
        raise WrongUse(f"--window-ms: must be from {WINDOWS[0]} to {WINDOWS[1]}")
    if text in LAYER_POLICIES:
        return Layers.named(text, window_ms)
    interval, slash, ttl = text.partition("/")
    if not (
        slash
        and interval.isdecimal()
        and ttl.isdecimal()
        and 0 < int(interval) <= int(ttl) <= 4 * int(interval)
    ):
        policies = ", ".join(LAYER_POLICIES)
        raise WrongUse(
            f"--layers: {text!r} must be one of {policies}, or INTERVAL_MS/TTL_MS with one to four intervals"
        )
    return Layers(int(interval), int(ttl))


def _of_log(
    spark: SparkSession,
    arguments: argparse.Namespace,
    period: Period,
    at_ms: int | None,
    made_by: str | None,
) -> tuple[int, DataFrame, str, str | None]:
    """The moment, what is asserted, what is left out, and the fingerprint of the secret of its digests."""
    from pyspark.sql import functions as f  # noqa: PLC0415

    from workers.spark import assertions, log  # noqa: PLC0415
    from workers.spark.fingerprints import Fingerprints  # noqa: PLC0415

    fingerprints = Fingerprints(made_by)
    rows = log.read(spark, arguments.log, period, fingerprints.look)
    if at_ms is None:
        # by the store's time, if it decided anything; a row without it has the node's, which may be ahead
        by_store = f.max(f.when(f.col("order").isNotNull(), f.col("at_ms")))
        last = rows.agg(f.coalesce(by_store, f.max("at_ms"))).first()
        assert last is not None
        at_ms = int(last[0])
    rates = assertions.is_whole(rows)
    without = "" if rates else "without rates and token buckets: only a log of QUOTAGATE_LOG=all tells them"
    found = assertions.from_log(rows, at_ms, arguments.max_ids, rates=rates)
    return at_ms, found, without, fingerprints.known


def _of_history(
    spark: SparkSession, arguments: argparse.Namespace, period: Period, at_ms: int | None, secret: bytes
) -> tuple[int, DataFrame]:
    from pyspark.sql import functions as f  # noqa: PLC0415

    from workers.spark import assertions, foreign  # noqa: PLC0415

    if not secret:
        raise Refused(
            "ids are hashed with the deployment's secret: set QUOTAGATE_HASH_SECRET, or migrate first"
        )
    columns = foreign.Columns(arguments.principal_column, arguments.id_column, arguments.time_column)
    is_json = arguments.format == "json" or (
        arguments.format is None and arguments.history.removesuffix(".gz").endswith((".json", ".jsonl"))
    )
    uses = foreign.read(spark, arguments.history, "json" if is_json else "parquet", columns, period)
    last = uses.agg(f.max("at_ms")).first()
    if last is None or last[0] is None:
        raise Refused(f"{arguments.history}: no row in the period {period}")
    at_ms = int(last[0]) if at_ms is None else at_ms
    layers = layers_of(arguments.layers, arguments.window_ms)
    return at_ms, assertions.from_history(uses, at_ms, arguments.window_ms, layers, arguments.max_ids, secret)


def _files(spark: SparkSession, folder: Folder) -> list[dict[str, Any]]:
    """The files just written, in the order in which they are to be loaded, and the rows of each."""
    from pyspark.sql import functions as f  # noqa: PLC0415

    written = spark.read.parquet(folder.inside(ROWS)).groupBy(f.input_file_name().alias("file")).count()
    found = sorted((row["file"].rsplit("/", 1)[1], row["count"]) for row in written.collect())
    return [{"name": f"{ROWS}/{name}", "rows": rows} for name, rows in found]
