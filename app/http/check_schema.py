"""What the OpenAPI document says about the check."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from app.http.bodies import Address, Amount, ClientName, Count, Name
from app.http.check import not_understood
from app.http.check_question import AMOUNTS, COUNTS, DENY_STATUSES, FORWARDED_FOR, NAMES, Sources
from app.http.problems import PROBLEM_JSON, FieldError, Problem
from app.http.wire import Clock

Schema = dict[str, Any]

METHODS: Final = ("get", "head", "post", "put", "patch", "delete", "options", "trace")
"""Every method that OpenAPI 3.1 knows; others are answered too."""

DESCRIPTION: Final = f"""\
For nginx `auth_request`, Envoy `ext_authz` and forward-auth of Caddy and Traefik: the question stands in
headers and in the query, the answer in the status and in headers. Any method will do, and a body is not read.
Every quota is decided as deny. A request counts as `{{"requests": 1}}`, unless the query says what it uses.

A gateway must set or remove each of the headers itself, or its clients say who they are. Headers are UTF-8;
one that stands twice is 400, and so is a parameter. With trusted proxies, the address is instead the
rightmost one of `{FORWARDED_FOR}` that is in none of their networks: several lines of it are joined, and an
entry may have a port (`192.0.2.1:4711`, `[2001:db8::1]:4711`).
"""
REFUSED: Final = {
    "decision": "throttle",
    "throttle_ms": 5_300,
    "charged": False,
    "applied": 1,
    "source": "store",
    "limited_by": {"quota": "request_rate", "entity": "user=*", "bucket": "user=alice"},
}
NAMES_OF: Final = {
    "200": "CheckAdmitted",
    "400": "CheckNotUnderstood",
    "401": "CheckUnauthorized",
    "403": "CheckForbidden",
    "429": "CheckRefused",
}
"""Where each status is described, once for all methods."""
_WRONG: Final = [FieldError("/requests", "must be an integer"), FieldError("/X-Quotagate-IP", "stands twice")]


def parameters(sources: Sources, clock: Clock) -> list[Schema]:
    """The headers and the query."""
    nobody = "Empty is as absent."
    found = [
        _parameter("header", sources.principal, msgspec.json.schema(ClientName), f"Who asks. {nobody}"),
        _parameter("header", sources.client, msgspec.json.schema(ClientName), "As which client."),
    ]
    if sources.trusted:
        hops = {"type": "string"}
        found.append(_parameter("header", FORWARDED_FOR, hops, "The addresses on the way, nearest last."))
    else:
        address = msgspec.json.schema(Address)
        one = {**address, "anyOf": [*address["anyOf"], {"maxLength": 0}]}
        found.append(_parameter("header", sources.ip, one, f"From which address, one. {nobody}"))
    found += [_parameter("query", name, msgspec.json.schema(Count)) for name in COUNTS]
    found += [_parameter("query", name, msgspec.json.schema(Amount)) for name in AMOUNTS]
    found += [_parameter("query", name, msgspec.json.schema(Name)) for name in NAMES]
    status = {"type": "integer", "enum": [*DENY_STATUSES], "default": 429}
    found.append(_parameter("query", "deny_status", status, "The status of a refusal."))
    if clock == "caller":
        newest = "When; without it the newest time of any ask or observation that this process took."
        found.append(_parameter("query", "at_ms", msgspec.json.schema(Count), newest))
    return found


def item(sources: Sources, clock: Clock) -> Schema:
    """The path with its methods, which all do the same."""
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


def responses(admitted: object, unauthorized: Problem, forbidden: Problem) -> Schema:
    """What the path answers, by the names under which its methods refer to it."""
    refused = _content("application/json", "Decision", REFUSED)
    throttled_only = {"Retry-After": whole("Seconds, rounded up; there when the request was throttled.")}
    answers = {
        "200": ("Admitted.", _HEADERS, _content("application/json", "Decision", admitted)),
        "400": ("Cannot be understood.", _THROTTLE_MS, _problem(not_understood(_WRONG))),
        "401": ("Unauthorized", {}, _problem(unauthorized)),
        "403": (
            "Throttled or rejected under `deny_status=403`; or, as a problem, the key lacks the scope.",
            _HEADERS | throttled_only,
            refused | _problem(forbidden),
        ),
        "429": (
            "Throttled or rejected; or the node is overloaded: then no quota is named.",
            _HEADERS | throttled_only,
            refused,
        ),
    }
    return {
        NAMES_OF[status]: {"description": text, "headers": headers, "content": content}
        for status, (text, headers, content) in answers.items()
    }


def _parameter(place: str, name: str, schema: Schema, description: str = "") -> Schema:
    said = {"description": description} if description else {}
    return {"name": name, "in": place, "required": False, "schema": schema, **said}


def _content(type_: str, schema: str, example: object) -> Schema:
    return {type_: {"schema": {"$ref": f"#/components/schemas/{schema}"}, "example": example}}


def _problem(problem: Problem) -> Schema:
    return _content(PROBLEM_JSON, "Problem", problem.document())


def whole(description: str) -> Schema:
    """A header that holds a whole number."""
    return {"description": description, "schema": {"type": "integer", "minimum": 0}}


def _fields(description: str, example: str) -> Schema:
    return {"description": description, "schema": {"type": "string"}, "example": example}


_THROTTLE_MS: Final = {"X-Throttle-Ms": whole("`throttle_ms` of the decision; 0 on 400.")}
_HEADERS: Final = _THROTTLE_MS | {
    "RateLimit-Policy": _fields(
        "For each quota that applied, q units over w seconds (draft-ietf-httpapi-ratelimit-headers). "
        "The second of two with one key has the type of its entity in its name.",
        '"request_rate";q=50;w=10, "request_rate_ip";q=1000;w=10',
    ),
    "RateLimit": _fields(
        "Of each of them r units are left; t: `Retry-After`, or w where there is none. A quota that was "
        "decided without the store is left out.",
        '"request_rate";r=12;t=10, "request_rate_ip";r=980;t=10',
    ),
}
