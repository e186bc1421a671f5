"""The OpenAPI document: FastAPI's own, plus the hot routes, which FastAPI does not know."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute, iter_route_contexts

from app.http import bodies
from app.http.access.access import scope_of
from app.http.check_question import Sources
from app.http.openapi import buckets as buckets_schema
from app.http.openapi import check as check_schema
from app.http.openapi import keys as keys_schema
from app.http.openapi import leases as leases_schema
from app.http.openapi import overview as overview_schema
from app.http.openapi import quotas_lists as quotas_lists_schema
from app.http.openapi import quotas_shadow as quotas_shadow_schema
from app.http.openapi import reports as reports_schema
from app.http.openapi import volumes as volumes_schema
from app.http.openapi.schema import KEY, Schema, access_problems, components, problem_answers, ref
from app.http.problems import FieldError, ProblemError, overloaded, unprocessable
from app.http.routes import check, decisions
from app.http.server.protocol import LONG_TARGET
from app.http.wire import MAX_BODY, Clock

DESCRIPTION: Final = """\
Quotagate answers one question, fast and the same on every node: **may this work go ahead, or must it wait
N milliseconds?** Kafka broker plugins, proxies and API gateways ask it for a principal, a client, an IP
address and a request.

Errors are RFC 9457 problems; `errors` names each field by JSON pointer. Administration needs a key, sent as
`Authorization: Bearer KEY`. Decisions may be open to some networks without a key, but a key that is sent
must be valid.
"""
TAGS: Final = {
    "Decisions": "The hot routes: may this work go ahead?",
    "Leases": "Parts of quotas that callers take, to decide alone for a short time.",
    "Quotas": "What is limited, and for which entities.",
    "Buckets": "The counters: what has been charged so far.",
    "Volumes": "Disks that are running full, and the throttle factor computed from them.",
    "Overview": "The whole deployment, added up over its nodes.",
    "Reports": "The results of audits and what-ifs.",
    "Keys": "API keys: who may ask for decisions, and who may administer.",
    "Health": "Liveness, readiness and metrics.",
}
ABOUT: Final[Mapping[str, Any]] = {
    "title": "Quotagate",
    "summary": "Cluster-wide quota decisions: may this work go ahead, or must it wait N milliseconds?",
    "description": DESCRIPTION,
    "license_info": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
    "openapi_tags": [{"name": name, "description": text} for name, text in TAGS.items()],
}
"""Arguments of ``FastAPI`` that describe the API."""

KEY_DESCRIPTION: Final = (
    "The admin key, or a key made by POST /v1/keys. Each operation names the scope that it needs."
)
KEYLESS: Final = frozenset({"/health/live", "/health/ready"})

_ASK: Final = {"principal": "alice", "client_id": "etl", "usage": {"requests": 1, "producer_ids": [4711]}}
_ADMITTED: Final = {
    "decision": "admit",
    "throttle_ms": 0,
    "charged": True,
    "applied": 1,
    "source": "store",
    "limited_by": None,
}
_THROTTLED: Final = {
    "decision": "throttle",
    "throttle_ms": 36_000,
    "charged": False,
    "applied": 1,
    "source": "store",
    "limited_by": {"quota": "producer_ids_rate", "entity": "user=*", "bucket": "user=alice"},
}


def document_of(api: FastAPI, clock: Clock, sources: Sources) -> Schema:
    """Return the document of an application."""
    document = get_openapi(
        title=api.title,
        version=api.version,
        summary=api.summary,
        description=api.description,
        license_info=api.license_info,
        tags=api.openapi_tags,
        servers=[{"url": ".", "description": "The place that serves this document, also below a prefix."}],
        routes=api.routes,
    )
    for context in iter_route_contexts(api.routes):
        route = context.original_route
        if isinstance(route, APIRoute) and route.include_in_schema:
            for method in route.methods or ():
                _restore_nulls(document["paths"][route.path_format][method.lower()], route)
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            scope = scope_of(method.upper(), path)
            operation["security"] = [] if path in KEYLESS else [{KEY: [scope]}]
            if path in KEYLESS:  # a key that is sent must be valid all the same
                invalid = ProblemError(401, "The key is not valid.")
                operation["responses"].update(problem_answers([invalid]))
            operation["responses"] = _without_fastapis_422(operation["responses"])
            operation["tags"] = list(dict.fromkeys(operation.get("tags", ())))
            # FastAPI adds path and method to the name of the function; a generated client needs the name.
            added = re.sub(r"\W", "_", path) + f"_{method}"
            operation["operationId"] = operation["operationId"].removesuffix(added)
    document["paths"]["/metrics"]["get"]["security"].append({})
    document["paths"]["/metrics"]["get"]["responses"] |= problem_answers(access_problems("read"))
    document["paths"] = {
        **_hot_paths(),
        check.PATH: check_schema.item(sources, clock),
        **leases_schema.paths(timed=clock == "caller"),
        **document["paths"],
    }
    for item in document["paths"].values():
        _add_long_target(item)
    schemas = _schemas(clock)
    for room in (
        *(quotas_lists_schema, buckets_schema, leases_schema, volumes_schema, keys_schema),
        overview_schema,
        reports_schema,
        quotas_shadow_schema,
    ):
        schemas |= room.COMPONENTS
    schemas["Wish"] = _timed(schemas["Wish"], clock)
    schemas["Health"] = document["components"]["schemas"]["Health"]
    document["components"] = {
        "schemas": schemas,
        "responses": check_schema.responses(_ADMITTED, *access_problems("decide")),
        "securitySchemes": {KEY: {"type": "http", "scheme": "bearer", "description": KEY_DESCRIPTION}},
    }
    return document


def _add_long_target(item: Schema) -> None:
    """Add the 414 to operations whose path or query can make the target too long."""
    shared = item.get("parameters", [])
    for operation in item.values():
        if isinstance(operation, dict):
            names = [*shared, *operation.get("parameters", ())]
            if any(name["in"] in ("path", "query") for name in names):
                operation["responses"].update(problem_answers([LONG_TARGET]))


def _restore_nulls(operation: Schema, route: APIRoute) -> None:
    """Put bodies back as the routes give them: FastAPI drops every null, even in examples."""
    for status, answer in route.responses.items():
        if "content" in answer:
            operation["responses"][str(status)]["content"] = answer["content"]
    if body := (route.openapi_extra or {}).get("requestBody"):
        operation["requestBody"] = body


def _without_fastapis_422(responses: Schema) -> Schema:
    """Drop FastAPI's own 422: each route documents its problems itself."""
    fastapis = {"application/json": {"schema": ref("HTTPValidationError")}}
    return {status: answer for status, answer in responses.items() if answer.get("content") != fastapis}


