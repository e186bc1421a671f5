"""No request type is declared twice: one Struct makes the schema in openapi.json, and it reads the body."""

from __future__ import annotations

import ast
import json
import pkgutil
from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import pytest

from app.http import bodies, openapi
from app.http.openapi.schema import schema_of

ROOT: Final = Path(__file__).parents[2]
DOCUMENT: Final = json.loads((ROOT / "openapi" / "openapi.json").read_text())
TREES: Final = [ast.parse(path.read_text()) for path in sorted((ROOT / "app" / "http").rglob("*.py"))]
MODULES: Final = [
    bodies,
    *(import_module(f"{openapi.__name__}.{each.name}") for each in pkgutil.iter_modules(openapi.__path__)),
]
"""The modules that may declare the Struct of a body."""
READERS: Final = {"read_struct", "read", "_decoded"}
"""Functions that read a body; the second argument is the Struct."""
BY_CLOCK: Final = {"at_ms"}
"""Fields that the document has only under the callers' clock."""
GENERATED: Final = {"QuotaSet", "QuotaPatch"}
"""Components that are generated from the table of quota keys."""
POINTERS: Final = {"$ref", "items"}
"""Members of a schema that name other schemas; the document names components, a Struct its classes."""
BY_VARIANT: Final = {("NewKey", "bound_to"): {"anyOf", "type", "minItems", "maxItems"}}
"""Members that differ between the variants of a body, which a type cannot express."""


def requests() -> list[str]:
    """The components that are bodies of requests."""
    operations = [each for path in DOCUMENT["paths"].values() for each in path.values()]
    contents = [each["requestBody"]["content"] for each in operations if "requestBody" in each]
    found = {media["schema"]["$ref"].rpartition("/")[2] for content in contents for media in content.values()}
    return sorted(found - GENERATED)


def struct_name(component: str) -> str:
    return f"{component.removeprefix('Quota')}Body"


def structs() -> Counter[str]:
    """The names of all Structs of bodies, each as often as it is declared."""
    classes = [node for tree in TREES for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    return Counter(each.name for each in classes if each.name.endswith("Body"))


def read() -> set[str]:
    """The names of the Structs that read a body."""
    calls = [node for tree in TREES for node in ast.walk(tree) if isinstance(node, ast.Call)]
    types = [call.args[1] for call in calls if ast.unparse(call.func) in READERS and len(call.args) > 1]
    names = {ast.unparse(each).rpartition(".")[2] for each in types}
    return {name for name in names if name.endswith("Body")}


def test_all_requests_are_found():
    assert len(requests()) >= 11


@pytest.mark.parametrize("component", requests())
def test_a_request_is_declared_once_and_read_by_that_type(component: str):
    name = struct_name(component)
    assert structs()[name] == 1
    assert name in read()
    found = {vars(module)[name] for module in MODULES if name in vars(module)}
    assert len(found) == 1, f"{name} is in app/http/bodies.py, or in a module of app/http/openapi"
    (struct,) = found
    declared = schema_of(struct)["properties"]
    fields, defaults = struct.__struct_fields__, len(struct.__struct_defaults__)
    schema: dict[str, Any] = DOCUMENT["components"]["schemas"][component]
    for variant in schema.get("anyOf", [schema]):
        assert set(variant["properties"]) == set(fields) - BY_CLOCK
        assert set(variant.get("required", [])) == set(fields[: len(fields) - defaults])
        for field, shown in variant["properties"].items():
            of_type = declared[field]
            members = (shown.keys() | of_type.keys()) - POINTERS - BY_VARIANT.get((component, field), set())
            differ = {each for each in members if shown.get(each) != of_type.get(each)}
            assert not differ, f"{component}.{field} is not as {name} declares it: {differ}"


def test_a_type_that_reads_a_body_is_a_request():
    assert read() == set(map(struct_name, requests()))


def test_an_unread_batch_has_the_fields_of_a_batch():
    assert bodies.RawBatchBody.__struct_fields__ == bodies.BatchBody.__struct_fields__


def test_no_struct_is_a_copy_of_another_under_its_own_name():
    """One field may be a coincidence: many answers are a list. The same two fields are a copy."""
    structs_of_bodies = {
        each
        for module in MODULES
        for name, each in vars(module).items()
        if name.endswith("Body") and each.__struct_fields__[1:] and not getattr(each, "__parameters__", ())
    }
    shapes = Counter(json.dumps(shape(schema_of(each)["properties"])) for each in structs_of_bodies)
    assert len(structs_of_bodies) > 20
    assert [each for each, times in shapes.items() if times > 1] == []


def shape(node: Any) -> Any:
    """A schema without descriptions."""
    if isinstance(node, list):
        return [shape(each) for each in node]
    if not isinstance(node, dict):
        return node
    return {name: shape(each) for name, each in sorted(node.items()) if name != "description"}
