"""Reading a list page by page, with progress at a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from app.run.commands import show
from app.run.commands.node import Node
from app.run.errors import CannotAsk

LONGEST_PAGE: Final = 1_000
BEGINNINGS: Final = 5
"""How often a list that changes under the reader is begun anew."""


@dataclass(frozen=True, slots=True)
class Listed:
    """What a list holds, and its ETag, if it has one."""

    items: list[Any]
    etag: str | None


def pages(
    node: Node, path: str, name: str, query: Mapping[str, Any] | None = None, *, limit: int | None = None
) -> Listed:
    """Every page of a list, or as many as hold ``limit`` items."""
    found, etags = _read(node, path, name, query or {}, limit)
    return Listed(found, etags.pop() if len(etags) == 1 else None)


def one_version(node: Node, path: str, name: str) -> Listed:
    """Every page of a list, all of one version: begun anew when the list has changed in between.

    Raises:
        CannotAsk: it changed each time.
    """
    for _ in range(BEGINNINGS):
        found, etags = _read(node, path, name, {}, None)
        if len(etags) == 1:
            return Listed(found, etags.pop())
    raise CannotAsk(f"{path} changed {BEGINNINGS} times while it was read; try again")


def _read(
    node: Node, path: str, name: str, query: Mapping[str, Any], limit: int | None
) -> tuple[list[Any], set[str | None]]:
    found: list[Any] = []
    etags: set[str | None] = set()
    cursor: str | None = None
    with show.progress().status(f"reading {name} ...") as status:
        while True:
            left = LONGEST_PAGE if limit is None else min(LONGEST_PAGE, limit - len(found))
            answer = node.ask("GET", path, query={**query, "limit": left, "cursor": cursor})
            page = answer.json()
            found += page[name]
            etags.add(answer.headers.get("etag"))
            cursor = page["next_cursor"]
            if cursor is None or (limit is not None and len(found) >= limit):
                return found, etags
            status.update(f"reading {name} ... {len(found):,}")