def _hot_paths() -> Schema:
    return {
        decisions.ONE: _hot(
            "Decide one ask",
            "Every decision has status 200, also a refusal. An answer that charged is kept for 60 s: the "
            "same ask with the same `id` and API key gets it again. An ask with different content is a new "
            "ask; `at_ms` and `detail` do not count as content.",
            ("Ask", _ASK),
            ("Decision", {"admitted": _ADMITTED, "throttled": _THROTTLED}),
            unprocessable(FieldError("/usage/request", "is unknown")),
        ),
        decisions.BATCH: _hot(
            "Decide a batch of asks",
            "1 to 1,000 asks, decided in order; each is atomic by itself. An invalid ask fails the whole "
            "batch before anything is written. At most 10,000 producer ids in all asks together.",
            ("Batch", {"asks": [_ASK, _ASK]}),
            ("Decisions", {"two": {"decisions": [_ADMITTED, _THROTTLED]}}),
            unprocessable(FieldError("/asks/3/usage/requests", "must be an integer")),
        ),
    }


def _hot(
    summary: str,
    description: str,
    ask: tuple[str, object],
    answer: tuple[str, Mapping[str, object]],
    wrong: ProblemError,
) -> Schema:
    examples = {name: {"value": value} for name, value in answer[1].items()}
    shown = {"schema": ref(answer[0]), "examples": examples}
    problems = [
        ProblemError(400, "The body is not JSON: Input data was truncated."),
        *access_problems("decide"),
        ProblemError(413, f"The body is larger than {MAX_BODY:,} bytes."),
        wrong,
        overloaded(2_000),
    ]
    operation: Schema = {
        "tags": ["Decisions"],
        "summary": summary,
        "description": description,
        "operationId": summary.lower().replace(" ", "_"),
        "security": [{KEY: ["decide"]}, {}],
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": ref(ask[0]), "example": ask[1]}},
        },
        "responses": {"200": {"description": "Decided.", "content": {"application/json": shown}}}
        | problem_answers(problems),
    }
    operation["responses"]["503"]["headers"] = {"Retry-After": check_schema.whole("Seconds, 1 to 3.")}
    return {"post": operation}


def _schemas(clock: Clock) -> Schema:
    """Return the schemas of the hot routes' bodies, with constraints that types cannot express."""
    schemas = components(bodies.BatchBody, bodies.DecisionsBody)
    schemas["Usage"]["minProperties"] = 1
    ask = schemas["Ask"]
    some_ids = {"required": ["producer_ids"], "properties": {"producer_ids": True}}
    ids_given_back = {"mode": {"const": "refund"}, "usage": some_ids}
    ask["not"] = {"required": ["mode", "usage"], "properties": ids_given_back}
    schemas["Ask"] = _timed(ask, clock)
    return schemas


def _timed(schema: Schema, clock: Clock) -> Schema:
    """Return the schema of an ask: with ``at_ms``, required, under the caller's clock, else without it."""
    if clock == "caller":
        return schema | {"required": [*schema["required"], "at_ms"]}
    properties = {
        name: property_schema for name, property_schema in schema["properties"].items() if name != "at_ms"
    }
    return schema | {"properties": properties}
