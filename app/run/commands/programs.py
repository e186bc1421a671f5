"""Commands that run programs of ``workers``, which ``app`` never imports: `generate`, jobs over the log."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn

import typer

from app.node.command_lines import program
from app.node.errors import CommandError
from app.run.commands import show

if TYPE_CHECKING:
    from app.node.settings import Settings

PASS_THROUGH: Final[dict[str, Any]] = {
    "ignore_unknown_options": True,
    "allow_extra_args": True,
    "help_option_names": [],
}
"""The context settings of a command that passes its arguments on unchanged, ``--help`` too."""
HASHES: Final = "log"
"""The subcommand of `generate` that hashes ids itself, so it needs the deployment's secret."""
ROOT: Final = Path(__file__).parents[3]
NEEDS_SECRET: Final = frozenset({"backfill"})
"""Jobs that hash ids themselves; only they get the secret."""

HELP: Final = frozenset({"-h", "--help"})


def become(module: str, arguments: Sequence[str], settings: Mapping[str, str] | None = None) -> NoReturn:
    """Replace this process by the program of a module, which keeps the process id, signals and terminal.

    Args:
        settings: environment variables for it, in addition to ours.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    command = program(module, *arguments)
    os.execve(sys.executable, command, {**os.environ, **(settings or {})})  # noqa: S606  our own program


def generate(context: typer.Context) -> None:
    """Generate realistic traffic with ground truth: send it to nodes, or write it as a decision log."""
    settings = {}
    if context.args[:1] == [HASHES] and HELP.isdisjoint(context.args):
        from app.node.settings import PREFIX, load  # every other command starts twice as fast without it

        if secret := _secret_of(load()):
            settings[f"{PREFIX}HASH_SECRET"] = secret.hex()
    become("workers.generate", context.args, settings)


def spark(
    context: typer.Context,
    job: Annotated[str | None, typer.Argument(show_default=False)] = None,
) -> None:
    """Run a Spark job over the decision log; without JOB, or with --help, list the jobs.

    In a checkout, Spark and Java are installed at first use. Elsewhere, install them with
    `pip install "quotagate[spark]"`. For the options of a job: quotagate spark JOB --help.
    """
    arguments = [*([job] if job else []), *context.args] or ["--help"]
    if HELP.isdisjoint(arguments):
        _install()
    _run_job("workers.spark", arguments)


def audit(context: typer.Context) -> None:
    """Prove from the decision log that the limits held. For the options: quotagate audit --help."""
    _run_job("workers.jobs", ["audit", *context.args])


def whatif(context: typer.Context) -> None:
    """Replay the decision log under other quotas: which asks would be refused, how long would callers wait?

    For the options: quotagate whatif --help.
    """
    _run_job("workers.jobs", ["whatif", *context.args])


def recommend(context: typer.Context) -> None:
    """Recommend limits from the decision log, as a file of quotas.

    For the options: quotagate recommend --help.
    """
    _run_job("workers.jobs", ["recommend", *context.args])


def backfill(context: typer.Context) -> None:
    """Compute from the log, or from a history, what every bucket should hold at a moment; `load` loads it.

    For the options: quotagate backfill run --help.
    """
    _run_job("workers.jobs", ["backfill", *context.args])


def _run_job(module: str, arguments: Sequence[str]) -> NoReturn:
    """Become a job over the log, which gets the settings that it needs as variables."""
    if not HELP.isdisjoint(arguments):
        become(module, arguments)
    from app.node.settings import load  # every other command starts twice as fast without it

    become(module, arguments, _settings(load(), arguments[0]))


def _install() -> None:
    """Install pyspark if it is missing and this is a checkout."""
    if importlib.util.find_spec("pyspark") is not None:
        return
    if not (ROOT / "Makefile").is_file() or Path(sys.prefix) != ROOT / ".venv":
        raise CommandError('Spark is not installed; pip install "quotagate[spark]" installs it with Java')
    show.note("quotagate: downloading Spark, once (half a gigabyte) ...")
    if subprocess.run(["make", ".venv/.spark"], cwd=ROOT, stdout=sys.stderr, check=False).returncode:
        raise CommandError("Spark could not be installed; run `make .venv/.spark` to see why")


def _settings(given: Settings, job: str) -> dict[str, str]:
    """The environment of a job. The secret goes only there, never into an argument."""
    from app.node.settings import PREFIX

    settings = {
        "LOG_URL": given.log_url or str(given.home.resolve() / "log"),
        "MAX_IDS_PER_PRINCIPAL": str(given.max_ids_per_principal),
        "COMBINE_DELAYS": given.combine_delays,
        "CLOCK": given.clock,
        "PRODUCER_ID_WINDOW_MS": str(given.producer_id_window_ms),
        "PRODUCER_ID_LAYERS": given.producer_id_layers,
        "SAMPLES": str(given.samples),
        "SAMPLE_MS": str(given.sample_ms),
        "MAX_DEBT": f"PT{given.max_debt_ms / 1000:.3f}S",
        "IPV6_PREFIX": str(given.ipv6_prefix),
        "INTER_BROKER_LISTENER": given.inter_broker_listener or "",
    }
    if job in NEEDS_SECRET and (secret := _secret_of(given)):
        settings["HASH_SECRET"] = secret.hex()
    return {PREFIX + name: value for name, value in settings.items()}


def _secret_of(given: Settings) -> bytes | None:
    """Return the secret from the setting, else from the catalog; None if there is no catalog yet."""
    if given.hash_secret is not None:
        return given.hash_secret
    from app.catalog.catalog import Catalog
    from app.catalog.errors import CatalogUnavailableError, DeploymentMismatchError, SchemaVersionError
    from app.node import logs
    from app.run.wiring import defaults

    logs.configure(logging.WARNING)  # without the catalog's info lines

    async def kept() -> bytes:
        catalog = Catalog(given.catalog_url, defaults(given))
        await catalog.open()
        await catalog.close()
        return catalog.hash_secret

    try:
        return asyncio.run(kept())
    except DeploymentMismatchError as refused:
        raise CommandError(str(refused)) from None
    except (CatalogUnavailableError, SchemaVersionError):
        return None
