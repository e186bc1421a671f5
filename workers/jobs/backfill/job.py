"""The job `backfill`: the content of every bucket at a moment, from the log or from a foreign history.

The arguments are here; ``logged`` and ``foreign`` compute the result, which ``assertions`` writes.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import TYPE_CHECKING, Final

from app.domain.digest import fingerprint, secret_of
from app.domain.quota import LAYER_POLICIES, Layers
from workers.jobs.errors import JobError, JobUsageError

if TYPE_CHECKING:
    from workers.jobs.backfill.assertions import Source
    from workers.jobs.backfill.foreign import History
    from workers.jobs.backfill.logged import Log
    from workers.jobs.command import Driver
    from workers.jobs.period import Period

FORMATS: Final = ("parquet", "json")
WINDOWS: Final = (1_000, 2_073_600_000)

DESCRIPTION: Final = """\
Compute what every principal's filter and windows should hold at a moment, so that a quota starts warm, or a
lost store can be restored: `quotagate backfill load OUT` loads the result into the store.

From the decision log: producer ids, and with QUOTAGATE_LOG=all rates and token buckets too. From a foreign
history, with --history: who used which producer id when. There a use is charged if no layer holds the id,
by exact sets.

examples:
  quotagate backfill run --out assertions
  quotagate backfill run --out assertions --at 2026-11-21T10:00:00Z
  quotagate backfill run --out assertions --history uses.json --format json --time-column seen_at
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the backfill."""
    parser.description = DESCRIPTION
    parser.add_argument("step", nargs="?", choices=("run",), help="as in `quotagate backfill run`")
    parser.add_argument("--out", required=True, help="output folder of the assertions; must not exist yet")
    parser.add_argument(
        "--at", metavar="INSTANT", help="the moment (ISO 8601); default: the time of the last row"
    )
    parser.add_argument(
        "--from", dest="from_", metavar="INSTANT", help="ignore earlier rows; default: use all"
    )
    parser.add_argument("--to", metavar="INSTANT", help="ignore rows from this instant on; default: use all")
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


def run(arguments: argparse.Namespace, driver: Driver) -> int:
    """Write the assertions; returns 0."""
    from workers.jobs.backfill.assertions import write_assertions  # pyarrow is slow to import
    from workers.jobs.folder import OutputFolder
    from workers.jobs.period import Period, format_instant, parse_instant
    from workers.jobs.progress import progress

    if not arguments.log and not arguments.history:
        raise JobUsageError("--log, QUOTAGATE_LOG_URL or --history must be the URL of a log or of a history")
    at_ms, asked = parse_instant("--at", arguments.at), Period.of(arguments.from_, arguments.to)
    if at_ms is not None and asked.from_ms is not None and asked.from_ms > at_ms:
        raise JobUsageError(f"--from: {arguments.from_} is after --at {arguments.at}")
    layers_of(arguments.layers, arguments.window_ms)  # a wrong argument is refused before anything is read
    secret = deployment_secret()
    ends_ms = [end for end in (asked.to_ms, None if at_ms is None else at_ms + 1) if end is not None]
    period = Period(asked.from_ms, min(ends_ms, default=None))
    began = time.monotonic()
    with OutputFolder(arguments.out, overwrite=arguments.overwrite) as folder, progress("backfill") as bar:
        source: Source
        known: str | None
        if arguments.history:
            source, known = _history(arguments, period, secret)
        else:
            source, known = _log(arguments, driver, period, secret)
        with driver.runner(arguments, bar, source.rows) as runner:
            written = write_assertions(runner, source, at_ms, arguments.max_ids, known, folder)
    print(  # noqa: T201  the result
        f"{written.assertions:,} assertions as of {format_instant(written.at_ms)} in {arguments.out}"
        f" ({time.monotonic() - began:.0f} s)\n"
        + ("" if written.rates else "without rates and token buckets: they need a log of QUOTAGATE_LOG=all\n")
        + f"next: quotagate backfill load {arguments.out}"
    )
    return 0


def _log(
    arguments: argparse.Namespace, driver: Driver, period: Period, secret: bytes
) -> tuple[Log, str | None]:
    """The log, and the fingerprint of the secret that its ids were hashed with."""
    from workers.jobs.backfill.logged import Log
    from workers.jobs.files import Fingerprints

    fingerprints = Fingerprints(fingerprint(secret) if secret else None)
    tasks = driver.row_groups(arguments.log, period, fingerprints.check)
    return Log(arguments.log, tasks, period), fingerprints.known


def _history(arguments: argparse.Namespace, period: Period, secret: bytes) -> tuple[History, str]:
    """The foreign history, and the fingerprint of the secret that its ids will be hashed with."""
    from workers.jobs.backfill.foreign import History, history_tasks
    from workers.jobs.backfill.uses import HistoryColumns

    if not secret:
        raise JobError(
            "ids are hashed with the deployment's secret: set QUOTAGATE_HASH_SECRET, or migrate first"
        )
    url, kind = arguments.history, arguments.format
    if kind is None:
        kind = "json" if url.removesuffix(".gz").endswith((".json", ".jsonl", ".ndjson")) else "parquet"
    columns = HistoryColumns(arguments.principal_column, arguments.id_column, arguments.time_column)
    name, tasks = history_tasks(url, kind, columns)
    layers = layers_of(arguments.layers, arguments.window_ms)
    history = History(name, tasks, columns, period, arguments.window_ms, layers, secret)
    return history, fingerprint(secret)


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
