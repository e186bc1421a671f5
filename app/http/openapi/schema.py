"""Pieces of the OpenAPI document that several routes use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from app.domain.quota import MAX_EXACT
from app.http.problems import PROBLEM_JSON, ProblemError
from app.http.strict import JSON

Schema = dict[str, Any]

KEY: Final = "key"
"""The name of the security scheme in the document."""
SUFFIX: Final = "Body"
"""The ending of a Struct that is a component; the component's name in the document lacks it."""

BODY_PROBLEMS: Final = (
    ProblemError(400, "The body is not JSON: Expecting value: line 1 column 18 (char 17)."),
    ProblemError(413, "The body is larger than 1,048,576 bytes."),
    ProblemError(415, f"The body must be sent as Content-Type: {JSON}."),
)


def ref(name: str) -> Schema:
    """Return a reference to a component."""
    return {"$ref": f"#/components/schemas/{name}"}


def components(*bodies: type) -> dict[str, Schema]:
    """Return the schemas of these Structs and of all Structs they refer to, by component name.

    A Struct whose name does not end in ``Body`` has no component: its schema is written out wherever it is
    used.
    """
    _, found = msgspec.json.schema_components(bodies, ref_template="{name}")

    def resolved(node: Any) -> Any:
        if isinstance(node, list):
            return [resolved(item) for item in node]
        if not isinstance(node, dict):
            return node
        name = node.get("$ref", "")
        if name in found and not name.endswith(SUFFIX):
            inline = {key: value for key, value in found[name].items() if key not in ("title", "description")}
            return resolved(inline | {key: value for key, value in node.items() if key != "$ref"})
        made = {key: resolved(value) for key, value in node.items()}
        if "default" in made:  # last, as msgspec writes the default of a field that is always set
            made["default"] = made.pop("default")
        return made | ref(name.removesuffix(SUFFIX)) if name in found else made

    return {
        name.removesuffix(SUFFIX): {**resolved(schema), "title": name.removesuffix(SUFFIX)}
        for name, schema in found.items()
        if name.endswith(SUFFIX)
    }


def request_schema(body: type, orders: Mapping[str, str], replaced: Mapping[str, Schema]) -> Schema:
    """Return the schema of the Struct of a request, with its members in the order that the document had.

    Args:
        orders: for each property the members of its schema, separated by blanks.
        replaced: for some properties, members that the type does not know.
    """
    schema = schema_of(body)
    schema["properties"] = {
        name: ordered(schema["properties"][name] | replaced.get(name, {}), *members.split())
        for name, members in orders.items()
    }
    members = ("description", "type", "required", "properties", "additionalProperties")
    return ordered(schema, *(member for member in members if schema.get(member) not in (None, [])))


def schema_of(body: type) -> Schema:
    """Return the schema of a Struct, without its title."""
    _, found = msgspec.json.schema_components((body,), ref_template="{name}")
    schema: Schema = found[body.__name__]
    del schema["title"]
    return schema


def ordered(schema: Schema, *members: str) -> Schema:
    """Return these members of a schema, in this order: the document keeps the order that it had."""
    return {member: schema[member] for member in members}


def or_null(schema: Schema, description: str) -> Schema:
    """Return the schema of a value that may be null."""
    return {"anyOf": [schema, {"type": "null"}], "description": description}


def or_blank(schema: Schema) -> Schema:
    """Return the schema; if it lists alternatives, with an empty string as one more."""
    return schema | {"anyOf": [*schema["anyOf"], {"maxLength": 0}]} if "anyOf" in schema else schema


def at_ms_parameter(*, timed: bool) -> list[Schema]:
    """Return the query parameter ``at_ms``, which routes take under the caller's clock only."""
    when = "The time in milliseconds; the default is the newest `at_ms` that this process has received."
    schema = {"type": "integer", "minimum": 0, "maximum": MAX_EXACT}
    parameter = {"name": "at_ms", "in": "query", "description": when, "schema": schema, "example": 1_000_000}
    return [parameter] if timed else []


def access_problems(scope: str) -> list[ProblemError]:
    """Return the answers of a route to a request without a key of this scope."""
    return [
        ProblemError(401, f"This needs a key with the scope {scope}: send Authorization: Bearer KEY."),
        ProblemError(403, f"The key lacks the scope {scope}."),
    ]


def content(name: str, example: object, *types: str) -> Schema:
    """Return the content of a body: its component and an example, as JSON unless other types are given."""
    return {type_: {"schema": ref(name), "example": example} for type_ in types or (JSON,)}


def body_of(name: str, example: object, *types: str) -> Schema:
    """Return a request body, which must be sent."""
    return {"required": True, "content": content(name, example, *types)}


def answer_of(
    description: str, name: str = "", example: object = None, headers: Schema | None = None
) -> Schema:
    """Return an answer of a route; it has no body if no component is named."""
    return {
        "description": description,
        **({"headers": headers} if headers else {}),
        **({"content": content(name, example)} if name else {}),
    }


def problem_answers(problems: Iterable[ProblemError]) -> Schema:
    """Return problems as answers of a route, by their status."""
    answers: Schema = {}
    for problem in problems:
        document = problem.document()
        headers = {
            name: {"description": "Seconds.", "schema": {"type": "string"}, "example": value}
            for name, value in problem.headers.items()
        }
        answer = answer_of(document["title"], headers=headers)
        answers[str(problem.status)] = answer | {"content": content("Problem", document, PROBLEM_JSON)}
    return answers


def operation(name: str, tag: str, scope: str, of: Schema) -> Schema:
    """Return the operation of a hot route, which FastAPI does not know, from what ``route`` returned."""
    description = {"description": of["description"]} if of["description"] else {}
    return {
        "tags": [tag],
        "summary": of["summary"],
        **description,
        "operationId": name,
        "security": [{KEY: [scope]}],
        **of["openapi_extra"],
        "responses": {str(status): answer for status, answer in of["responses"].items()},
    }


def route(
    summary: str,
    answers: Mapping[int, Schema],
    problems: Iterable[ProblemError],
    *,
    description: str | None = None,
    parameters: Iterable[Schema] = (),
    body: Schema | None = None,
) -> Schema:
    """Return the keyword arguments of a FastAPI route; its first answer has the status of a success."""
    extra: Schema = {"parameters": [*parameters]} if parameters else {}
    return {
        "summary": summary,
        "description": description,
        "status_code": next(iter(answers)),
        "responses": {**answers, **problem_answers(problems)},
        "openapi_extra": extra | ({"requestBody": body} if body else {}),
    }
