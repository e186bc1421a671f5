"""The OpenAPI document: what FastAPI knows of its routes, and the hot routes beside it."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute, iter_route_contexts

from app.http import bodies, buckets_schema, check, check_schema, decisions, keys_schema, volumes_schema
from app.http.access import scope_of
from app.http.check_question import Sources
from app.http.problems import PROBLEM_JSON, FieldError, Problem, overloaded, unprocessable
from app.http.quotas_lists_schema import COMPONENTS
from app.http.quotas_schema import access_problems
from app.http.wire import MAX_BODY, Clock

Schema = dict[str, Any]

DESCRIPTION: Final = """\
Quotagate answers one question, fast and the same on every node: **may this work go ahead, or must it wait
N milliseconds?** It is asked by Kafka broker plugins, proxies and API gateways, for a principal, a client,
an IP address and a request.

Errors are RFC 9457 problems; `errors` names each field by JSON pointer. Administration needs a key, sent as
`Authorization: Bearer KEY`; decisions may be open to networks. A key that is sent must be valid.
"""
TAGS: Final = {
    "Decisions": "The hot routes: may this work go ahead?",
    "Quotas": "What is limited, and for whom.",
    "Buckets": "What has been counted, as it stands now.",
    "Volumes": "Disks that run full, and the throttle factor that they make.",
    "Keys": "Who may ask and administer.",
    "Health": "For whoever watches over the process.",
}
ABOUT: Final[Mapping[str, Any]] = {
    "title": "Quotagate",
    "summary": "Cluster-wide quota decisions: may this work go ahead, or must it wait N milliseconds?",
    "description": DESCRIPTION,
    "license_info": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
    "openapi_tags": [{"name": name, "description": text} for name, text in TAGS.items()],
}
"""FastAPI's arguments that say what this is."""

KEY: Final = "key"
KEYS_SAID: Final = "The admin key, or one of POST /v1/keys; each operation names the scope that it needs."
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
_UNKNOWN: Final = FieldError("/usage/request", "is unknown")
_NO_WHOLE: Final = FieldError("/asks/3/usage/requests", "must be an integer")


class Document:
    """The document of one application, made when it is first asked for."""

    def __init__(self, api: FastAPI, clock: Clock, sources: Sources) -> None:
        self._api = api
        self._clock = clock
        self._sources = sources
        self._made: Schema = {}

    def __call__(self) -> Schema:
        if not self._made:
            self._made = self._make()
        return self._made

    def _make(self) -> Schema:
        api = self._api
        document = get_openapi(
            title=api.title,
            version=api.version,
            summary=api.summary,
            description=api.description,
            license_info=api.license_info,
            tags=api.openapi_tags,
            servers=[{"url": "/", "description": "Where this document was read."}],
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
                operation["responses"].update(_access_problem() if path in KEYLESS else {})
                operation["responses"] = _said_by_us(operation["responses"])
                operation["tags"] = list(dict.fromkeys(operation.get("tags", ())))
                # FastAPI adds path and method to the name of the function; a generated client needs the name.
                added = re.sub(r"\W", "_", path) + f"_{method}"
                operation["operationId"] = operation["operationId"].removesuffix(added)
        document["paths"]["/metrics"]["get"]["security"].append({})
        document["paths"]["/metrics"]["get"]["responses"] |= _problems(access_problems("read"))
        its_check = {check.PATH: check_schema.item(self._sources, self._clock)}
        document["paths"] = _hot_paths() | its_check | document["paths"]
        components = document.setdefault("components", {})
        for never_answered in ("HTTPValidationError", "ValidationError"):
            components.get("schemas", {}).pop(never_answered, None)
        ours = {**_schemas(self._clock), **COMPONENTS}
        for more in (buckets_schema, volumes_schema, keys_schema):
            ours |= more.COMPONENTS
        components["schemas"] = ours | components.get("schemas", {})
        components["responses"] = check_schema.responses(_ADMITTED, *access_problems("decide"))
        scheme = {"type": "http", "scheme": "bearer", "description": KEYS_SAID}
        components["securitySchemes"] = {KEY: scheme}
        return document


def _restore_nulls(operation: Schema, route: APIRoute) -> None:
    """Say again what FastAPI was told of bodies: it leaves out every null, also those of examples."""
    for status, said in route.responses.items():
        if "content" in said:
            operation["responses"][str(status)]["content"] = said["content"]
    if body := (route.openapi_extra or {}).get("requestBody"):
        operation["requestBody"] = body


def _said_by_us(responses: Schema) -> Schema:
    """Without FastAPI's own 422: each route says what it refuses, as a problem."""
    fastapis = {"application/json": {"schema": _ref("HTTPValidationError")}}
    return {status: said for status, said in responses.items() if said.get("content") != fastapis}


def _access_problem() -> Schema:
    """Of routes that need no key: one that is sent must be valid all the same."""
    return _problems([Problem(401, "The key is not valid.")])


def _hot_paths() -> Schema:
    return {
        decisions.ONE: _hot(
            "Decide one ask",
            "Status 200 for every decision, whatever it says. An answer that charged is kept for 60 s and "
            "given again to the same ask with the same `id` and of the same key. With other content it is "
            "another ask; `at_ms` and `detail` are no content.",
            ("Ask", _ASK),
            ("Decision", {"admitted": _ADMITTED, "throttled": _THROTTLED}),
            unprocessable(_UNKNOWN),
        ),
        decisions.BATCH: _hot(
            "Decide a batch of asks",
            "1 to 1,000 asks, decided in their order; each is atomic by itself. One that is invalid fails "
            "the batch before anything is written. At most 10,000 producer ids in all.",
            ("Batch", {"asks": [_ASK, _ASK]}),
            ("Decisions", {"two": {"decisions": [_ADMITTED, _THROTTLED]}}),
            unprocessable(_NO_WHOLE),
        ),
    }


def _hot(
    summary: str,
    description: str,
    ask: tuple[str, object],
    answer: tuple[str, Mapping[str, object]],
    wrong: Problem,
) -> Schema:
    examples = {name: {"value": value} for name, value in answer[1].items()}
    shown = {"schema": _ref(answer[0]), "examples": examples}
    problems = [
        Problem(400, "The body is not JSON: Input data was truncated."),
        *access_problems("decide"),
        Problem(413, f"The body is larger than {MAX_BODY:,} bytes."),
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
            "content": {"application/json": {"schema": _ref(ask[0]), "example": ask[1]}},
        },
        "responses": {"200": {"description": "Decided.", "content": {"application/json": shown}}}
        | _problems(problems),
    }
    operation["responses"]["503"]["headers"] = {"Retry-After": check_schema.whole("Seconds, 1 to 3.")}
    return {"post": operation}


