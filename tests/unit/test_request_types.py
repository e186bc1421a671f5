"""No request type is declared twice: one Struct makes the schema in openapi.json, and it reads the body."""

from __future__ import annotations

import ast
import json
from collections import Counter
from pathlib import Path
from typing import Any, Final

import pytest

from app.http import bodies
from app.http.openapi import buckets, keys, quotas_lists, volumes

ROOT: Final = Path(__file__).parents[2]
DOCUMENT: Final = json.loads((ROOT / "openapi" / "openapi.json").read_text())
TREES: Final = [ast.parse(path.read_text()) for path in sorted((ROOT / "app" / "http").rglob("*.py"))]
READERS: Final = {"read_struct", "read", "_decoded"}
"""Functions that read a body; the second argument is the Struct."""
BY_CLOCK: Final = {"at_ms"}
"""Fields that the document has only under the callers' clock."""
GENERATED: Final = {"QuotaSet", "QuotaPatch"}
"""Components that are generated from the table of quota keys."""


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
    assert len(requests()) == 11


@pytest.mark.parametrize("component", requests())
def test_a_request_is_declared_once_and_read_by_that_type(component: str):
    name = struct_name(component)
    assert structs()[name] == 1
    assert name in read()
    (struct,) = {
        vars(module)[name]
        for module in (bodies, buckets, keys, quotas_lists, volumes)
        if name in vars(module)
    }
    fields, defaults = struct.__struct_fields__, len(struct.__struct_defaults__)
    schema: dict[str, Any] = DOCUMENT["components"]["schemas"][component]
    for variant in schema.get("anyOf", [schema]):
        assert set(variant["properties"]) == set(fields) - BY_CLOCK
        assert set(variant.get("required", [])) == set(fields[: len(fields) - defaults])


def test_a_type_that_reads_a_body_is_a_request():
    assert read() == set(map(struct_name, requests()))


def test_an_unread_batch_has_the_fields_of_a_batch():
    assert bodies.RawBatchBody.__struct_fields__ == bodies.BatchBody.__struct_fields__
