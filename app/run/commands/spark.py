"""`quotagate spark JOB ...`: run a Spark job over the decision log, with this installation's settings."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from app.node.errors import CommandError
from app.run.commands import child
from app.run.commands.secret import secret_of

if TYPE_CHECKING:
    from app.node.settings import Settings

ROOT: Final = Path(__file__).parents[3]
NEEDS_SECRET: Final = frozenset({"backfill"})
"""Jobs that hash ids themselves; only they get the secret."""


def spark(
    context: typer.Context,
    job: Annotated[str | None, typer.Argument(show_default=False)] = None,
) -> None:
    """Run a Spark job over the decision log; without JOB, or with --help, list the jobs.

    In a checkout, Spark and Java are installed at first use. Elsewhere, install them with
    `pip install "quotagate[spark]"`. For the options of a job: quotagate spark JOB --help.
    """
    arguments = [*([job] if job else []), *context.args]
    if not arguments:
        arguments = ["--help"]
    asks_for_help = not {"-h", "--help"}.isdisjoint(arguments)
    if asks_for_help:
        child.become("workers.spark", arguments)
    _install()
    from app.node.settings import load  # every other command starts twice as fast without it

    child.become("workers.spark", arguments, _settings(load(), job))


def _install() -> None:
    """Install pyspark if it is missing and this is a checkout."""
    if importlib.util.find_spec("pyspark") is not None:
        return
    if not (ROOT / "Makefile").is_file() or Path(sys.prefix) != ROOT / ".venv":
        raise CommandError('Spark is not installed; pip install "quotagate[spark]" installs it with Java')
    typer.echo("quotagate: downloading Spark, once (half a gigabyte) ...", err=True)
    if subprocess.run(["make", ".venv/.spark"], cwd=ROOT, stdout=sys.stderr, check=False).returncode:
        raise CommandError("Spark could not be installed; run `make .venv/.spark` to see why")


def _settings(given: Settings, job: str | None) -> dict[str, str]:
    """The environment of a job. The secret goes only there, never into an argument."""
    from app.node.settings import PREFIX

    settings = {
        "LOG_URL": given.log_url or str(given.home.resolve() / "log"),
        "MAX_IDS_PER_PRINCIPAL": str(given.max_ids_per_principal),
        "COMBINE_DELAYS": given.combine_delays,
        "CLOCK": given.clock,
        "PRODUCER_ID_WINDOW_MS": str(given.producer_id_window_ms),
        "PRODUCER_ID_LAYERS": given.producer_id_layers,
    }
    if job in NEEDS_SECRET and (secret := secret_of(given)):
        settings["HASH_SECRET"] = secret.hex()
    return {PREFIX + name: value for name, value in settings.items()}
