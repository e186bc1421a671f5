"""The OpenAPI document as clients read it: it passes a linter, and each body in it has an example."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.http.openapi.check import METHODS
from tests.clients.generated import ROOT, npm_tool, run

FILE = ROOT / "openapi" / "openapi.json"


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def test_document_passes_the_linter():
    """By the recommended rules, which also check examples against schemas; a warning is an error."""
    assert _lint(FILE) == []


def test_linter_finds_a_fault_in_the_document(document: dict[str, Any], tmp_path: Path):
    """Otherwise a linter that checks nothing would go unnoticed."""
    wrong = document["paths"]["/v1/decisions"]["post"]["responses"]["422"]["content"]
    del wrong["application/problem+json"]["example"]["title"]
    file = tmp_path / "openapi.json"
    file.write_text(json.dumps(document), encoding="utf-8")
    assert _lint(file) == ["no-invalid-media-type-examples"]


def test_every_body_and_every_answer_has_an_example(document: dict[str, Any]):
    found = list(_contents(document))
    assert len(found) > 100
    without = [where for where, content in found if not content.keys() & {"example", "examples"}]
    assert without == []


def test_errors_are_problems_whose_example_has_their_status(document: dict[str, Any]):
    for (path, method, place), content in _contents(document):
        example = content.get("example")
        if isinstance(example, dict) and "title" in example and place != "body":
            assert place == str(example["status"]), (path, method)
            assert bool(example.get("errors")) == (place == "422" or (place == "400" and path == "/v1/check"))


def test_operation_ids_are_short_and_unique(document: dict[str, Any]):
    """Generated clients use these names."""
    names = [operation["operationId"] for _, _, operation in _operations(document)]
    assert len(set(names)) == len(names)
    assert not [name for name in names if "_v1_" in name]


def _lint(file: Path) -> list[str]:
    """The rules that the document breaks."""
    silent = {"REDOCLY_TELEMETRY": "off", "REDOCLY_SUPPRESS_UPDATE_NOTICE": "true"}
    command = (npm_tool("redocly"), "lint", file, "--extends", "recommended", "--format", "json")
    broken: list[str] = [
        problem["ruleId"] for problem in json.loads(run(*command, environment=silent))["problems"]
    ]
    return broken


def _operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, item in document["paths"].items():
        for method in item.keys() & METHODS:
            yield path, method, item[method]


def _contents(document: dict[str, Any]) -> Iterator[tuple[tuple[str, str, str], dict[str, Any]]]:
    """Yield every body in the document, with its place."""
    shared = document["components"]["responses"]
    for path, method, operation in _operations(document):
        bodies = {"body": operation.get("requestBody", {})} | operation["responses"]
        for place, said in bodies.items():
            body = shared[said["$ref"].rpartition("/")[2]] if "$ref" in said else said
            for content in body.get("content", {}).values():
                yield (path, method, place), content
