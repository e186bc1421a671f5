"""The routes that change many quotas: ``alter``, each entity by itself, and ``apply``, all or nothing."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from app.catalog.catalog import Catalog, ChangeResult, Conditions, QuotaChange
from app.domain.entity import Entity
from app.domain.errors import EntityError, QuotaValueError
from app.domain.quota import Defaults
from app.domain.quota_value import Definition, pointer, replace
from app.http import quotas_lists_schema as schema
from app.http.access import Access
from app.http.problems import FLAG, MAX_ERRORS, FieldError, Rule, faults, must, unprocessable
from app.http.query import Parameters
from app.http.quotas_lists_schema import MAX_ALTERED, MAX_APPLIED
from app.http.quotas_wire import conditions_of, origin_of, refusals
from app.http.strict import JSON, answer, read_json

_LIST: Final = must("must be a list", lambda value: isinstance(value, list))
_ALTERATION: Final = {
    "entity": Rule(must("must be a string", lambda value: isinstance(value, str))),
    "quotas": Rule(must("must be an object of quotas by key", lambda value: isinstance(value, dict))),
}


@dataclass(slots=True)
class Alteration:
    """The new quotas of one entity, or the errors in them."""

    sent: str
    entity: Entity | None = None
    edits: Mapping[str, Definition | None] = field(default_factory=dict)
    errors: list[FieldError] = field(default_factory=list)


def add_routes(routes: APIRouter, catalog: Catalog, access: Access) -> None:
    """Add the routes."""

    async def read(request: Request, most: int) -> tuple[list[Alteration], bool]:
        """Return the alterations of a request, and whether to keep what they change."""
        alterations, keep = await read_json(request, JSON, of=partial(_alterations, most, catalog.defaults))
        Parameters(request.scope["query_string"]).check()
        return alterations, keep

    async def change(request: Request, good: list[Alteration], *, keep: bool) -> ChangeResult:
        edits = {each.entity: each.edits for each in good if each.entity is not None}
        conditions = Conditions(match=conditions_of(request).match)
        async with refusals():
            return await catalog.change(edits, origin_of(request, access), conditions, keep=keep)

    @routes.post("/v1/quotas:alter", **schema.ALTER)
    async def alter_quotas(request: Request) -> Response:
        alterations, keep = await read(request, MAX_ALTERED)
        await change(request, [each for each in alterations if not each.errors], keep=keep)
        return await asyncio.to_thread(_altered, alterations)

    @routes.post("/v1/quotas:apply", **schema.APPLY)
    async def apply_quotas(request: Request) -> Response:
        alterations, keep = await read(request, MAX_APPLIED)
        if errors := [error for each in alterations for error in each.errors]:
            raise unprocessable(*errors)
        return await asyncio.to_thread(_applied, await change(request, alterations, keep=keep))


def _structure(body: Any, most: int) -> tuple[list[dict[str, Any]], bool]:
    """Return the alterations of a body, and whether this is a dry run.

    Raises:
        ProblemError: 422 for a body with another structure.
    """
    count = must(f"must have at most {most:,} entries", lambda value: len(value) <= most)
    rules = {"alterations": Rule(lambda value: _LIST(value) or count(value)), "validate_only": FLAG}
    errors = faults(body, "must be an object with alterations", rules)
    if isinstance(body, dict) and not rules["alterations"].fault(body.get("alterations")):
        for place, each in enumerate(body["alterations"]):
            errors += faults(
                each, "must be an object with entity and quotas", _ALTERATION, "alterations", place
            )
    if errors:
        raise unprocessable(*errors)
    return body["alterations"], body.get("validate_only", False)


def _alterations(most: int, defaults: Defaults, body: Any) -> tuple[list[Alteration], bool]:
    """Return every alteration with its errors, duplicated entities included; and whether to keep them.

    Together they name ``MAX_ERRORS`` errors, but at least one for each failure.

    Raises:
        ProblemError: 422 for a body with another structure.
    """
    sent, validate_only = _structure(body, most)
    found: list[Alteration] = []
    left = MAX_ERRORS
    for place, each in enumerate(sent):
        alteration = _alteration(each["entity"], each["quotas"], defaults, "alterations", place)
        alteration.errors = alteration.errors[: max(1, left)]
        left -= len(alteration.errors)
        found.append(alteration)
    times = Counter(alteration.entity for alteration in found)
    for place, alteration in enumerate(found):
        entity = alteration.entity
        if entity is not None and times[entity] > 1:
            where = pointer("alterations", place, "entity")
            alteration.errors.insert(0, FieldError(where, f"{entity} is given {times[entity]} times"))
    return found, not validate_only


def _alteration(spelled: str, quotas: dict[str, object], defaults: Defaults, *at: str | int) -> Alteration:
    found = Alteration(spelled)
    try:
        found.entity = Entity.parse(spelled)
        found.edits = replace(quotas, found.entity, defaults)
    except EntityError as error:
        found.errors = [FieldError(pointer(*at, "entity"), str(error))]
    except QuotaValueError as wrong:
        found.errors = [
            FieldError(pointer(*at, "quotas") + below, message) for below, message in wrong.errors
        ]
    return found


def _altered(alterations: list[Alteration]) -> Response:
    return answer(schema.QuotaResultsBody(_results(alterations)))


def _applied(changed: ChangeResult) -> Response:
    return answer(schema.QuotaPlanBody(changed.version, [*map(_planned, changed.changes)]))


def _results(alterations: list[Alteration]) -> list[schema.QuotaResult]:
    results = []
    for each in alterations:
        result = schema.QuotaResult(
            each.sent if each.entity is None else str(each.entity), ok=not each.errors
        )
        if each.errors:
            result.problem = unprocessable(*each.errors).structured()
        results.append(result)
    return results


def _planned(change: QuotaChange) -> schema.PlannedChange:
    return schema.PlannedChange(
        str(change.entity),
        change.quota,
        "added" if change.before is None else "removed" if change.after is None else "changed",
        change.before,
        change.after,
        "emptied" if change.emptied else "kept",
    )
