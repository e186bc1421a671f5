"""Prints the result of a proof or a measurement as a table, with date, command and machine."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path


def print_table(heading: str, command: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table."""
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in (columns, ["---"] * len(columns), *rows)]
    when = f"{datetime.now(UTC):%Y-%m-%d}, `{command}`, {machine()}."
    print("\n".join(["", f"## {heading}", "", when, "", *lines]))


def machine() -> str:
    """The machine: its cores, its processor and its Python."""
    model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    name = model[1] if model else platform.processor()
    return f"{os.cpu_count()} shared cores, {name}, Python {platform.python_version()}"
