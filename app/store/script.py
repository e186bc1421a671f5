"""The script of the store, assembled from ``lua/*.lua``."""

from __future__ import annotations

from importlib.resources import files
from typing import Final

from app.domain.shape import GROWTH, SHARES, SMALLEST_SEGMENT

PARTS: Final = ("call", "sampled_rate", "token_bucket", "producer_ids", "decide")
"""The files of the script, in the order in which they stand in it."""


def constants() -> str:
    """What the script takes from the domain, so that nothing is defined twice."""
    shares = ", ".join(f"{{{hashes}, {load!r}}}" for hashes, load in SHARES)
    return f"local SHARES = {{{shares}}}\nlocal SMALLEST_SEGMENT, GROWTH = {SMALLEST_SEGMENT}, {GROWTH}\n"


def assemble() -> str:
    """The whole script."""
    folder = files("app.store") / "lua"
    return constants() + "\n".join((folder / f"{part}.lua").read_text() for part in PARTS)


SCRIPT: Final = assemble()
