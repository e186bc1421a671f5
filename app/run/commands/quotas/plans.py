"""A plan: the changes to one version of the catalog, to be shown, and applied only to that version."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import typer

from app.node.errors import NodeRequestError
from app.run.commands import show
from app.run.commands.node.requests import Node, NodeRefusalError
from app.terminal import count, plain

MAX_BODY: Final = 1_048_576
MAX_ALTERATIONS: Final = 10_000
"""The largest request that a node accepts."""
APPLY_TIMEOUT_S: Final = 120.0
SPLIT: Final = "Split the file, and apply its parts with --only-named."

Alteration = dict[str, Any]
"""New quotas of an entity, as the API takes them; None removes a quota."""


@dataclass(frozen=True, slots=True)
class ChangePlan:
    """The changes that alterations would make to one version of the catalog."""

    etag: str
    alterations: list[Alteration]
    changes: list[dict[str, Any]]

    @property
    def version(self) -> int:
        """The catalog's version that the plan is for."""
        return int(self.etag.strip('"'))


def plan(node: Node, etag: str, alterations: list[Alteration]) -> ChangePlan:
    """Ask the node for the changes by alterations; only the node knows which buckets are kept."""
    planned = ChangePlan(etag, alterations, [])
    if alterations:
        planned.changes.extend(_post(node, planned, validate_only=True)["changes"])
    return planned


def apply(node: Node, planned: ChangePlan, reason: str | None) -> dict[str, Any]:
    """Apply a plan atomically; return the new version and the changes."""
    try:
        return _post(node, planned, reason=reason)
    except NodeRefusalError:
        raise
    except NodeRequestError as error:
        raise NodeRequestError(
            *error.args, "  There was no answer: all changes were applied, or none. Plan again to see which."
        ) from None


def parts(alterations: Sequence[Alteration]) -> Iterator[list[Alteration]]:
    """Split alterations into requests that a node accepts; each request is applied atomically.

    >>> [len(part) for part in parts([{"entity": "user=a", "quotas": {}}] * 10_001)]
    [10000, 1]
    """
    part: list[Alteration] = []
    size = _size([])
    for one in alterations:
        more = len(_json(one)) + 1
        if part and (size + more > MAX_BODY or len(part) == MAX_ALTERATIONS):
            yield part
            part, size = [], _size([])
        part.append(one)
        size += more
    if part:
        yield part


def show_changes(planned: ChangePlan, nothing: str) -> None:
    """Show a plan as a table, or the text ``nothing`` if it changes nothing."""
    if not planned.changes:
        show.line(nothing)
        return
    show.table(
        ["", "ENTITY", "QUOTA", "BEFORE", "AFTER", "BUCKETS"],
        [
            (
                {"added": "+", "changed": "~", "removed": "-"}[one["change"]],
                one["entity"],
                one["quota"],
                one["before"] and show.brief(one["before"]),
                one["after"] and show.brief(one["after"]),
                one["buckets"],
            )
            for one in planned.changes
        ],
    )
    kinds = Counter(one["change"] for one in planned.changes)
    emptied = sum(one["buckets"] == "emptied" for one in planned.changes)
    summary = ", ".join(f"{kinds[kind]} {kind}" for kind in ("added", "changed", "removed"))
    buckets = count(emptied, "quota empties its buckets", "quotas empty their buckets")
    show.line(
        f"Plan: {summary}; {buckets if emptied else 'every bucket is kept'}. "
        f"The catalog is at version {planned.version}."
    )


def confirm(planned: ChangePlan, node: Node) -> None:
    """Ask the person at the terminal; abort without a yes."""
    typer.confirm(
        f"Apply {count(len(planned.changes), 'change', 'changes')} to {plain(node.url)}?",
        abort=True,
        err=True,
    )


def _post(
    node: Node, planned: ChangePlan, *, reason: str | None = None, validate_only: bool = False
) -> dict[str, Any]:
    size = _size(planned.alterations)
    if size > MAX_BODY or len(planned.alterations) > MAX_ALTERATIONS:
        raise NodeRequestError(
            f"{len(planned.alterations):,} entities change, {size:,} bytes; {MAX_ALTERATIONS:,} entities and "
            f"{MAX_BODY:,} bytes are the most in one atomic change. {SPLIT}"
        )
    body = {"alterations": planned.alterations, "validate_only": validate_only}
    headers = {"If-Match": planned.etag, "X-Reason": reason}
    with show.working("planning ..." if validate_only else "applying ..."):
        try:
            return node.ask("POST", "/v1/quotas:apply", body, headers=headers, timeout=APPLY_TIMEOUT_S).body
        except NodeRefusalError as refused:
            if refused.status != 412:
                raise
            raise NodeRefusalError(
                412, "the catalog changed since the plan. Nothing was applied; plan again."
            ) from None


def _size(alterations: list[Alteration]) -> int:
    """The bytes of a request body with these alterations, at most."""
    return len(_json({"alterations": alterations, "validate_only": False}))


def _json(content: object) -> bytes:
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
