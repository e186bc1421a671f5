"""The broker plugin as a jar, built by its own Makefile, and the properties of a broker that loads it."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tests.built import build

PROJECT: Final = Path(__file__).parents[2] / "integrations" / "kafka-broker-plugin"
BUILD_WITHIN_S: Final = 900.0
BROKERS: Final = 2
"""The number of brokers, by which the plugin divides limits."""
EXCLUDED: Final = "carol"
"""The principal to which no throttle factor applies."""


def properties(url: str, key_file: Path) -> dict[str, object]:
    """The properties of a broker that takes its quotas from Quotagate at this address."""
    prefix = "client.quota.callback.quotagate"
    return {
        "client.quota.callback.class": "quotagate.kafka.plugin.Quotagate",
        f"{prefix}.url": url,
        f"{prefix}.key.file": key_file,
        f"{prefix}.brokers": "auto",
        f"{prefix}.excluded.principals": EXCLUDED,
    }


def jar() -> Path:
    """The plugin, rebuilt if sources are newer."""
    make()
    return PROJECT / "target" / "quotagate-kafka-plugin.jar"


def make(*targets: str) -> None:
    """Run the project's own Makefile."""
    build(["make", "--no-print-directory", *targets], PROJECT, PROJECT / "target" / ".lock", BUILD_WITHIN_S)
