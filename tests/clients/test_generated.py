"""`make clients`: each generated client compiles, and its example runs against a real service."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import httpx
import pytest

from app.domain.quota import KEYS
from app.node.reports import MAX_LISTED_BYTES, SUMMARY
from clients.generate import LANGUAGES, easier, main
from tests.clients import generated
from tests.clients.scripted import Reply, Request, overloaded, serving
from tests.report_folders import AUDIT
from tests.report_folders import made as report
from tests.service import Service, eventually, running
from workers.jobs import console
from workers.jobs.folder import OutputFolder

pytestmark = pytest.mark.timeout(900)

COMPILED: dict[str, Callable[[], generated.Programs]] = {
    "python": generated.python,
    "typescript": generated.typescript,
    "java": generated.java,
    "go": generated.go,
}
CASES: Final = console.ConsoleTable(
    "cases",
    "Cases",
    ("case", "at_ms", "principal", "logged"),
    [("gone", 1_763_719_742_123, None, 0.1), ("<b>", 2**53 - 1, "alice", 2**31 + 1), (None, 0, "", -1e300)],
    count=5,
)
"""A table of a report, with text, integers, other numbers, and nulls."""
NIGHTLY: Final = "nightly, a+b=*"
"""The name of a report."""
METHODS: Final = frozenset({"get", "put", "post", "patch", "delete"})


@pytest.fixture(scope="module")
def made() -> None:
    """Make the clients, as `make clients` does."""
    main([])


@pytest.fixture(scope="module", params=COMPILED)
def compiled(made: None, request: pytest.FixtureRequest) -> tuple[str, generated.Programs]:
    """A language, and its programs."""
    return request.param, COMPILED[request.param]()


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Reports: one as a job writes it, and an older one with a large summary of no known job."""
    folder = tmp_path_factory.mktemp("reports")
    os.utime(report(folder, "older", summary={"note": MAX_LISTED_BYTES * "x"}), (1, 1))
    with OutputFolder(str(folder / NIGHTLY)) as output:
        output.text(SUMMARY, json.dumps(AUDIT))
        console.write(output, "log", 1_763_719_742_123, 1_763_719_743_000, [CASES])
    return folder


@pytest.fixture(scope="module")
def pushed(reports: Path) -> Iterator[Service]:
    """A node that takes pushed volumes, and shows reports."""
    source = {"QUOTAGATE_VOLUME_SOURCE": "push", "QUOTAGATE_VOLUME_MIN_AVAILABLE_BYTES": "1000"}
    with running(environment={**source, "QUOTAGATE_REPORTS": str(reports)}) as node:
        yield node


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
        said = generated.printed(command, script.url, node.admin_key)
    assert len(shed) == 2
    assert shed[1] - shed[0] >= 1.0
    assert asked[1] - shed[1] >= 1.0, "the ask after the one that put the quota"
    return said


def test_every_language_is_tested():
    assert COMPILED.keys() == LANGUAGES.keys()


def test_generated_client_compiles_and_runs_against_the_service(
    compiled: tuple[str, generated.Programs], node: Service
):
    language, programs = compiled
    entity = f"user=example-{language},client-id=*"
    assert through_an_overloaded_one(programs.example, node) == [
        f"put {entity}",
        "admitted 3 times, then throttle",
        "a bad ask: /usage/requests",
        "deleted",
    ]
    assert node.http.get(f"/v1/quotas/{entity}").status_code == 404


class Call(NamedTuple):
    """A call of a program: the operation, both bodies, and the answer as the client sends it again."""

    operation: str
    sent: Any
    answered: Any
    again: Any


def calls(command: Sequence[str | Path], node: Service) -> list[Call]:
    """All calls of a program that calls each operation; its requests reach the node unchanged."""
    answers: list[Any] = []

    def pass_on(request: Request) -> Reply:
        passed = ("authorization", "content-type", "accept", "x-reason", "x-quotagate-principal")
        headers = {name: value for name, value in request.headers.items() if name.lower() in passed}
        with httpx.Client(base_url=node.url, timeout=60, trust_env=False) as http:
            answer = http.request(request.method, request.path, content=request.content, headers=headers)
        is_json = answer.headers.get("Content-Type", "").startswith("application/json")
        answers.append(answer.json() if is_json else answer.text or None)
        return Reply(answer.status_code, answer.content, answer.headers.get("Content-Type", ""))

    with serving() as script:
        script.plays(pass_on)
        (line,) = generated.printed(command, script.url, node.admin_key)
    said = json.loads(line)
    sent = [request.body if request.content else None for request in script.requests]
    return [
        Call(operation, body, answered, again)
        for (operation, again), body, answered in zip(said, sent, answers, strict=True)
    ]


