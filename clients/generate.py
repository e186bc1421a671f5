"""Generates clients from `openapi/openapi.json` into `clients/generated`: `python -m clients.generate`.

The document describes the service exactly. Generators read a simplified copy, made here: each schema has one
shape and no bounds, and the check has one method. So a client refuses nothing by itself, and an older client
still reads the answers of a newer service.
"""
# ruff: noqa: INP001  clients are distributions of their own, no package of this one

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterable, Mapping
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
    "containerDefaultToNull=true,invokerPackage=io.quotagate.api,apiPackage=io.quotagate.api,modelPackage=io.quotagate.api.model"
)
LANGUAGES: Final[Mapping[str, tuple[str, str]]] = {
    "python": ("python", f"packageName=quotagate_api,{OPEN}"),
    "typescript": ("typescript-fetch", "npmName=quotagate-api,supportsES6=true"),
    "java": ("java", f"{_JAVA},{OPEN}"),
    "go": ("go", f"packageName=quotagate,{OPEN}"),
}
"""The generator of each language, and its options."""
MAPPED: Final[Mapping[str, tuple[str, ...]]] = {"go": ("--type-mappings", "number=float64")}
"""The generator's float32 for Go has 24 bits: it would change a limit of 16,777,217."""

RENAMED: Final = ("--model-name-mappings", "NewKey=KeyWanted")
"""In Go `NewKey` is the constructor of `Key`."""
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

MENDED: Final[Mapping[str, tuple[tuple[str, str, str], ...]]] = {
    "go": (("api_*.go", "url.PathEscape(", "escaped("),),
    "java": (("src/main/**/*.java", "JsonNullable.<Object>of(null)", "JsonNullable.<Object>undefined()"),),
    "python": (
        (
            "quotagate_api/models/*.py",
            "cls.model_validate({\n",
            "cls.model_validate({name: value for name, value in {\n",
        ),
        (
            "quotagate_api/models/quota*.py",
            "cls.model_validate(obj)\n",
            'cls.model_validate({"limit": obj} if isinstance(obj, (int, float)) else obj)\n',
        ),
        ("quotagate_api/models/*.py", "\n        })\n", "\n        }.items() if name in obj})\n"),
    ),
}
"""Corrections of code that would send other values than the program set: files, wrong code, right code.

Go's escaping mistakes an entity for a name. Java, and Python after reading, send null for a field that was
not set; in a patch that is a deletion. In a dict a number may be given for a quota, as in JSON.
"""

_SCHEMAS: Final = "#/components/schemas/"
_QUOTA: Final = f"{_SCHEMAS}Quota"
_BOUNDS: Final = frozenset(
    {"pattern", "not", "default", "title", "additionalProperties", "minProperties", "uniqueItems"}
    | {"minLength", "maxLength", "minItems", "maxItems", "minimum", "maximum", "exclusiveMinimum"}
)


def easier(document: Schema) -> Schema:
    """The simplified document for generators."""
    components = document["components"]
    exact: Mapping[str, Schema] = components["schemas"]
    nullable = {
        f"{_SCHEMAS}{name}" for name, schema in exact.items() if {"type": "null"} in schema.get("anyOf", ())
    }
    schemas = {name: _component(schema, exact) for name, schema in exact.items()}
    responses = {name: _content(response) for name, response in components.get("responses", {}).items()}
    linked = {name: _linked(schema, nullable, is_component=True) for name, schema in schemas.items()}
    return {
        **document,
        "paths": {path: _path(item) for path, item in document["paths"].items()},
        "components": {**components, "schemas": linked, "responses": responses},
    }


def _component(schema: Schema, exact: Mapping[str, Schema]) -> Schema:
    """A component in one shape, with the fields of all its options."""
    options = [_resolved(option, exact) for option in schema.get("anyOf", ())]
    if not options:
        return _schema(schema)
    made = _merged([option for option in options if "properties" in option])
    return {"description": schema["description"], **made} if "description" in schema else made


def _resolved(option: Schema, exact: Mapping[str, Schema]) -> Schema:
    """An option without references; a map of quotas gets a field for each quota key."""
    if "$ref" in option:
        return _schema(exact[option["$ref"].removeprefix(_SCHEMAS)])
    if option.get("additionalProperties") == {"$ref": _QUOTA}:
        keys = exact["QuotaSet"]["properties"]
        return {"type": "object", "properties": {key: {"$ref": _QUOTA} for key in keys}}
    return _schema(option)


