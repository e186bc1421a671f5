"""Folders written aside and renamed at the end, so that they appear whole or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_aside(*folders: Path) -> Iterator[Sequence[Path]]:
    """For each folder one beside it to write into, which takes its name at the end, if all went well.

    Raises:
        OSError: a folder cannot be made, or its name is taken; nothing is left behind then.
    """
    made: list[Path] = []
    try:
        for folder in folders:
            aside = folder.with_name(f"_{folder.name}.writing")
            aside.mkdir(parents=True)
            made.append(aside)
        yield made
        for written, folder in zip(made, folders, strict=True):
            written.rename(folder)
    finally:
        for aside in made:
            shutil.rmtree(aside, ignore_errors=True)