def set_fields(value: Any) -> Any:
    """A JSON value without its null fields: in an answer, null and absent mean the same."""
    if isinstance(value, dict):
        return {name: set_fields(each) for name, each in value.items() if each is not None}
    return [set_fields(each) for each in value] if isinstance(value, list) else value


def throttle(node: Service, principal: str) -> None:
    """Let an ask be admitted and another be throttled, and wait until the overview has both."""
    node.put(
        f"user={principal}",
        request_rate={"limit": 0.001, "algorithm": "token_bucket", "burst": 1, "enforcement": "deny"},
    )
    ask = {"principal": principal, "usage": {"requests": 1}}
    assert [node.ask(**ask)["decision"] for _ in range(2)] == ["admit", "throttle"]
    eventually(lambda: f'"user={principal}"' in node.http.get("/v1/overview").text)


def test_every_operation_is_called_and_answers_are_sent_back_as_they_were_read(
    compiled: tuple[str, generated.Programs], pushed: Service
):
    language, programs = compiled
    throttle(pushed, f"throttled-{language}")
    made = calls(programs.operations, pushed)
    by_name: dict[str, list[Call]] = {}
    for call in made:
        by_name.setdefault(call.operation, []).append(call)

    document = json.loads((generated.GENERATED / "openapi.json").read_text(encoding="utf-8"))
    operations = {
        operation["operationId"]
        for path in document["paths"].values()
        for method, operation in path.items()
        if method in METHODS
    }
    assert by_name.keys() == operations

    for call in made:
        assert set_fields(call.again) == set_fields(call.answered), call.operation

    first, same, former = by_name["put_quotas"]
    assert first.sent == {
        "request_rate": {
            "limit": 16777217.5,
            "burst": 3e9,
            "algorithm": "token_bucket",
            "enforcement": "deny",
        },
        "producer_byte_rate": {"limit": 2**53 - 1},
        "producer_ids_rate": {"limit": 5, "layers": {"interval_ms": 3_600_000, "ttl_ms": 7_200_000}},
        "consumer_byte_rate": {"limit": 2**31 + 1, "shadow": True},
    }
    assert same.sent == by_name["get_quotas"][0].answered["quotas"]
    (patched,) = by_name["patch_quotas"]
    assert patched.sent == {
        "request_rate": {"limit": 10, "burst": None},
        "producer_ids_rate": None,
        "consumer_byte_rate": {"limit": 8},
    }
    assert patched.answered["quotas"] == {
        "request_rate": {"limit": 10, "algorithm": "token_bucket", "enforcement": "deny"},
        "producer_byte_rate": {"limit": 2**53 - 1},
        "consumer_byte_rate": {"limit": 8, "shadow": True},
    }
    of_entity, of_drill = by_name["quotas_history"]
    assert former.sent == of_entity.answered["changes"][0]["before"]
    assert of_entity.again["changes"][-1].get("before") is None
    assert [change["after"] is None for change in of_drill.answered["changes"]] == [True, False]

    (altered,), (applied,) = by_name["alter_quotas"], by_name["apply_quotas"]
    assert altered.sent["alterations"][0]["quotas"] == {"request_rate": 7, "producer_byte_rate": None}
    read = by_name["list_quotas"][0].answered["quotas"][0]["quotas"]
    assert applied.sent["alterations"][0]["quotas"] == {**read, "consumer_byte_rate": None}

    (decided,) = by_name["decide_one_ask"]
    assert (
        set_fields(decided.sent)
        == decided.sent
        == {
            "principal": f"operations-{language}",
            "usage": {"requests": 1, "producer_ids": ["123", "9223372036854775807"]},
            "detail": True,
        }
    )
    (shadowed,), (overview,) = by_name["shadow_quotas"], by_name["get_overview"]
    assert shadowed.again["version"] == same.answered["version"]
    (shadow,) = shadowed.again["shadows"]
    assert 0 < shadow.pop("since_ms") <= shadowed.again["now_ms"]
    assert shadow == {
        "quota": "consumer_byte_rate",
        "limit": 2**31 + 1,
        "enforcement": "deny",
        "window_ms": 11_000,
        **dict.fromkeys(("admit", "delay", "throttle", "reject"), 0),
    }
    series = overview.again["series"]
    assert all(sum(entry[outcome] for entry in series) >= 1 for outcome in ("admit", "throttle"))
    assert {len(entry["latency"]) for entry in series} == {len(overview.again["latency_ms"]) + 1}
    throttled = {each["bucket"]: (each["quota"], each["asks"]) for each in overview.again["throttled"]}
    assert throttled[f"user=throttled-{language}"] == ("request_rate", 1)
    (store,) = overview.again["stores"]
    assert 0 < store["memory_bytes"] < store["max_bytes"]

    (listed,), (shown,) = by_name["get_reports"], by_name["get_report"]
    nightly, older = listed.again["reports"]
    assert set_fields(older) == {"name": "older", "modified_ms": 1_000}
    expected = {
        "name": NIGHTLY,
        "kind": "audit",
        "from_ms": 1_763_719_742_123,
        "to_ms": 1_763_719_743_000,
        "modified_ms": nightly["modified_ms"],
        "summary": AUDIT,
    }
    assert nightly == expected
    assert shown.again == {**expected, "log": "log", "tables": [CASES.document()]}

    assert by_name["create_key"][0].sent["expires_ms"] == 4_102_444_800_000
    volumes, again = by_name["push_volumes"]
    assert again.sent == volumes.sent
    assert volumes.sent["volumes"][1] == {
        "broker": "1",
        "dir": "/b",
        "total_bytes": None,
        "available_bytes": None,
    }