def _linked(schema: Any, nullable: Collection[str], *, is_component: bool = False) -> Any:
    """The schema with null next to references, and with one component for all sets of quotas.

    So a program can send a set of quotas that it has read, with the same type.
    """
    if isinstance(schema, list):
        return [_linked(each, nullable) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("$ref") in nullable:
        return {"anyOf": [schema, {"type": "null"}]}
    properties = schema.get("properties", {})
    if not is_component and properties and all(each == {"$ref": _QUOTA} for each in properties.values()):
        return {"$ref": f"{_SCHEMAS}QuotaSet"}
    if properties and not is_component:  # a class is shared by equal shapes, so their texts must not differ
        named = {name: _without_text(value) for name, value in properties.items()}
        schema = {**_without_text(schema), "properties": named}
    return {name: _linked(value, nullable) for name, value in schema.items()}


def _path(item: Schema) -> Schema:
    """The operations of a path; if all its methods do the same, only one stays."""
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
    """A body in one media type, plain JSON if possible, with only its schema."""
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
    more = schema.get("additionalProperties")
    if more:  # True stays: of {} the generator for Go makes pointers
        made["additionalProperties"] = _schema(more) if isinstance(more, dict) else more
    options = [_schema(option) for option in _flat(made.pop("anyOf", []))]
    if options:
        made = {**_one_of(options), **made}
    return {"$ref": made["$ref"]} if "$ref" in made else made


def _flat(options: list[Schema]) -> list[Schema]:
    """The options, with nested lists of options flattened."""
    found: list[Schema] = []
    for option in options:
        found += _flat(option["anyOf"]) if "anyOf" in option and "type" not in option else [option]
    return found


def _one_of(options: list[Schema]) -> Schema:
    """One shape that accepts the values of every option; ``{}`` accepts anything."""
    others = [option for option in options if option.get("type") != "null"]
    nullable = len(others) < len(options)
    found = _widest(others)
    if not nullable or not found:
        return found
    if "$ref" in found:
        return {"anyOf": [found, {"type": "null"}]}
    return {**found, "type": [found["type"], "null"]} if isinstance(found.get("type"), str) else found


def _without_text(schema: Schema) -> Schema:
    return {name: value for name, value in schema.items() if name != "description"}


def _widest(options: list[Schema]) -> Schema:
    first: Schema = options[0]
    if all(_without_text(option) == _without_text(first) for option in options):
        return _shape([first]) if "properties" in first else first
    objects = [option for option in options if "properties" in option]
    types = {option.get("type") for option in options}
    if any("$ref" in option for option in options):
        raise ValueError(
            f"several schemas of which one is named need a name, and all their fields: {options}"
        )
    if objects and types <= {"object", "number", "integer"}:
        return _shape(objects)  # a number is short for an object
    if types <= {"number", "integer"}:
        return {"type": "number"}
    if types <= {"string", "integer"}:
        return {"type": "string"}  # an id may be spelled as its decimal
    if types == {"array"}:
        return next(option for option in options if "items" in option)
    return {}


def _shape(objects: list[Schema]) -> Schema:
    """One object with the fields of all; an object with a quota's fields becomes a reference to it."""
    made = _merged(objects)
    is_quota = "on_store_failure" in made["properties"] and "limit" in made["required"]
    return {"$ref": _QUOTA} if is_quota else made


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
    """One field for several shapes; it is nullable if it is in one of them."""
    values = list(dict.fromkeys(value for schema in schemas for value in schema.get("enum", ())))
    if values:
        return {**schemas[0], "enum": values}
    options: list[Schema] = []
    for schema in schemas:
        types = schema.get("type")
        if isinstance(types, list):
            options += [{**schema, "type": each} if each != "null" else {"type": "null"} for each in types]
        else:
            options.append(schema)
    return _one_of(options)


def generate(language: str, document: Path) -> Path:
    """Generate a client in one language; return its folder."""
    generator, options = LANGUAGES[language]
    target = GENERATED / language
    shutil.rmtree(target, ignore_errors=True)
    program = Path(sys.executable).parent / "openapi-generator-cli"
    command = [str(program), "generate", "-i", str(document), "-g", generator, "-o", str(target)]
    arguments = ["--additional-properties", options, *RENAMED, *NAMED, *MAPPED.get(language, ())]
    environment = {"JAVA_OPTS": QUICK_START, **os.environ}
    ran = subprocess.run([*command, *arguments], env=environment, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise SystemExit(f"{language}: {ran.stderr or ran.stdout}")
    for files, wrong, right in MENDED.get(language, ()):
        _mend(target, files, wrong, right)
    if language == "go":
        (target / "escaped.go").write_text(ESCAPED, encoding="utf-8")
    return target


def _mend(target: Path, files: str, wrong: str, right: str) -> None:
    sources = {file: file.read_text(encoding="utf-8") for file in target.glob(files)}
    found = {file: source for file, source in sources.items() if wrong in source}
    if not found:
        raise SystemExit(f"{files}: nothing to mend, {wrong!r} is not there")
    for file, source in found.items():
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
