"""`python -m workers`: the work beside the API, each part as far as it is asked for, until told to stop."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import structlog

from app.run import home, logs
from app.run.children import stop_asked
from app.run.errors import CannotRun, SettingsRefused
from app.run.own_name import own_name
from app.run.settings import PREFIX, Settings, load
from app.run.volumes import volume_rules
from app.store.lease import Lease
from app.store.volumes import LEASE, VolumeRecord

log = structlog.get_logger("quotagate.workers")


def main() -> None:
    """Run the workers."""
    parser = argparse.ArgumentParser(
        prog="quotagate workers",
        description="Run the workers: the observer of volumes and the writer of the decision log, "
        "against QUOTAGATE_REDIS_URL. Several may run; one of each kind leads.",
    )
    parser.add_argument("--env-file", type=Path, help="read settings from this file instead of .env")
    given = parser.parse_args()
    logs.configure()
    home.keep_private()
    try:
        settings = load(given.env_file)
        if settings.home.is_dir():
            home.close(settings.home.resolve())
        asyncio.run(work(settings))
    except CannotRun as refused:
        print(f"quotagate: {refused}", file=sys.stderr)  # noqa: T201
        sys.exit(1)
    except ExceptionGroup as group:
        refusals, faults = group.split(CannotRun)
        if refusals is None or faults is not None:
            raise
        print(*(f"quotagate: {refused}" for refused in refusals.exceptions), sep="\n", file=sys.stderr)  # noqa: T201
        sys.exit(1)


async def work(settings: Settings) -> None:
    """Do everything the settings ask for; a part that ends in a fault ends the program, which says so."""
    if settings.redis_url is None:
        raise SettingsRefused(f"{PREFIX}REDIS_URL: not set; `quotagate up` brings an embedded store")
    stop = stop_asked()
    parts = _parts(settings, stop)
    log.info("open", parts=sorted(parts))
    async with asyncio.TaskGroup() as group:
        for name, part in parts.items():
            group.create_task(part, name=name)
        await stop.wait()
    log.info("closed")


def _parts(settings: Settings, stop: asyncio.Event) -> dict[str, Coroutine[Any, Any, None]]:
    """The parts that have something to do."""
    parts = {}
    if volume_rules(settings).source == "kafka":
        if settings.clock == "store":
            parts["volumes"] = _observe(settings, stop)
        else:
            log.warning("volumes are not observed: under QUOTAGATE_CLOCK=caller only callers tell the time")
    if settings.log != "off":
        parts["decision-log"] = _write_log(settings, stop)
    return parts


async def _observe(settings: Settings, stop: asyncio.Event) -> None:
    from workers.volumes.kafka import KafkaSource  # noqa: PLC0415  the client, only where it is asked for
    from workers.volumes.leader import Observer, lease_s  # noqa: PLC0415

    assert settings.redis_url is not None
    assert settings.kafka_bootstrap is not None
    rules = volume_rules(settings)
    observer = Observer(
        KafkaSource(settings.kafka_bootstrap, settings.kafka),
        VolumeRecord.at(settings.redis_url),
        Lease.at(settings.redis_url, LEASE, own_name(), lease_s(rules)),
        rules,
    )
    await observer.run(stop)


async def _write_log(settings: Settings, stop: asyncio.Event) -> None:
    from workers.decision_log.run import run  # noqa: PLC0415  Arrow, only where it is asked for

    await run(settings, stop)


if __name__ == "__main__":
    main()
