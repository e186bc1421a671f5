"""Generates clients from `openapi/openapi.json` into `clients/generated`: `python -m clients.generate`.

The document says exactly what the service takes. Generators read an easier one, made of it here: one shape
where there are several, no bounds, and only one of the methods of the check. So a client refuses nothing
by itself, and one that is older than its service still reads what that answers.
"""
# ruff: noqa: INP001  clients are distributions of their own, no package of this one

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

Schema = dict[str, Any]

ROOT: Final = Path(__file__).parents[1]
GENERATED: Final = ROOT / "clients" / "generated"
OPEN: Final = "disallowAdditionalPropertiesIfNotPresent=false"
"""A field that a newer service answers is no error."""

QUICK_START: Final = "-XX:TieredStopAtLevel=1"
"""The generator runs for seconds, too short to gain from code that is compiled well."""

_JAVA: Final = (
    "library=native,groupId=io.quotagate,artifactId=quotagate-api,hideGenerationTimestamp=true,"
    "invokerPackage=io.quotagate.api,apiPackage=io.quotagate.api,modelPackage=io.quotagate.api.model"
)
LANGUAGES: Final[Mapping[str, tuple[str, str]]] = {
    "python": ("python", f"packageName=quotagate_api,{OPEN}"),
    "typescript": ("typescript-fetch", "npmName=quotagate-api,supportsES6=true"),
    "java": ("java", f"{_JAVA},{OPEN}"),
    "go": ("go", f"packageName=quotagate,{OPEN}"),
}
"""The generator of each language, and its options."""

RENAMED: Final = ("--model-name-mappings", "NewKey=KeyWanted")
"""In Go `NewKey` is what makes a `Key`."""
NAMED: Final = ("--git-host", "quotagate.example", "--git-user-id", "clients", "--git-repo-id", "quotagate")
"""The module's path in Go; nothing is fetched from there."""
ESCAPED: Final = """\
package quotagate

import (
	"net/url"
	"strings"
)

// escaped escapes all of a path segment. Go's own way leaves = and escapes , and *, which would make of
// user=alice,client-id=* one user with a long name.
func escaped(segment string) string {
	return strings.ReplaceAll(url.QueryEscape(segment), "+", "%20")
}
"""

_BOUNDS: Final = frozenset(
    {"pattern", "not", "default", "title", "additionalProperties", "minProperties", "uniqueItems"}
    | {"minLength", "maxLength", "minItems", "maxItems", "minimum", "maximum", "exclusiveMinimum"}
)


def easier(document: Schema) -> Schema:
    """The document as generators read it."""
    paths = {path: _path(item) for path, item in document["paths"].items()}
    components = document["components"]
    schemas = {name: _schema(schema) for name, schema in components["schemas"].items()}
    schemas["Quota"] = _merged([_schema(option) for option in components["schemas"]["Quota"]["anyOf"]])
    responses = {name: _content(response) for name, response in components.get("responses", {}).items()}
    return {
        **document,
        "paths": paths,
        "components": {**components, "schemas": schemas, "responses": responses},
    }


def _path(item: Schema) -> Schema:
    """A path where all methods do the same keeps one."""
    methods = {"get"} if "trace" in item else set(item)
    shared = item.get("parameters", [])
    return {
        method: _operation(operation, shared)
        for method, operation in item.items()
        if method in methods and method not in ("parameters", "description")
    }


def _operation(operation: Schema, shared: list[Schema]) -> Schema:
    made = {**operation, "parameters": [*map(_parameter, [*shared, *operation.get("parameters", [])])]}
    if "requestBody" in operation:
        made["requestBody"] = _content(operation["requestBody"])
    made["responses"] = {status: _content(said) for status, said in operation["responses"].items()}
    return made


def _parameter(parameter: Schema) -> Schema:
    kept = {name: value for name, value in parameter.items() if name not in ("example", "examples")}
    return {**kept, "schema": _schema(parameter["schema"])}


def _content(said: Schema) -> Schema:
    """A body in one media type, plain JSON if it can be, with its schema alone."""
    types = said.get("content", {})
    chosen = "application/json" if "application/json" in types else next(iter(types), None)
    made = {name: value for name, value in said.items() if name not in ("content", "headers")}
    if chosen:
        made["content"] = {chosen: {"schema": _schema(types[chosen].get("schema", {}))}}
    return made


