"""`quotagate generate`: generate traffic with ground truth."""

from __future__ import annotations

from typing import Final

import typer

from app.run.commands import child
from app.run.commands.secret import secret_of

HASHES: Final = "log"
"""The subcommand that hashes ids itself, so it needs the deployment's secret."""


def generate(context: typer.Context) -> None:
    """Generate realistic traffic with ground truth: send it to nodes, or write it as a decision log."""
    settings = {}
    if context.args[:1] == [HASHES] and {"-h", "--help"}.isdisjoint(context.args):
        from app.node.settings import PREFIX, load  # every other command starts twice as fast without it

        if secret := secret_of(load()):
            settings[f"{PREFIX}HASH_SECRET"] = secret.hex()
    child.become("workers.generate", context.args, settings)
