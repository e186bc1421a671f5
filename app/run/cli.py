"""The command line: `quotagate up`, `serve`, `workers`, `migrate`, and the commands for a running node.

Exit codes: 0 done, 1 refused or failed, 2 wrong use.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import app
from app.node import collector
from app.node.errors import CommandError
from app.run.commands import backfill, buckets, keys, programs, volumes
from app.run.commands.decide import decide
from app.run.commands.options import EnvFile, PlainErrorsGroup
from app.run.commands.quotas import (
    entity,
    envoy_import,
    explain,
    files,
    kafka_import,
    kafka_options,
    shadow,
    undo,
)
from app.run.commands.top import top
from app.terminal import escape_output

if TYPE_CHECKING:
    from app.node.settings import Settings

cli = typer.Typer(
    cls=PlainErrorsGroup,
    help="Cluster-wide quota decisions over HTTP: may this work go ahead, or must it wait N milliseconds?",
    epilog="Settings come from QUOTAGATE_* variables; see docs/settings.md. "
    "Exit codes: 0 done, 1 refused or failed, 2 wrong use.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Run the command line."""
    collector.configure()
    escape_output()
    try:
        cli(prog_name="quotagate")
    except CommandError as refused:
        print(f"quotagate: {refused}", file=sys.stderr)  # noqa: T201
        sys.exit(1)


def _version(asked: bool) -> None:
    if asked:
        print(f"quotagate {app.__version__}")  # noqa: T201
        raise typer.Exit


@cli.callback()
def _root(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    del version  # its callback has printed it


@cli.command()
def up(env_file: EnvFile = None) -> None:
    """Run everything on this machine: embedded store and catalog, the API and the workers.

    The state is kept in QUOTAGATE_HOME. QUOTAGATE_REDIS_URL and QUOTAGATE_DATABASE_URL replace the embedded
    store and catalog by servers.
    """
    from app.run.up import up  # `decide` starts twice as fast without it

    up(_settings(env_file), _again(env_file), options=_passed_on(env_file))


@cli.command()
def serve(
    env_file: EnvFile = None,
    fd: Annotated[int | None, typer.Option(hidden=True, help="An inherited listening socket.")] = None,
    envoy_fd: Annotated[int | None, typer.Option(hidden=True, help="The same for Envoy's port.")] = None,
    ready_fd: Annotated[
        int | None, typer.Option(hidden=True, help="An inherited pipe, written to when ready.")
    ] = None,
    counts: Annotated[
        Path | None, typer.Option(hidden=True, help="Folder for the metrics of sibling processes.")
    ] = None,
) -> None:
    """Run only the API, with QUOTAGATE_REDIS_URL and QUOTAGATE_DATABASE_URL."""
    from app.run.serve import serve

    serve(
        _settings(env_file, warn=fd is None),
        _again(env_file),
        fd=fd,
        envoy_fd=envoy_fd,
        ready_fd=ready_fd,
        counts=counts,
        options=_passed_on(env_file),
    )


@cli.command()
def workers(env_file: EnvFile = None) -> None:
    """Run only the workers: they observe volumes, if a source is set, and write the decision log."""
    programs.become("workers", _passed_on(env_file))


@cli.command()
def migrate(
    env_file: EnvFile = None,
    *,
    max_debt: Annotated[
        bool,
        typer.Option(
            "--max-debt",
            help="Change the deployment's longest debt to this QUOTAGATE_MAX_DEBT; stop all nodes first.",
        ),
    ] = False,
) -> None:
    """Upgrade the catalog to the newest schema."""
    given = _settings(env_file, warn=False)

    from app.catalog import deployment, schema  # not the whole API: `up` waits for this command
    from app.catalog.errors import CatalogUnavailableError
    from app.node import home

    if given.database_url is None:
        home.restrict_access(home.make(given.home))
    try:
        schema.upgrade(given.catalog_url)
        if max_debt:
            deployment.adopt_debt(given.catalog_url, given.max_debt_ms)
    except CatalogUnavailableError as away:
        raise CommandError(str(away)) from None


cli.command()(decide)
cli.command()(top)
for program in (programs.generate, programs.audit, programs.whatif, programs.recommend, programs.spark):
    cli.command(context_settings=programs.PASS_THROUGH)(program)
entity.group.callback(invoke_without_command=True, no_args_is_help=True)(kafka_options.kafka)
for part in (explain, undo, shadow, files, kafka_import, envoy_import):
    entity.group.add_typer(part.group)
for noun, commands in {
    "quotas": entity,
    "buckets": buckets,
    "backfill": backfill,
    "keys": keys,
    "volumes": volumes,
}.items():
    cli.add_typer(commands.group, name=noun)


def _settings(env_file: Path | None, *, warn: bool = True) -> Settings:
    import structlog

    from app.node import home, logs, settings

    logs.configure()
    home.keep_private()
    given = settings.load(env_file)
    # Only the outermost process warns; a child reads the same variables.
    if warn and given.unknown_variables:
        said, log = settings.given_variables(env_file), structlog.get_logger("quotagate.settings")
        for name in given.unknown_variables:
            why = settings.explained(name, said) or "unknown"
            log.warning("nothing reads this variable", variable=name, why=why)
    return given


def _again(env_file: Path | None) -> Callable[[], Settings]:
    """Return a function that reads the settings again."""
    from app.node import settings

    return partial(settings.load, env_file)


def _passed_on(env_file: Path | None) -> tuple[str, ...]:
    return () if env_file is None else ("--env-file", str(env_file.resolve()))


if __name__ == "__main__":
    main()