def _schema(schema: Schema) -> Schema:
    made = {name: value for name, value in schema.items() if name not in _BOUNDS}
    if "enum" in made:
        made["type"] = "string" if isinstance(made["enum"][0], str) else "integer"
    if made.get("type") == "integer":
        made["format"] = "int64"
    if "properties" in made:
        made["properties"] = {name: _schema(value) for name, value in made["properties"].items()}
    if "items" in made:
        made["items"] = _schema(made["items"])
    if isinstance(schema.get("additionalProperties"), dict):
        made["additionalProperties"] = _schema(schema["additionalProperties"])
    options = [_schema(option) for option in made.pop("anyOf", [])]
    return {**_one_of(options), **made} if options else made


def _one_of(options: list[Schema]) -> Schema:
    """One shape that holds what each option does."""
    others = [option for option in options if option.get("type") != "null"]
    nullable = len(others) < len(options)
    found = _widest(others)
    if not nullable or not found:
        return found
    if "$ref" in found:
        return {"anyOf": [found, {"type": "null"}]}
    return {**found, "type": [found["type"], "null"]} if isinstance(found.get("type"), str) else found


def _widest(options: list[Schema]) -> Schema:
    objects = [option for option in options if "properties" in option]
    refs = [option for option in options if "$ref" in option]
    types = {option["type"] for option in options if isinstance(option.get("type"), str)}
    if refs:
        return refs[0]
    if len(options) == 1 and not objects:
        return options[0]
    if objects and types <= {"object", "number", "integer"}:
        return _shape(objects)  # a number is short for an object
    if types <= {"number", "integer"}:
        return {"type": "number"}
    if types <= {"string", "integer"}:
        return {"type": "string"}  # an id may be spelled as its decimal
    return next((option for option in options if option.get("type") == "array" and "items" in option), {})


def _shape(objects: list[Schema]) -> Schema:
    """All of them in one; what has a quota's fields is one, by name."""
    made = _merged(objects)
    is_quota = "on_store_failure" in made["properties"] and "limit" in made["required"]
    return {"$ref": "#/components/schemas/Quota"} if is_quota else made


def _merged(objects: list[Schema]) -> Schema:
    required = set.intersection(*(set(shape.get("required", ())) for shape in objects))
    properties: dict[str, list[Schema]] = {}
    for shape in objects:
        for name, schema in shape["properties"].items():
            properties.setdefault(name, []).append(schema)
    return {
        "type": "object",
        "required": sorted(required),
        "properties": {name: _together(schemas) for name, schemas in properties.items()},
    }


def _together(schemas: list[Schema]) -> Schema:
    values = list(dict.fromkeys(value for schema in schemas for value in schema.get("enum", ())))
    first: Schema = schemas[0] if all(schema == schemas[0] for schema in schemas) else _widest(schemas)
    return {**schemas[0], "enum": values} if values else first


def generate(language: str, document: Path) -> Path:
    """A client in one language; where it lies."""
    generator, options = LANGUAGES[language]
    target = GENERATED / language
    shutil.rmtree(target, ignore_errors=True)
    program = Path(sys.executable).parent / "openapi-generator-cli"
    command = [str(program), "generate", "-i", str(document), "-g", generator, "-o", str(target)]
    arguments = ["--additional-properties", options, *RENAMED, *NAMED]
    environment = {"JAVA_OPTS": QUICK_START, **os.environ}
    ran = subprocess.run([*command, *arguments], env=environment, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise SystemExit(f"{language}: {ran.stderr or ran.stdout}")
    if language == "go":
        _mend(target, "api_*.go", "url.PathEscape(", "escaped(")
        (target / "escaped.go").write_text(ESCAPED, encoding="utf-8")
    if language == "java":
        _mend(
            target, "src/main/**/*.java", "JsonNullable.<Object>of(null)", "JsonNullable.<Object>undefined()"
        )
    return target


def _mend(target: Path, files: str, wrong: str, right: str) -> None:
    """Go's escaping mistakes an entity for a name, and Java sends null for what was not set."""
    for file in target.glob(files):
        source = file.read_text(encoding="utf-8")
        if wrong in source:
            file.write_text(source.replace(wrong, right), encoding="utf-8")


def main(languages: Iterable[str]) -> None:
    """Generate clients in these languages, or in all."""
    GENERATED.mkdir(exist_ok=True)
    document = GENERATED / "openapi.json"
    exact = json.loads((ROOT / "openapi" / "openapi.json").read_text(encoding="utf-8"))
    document.write_text(json.dumps(easier(exact), indent=1), encoding="utf-8")
    for language in languages or LANGUAGES:
        print(generate(language, document).relative_to(ROOT))  # noqa: T201  what the command says


if __name__ == "__main__":
    main(sys.argv[1:])
