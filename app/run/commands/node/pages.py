"""Reads lists page by page, with progress at a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from app.node.errors import NodeRequestError
from app.run.commands import show
from app.run.commands.node.requests import Node

MAX_PAGE: Final = 1_000
ATTEMPTS: Final = 5
"""How often a list is read again because it changed meanwhile."""


class CatalogContent(NamedTuple):
    """All quotas by entity, at one version."""

    etag: str
    quotas: Mapping[str, Mapping[str, Any]]


def pages(
    node: Node, path: str, name: str, query: Mapping[str, Any], *, limit: int | None = None
) -> list[Any]:
    """Return the items of all pages, or the first ``limit`` items."""
    return _read(node, path, name, query, limit)[0]


def catalog(node: Node) -> CatalogContent:
    """Read the whole catalog at one version; read again if it changed in between.

    Raises:
        NodeRequestError: it changed on every attempt, or the node does not send its version.
    """
    for _ in range(ATTEMPTS):
        items, (etag, *others) = _read(node, "/v1/quotas", "quotas", {}, None)
        if etag is None:
            raise NodeRequestError(
                "the node does not send the catalog's version: it is older than this command"
            )
        if not others:
            return CatalogContent(etag, {one["entity"]: one["quotas"] for one in items})
    raise NodeRequestError(f"/v1/quotas changed {ATTEMPTS} times while it was read; try again")


def _read(
    node: Node, path: str, name: str, query: Mapping[str, Any], limit: int | None
) -> tuple[list[Any], set[str | None]]:
    items: list[Any] = []
    etags: set[str | None] = set()
    cursor: str | None = None
    with show.working(f"reading {name} ...") as status:
        while True:
            left = MAX_PAGE if limit is None else min(MAX_PAGE, limit - len(items))
            answer = node.ask("GET", path, query={**query, "limit": left, "cursor": cursor})
            items += answer.body[name]
            etags.add(answer.headers.get("etag"))
            cursor = answer.body["next_cursor"]
            if cursor is None or (limit is not None and len(items) >= limit):
                return items, etags
            status.update(f"reading {name} ... {len(items):,}")
