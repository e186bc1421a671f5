"""`quotagate generate`: traffic with ground truth, made by a program of its own."""

from __future__ import annotations

from typing import Final

import typer

from app.run.commands import child
from app.run.commands.secret import secret_of

HASHES: Final = "log"
"""What it makes of ids that it hashes itself: a store of this deployment is to know them."""


def generate(context: typer.Context) -> None:
    """Make realistic traffic with ground truth: sent to nodes, or written as a decision log."""
    settings = {}
    if context.args[:1] == [HASHES] and {"-h", "--help"}.isdisjoint(context.args):
        from app.run.settings import PREFIX, load  # noqa: PLC0415  every other command starts twice as fast without

        if secret := secret_of(load()):
            settings[f"{PREFIX}HASH_SECRET"] = secret.hex()
    child.become("workers.generate", context.args, settings)
