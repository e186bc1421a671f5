"""Runs the programs of ``workers``, which ``app`` never imports."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final, NoReturn

PASS_THROUGH: Final[dict[str, Any]] = {
    "ignore_unknown_options": True,
    "allow_extra_args": True,
    "help_option_names": [],
}
"""The context settings of a command that passes its arguments on unchanged, ``--help`` too."""


def become(module: str, arguments: Sequence[str], settings: Mapping[str, str] | None = None) -> NoReturn:
    """Replace this process by that program, which keeps the process id, signals and terminal.

    Args:
        settings: environment variables for it, in addition to ours.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    command = [sys.executable, "-P", "-m", module, *arguments]
    os.execve(sys.executable, command, {**os.environ, **(settings or {})})  # noqa: S606  our own program
