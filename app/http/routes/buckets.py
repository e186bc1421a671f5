"""The routes that show and reset a bucket; showing it changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Final

import structlog
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from app.admission.buckets import Buckets
from app.domain.bucket import BucketName
from app.domain.errors import EntityError
from app.domain.quota import MAX_EXACT
from app.http.access.access import Access
from app.http.head import head_of
from app.http.openapi import buckets as schema
from app.http.problems import FieldError, unprocessable
from app.http.query import Parameters
from app.http.routes.admin import admin_router, needing_store
from app.http.strict import answer, read_struct

PATH: Final = "/v1/buckets"
RESET: Final = "/v1/buckets:reset"
FIELDS: Final = ("bucket", "quota")
MISSING: Final = "is required: name a bucket, such as user=alice"

log = structlog.get_logger("quotagate.http")


WasReset = Callable[[str, list[str], str, int | None], None]
"""Called with the bucket that was reset, its quotas, who did it, and its place in the log's order."""


def router(
    buckets: Buckets,
    access: Access,
    now_ms: Callable[[], int] | None,
    was_reset: WasReset = lambda *_: None,
) -> APIRouter:
    """Return the routes.

    Args:
        now_ms: returns the newest time seen, under the caller's clock; None under the store's.
        was_reset: called after each reset.
    """
    routes = admin_router("Buckets", access)

    @routes.get(PATH, **schema.show(timed=now_ms is not None))
    async def get_buckets(request: Request) -> Response:
        query = Parameters(request.scope["query_string"], *FIELDS, *(["at_ms"] if now_ms else []))
        if not query.texts("bucket"):
            query.wrong("bucket", MISSING)
        bucket, quota = query.one("bucket", buckets.parse), query.one("quota", _key)
        at_ms = query.integer("at_ms", 0, MAX_EXACT) if now_ms else None
        query.check()
        assert bucket is not None
        if at_ms is None and now_ms:
            at_ms = now_ms()
        with needing_store(schema.AWAY):
            found = await buckets.status(bucket, quota, at_ms)
        return answer(
            schema.BucketsBody([schema.BucketBody(**asdict(one)) for one in found]),
            headers={"Cache-Control": "no-store"},
        )

    @routes.post(RESET, **schema.RESET)
    async def reset_bucket(request: Request) -> Response:
        bucket, quota = await read_struct(request, schema.BucketResetBody, partial(_bucket_of, buckets))
        Parameters(request.scope["query_string"]).check()
        with needing_store(schema.AWAY):
            emptied, order = await buckets.reset(bucket, quota)
        who = access.who(head_of(request.scope))
        log.info("a bucket was reset", bucket=str(bucket), quotas=emptied, who=who)
        was_reset(str(bucket), emptied, who, order)
        return Response(status_code=204)

    return routes


def _bucket_of(buckets: Buckets, sent: schema.BucketResetBody) -> tuple[BucketName, str | None]:
    """Return the bucket to reset, and the quota key if only one is meant.

    Raises:
        ProblemError: 422 if there is no such bucket or quota key.
    """
    errors = []
    if sent.quota is not None and (wrong := schema.key_fault(sent.quota)):
        errors.append(FieldError("/quota", wrong))
    try:
        bucket = buckets.parse(sent.bucket)
    except EntityError as error:
        raise unprocessable(FieldError("/bucket", str(error)), *errors) from None
    if errors:
        raise unprocessable(*errors)
    return bucket, sent.quota


def _key(text: str) -> str:
    """Return a quota key.

    Raises:
        ValueError: the text is not a quota key.
    """
    if wrong := schema.key_fault(text):
        raise ValueError(wrong)
    return text
