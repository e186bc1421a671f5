"""Options that several commands share, beside those that say which node they ask."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

AtMs = Annotated[int | None, typer.Option(help="The time, where the caller's clock decides.")]
Reason = Annotated[str | None, typer.Option(help="Why; kept in the history.")]
EnvFile = Annotated[
    Path | None, typer.Option(help="Read settings from this file instead of .env; the environment wins.")
]
