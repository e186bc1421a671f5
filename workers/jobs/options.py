"""Options of the jobs that replay decisions: settings of the nodes that a log does not name."""

from __future__ import annotations

import argparse
import os
from typing import Final

from workers.jobs.errors import JobUsageError

COMBINATIONS: Final = ("max", "sequential")
CLOCKS: Final = ("store", "caller")


def add_replay_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "--combine-delays",
        choices=COMBINATIONS,
        default=os.environ.get("QUOTAGATE_COMBINE_DELAYS", COMBINATIONS[0]),
        help="how the nodes combine delays; default: QUOTAGATE_COMBINE_DELAYS, %(default)s",
    )
    parser.add_argument(
        "--clock",
        choices=CLOCKS,
        default=os.environ.get("QUOTAGATE_CLOCK", CLOCKS[0]),
        help="whose time the nodes use; the caller's time is not compared with the store's order; default: "
        "QUOTAGATE_CLOCK, %(default)s",
    )


def check_replay_options(arguments: argparse.Namespace) -> None:
    """Check the options of a job that replays a log, since argparse checks no defaults.

    Raises:
        JobUsageError: a setting is not one of its values, or there is no log.
    """
    if not arguments.log:
        raise JobUsageError("--log or QUOTAGATE_LOG_URL must be the URL of the decision log")
    if arguments.combine_delays not in COMBINATIONS:
        raise JobUsageError(f"--combine-delays: must be {' or '.join(COMBINATIONS)}")
    if arguments.clock not in CLOCKS:
        raise JobUsageError(f"--clock: must be {' or '.join(CLOCKS)}")
