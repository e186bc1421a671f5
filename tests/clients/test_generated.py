"""`make clients`: each generated client compiles, and its example runs against a real service."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx
import pytest

from app.domain.quota import KEYS
from clients.generate import LANGUAGES, easier, main
from tests.clients import generated
from tests.clients.scripted import Reply, Request, overloaded, serving
from tests.service import Service

pytestmark = pytest.mark.timeout(900)

COMPILED: dict[str, Callable[[], Sequence[str | Path]]] = {
    "python": generated.python,
    "typescript": generated.typescript,
    "java": generated.java,
    "go": generated.go,
}


@pytest.fixture(scope="module")
def made() -> None:
    """Make the clients, as `make clients` does."""
    main([])


def through_an_overloaded_one(command: Sequence[str | Path], node: Service) -> list[str]:
    """The output of an example whose first two asks are shed; all others reach the node unchanged."""

    def pass_on(request: Request) -> Reply:
        if request.path == "/v1/decisions" and len(shed) < 2:
            shed.append(time.monotonic())
            return overloaded("1")
        asked.append(time.monotonic())
        passed_on = ("Authorization", "Content-Type", "Accept")
        headers = {name: request.headers[name] for name in passed_on if name in request.headers}
        with httpx.Client(base_url=node.url, timeout=60, trust_env=False) as http:
            answer = http.request(request.method, request.path, content=request.content, headers=headers)
        return Reply(answer.status_code, answer.content, answer.headers.get("Content-Type", ""))

    shed: list[float] = []
    asked: list[float] = []
    with serving() as script:
        script.plays(pass_on)
        said = generated.example(command, script.url, node.admin_key)
    assert len(shed) == 2
    assert shed[1] - shed[0] >= 1.0
    assert asked[1] - shed[1] >= 1.0, "the ask after the one that put the quota"
    return said


def test_every_language_is_tested():
    assert COMPILED.keys() == LANGUAGES.keys()


@pytest.mark.parametrize("language", COMPILED)
def test_generated_client_compiles_and_runs_against_the_service(made: None, node: Service, language: str):
    entity = f"user=example-{language},client-id=*"
    command = COMPILED[language]()
    assert through_an_overloaded_one(command, node) == [
        f"put {entity}",
        "admitted 3 times, then throttle",
        "a bad ask: /usage/requests",
        "deleted",
    ]
    assert node.http.get(f"/v1/quotas/{entity}").status_code == 404


def test_example_of_the_hand_made_client_works(node: Service):
    node.put(
        "user=example-hand-made,client-id=*",
        request_rate={"limit": 0.1, "algorithm": "token_bucket", "burst": 3, "enforcement": "deny"},
    )
    said = generated.example([sys.executable, generated.EXAMPLES / "hand_made" / "example.py"], node.url, "")
    assert said[:2] == ["admitted 3 times, then throttle", "a bad ask: /usage/requests"]
    waited = int(said[2].removeprefix("waited ").removesuffix(" ms at most"))
    assert 1_000 < waited <= 10_000


def test_simplified_document_keeps_every_path_and_quota_key():
    exact = json.loads((generated.ROOT / "openapi" / "openapi.json").read_text(encoding="utf-8"))
    document = easier(exact)
    assert document["paths"].keys() == exact["paths"].keys()
    assert list(document["paths"]["/v1/check"]) == ["get"]
    schemas = document["components"]["schemas"]
    assert schemas.keys() == exact["components"]["schemas"].keys()
    quota = {"$ref": "#/components/schemas/Quota"}
    assert schemas["QuotaSet"]["properties"] == dict.fromkeys(KEYS, quota)
    fields = {
        name for shape in exact["components"]["schemas"]["Quota"]["anyOf"] for name in shape["properties"]
    }
    assert schemas["Quota"]["properties"].keys() == fields
    assert schemas["Quota"]["required"] == ["limit"]
