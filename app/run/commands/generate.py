"""`quotagate generate`: traffic with ground truth, made by a program of its own."""

from __future__ import annotations

import typer

from app.run.commands import child


def generate(context: typer.Context) -> None:
    """Make realistic traffic with ground truth: sent to nodes, or written as a decision log."""
    child.become("workers.generate", context.args)
