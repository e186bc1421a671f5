"""Writes the result of a proof to its page under docs/proofs, with date, command and machine."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

PAGES = Path(__file__).parents[1] / "docs" / "proofs"


def record(
    page: str, heading: str, command: str, columns: Sequence[str], rows: Sequence[Sequence[object]]
) -> None:
    """Print a table, and let it replace the page's section of that heading, or append it."""
    table = [columns, ["---"] * len(columns), *rows]
    lines = ["| " + " | ".join(str(cell) for cell in row) + " |" for row in table]
    when = f"{datetime.now(UTC):%Y-%m-%d}, `{command}`, {machine()}."
    section = "\n".join([f"## {heading}", "", when, "", *lines, ""])
    print(f"\n{section}")
    path = PAGES / f"{page}.md"
    text = path.read_text(encoding="utf-8")
    text, times = re.subn(
        rf"## {re.escape(heading)}\n.*?(?=\n## |\Z)", lambda _: section, text, flags=re.DOTALL
    )
    path.write_text(text if times else f"{text.rstrip()}\n\n{section}", encoding="utf-8")


def machine() -> str:
    """The machine: its cores, its processor and its Python."""
    model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    name = model[1] if model else platform.processor()
    return f"{os.cpu_count()} shared cores, {name}, Python {platform.python_version()}"