def test_example_of_the_hand_made_client_works(node: Service):
    node.put(
        "user=example-hand-made,client-id=*",
        request_rate={"limit": 0.1, "algorithm": "token_bucket", "burst": 3, "enforcement": "deny"},
    )
    said = generated.printed([sys.executable, generated.EXAMPLES / "hand_made" / "example.py"], node.url, "")
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


ANYTHING: Final = "anything"


def fields(schema: Any, document: Any, at: str = "") -> Iterator[str]:
    """The paths of all fields of a schema; also the paths that may be null or anything, with that word."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        schema = document["components"]["schemas"][name]
    types = schema.get("type")
    nullable = types == "null" or (isinstance(types, list) and "null" in types)
    if nullable:
        yield f"{at} null"
    for option in schema.get("anyOf", ()):
        yield from fields(option, document, at)
    more = schema.get("additionalProperties")
    named = schema.get("properties", {})
    if isinstance(more, dict) and more.get("$ref", "").endswith("/Quota"):
        named = dict.fromkeys(KEYS, more)
    for name, value in named.items():
        yield f"{at}/{name}"
        yield from fields(value, document, f"{at}/{name}")
    if "items" in schema:
        yield from fields(schema["items"], document, f"{at}/-")
    if not schema.keys() - {"description"}:
        yield f"{at} {ANYTHING}"


def test_simplified_document_keeps_every_field_and_every_null():
    exact = json.loads((generated.ROOT / "openapi" / "openapi.json").read_text(encoding="utf-8"))
    document = easier(exact)
    for name, schema in exact["components"]["schemas"].items():
        known = set(fields(document["components"]["schemas"][name], document))
        free = [path.removesuffix(f" {ANYTHING}") for path in known if path.endswith(ANYTHING)]
        for path in set(fields(schema, exact)) - known:
            is_free = any(path.startswith((f"{at}/", f"{at} ")) for at in free)
            is_null_itself = path == " null"  # its references say so
            assert is_free or is_null_itself, f"{name}{path}"


@pytest.mark.parametrize(
    ("options", "simplified"),
    [
        ([{"type": "integer"}, {"type": "null"}], {"type": ["integer", "null"], "format": "int64"}),
        ([{"type": "integer"}, {"type": "string"}], {"type": "string"}),
        ([{"type": "integer"}, {"type": "number"}, {"type": "null"}], {"type": ["number", "null"]}),
        ([{"anyOf": [{"type": "string"}, {"type": "object", "properties": {}}]}, {"type": "null"}], {}),
        ([{"anyOf": [{"format": "ipv4"}, {"format": "ipv6"}], "type": "string"}], {"type": "string"}),
        (
            [{"$ref": "#/components/schemas/Drill"}, {"type": "null"}],
            {"anyOf": [{"$ref": "#/components/schemas/Drill"}, {"type": "null"}]},
        ),
    ],
)
def test_schema_with_several_options_becomes_one_that_holds_all(options: list[Any], simplified: Any):
    schemas = {"Drill": {"type": "object", "properties": {}}, "QuotaSet": {"properties": {}}}
    schemas["Held"] = {"type": "object", "properties": {"value": {"anyOf": options}}}
    made = easier({"paths": {}, "components": {"schemas": schemas}})
    assert made["components"]["schemas"]["Held"]["properties"]["value"] == simplified


def test_several_named_schemas_are_not_reduced_to_the_first():
    both = [{"$ref": "#/components/schemas/A"}, {"$ref": "#/components/schemas/B"}]
    schemas = {
        "A": {"type": "object", "properties": {"a": {"type": "string"}}},
        "B": {"type": "object", "properties": {"b": {"type": "string"}}},
        "Both": {"anyOf": both},
        "QuotaSet": {"properties": {}},
    }
    made = easier({"paths": {}, "components": {"schemas": schemas}})["components"]["schemas"]
    assert made["Both"]["properties"].keys() == {"a", "b"}
    schemas["Held"] = {"type": "object", "properties": {"value": {"anyOf": both}}}
    with pytest.raises(ValueError, match="need a name"):
        easier({"paths": {}, "components": {"schemas": schemas}})


def test_names_of_generated_classes_do_not_depend_on_descriptions():
    """A generator merges equal shapes without a name into one class."""
    exact = json.loads((generated.ROOT / "openapi" / "openapi.json").read_text(encoding="utf-8"))
    patch = exact["components"]["schemas"]["QuotaPatch"]["properties"]
    for key in ("producer_byte_rate", "consumer_byte_rate"):
        (shape,) = (option for option in patch[key]["anyOf"] if "properties" in option)
        shape["properties"]["limit"]["description"] = f"The limit of {key}."
    made = easier(exact)["components"]["schemas"]["QuotaPatch"]["properties"]
    assert made["producer_byte_rate"] == made["consumer_byte_rate"]


READ_AND_SENT: Final[list[tuple[str, Any, Any]]] = [
    ("QuotaPatch", {}, {}),
    ("QuotaPatch", {"request_rate": None}, {"request_rate": None}),
    ("QuotaPatch", {"request_rate": 5}, {"request_rate": {"limit": 5}}),
    (
        "QuotaPatch",
        {"producer_ids_rate": {"layers": "kip936"}},
        {"producer_ids_rate": {"layers": "kip936"}},
    ),
    ("QuotaPatch", {"producer_ids_rate": {"layers": None}}, {"producer_ids_rate": {"layers": None}}),
    ("QuotaSet", {"request_rate": {"limit": 0.5}}, {"request_rate": {"limit": 0.5}}),
    ("Quota", {"limit": 2**53 - 1}, {"limit": 2**53 - 1}),
    ("QuotaSetting", {"entity": "ip=*", "quotas": {}}, {"entity": "ip=*", "quotas": {}}),
    ("Ask", {"usage": {"requests": 1}, "ip": None}, {"usage": {"requests": 1}, "ip": None}),
    ("Wish", {"usage": {"requests": 1}}, {"usage": {"requests": 1}}),
    ("KeyWanted", {"name": "a", "scopes": ["read"]}, {"name": "a", "scopes": ["read"]}),
]
"""A class of the Python client, the dict that an object is made from, and the dict that is sent."""


def test_python_client_sends_null_only_where_it_was_said(made: None):
    program = (
        "import json, sys, quotagate_api as api\n"
        "given = json.loads(sys.argv[1])\n"
        "print(json.dumps([getattr(api, kind).from_dict(read).to_dict() for kind, read, _ in given]))"
    )
    path = {"PYTHONPATH": str(generated.GENERATED / "python")}
    said = generated.run(sys.executable, "-c", program, json.dumps(READ_AND_SENT), environment=path)
    assert json.loads(said) == [sent for _, _, sent in READ_AND_SENT]
