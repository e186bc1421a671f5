"""The Lua scripts, read from ``lua/*.lua``; the large one, which decides, is put together from several.

``library.py`` makes a function library of the large one. ``run_script`` sends the small ones unchanged.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Final

from app.domain.holds import MOST_HOLDS
from app.domain.producer_ids import FULL_MS
from app.domain.quota import MAX_THROTTLE_MS, RECHECK_MS
from app.domain.retry import RETRY_MS
from app.domain.sampled_rate import UNREACHABLE_MS
from app.domain.shape import (
    BLOCK_BYTES,
    CELLS,
    FIRST_SEGMENT,
    GROWTH,
    LAYERS,
    LEAST_STEP,
    SHARES,
    SMALLEST_SEGMENT,
    STEPS,
)
from app.store.keys import LONGEST_TTL_MS

ALGORITHMS: Final = ("sampled_rate", "token_bucket", "producer_ids")

CHECK_FULL_EVERY_MS: Final = 100
"""The least time between two checks of the store's memory by the script: a check takes 18 microseconds."""

MOST_WRITTEN: Final = 256 * 1024
"""Written bytes after which a call decides no further ask."""

FOLDER: Final = files("app.store") / "lua"


def numbers() -> str:
    """The numbers that the script takes from Python, where each is defined once."""
    taken = {
        "MAX_THROTTLE_MS": MAX_THROTTLE_MS,
        "RECHECK_MS": RECHECK_MS,
        "RETRY_MS": RETRY_MS,
        "UNREACHABLE_MS": UNREACHABLE_MS,
        "SMALLEST_SEGMENT": SMALLEST_SEGMENT,
        "FIRST_SEGMENT": FIRST_SEGMENT,
        "STEPS": STEPS,
        "LEAST_STEP": LEAST_STEP,
        "GROWTH": GROWTH,
        "LAYERS": LAYERS,
        "CELLS": CELLS,
        "BLOCK_BYTES": BLOCK_BYTES,
        "LONGEST_TTL_MS": LONGEST_TTL_MS,
        "FULL_MS": FULL_MS,
        "CHECK_FULL_EVERY_MS": CHECK_FULL_EVERY_MS,
        "MOST_WRITTEN": MOST_WRITTEN,
        "MOST_HOLDS": MOST_HOLDS,
    }
    return "".join(f"local {name} = {number}\n" for name, number in taken.items())


def shares() -> str:
    """The shapes of segments by share, from the domain."""
    return f"local SHARES = {{{', '.join(f'{{{hashes}, {load!r}}}' for hashes, load in SHARES)}}}\n"


def text(name: str) -> str:
    """Return one of the files; each begins with a description of its keys, arguments and reply."""
    return (FOLDER / f"{name}.lua").read_text()


def maker(name: str, more: str = "") -> str:
    """Wrap an algorithm, and code that is added to it, in a Lua function that returns the algorithm."""
    before = shares() if name == "producer_ids" else ""
    return f"local function make_{name}()\n{before}{text(name)}{more}return {name}\nend\n"


def assemble() -> str:
    """The whole script."""
    makers = map(maker, ALGORITHMS)
    return "\n".join(
        [
            numbers() + text("call"),
            text("holds"),
            text("history"),
            text("undo"),
            *makers,
            text("order"),
            text("decide"),
        ]
    )


SCRIPT: Final = assemble()

FORGET: Final = numbers() + text("order") + text("forget")

MARK: Final = numbers() + text("history") + text("mark")


def assemble_look() -> str:
    """The script that reads the layers of a bucket; the store refuses any write of it."""
    parts = [numbers(), text("call"), maker("producer_ids", text("layers_read"))]
    return "\n".join(
        [
            "#!lua flags=no-writes",
            "local keys, args = KEYS, ARGV",  # call.lua gives these names to its own variables
            *parts,
            "return make_producer_ids().read_layers(keys, args)",
        ]
    )


READ_LAYERS: Final = assemble_look()
