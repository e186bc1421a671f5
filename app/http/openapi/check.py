"""The part of the OpenAPI document about ``/v1/check``."""

from __future__ import annotations

from typing import Final

import msgspec

from app.domain.ask import AMOUNTS, COUNTS
from app.http.bodies import Address, Amount, ClientName, Count, Name
from app.http.check_question import DENY_STATUSES, FORWARDED_FOR, NAMES, Sources, invalid
from app.http.openapi.schema import Schema, content, or_blank
from app.http.problems import PROBLEM_JSON, FieldError, ProblemError
from app.http.wire import Clock

METHODS: Final = ("get", "head", "post", "put", "patch", "delete", "options", "trace")
"""Every method that OpenAPI 3.1 knows; the route answers others too."""

DESCRIPTION: Final = f"""\
For nginx `auth_request`, Envoy `ext_authz` and forward-auth of Caddy and Traefik. The ask is in the headers
and the query, the decision in the status and the headers. Any method is accepted; a body is not read. Every
quota is decided under `deny`. The usage is `{{"requests": 1}}`, unless the query gives another.

A gateway must set or remove each of these headers itself; otherwise its clients could claim to be anyone.
Headers are UTF-8. A duplicated header or parameter is answered with 400. With trusted proxies, the address is
instead the rightmost entry of `{FORWARDED_FOR}` that is in none of their networks. Several lines of this
header are joined, and an entry may have a port (`192.0.2.1:4711`, `[2001:db8::1]:4711`).
"""
NAMES_OF: Final = {
    "200": "CheckAdmitted",
    "400": "CheckNotUnderstood",
    "401": "CheckUnauthorized",
    "403": "CheckForbidden",
    "429": "CheckRefused",
}
"""The component that describes each status, for all methods."""


def parameters(sources: Sources, clock: Clock) -> list[Schema]:
    """Return the headers and the parameters of the query."""
    name, address = msgspec.json.schema(ClientName), or_blank(msgspec.json.schema(Address))
    status = {"type": "integer", "enum": [*DENY_STATUSES], "default": 429}
    newest = "The time in milliseconds; the default is the newest `at_ms` that this process has received."
    return [
        _parameter("header", sources.principal, name, "The principal. Empty means absent."),
        _parameter("header", sources.client, name, "The client id."),
        _parameter(
            "header", FORWARDED_FOR, {"type": "string"}, "The addresses on the way here, the nearest last."
        )
        if sources.trusted
        else _parameter("header", sources.ip, address, "One IP address of the client. Empty means absent."),
        *(
            _parameter("query", name, msgspec.json.schema(type_))
            for names, type_ in ((COUNTS, Count), (AMOUNTS, Amount), (NAMES, Name))
            for name in names
        ),
        _parameter("query", "deny_status", status, "The status of a refused request."),
        *([_parameter("query", "at_ms", msgspec.json.schema(Count), newest)] if clock == "caller" else []),
    ]


def item(sources: Sources, clock: Clock) -> Schema:
    """Return the path with its methods, which all do the same."""
    answers = {status: {"$ref": f"#/components/responses/{name}"} for status, name in NAMES_OF.items()}
    operations = {
        method: {
            "tags": ["Decisions"],
            "summary": "Decide a request of a gateway",
            "operationId": f"check_by_{method}",
            "security": [{"key": ["decide"]}, {}],
            "responses": answers,
        }
        for method in METHODS
    }
    return {"description": DESCRIPTION, "parameters": parameters(sources, clock), **operations}


def responses(admitted: object, unauthorized: ProblemError, forbidden: ProblemError) -> Schema:
    """Return the answers, by the component names that the methods refer to."""
    refused = content(
        "Decision",
        {
            "decision": "throttle",
            "throttle_ms": 5_300,
            "charged": False,
            "applied": 1,
            "source": "store",
            "limited_by": {"quota": "request_rate", "entity": "user=*", "bucket": "user=alice"},
        },
    )
    wrong = FieldError("/requests", "must be an integer"), FieldError("/X-Quotagate-IP", "is duplicated")
    throttled_only = {"Retry-After": whole("Seconds, rounded up; only if the request was throttled.")}
    answers = {
        "200": ("Admitted.", _HEADERS, content("Decision", admitted)),
        "400": ("The request is invalid.", _THROTTLE_MS, _problem(invalid(wrong))),
        "401": ("Unauthorized", {}, _problem(unauthorized)),
        "403": (
            "Throttled or rejected with `deny_status=403`; or a problem: the key lacks the scope.",
            _HEADERS | throttled_only,
            refused | _problem(forbidden),
        ),
        "429": (
            "Throttled or rejected; or the node is overloaded, and `limited_by` is null.",
            _HEADERS | throttled_only,
            refused,
        ),
    }
    return {
        NAMES_OF[status]: {"description": text, "headers": headers, "content": shown}
        for status, (text, headers, shown) in answers.items()
    }


def _parameter(place: str, name: str, schema: Schema, description: str = "") -> Schema:
    said = {"description": description} if description else {}
    return {"name": name, "in": place, "required": False, "schema": schema, **said}


def _problem(problem: ProblemError) -> Schema:
    return content("Problem", problem.document(), PROBLEM_JSON)


def whole(description: str) -> Schema:
    """Return a header that holds a whole number."""
    return {"description": description, "schema": {"type": "integer", "minimum": 0}}


def _fields(description: str, example: str) -> Schema:
    return {"description": description, "schema": {"type": "string"}, "example": example}


_THROTTLE_MS: Final = {"X-Throttle-Ms": whole("`throttle_ms` of the decision; 0 on 400.")}
_HEADERS: Final = _THROTTLE_MS | {
    "RateLimit-Policy": _fields(
        "For each quota that applied: q units over w seconds (draft-ietf-httpapi-ratelimit-headers). "
        "If two quotas have the same key, the second one has the type of its entity in its name.",
        '"request_rate";q=50;w=10, "request_rate_ip";q=1000;w=10',
    ),
    "RateLimit": _fields(
        "For each of them: r units are left; t is `Retry-After`, or else w. Quotas that were "
        "decided without the store are omitted.",
        '"request_rate";r=12;t=10, "request_rate_ip";r=980;t=10',
    ),
}
