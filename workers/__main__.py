"""`python -m workers`: the volume observer and the decision-log writer, as the settings enable them."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import structlog

from app.node import collector, home, logs
from app.node.children import stop_event
from app.node.errors import CommandError, SettingsError
from app.node.own_name import own_name
from app.node.settings import PREFIX, Settings, load
from app.store.leader_election import Contender
from app.store.volumes import LEASE, VolumeRecord
from app.terminal import escape_output
from workers.arguments import PlainArgumentParser

log = structlog.get_logger("quotagate.workers")


def main() -> None:
    """Run the workers."""
    collector.configure()
    escape_output()
    parser = PlainArgumentParser(
        prog="quotagate workers",
        description="Run the workers: the volume observer and the decision-log writer, for the store "
        "QUOTAGATE_REDIS_URL. Several processes may run; one of each kind leads.",
    )
    parser.add_argument("--env-file", type=Path, help="read settings from this file instead of .env")
    given = parser.parse_args()
    logs.configure()
    home.keep_private()
    try:
        settings = load(given.env_file)
        if settings.home.is_dir():
            home.restrict_access(settings.home.resolve())
        asyncio.run(work(settings))
    except CommandError as refused:
        print(f"quotagate: {parser.redacted(str(refused))}", file=sys.stderr)  # noqa: T201
        sys.exit(1)
    except ExceptionGroup as group:
        refusals, faults = group.split(CommandError)
        if refusals is None or faults is not None:
            raise
        print(*(f"quotagate: {refused}" for refused in refusals.exceptions), sep="\n", file=sys.stderr)  # noqa: T201
        sys.exit(1)


async def work(settings: Settings) -> None:
    """Run all enabled parts until a signal; an error in one part ends the process."""
    if settings.redis_url is None:
        raise SettingsError(f"{PREFIX}REDIS_URL: not set; `quotagate up` brings an embedded store")
    stop = stop_event()
    parts = _parts(settings, stop)
    log.info("workers started", parts=sorted(parts))
    async with asyncio.TaskGroup() as group:
        for name, part in parts.items():
            group.create_task(part, name=name)
        await stop.wait()
    log.info("workers stopped")


def _parts(settings: Settings, stop: asyncio.Event) -> dict[str, Coroutine[Any, Any, None]]:
    """The parts that the settings enable."""
    parts = {}
    if settings.volume_rules.source == "kafka":
        if settings.clock == "store":
            parts["volumes"] = _observe(settings, stop)
        else:
            log.warning("volumes are not observed: with QUOTAGATE_CLOCK=caller, time comes from the callers")
    if settings.log != "off":
        from workers.decision_log.run import run

        parts["decision-log"] = run(settings, stop)
    return parts


async def _observe(settings: Settings, stop: asyncio.Event) -> None:
    from workers.volumes.kafka import KafkaSource
    from workers.volumes.leader import Observer, lease_s

    assert settings.redis_url is not None
    assert settings.kafka_bootstrap is not None
    rules = settings.volume_rules
    await Observer(
        KafkaSource(settings.kafka_bootstrap, settings.kafka),
        VolumeRecord.at(settings.redis_url),
        Contender.at(settings.redis_url, LEASE, own_name(), lease_s(rules)),
        rules,
    ).run(stop)


if __name__ == "__main__":
    main()