def _problems(examples: list[Problem]) -> Schema:
    return {
        str(problem.status): {
            "description": problem.document()["title"],
            "content": {PROBLEM_JSON: {"schema": _ref("Problem"), "example": problem.document()}},
        }
        for problem in examples
    }


def _schemas(clock: Clock) -> Schema:
    """The bodies of the hot routes, with what their types cannot say."""
    _, schemas = msgspec.json.schema_components(
        [bodies.Batch, bodies.Decisions], ref_template=_ref("{name}")["$ref"]
    )
    schemas["Usage"]["minProperties"] = 1
    ask = schemas["Ask"]
    some_ids = {"required": ["producer_ids"], "properties": {"producer_ids": True}}
    ids_given_back = {"mode": {"const": "refund"}, "usage": some_ids}
    ask["not"] = {"required": ["mode", "usage"], "properties": ids_given_back}
    if clock == "caller":
        ask["required"].append("at_ms")
    else:
        del ask["properties"]["at_ms"]
    return schemas


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def main() -> None:
    """Write the document of the default settings to the file that is named, or to the standard output."""
    from app.admission.buckets import Buckets  # noqa: PLC0415  these import this file
    from app.admission.circuit import Circuit  # noqa: PLC0415
    from app.admission.metrics import Metrics  # noqa: PLC0415
    from app.admission.throttling import Throttling  # noqa: PLC0415
    from app.catalog.catalog import Catalog  # noqa: PLC0415
    from app.catalog.keys import Keys  # noqa: PLC0415
    from app.catalog.snapshot import Snapshot  # noqa: PLC0415
    from app.domain.ladder import Rules  # noqa: PLC0415
    from app.domain.quota import Defaults  # noqa: PLC0415
    from app.domain.volumes import Rules as VolumeRules  # noqa: PLC0415
    from app.http import buckets, health, keys, quotas, volumes  # noqa: PLC0415
    from app.http.access import Access  # noqa: PLC0415
    from app.http.app import administration  # noqa: PLC0415
    from app.store.redis import RedisStore  # noqa: PLC0415
    from app.store.volumes import VolumeRecord  # noqa: PLC0415

    access, metrics = Access("", ()), Metrics()
    circuit = Circuit(RedisStore("redis://"), metrics)
    catalog = Catalog("sqlite://", Defaults())
    routers = [
        quotas.router(catalog, access),
        keys.router(Keys(catalog.database), access),
        buckets.router(Buckets(circuit, Snapshot, Rules()), access, None),
        volumes.router(Throttling(VolumeRecord.at("redis://"), VolumeRules()), catalog, access, None),
        health.router(lambda: health.Readiness(snapshot=False), metrics, access),
    ]
    text = json.dumps(administration(routers, "store", Sources()).openapi(), indent=2) + "\n"
    if sys.argv[1:]:
        Path(sys.argv[1]).write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text)


if __name__ == "__main__":
    main()
