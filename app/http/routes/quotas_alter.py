"""The routes that change many quotas: ``alter``, each entity by itself, and ``apply``, all or nothing."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from app.catalog.catalog import Catalog, ChangeResult, Conditions, QuotaChange
from app.domain.entity import Entity
from app.domain.errors import EntityError, QuotaValueError
from app.domain.quota import Defaults
from app.domain.quota_value import Definition, pointer, replace
from app.http.access.access import Access
from app.http.openapi import quotas_lists as schema
from app.http.problems import MAX_ERRORS, FieldError, unprocessable
from app.http.query import Parameters
from app.http.routes.quotas_wire import conditions_of, origin_of, refusals
from app.http.strict import answer, read_struct


@dataclass(slots=True)
class Alteration:
    """The new quotas of one entity, or the errors in them."""

    sent: str
    entity: Entity | None = None
    edits: Mapping[str, Definition | None] = field(default_factory=dict)
    errors: list[FieldError] = field(default_factory=list)


def add_routes(routes: APIRouter, catalog: Catalog, access: Access) -> None:
    """Add the routes."""

    async def read(
        request: Request, body: type[schema.AlterationsBody | schema.ApplicationBody]
    ) -> tuple[list[Alteration], bool]:
        """Return the alterations of a request, and whether to keep the changes."""
        alterations, keep = await read_struct(request, body, partial(_alterations, catalog.defaults))
        Parameters(request.scope["query_string"]).check()
        return alterations, keep

    async def change(request: Request, good: list[Alteration], *, keep: bool) -> ChangeResult:
        edits = {each.entity: each.edits for each in good if each.entity is not None}
        conditions = Conditions(match=conditions_of(request).match)
        async with refusals():
            return await catalog.change(edits, origin_of(request, access), conditions, keep=keep)

    @routes.post("/v1/quotas:alter", **schema.ALTER)
    async def alter_quotas(request: Request) -> Response:
        alterations, keep = await read(request, schema.AlterationsBody)
        await change(request, [each for each in alterations if not each.errors], keep=keep)
        return await asyncio.to_thread(_altered, alterations)

    @routes.post("/v1/quotas:apply", **schema.APPLY)
    async def apply_quotas(request: Request) -> Response:
        alterations, keep = await read(request, schema.ApplicationBody)
        if errors := [error for each in alterations for error in each.errors]:
            raise unprocessable(*errors)
        return await asyncio.to_thread(_applied, await change(request, alterations, keep=keep))


def _alterations(
    defaults: Defaults, sent: schema.AlterationsBody | schema.ApplicationBody
) -> tuple[list[Alteration], bool]:
    """Return every alteration with its errors, duplicated entities included; and whether to keep them.

    Together they name at most ``MAX_ERRORS`` errors, but at least one for each failure.
    """
    found: list[Alteration] = []
    left = MAX_ERRORS
    for place, each in enumerate(sent.alterations):
        alteration = _alteration(each.entity, each.quotas, defaults, "alterations", place)
        alteration.errors = alteration.errors[: max(1, left)]
        left -= len(alteration.errors)
        found.append(alteration)
    times = Counter(alteration.entity for alteration in found)
    for place, alteration in enumerate(found):
        entity = alteration.entity
        if entity is not None and times[entity] > 1:
            where = pointer("alterations", place, "entity")
            alteration.errors.insert(0, FieldError(where, f"{entity} is given {times[entity]} times"))
    return found, not sent.validate_only


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
