"""The script of the store, assembled from ``lua/*.lua``."""

from __future__ import annotations

from importlib.resources import files
from typing import Final

from app.domain.shape import GROWTH, SHARES, SMALLEST_SEGMENT

ALGORITHMS: Final = ("sampled_rate", "token_bucket", "producer_ids")
"""Each is made when a call first needs it: to build every function of the script takes 25 microseconds."""


FOLDER: Final = files("app.store") / "lua"


def constants() -> str:
    """What the script takes from the domain, so that nothing is defined twice."""
    shares = ", ".join(f"{{{hashes}, {load!r}}}" for hashes, load in SHARES)
    return f"local SHARES = {{{shares}}}\nlocal SMALLEST_SEGMENT, GROWTH = {SMALLEST_SEGMENT}, {GROWTH}\n"


def assemble() -> str:
    """The whole script."""
    texts = {part: (FOLDER / f"{part}.lua").read_text() for part in ("call", *ALGORITHMS, "decide")}
    texts["producer_ids"] = constants() + texts["producer_ids"]
    for name in ALGORITHMS:
        texts[name] = f"local function make_{name}()\n{texts[name]}return {name}\nend\n"
    return "\n".join(texts.values())


SCRIPT: Final = assemble()
