"""The OpenAPI document: the app serves the file of the repository, with the hot routes in it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.admission.gathering.slices import completed
from app.domain.grant import PERMISSIONS
from app.http.openapi.check import METHODS
from app.http.wire import decode_batch
from app.run.document import text, wired
from tests.http.conftest import serving
from tests.steps import decode_ask

FILE = Path(__file__).parents[2] / "openapi" / "openapi.json"


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def test_file_is_the_document_of_the_wired_program():
    assert FILE.read_text(encoding="utf-8") == text(), "make openapi"


async def test_app_serves_the_document(document: dict[str, Any]):
    async with serving() as node:
        served = (await node.http.get("/openapi.json")).json()
    del served["paths"]["/v1/failing"]  # a route of the tests' own
    without_routers = {
        path: item
        for path, item in document["paths"].items()
        if {"Decisions", "Leases", "Health"}.intersection(
            *(item[method]["tags"] for method in item.keys() & METHODS)
        )
    }
    assert served["paths"] == without_routers, "only routers are added by app/run/wiring.py"
    assert served["info"] == document["info"]
    for name in ("Ask", "Decision", "Problem"):
        assert served["components"]["schemas"][name] == document["components"]["schemas"][name]


@pytest.mark.parametrize(
    ("path", "decode"), [("", decode_ask), (":batch", lambda *body: completed(decode_batch(*body)))]
)
def test_hot_routes_have_their_refusals_and_an_example_of_each(
    document: dict[str, Any], path: str, decode: Any
):
    route = document["paths"][f"/v1/decisions{path}"]["post"]
    assert set(route["responses"]) == {"200", "400", "401", "403", "413", "422", "503"}
    for status, response in route["responses"].items():
        if status != "200":
            shown = response["content"]["application/problem+json"]["example"]
            assert shown["status"] == int(status)
            assert bool(shown.get("errors")) == (status == "422")
    example = route["requestBody"]["content"]["application/json"]["example"]
    assert decode(json.dumps(example).encode(), "store")


def test_every_operation_names_its_scope(document: dict[str, Any]):
    for path, item in document["paths"].items():
        for method in item.keys() & METHODS:
            first, *others = item[method]["security"] or [{}]
            assert not others or others == [{}], path
            assert first in ({}, *({"key": [scope]} for scope in PERMISSIONS)), path


NEEDED = {
    "account": {"post /v1/leases", "delete /v1/leases/{lease}"},
    "read": {
        "get /v1/quotas",
        "get /v1/quotas/{entity}",
        "get /v1/quotas:history",
        "get /v1/quotas:effective",
        "get /v1/quotas:shadow",
        "get /v1/buckets",
        "get /v1/volumes",
        "get /v1/overview",
        "get /v1/reports",
        "get /v1/reports/{name}",
    },
    "write": {
        "put /v1/quotas/{entity}",
        "patch /v1/quotas/{entity}",
        "delete /v1/quotas/{entity}",
        "post /v1/quotas:alter",
        "post /v1/quotas:apply",
        "post /v1/buckets:reset",
        "post /v1/volumes",
        "delete /v1/volumes",
    },
    "admin": {
        "get /v1/keys",
        "post /v1/keys",
        "post /v1/keys/{name}:rotate",
        "delete /v1/keys/{name}",
        "post /v1/volumes:drill",
        "delete /v1/volumes:drill",
    },
}
"""The routes that need a key, by its scope: a list by hand, as program and document share one rule."""


async def test_every_route_of_administration_demands_its_scope(document: dict[str, Any]):
    demanded: dict[str, set[str]] = {scope: set() for scope in NEEDED}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(wired()), base_url="http://node") as http:
        for path, item in document["paths"].items():
            for method in item.keys() & METHODS:
                if not item[method]["security"] or {} in item[method]["security"]:
                    continue
                refused = await http.request(
                    method.upper(), path.format(entity="user=a", name="a", lease="a")
                )
                assert refused.status_code == 401
                (scope,) = re.findall(r"a key with the scope (\w+):", refused.json()["detail"])
                demanded[scope].add(f"{method} {path}")
    assert demanded == NEEDED, "NEEDED in this file lists each route by its scope"


@pytest.mark.parametrize("route", sorted(set().union(*NEEDED.values())))
def test_every_route_of_administration_documents_422(document: dict[str, Any], route: str):
    method, path = route.split(" ")
    assert "422" in document["paths"][path][method]["responses"], (
        "an unknown query parameter is refused with it"
    )


def undescribed(schema: Any, path: str = "") -> Iterator[str]:
    """The properties in a schema that have no description, except under ``not``."""
    inner = (
        schema.items() if isinstance(schema, dict) else enumerate(schema) if isinstance(schema, list) else ()
    )
    for name, each in inner:
        if name == "properties":
            for property_, property_schema in each.items():
                text = property_schema.get("description", "")
                if not (text.endswith(".") and len(text) > 1):
                    yield f"{path}.{property_}"
                yield from undescribed(property_schema, f"{path}.{property_}")
        elif name != "not":
            yield from undescribed(each, path)


async def test_every_component_and_property_has_a_description(document: dict[str, Any]):
    async with serving(clock="caller") as node:
        by_callers_clock = (await node.http.get("/openapi.json")).json()
    for each in (document, by_callers_clock):
        schemas = each["components"]["schemas"]
        assert [name for name, schema in schemas.items() if not schema.get("description")] == []
        assert [at for name, schema in schemas.items() for at in undescribed(schema, name)] == []


def test_undescribed_properties_are_found():
    inner = {"type": "object", "properties": {"known": {"description": "It is."}, "new": {"type": "string"}}}
    outer = {
        "properties": {
            "list": {"description": "Some.", "items": {"anyOf": [inner]}},
            "blank": {"description": "."},
        }
    }
    assert list(undescribed(outer, "A")) == ["A.list.new", "A.blank"]


def test_document_explains_a_recheck_and_a_cluster_action(document: dict[str, Any]):
    ask = document["components"]["schemas"]["Ask"]["properties"]
    assert "asks again with `recheck`" in ask["recheck"]["description"]
    for request in (
        "StopReplica",
        "ControlledShutdown",
        "LeaderAndIsr",
        "UpdateMetadata",
        "fetch of a replica",
    ):
        assert request in ask["cluster_action"]["description"]


async def test_at_ms_is_documented_only_under_the_callers_clock(document: dict[str, Any]):
    assert "at_ms" not in document["components"]["schemas"]["Ask"]["properties"]
    assert "at_ms" not in document["components"]["schemas"]["Wish"]["properties"]
    async with serving(clock="caller") as node:
        schemas = (await node.http.get("/openapi.json")).json()["components"]["schemas"]
    assert "at_ms" in schemas["Ask"]["required"]
    assert "at_ms" in schemas["Wish"]["required"]
