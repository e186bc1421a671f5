"""A plan: what a change would do at one version of the catalog, shown, and applied at that version alone."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import typer

from app.run.commands import show
from app.run.commands.node import Node, Refused
from app.run.commands.pages import one_version
from app.run.errors import CannotAsk

MAX_BODY: Final = 1_048_576
MAX_ALTERATIONS: Final = 10_000
"""What a node takes in one request."""
APPLY_TIMEOUT_S: Final = 120.0
SPLIT: Final = "Split the file, and apply its parts with --only-named."

Alteration = dict[str, Any]
"""What an entity's quotas are to become, as the node reads it; a quota that is None goes."""


class Catalog(NamedTuple):
    """What is set, by entity, at one version."""

    etag: str
    quotas: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Plan:
    """What alterations would change, at one version of the catalog."""

    etag: str
    alterations: list[Alteration]
    changes: list[dict[str, Any]]

    @property
    def version(self) -> int:
        """The version that it was made at."""
        return int(self.etag.strip('"'))


def catalog(node: Node) -> Catalog:
    """The whole catalog, all of one version."""
    listed = one_version(node, "/v1/quotas", "quotas")
    return Catalog(known_etag(listed.etag), {one["entity"]: one["quotas"] for one in listed.items})


def known_etag(etag: str | None) -> str:
    """The version of what was read.

    Raises:
        CannotAsk: the node does not say.
    """
    if etag is None:
        raise CannotAsk("the node does not say the catalog's version: it is older than this command")
    return etag


def plan(node: Node, etag: str, alterations: list[Alteration]) -> Plan:
    """What alterations would change, said by the node itself, which alone knows which buckets are kept."""
    found = Plan(etag, alterations, [])
    if alterations:
        found.changes.extend(_post(node, found, validate_only=True)["changes"])
    return found


def apply(node: Node, found: Plan, reason: str | None) -> dict[str, Any]:
    """Do what a plan says, all of it or nothing; the new version, and the changes."""
    try:
        return _post(node, found, reason=reason)
    except Refused:
        raise
    except CannotAsk as error:
        raise CannotAsk(
            f"{error}\n  No answer came: either all of it was applied or nothing. Plan again to see which."
        ) from None


def parts(alterations: Sequence[Alteration]) -> Iterator[list[Alteration]]:
    """Alterations in parts that a node takes, for whom it is enough that each part is made whole.

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


def show_changes(found: Plan, nothing: str) -> None:
    """A plan as a table, or that nothing changes."""
    if not found.changes:
        typer.echo(nothing)
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
            for one in found.changes
        ],
    )
    kinds = Counter(one["change"] for one in found.changes)
    emptied = sum(one["buckets"] == "emptied" for one in found.changes)
    said = ", ".join(f"{kinds[kind]} {kind}" for kind in ("added", "changed", "removed"))
    buckets = count(emptied, "quota empties its buckets", "quotas empty their buckets")
    typer.echo(
        f"Plan: {said}; {buckets if emptied else 'every bucket is kept'}. "
        f"The catalog is at version {found.version}."
    )


def confirm(found: Plan, node: Node) -> None:
    """Ask the person at the terminal; without a yes, nothing more is done."""
    typer.confirm(
        f"Apply {count(len(found.changes), 'change', 'changes')} to {node.url}?", abort=True, err=True
    )


def count(number: int, one: str, more: str) -> str:
    """A number of things, in words.

    >>> count(1, "entity", "entities"), count(2000, "entity", "entities")
    ('1 entity', '2,000 entities')
    """
    return f"{number:,} {one if number == 1 else more}"


def _post(
    node: Node, found: Plan, *, reason: str | None = None, validate_only: bool = False
) -> dict[str, Any]:
    size = _size(found.alterations)
    if size > MAX_BODY or len(found.alterations) > MAX_ALTERATIONS:
        raise CannotAsk(
            f"{len(found.alterations):,} entities change, {size:,} bytes; {MAX_ALTERATIONS:,} entities and "
            f"{MAX_BODY:,} bytes go into one change that is made whole or not at all. {SPLIT}"
        )
    body = {"alterations": found.alterations, "validate_only": validate_only}
    headers = {"If-Match": found.etag, "X-Reason": reason}
    with show.progress().status("planning ..." if validate_only else "applying ..."):
        try:
            answer = node.ask("POST", "/v1/quotas:apply", body, headers=headers, timeout=APPLY_TIMEOUT_S)
        except Refused as refused:
            if refused.status != 412:
                raise
            raise Refused(
                412, "the catalog changed since the plan. Nothing was applied; plan again."
            ) from None
    applied: dict[str, Any] = answer.json()
    return applied


def _size(alterations: list[Alteration]) -> int:
    """How many bytes a change takes on its way, in the longer of its two forms."""
    return len(_json({"alterations": alterations, "validate_only": False}))


def _json(content: object) -> bytes:
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
