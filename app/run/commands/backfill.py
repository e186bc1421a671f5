"""`quotagate backfill load`: what a job says that buckets should hold, put into the running store."""
# ruff: noqa: D301  a real backspace keeps the lines of examples apart

from __future__ import annotations

import asyncio
import dataclasses
import logging
import sys
from typing import TYPE_CHECKING, Annotated, Any, Final
from urllib.parse import quote

import typer

from app.run.commands import show
from app.run.commands.options import EnvFile
from app.run.commands.show import Out, Output
from app.run.errors import CannotRun

if TYPE_CHECKING:
    from app.run.assertions import Folder
    from app.run.backfill import Tally
    from app.run.settings import Settings

RATE: Final = 10_000
SAID: Final = {
    "added": "Added",
    "there": "There already",
    "over": "Too old to count",
    "no_room": "No room for",
}

group = typer.Typer(
    help="What buckets should hold at a moment: `quotagate spark backfill` says it, this loads it.",
    no_args_is_help=True,
)


@group.callback()
def _group() -> None:
    """Keep `load` a command of its own, though it is the only one."""


@group.command()
def load(
    folder: Annotated[
        str, typer.Argument(help="What `quotagate spark backfill` wrote: a folder or an object store's URL.")
    ],
    rate: Annotated[float, typer.Option(min=1, help="Assertions a second, at most.")] = RATE,
    env_file: EnvFile = None,
    output: Out = Output.table,
) -> None:
    """Put assertions into the store, beside live traffic: it adds, and never forgets.

    Buckets are those of the quotas in force. To load the same twice changes nothing; a load that was cut
    short goes on where it was. It talks to the store and the catalog directly: QUOTAGATE_REDIS_URL and
    QUOTAGATE_DATABASE_URL, else those that `quotagate up` runs in QUOTAGATE_HOME.

    \b
    Examples:
      quotagate spark backfill --out assertions
      quotagate backfill load assertions --rate 2000
    """
    from app.run import logs  # noqa: PLC0415
    from app.run.assertions import Folder  # noqa: PLC0415  Arrow takes half a second
    from app.run.settings import load as settings_of  # noqa: PLC0415

    logs.configure(logging.WARNING)  # that the catalog was read is no news here
    found = Folder.open(folder)
    try:
        tally = asyncio.run(_load(found, settings_of(env_file), rate))
    except KeyboardInterrupt:
        show.note("quotagate: stopped; the same command goes on where it was")
        raise typer.Exit(130) from None
    _say(found, tally, output)


async def _load(folder: Folder, settings: Settings, rate: float) -> Tally:
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn  # noqa: PLC0415

    from app.catalog.catalog import Catalog  # noqa: PLC0415  SQLAlchemy, only where it is needed
    from app.catalog.deployment import DeploymentRefused  # noqa: PLC0415
    from app.catalog.port import CatalogAway  # noqa: PLC0415
    from app.catalog.schema import SchemaRefused  # noqa: PLC0415
    from app.domain.ladder import Rules  # noqa: PLC0415
    from app.run import backfill  # noqa: PLC0415
    from app.run.load_log import LoadLog  # noqa: PLC0415
    from app.run.wiring import defaults  # noqa: PLC0415
    from app.store.loading import Loader  # noqa: PLC0415
    from app.store.log_stream import LogStream  # noqa: PLC0415

    url = store_url(settings)
    stream = LogStream.at(url)
    loader = Loader(
        url,
        folder.name,
        at_ms=folder.at_ms if settings.clock == "caller" else None,
        max_ids=settings.max_ids_per_principal,
    )
    catalog = Catalog(settings.catalog_url, defaults(settings), settings.hash_secret)
    rules = Rules(settings.inter_broker_listener, settings.ipv6_prefix)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    try:
        await catalog.open()
        with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as bars:
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
    except (CatalogAway, SchemaRefused, DeploymentRefused) as refused:
        raise CannotRun(str(refused)) from None
    finally:
        await catalog.close()
        await loader.close()
        await stream.close()


def store_url(settings: Settings) -> str:
    """The store that decides: the setting's, else the embedded one of a running `quotagate up`.

    Raises:
        CannotRun: there is none.
    """
    if settings.redis_url is not None:
        return settings.redis_url
    socket = settings.home.resolve() / "store.sock"
    if not socket.exists():
        raise CannotRun(
            f"there is no store: set QUOTAGATE_REDIS_URL, or run `quotagate up`, whose store is {socket}"
        )
    return f"unix://{quote(str(socket))}"


def _say(folder: Folder, tally: Tally, output: Output) -> None:
    counts = dataclasses.asdict(tally.loaded)
    said: dict[str, Any] = {"at_ms": folder.at_ms, "assertions": folder.rows, **counts}
    if show.document(said | {"skipped": dict(tally.skipped)}, output):
        return
    skipped = ((f"Skipped: {why}", number) for why, number in sorted(tally.skipped.items()))
    named = ((name, counts[field]) for field, name in SAID.items())
    show.fields([("As of", show.when(folder.at_ms)), ("Assertions", folder.rows), *named, *skipped])
