"""The paths through the code that docs/architecture.md describes, and the functions that a program enters."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final

ROOT: Final = Path(__file__).parents[1]
NAMED: Final = re.compile(r"`((?:app|workers)/[\w/]+\.py(?:::[\w.]+)?)`")


def steps(title: str, first: int, last: int) -> list[str]:
    """The code that some steps of a section name, in their order: paths, some with a name behind ``::``."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = text.partition(f"\n## {title}")[2].partition("\n## ")[0]
    found = section.partition(f"\n{first}. ")[2].partition(f"\n{last + 1}. ")[0]
    return list(dict.fromkeys(NAMED.findall(found)))


@contextmanager
def watching() -> Iterator[list[str]]:
    """Collect the functions of this repository that this thread enters, as ``path::name``; not imports."""
    entered: list[str] = []

    def note(frame: FrameType, event: str, _argument: object) -> None:
        code = frame.f_code
        is_ours = code.co_filename.startswith((f"{ROOT}/app/", f"{ROOT}/workers/"))
        if event == "call" and is_ours and code.co_flags & inspect.CO_OPTIMIZED:
            entered.append(f"{code.co_filename.removeprefix(f'{ROOT}/')}::{code.co_qualname}")

    sys.setprofile(note)
    try:
        yield entered
    finally:
        sys.setprofile(None)


def first_entries(named: list[str], entered: list[str]) -> dict[str, int]:
    """For each named piece of code the place of its first function that was entered; -1 if none was."""
    return {
        name: next((at for at, each in enumerate(entered) if each.startswith(name)), -1) for name in named
    }
