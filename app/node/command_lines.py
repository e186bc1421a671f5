"""Command lines that run modules of this installation, never of the working directory."""

from __future__ import annotations

import sys


def program(module: str, *arguments: str) -> list[str]:
    """Return a command line that runs a module."""
    return [sys.executable, "-P", "-m", module, *arguments]


def quotagate(*arguments: str) -> list[str]:
    """Return a command line that runs a command of `quotagate`."""
    return program("app.run.cli", *arguments)
