"""Reads lists page by page, with progress at a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from app.node.errors import NodeRequestError
from app.run.commands import show
from app.run.commands.node import Node

MAX_PAGE: Final = 1_000
ATTEMPTS: Final = 5
"""How often a list that changes while it is read is read again."""


@dataclass(frozen=True, slots=True)
class ListContent:
    """The items of a list, and its ETag, if it has one."""

    items: list[Any]
    etag: str | None


def pages(
    node: Node, path: str, name: str, query: Mapping[str, Any] | None = None, *, limit: int | None = None
) -> ListContent:
    """Return the items of all pages, or the first ``limit`` items."""
    items, etags = _read(node, path, name, query or {}, limit)
    return ListContent(items, etags.pop() if len(etags) == 1 else None)


def one_version(node: Node, path: str, name: str) -> ListContent:
    """Return the items of all pages at one version; read again if the list changed in between.

    Raises:
        NodeRequestError: it changed on every attempt.
    """
    for _ in range(ATTEMPTS):
        items, etags = _read(node, path, name, {}, None)
        if len(etags) == 1:
            return ListContent(items, etags.pop())
    raise NodeRequestError(f"{path} changed {ATTEMPTS} times while it was read; try again")


def _read(
    node: Node, path: str, name: str, query: Mapping[str, Any], limit: int | None
) -> tuple[list[Any], set[str | None]]:
    items: list[Any] = []
    etags: set[str | None] = set()
    cursor: str | None = None
    with show.progress().status(f"reading {name} ...") as status:
        while True:
            left = MAX_PAGE if limit is None else min(MAX_PAGE, limit - len(items))
            answer = node.ask("GET", path, query={**query, "limit": left, "cursor": cursor})
            page = answer.json()
            items += page[name]
            etags.add(answer.headers.get("etag"))
            cursor = page["next_cursor"]
            if cursor is None or (limit is not None and len(items) >= limit):
                return items, etags
            status.update(f"reading {name} ... {len(items):,}")
