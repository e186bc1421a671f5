"""Commands whose work is done by a program of ``workers``, which ``app`` never imports."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final, NoReturn

PASSED_ON: Final[dict[str, Any]] = {
    "ignore_unknown_options": True,
    "allow_extra_args": True,
    "help_option_names": [],
}
"""How a command takes its arguments that hands them to its program as they are, ``--help`` too."""


def become(module: str, arguments: Sequence[str], settings: Mapping[str, str] | None = None) -> NoReturn:
    """Go on as that program, under the same process id: its signals, its terminal, its exit code.

    Args:
        settings: variables that it finds in its environment beside ours.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    command = [sys.executable, "-P", "-m", module, *arguments]
    os.execve(sys.executable, command, {**os.environ, **(settings or {})})  # noqa: S606  our own program
