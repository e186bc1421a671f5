"""Writes folders under temporary names and renames them at the end: they appear whole or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_aside(*folders: Path) -> Iterator[Sequence[Path]]:
    """Yield a temporary folder next to each folder; it gets that folder's name at the end if nothing failed.

    Raises:
        OSError: a folder cannot be made, or its name is taken; then nothing is left behind.
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
