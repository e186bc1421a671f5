"""`quotagate backfill load`: load the assertions of a backfill job into the running store."""
# ruff: noqa: D301  a real backspace keeps the lines of examples apart

from __future__ import annotations

import asyncio
import dataclasses
import logging
import sys
from typing import TYPE_CHECKING, Annotated, Any, Final
from urllib.parse import quote

import typer

from app.node.errors import CommandError
from app.run.commands import programs, show
from app.run.commands.options import EnvFile
from app.run.commands.show import Out, Output
from app.terminal import styled

if TYPE_CHECKING:
    from app.backfill.assertions import AssertionFolder
    from app.backfill.load import LoadCounts
    from app.node.settings import Settings

RATE: Final = 10_000
LABELS: Final = {
    "added": "Added",
    "there": "Already there",
    "over": "Too old to count",
    "no_room": "No room for",
}

group = typer.Typer(
    help="Fill buckets from the log or from a history: `run` computes their content, `load` loads it.",
    no_args_is_help=True,
)


group.command("run", context_settings=programs.PASS_THROUGH)(programs.backfill)


@group.command()
def load(
    folder: Annotated[
        str,
        typer.Argument(help="The output of `quotagate backfill run`: a folder, or an object store's URL."),
    ],
    rate: Annotated[float, typer.Option(min=1, help="The most assertions a second.")] = RATE,
    env_file: EnvFile = None,
    output: Out = "table",
) -> None:
    """Load assertions into the store during live traffic; a load only adds to buckets.

    Assertions go to the buckets of the quotas in force. Loading the same twice changes nothing, and an
    interrupted load continues where it stopped. The command connects to the store and the catalog directly:
    to QUOTAGATE_REDIS_URL and QUOTAGATE_DATABASE_URL, else to those of `quotagate up` in QUOTAGATE_HOME.

    \b
    Examples:
      quotagate backfill run --out assertions
      quotagate backfill load assertions --rate 2000
    """
    from app.backfill.assertions import AssertionFolder  # Arrow takes half a second to import
    from app.node import logs
    from app.node.settings import load as settings_of

    logs.configure(logging.WARNING)  # without the catalog's info lines
    settings = settings_of(env_file)
    assertions = AssertionFolder.open(folder)
    try:
        counts = asyncio.run(_load(assertions, settings, rate))
    except KeyboardInterrupt:
        show.note("quotagate: stopped; run the same command again to continue")
        raise typer.Exit(130) from None
    _show(assertions, counts, output)


async def _load(folder: AssertionFolder, settings: Settings, rate: float) -> LoadCounts:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from app.backfill import load as backfill
    from app.backfill.log import LoadLog
    from app.catalog.catalog import Catalog
    from app.catalog.errors import CatalogUnavailableError, DeploymentMismatchError, SchemaVersionError
    from app.decision_log.stream import LogStream
    from app.domain.ladder import MatchingRules
    from app.run.wiring import defaults
    from app.store.loading import Loader

    url = store_url(settings)
    stream = LogStream.at(url)
    loader = Loader(
        url,
        folder.name,
        at_ms=folder.at_ms if settings.clock == "caller" else None,
        max_ids=settings.max_ids_per_principal,
    )
    catalog = Catalog(settings.catalog_url, defaults(settings), settings.hash_secret)
    rules = MatchingRules(settings.inter_broker_listener, settings.ipv6_prefix)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    try:
        await catalog.open()
        with Progress(
            *columns, console=Console(file=styled(sys.stderr)), disable=not sys.stderr.isatty()
        ) as bars:
            bar = bars.add_task("loading", total=folder.rows)
            return await backfill.load(
                folder,
                catalog,
                loader,
                rules,
                rate=rate,
                progress=lambda done: bars.update(bar, completed=done),
                log=None if settings.log == "off" else LoadLog(stream, loader),
            )
    except (CatalogUnavailableError, SchemaVersionError, DeploymentMismatchError) as refused:
        raise CommandError(str(refused)) from None
    finally:
        await catalog.close()
        await loader.close()
        await stream.close()


def store_url(settings: Settings) -> str:
    """Return the URL of the store: the setting, else the embedded store of a running `quotagate up`.

    Raises:
        CommandError: there is no store.
    """
    if settings.redis_url is not None:
        return settings.redis_url
    socket = settings.home.resolve() / "store.sock"
    if not socket.exists():
        raise CommandError(
            f"there is no store: set QUOTAGATE_REDIS_URL, or run `quotagate up`; {socket} is missing"
        )
    return f"unix://{quote(str(socket))}"


def _show(folder: AssertionFolder, counts: LoadCounts, output: Output) -> None:
    results = dataclasses.asdict(counts.loaded)
    document: dict[str, Any] = {"at_ms": folder.at_ms, "assertions": folder.rows, **results}
    if show.document(document | {"skipped": dict(counts.skipped)}, output):
        return
    numbers = {"Assertions": folder.rows, **{name: results[field] for field, name in LABELS.items()}}
    numbers |= {f"Skipped: {why}": number for why, number in sorted(counts.skipped.items())}
    shown = ((name, show.measured(number)) for name, number in numbers.items())
    show.fields([("As of", show.when(folder.at_ms)), *shown])
