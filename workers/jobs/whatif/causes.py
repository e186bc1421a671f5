"""The causes for which a decision of a log is not what its replay gives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

Cause = Literal[
    "false_positive",
    "fallback",
    "late",
    "reset",
    "load",
    "quotas_changed",
    "factor_changed",
    "lease",
    "clock",
    "store_full",
    "slots",
    "replayed",
    "local",
    "older",
    "unordered",
    "other",
]
CAUSES: Final[Mapping[Cause, str]] = {
    "false_positive": "the filter took a new id as seen",
    "fallback": "the node answered without the store",
    "late": "a call that was answered without the store may have charged without a row",
    "reset": "the bucket had been reset",
    "load": "a backfill had been loaded into the bucket",
    "quotas_changed": "the entity's quotas changed at about that time",
    "factor_changed": "the throttle factor held the ask, or changed at about that time",
    "lease": "the bucket held units for leases",
    "clock": "a clock was corrected",
    "store_full": "the store was full",
    "slots": "charges in several slots of a cluster were taken back",
    "replayed": "the answer was a kept one",
    "local": "the node answered from ids that it knew",
    "older": "the bucket is older than the log",
    "unordered": "the store numbers no call that has only peeks, so others may have been decided before it",
    "other": "none of these",
}
"""All causes, and their meanings; the list is closed."""
