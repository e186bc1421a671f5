"""`quotagate spark JOB ...`: a Spark job over the decision log, with the settings of this installation."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from app.run.commands import child
from app.run.commands.secret import secret_of
from app.run.errors import CannotRun

if TYPE_CHECKING:
    from app.run.settings import Settings

ROOT: Final = Path(__file__).parents[3]
NEEDS_SECRET: Final = frozenset({"backfill"})
"""Jobs that hash ids themselves; no other one is given the secret."""


def spark(
    context: typer.Context,
    job: Annotated[str | None, typer.Argument(show_default=False)] = None,
) -> None:
    """Run a Spark job over the decision log; without JOB, or with --help, say which there are.

    Spark and a Java are installed when they are first asked for, in a checkout; elsewhere they come with
    `pip install "quotagate[spark]"`. Options of a job: quotagate spark JOB --help.
    """
    arguments = [*([job] if job else []), *context.args]
    if not arguments:
        arguments = ["--help"]
    asks_for_help = not {"-h", "--help"}.isdisjoint(arguments)
    if asks_for_help:
        child.become("workers.spark", arguments)
    _install()
    from app.run.settings import load  # noqa: PLC0415  every other command starts twice as fast without

    child.become("workers.spark", arguments, _settings(load(), job))


def _install() -> None:
    """Have pyspark: in a checkout it is fetched, as `make test` does."""
    if importlib.util.find_spec("pyspark") is not None:
        return
    if not (ROOT / "Makefile").is_file() or Path(sys.prefix) != ROOT / ".venv":
        raise CannotRun('Spark is not installed; pip install "quotagate[spark]" brings it, and a Java')
    typer.echo("quotagate: fetching Spark, which is done once (half a gigabyte) ...", err=True)
    if subprocess.run(["make", ".venv/.spark"], cwd=ROOT, stdout=sys.stderr, check=False).returncode:
        raise CannotRun("Spark could not be fetched; `make .venv/.spark` says why")


def _settings(given: Settings, job: str | None) -> dict[str, str]:
    """What a job reads from its environment; the secret travels there alone, never in an argument."""
    from app.run.settings import PREFIX  # noqa: PLC0415

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
