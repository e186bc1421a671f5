"""Commands that ask a node: their requests, how answers and refusals are shown, where a key goes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from app.domain.grant import PERMISSIONS
from app.domain.quota import KEYS
from app.http.openapi.quotas_lists import MAX_APPLIED
from app.http.wire import MAX_BODY
from app.run import cli
from app.run.commands import keys
from app.run.commands.quotas import plans
from tests.commands import Command, Gate, quotagate
from tests.tools import need
from tests.unit.run.test_cli_kafka import gate

__all__ = ["gate", "quotagate"]

ALICE = {
    "entity": "user=alice",
    "quotas": {"request_rate": {"limit": 5.5, "samples": 21}},
    "bounds": {"request_rate": {"ratio": None, "window_ms": 1, "text": "none by itself"}},
    "version": 8,
}
PATH = "/v1/quotas/user=alice"
CHILDREN = (["generate"], ["audit"], ["whatif"], ["recommend"], ["backfill", "run"], ["spark"])
"""Commands that replace this process by another program, even for their help."""


def commands() -> list[list[str]]:
    """Every command, as a list of words."""
    found: list[list[str]] = []

    def walk(command: Any, words: list[str]) -> None:
        found.append(words)
        for name, below in getattr(command, "commands", {}).items():
            walk(below, [*words, name])

    walk(get_command(cli.cli), [])
    return found


def test_every_documented_command_exists():
    assert {" ".join(words) for words in commands()} >= {
        *("up", "serve", "migrate", "decide", "top"),
        *(f"quotas {name}" for name in ("set", "get", "list", "delete", "effective", "history")),
        *("quotas undo", "quotas watch", "quotas promote"),
        *(f"quotas {name}" for name in ("export", "plan", "apply", "lint", "schema")),
        *("buckets show", "buckets reset"),
        *("keys create", "keys list", "keys revoke", "keys rotate"),
        *("volumes", "volumes drill", "volumes push", "volumes forget"),
    }


@pytest.mark.parametrize("words", [words for words in commands() if words not in CHILDREN], ids=" ".join)
def test_every_command_has_help_with_examples(quotagate: Command, words):
    ran = quotagate(*words, "--help")
    assert (ran.code, ran.err) == (0, "")
    if len(words) == 2 or words in (["decide"], ["quotas"], ["volumes"], ["top"]):
        assert f"quotagate {' '.join(words)}" in ran.out.partition("Examples:")[2]


SETS = [
    ("producer_ids_rate=50", {"producer_ids_rate": 50}),
    ("request_rate=0.5 producer_byte_rate=1e3", {"request_rate": 0.5, "producer_byte_rate": 1000.0}),
    ("request_rate=limit=100,samples=21,enforcement=deny",
     {"request_rate": {"limit": 100, "samples": 21, "enforcement": "deny"}}),
    ("request_rate=shadow=true,burst=null", {"request_rate": {"shadow": True, "burst": None}}),
    ('request_rate={"limit":5,"shadow":false}', {"request_rate": {"limit": 5, "shadow": False}}),
    ("request_rate=null", {"request_rate": None}),
    ("producer_ids_rate=layers=kip936", {"producer_ids_rate": {"layers": "kip936"}}),
    ("producer_ids_rate=layers.interval_ms=500,layers.ttl_ms=1000",
     {"producer_ids_rate": {"layers": {"interval_ms": 500, "ttl_ms": 1000}}}),
]  # fmt: skip


@pytest.mark.parametrize(("words", "body"), SETS)
def test_set_merges_and_can_replace(quotagate: Command, gate: Gate, words, body):
    gate.answers["PATCH", PATH] = gate.answers["PUT", PATH] = (200, ALICE)
    assert quotagate("quotas", "set", "user=alice", *words.split(), "--url", gate.url).code == 0
    assert quotagate("quotas", "set", "user=alice", *words.split(), "--replace", "--url", gate.url).code == 0
    assert gate.brief() == [("PATCH", PATH, body), ("PUT", PATH, body)]


@pytest.mark.parametrize(
    "words",
    [
        "user=alice",
        "user=alice request_rate",
        "user=alice =5",
        "user=alice request_rate=",
        "user=alice request_rate=many",
        "user=alice request_rate=010",
        "user=alice request_rate=1_000",
        "user=alice request_rate=1e999",
        "user=alice request_rate=nan",
        "user=alice request_rate=limit=5,",
        "user=alice request_rate=limit=5,limit=6",
        "user=alice request_rate=layers=a,layers.x=1",
        "user=alice request_rate=5 request_rate=6",
        'user=alice request_rate={"limit":5,"limit":6}',
        'user=alice request_rate={"limit":NaN}',
        "user=alice request_rate={",
        "usr=alice request_rate=5",
        "user=alice,ip=10.0.0.7 request_rate=5",
        "ip=gate.example request_rate=5",
        "user=alice request_rate=5 --if-match new",
    ],
)
def test_wrong_use_of_set_exits_with_2_without_a_request(quotagate: Command, gate: Gate, words):
    ran = quotagate("quotas", "set", *words.split(), "--url", gate.url)
    assert (ran.code, gate.asked) == (2, []), ran.err


def test_if_match_and_reason_are_sent_as_headers(quotagate: Command, gate: Gate):
    gate.answers["PATCH", PATH] = gate.answers["DELETE", PATH] = (204, None)
    more = ["--if-match", "17", "--reason", "la  ncé", "--url", gate.url, "--key", "k"]
    assert quotagate("quotas", "set", "user=alice", "request_rate=null", *more).err == (
        "user=alice has no quotas left.\n"
    )
    assert quotagate("quotas", "delete", "user=alice", *more).code == 0
    assert quotagate("quotas", "delete", "user=alice", "request_rate", *more).code == 0
    assert gate.brief() == [
        ("PATCH", PATH, {"request_rate": None}),
        ("DELETE", PATH),
        ("PATCH", PATH, {"request_rate": None}),
    ]
    for one in gate.asked:
        sent = {name: one.headers[name] for name in ("If-Match", "X-Reason", "Authorization")}
        assert sent["X-Reason"].encode("latin-1").decode() == "la  ncé"
        assert (sent["If-Match"], sent["Authorization"]) == ('"17"', "Bearer k")


def test_response_without_a_body_is_shown_as_an_empty_document(quotagate: Command, gate: Gate):
    gate.answers["PATCH", PATH] = gate.answers["DELETE", PATH] = (204, None)
    gate.answers["POST", "/v1/buckets:reset"] = gate.answers["DELETE", "/v1/keys/a"] = (204, None)
    for words in (
        "quotas delete user=alice",
        "quotas set user=alice request_rate=null",
        "quotas --alter --delete-config request_rate --user alice",
        "buckets reset user=alice",
        "keys revoke a",
    ):
        for output, read in (("json", json.loads), ("yaml", yaml.safe_load)):
            ran = quotagate(*words.split(), "-o", output, "--url", gate.url)
            assert (ran.code, read(ran.out)) == (0, {}), words


@pytest.mark.parametrize(
    ("typed", "path"),
    [
        ("user=*", "user=*"),
        ("user=%2A", "user=%2A"),
        ("user=a b/ü", "user=a%20b%2F%C3%BC"),
        ("client-id=etl,user=alice", "user=alice,client-id=etl"),
        ("ip=2001:DB8::1", "ip=2001%3Adb8%3A%3A1"),
    ],
)
def test_entity_is_sent_in_canonical_spelling(quotagate: Command, gate: Gate, typed, path):
    gate.answers["GET", f"/v1/quotas/{path}"] = (200, ALICE)
    assert quotagate("quotas", "get", typed, "--url", gate.url).code == 0


def test_answer_is_shown_as_table_json_or_yaml(quotagate: Command, gate: Gate):
    gate.answers["GET", PATH] = (200, ALICE)
    ask = ("quotas", "get", "user=alice", "--url", gate.url)
    assert json.loads(quotagate(*ask, "-o", "json").out) == ALICE
    assert yaml.safe_load(quotagate(*ask, "-o", "yaml").out) == ALICE
    shown = quotagate(*ask)
    assert shown.out.splitlines() == [
        "QUOTA         LIMIT  SETTINGS    PROMISE",
        "request_rate    5.5  samples=21  none by itself",
    ]
    assert shown.err == "user=alice is at version 8.\n"
    assert quotagate(*ask, "-o", "xml").code == 2


def test_all_pages_of_a_list_are_read(quotagate: Command, gate: Gate):
    """The second page links to itself, so only the limit ends the list."""
    gate.answers["GET", "/v1/quotas"] = (200, {"quotas": [ALICE, ALICE], "next_cursor": "more"})
    ran = quotagate(
        *("quotas", "list", "user=alice", "client-id", "--strict", "--limit", "4", "-o", "json"),
        *("--url", gate.url),
    )
    assert json.loads(ran.out) == {"quotas": [ALICE] * 4}
    match = [("match", "user=alice"), ("match", "client-id"), ("strict", "true")]
    assert [one.query for one in gate.asked] == [
        [*match, ("limit", "4")],
        [*match, ("limit", "2"), ("cursor", "more")],
    ]


@pytest.mark.parametrize("words", ["usr", "user=", "user=a user=b", "ip user", "ip=gate.example", "user=%"])
def test_invalid_list_filter_is_wrong_use(quotagate: Command, gate: Gate, words):
    assert (quotagate("quotas", "list", *words.split(), "--url", gate.url).code, gate.asked) == (2, [])


def test_history_shows_one_quota_per_line(quotagate: Command, gate: Gate):
    change = {
        "at_ms": 1_700_000_000_123,
        "who": "ci",
        "entity": "user=alice",
        "before": {"request_rate": {"limit": 5}, "producer_ids_rate": {"limit": 1}},
        "after": {"request_rate": {"limit": 5, "shadow": True}},
        "reason": "tr\x1b[31mial",
    }
    gate.answers["GET", "/v1/quotas:history"] = (200, {"changes": [change], "next_cursor": None})
    ran = quotagate("quotas", "history", "user=alice", "--limit", "3", "--url", gate.url)
    assert [line.split("  ") for line in ran.out.splitlines()][1][0] == "2023-11-14 22:13:20Z"
    assert "request_rate 5 -> 5 shadow=yes" in ran.out.splitlines()[1]
    assert ran.out.splitlines()[1].endswith(r"tr\x1b[31mial"), "a terminal would have obeyed"
    assert ran.out.splitlines()[2].strip() == "producer_ids_rate 1 -> none"
    assert gate.asked[0].query == [("entity", "user=alice"), ("limit", "3")]


def test_effective_shows_the_ladder(quotagate: Command, gate: Gate):
    found = {
        "quota": "request_rate",
        "entity": "user=alice",
        "bucket": "user=alice",
        "limit": 5,
        "limit_now": 5,
        "ladder": [
            {"entity": "user=alice,client-id=*", "limit": None},
            {"entity": "user=alice", "limit": 5},
            {"entity": "user=*", "limit": 50},
        ],
    }
    gate.answers["GET", "/v1/quotas:effective"] = (200, {"quotas": [found]})
    ran = quotagate("quotas", "effective", "--principal", "alice", "--client-id", "", "--url", gate.url)
    assert [line.split() for line in ran.out.splitlines()] == [
        ["QUOTA", "LIMIT", "NOW", "FROM", "BUCKET"],
        ["request_rate", "5", "5", "user=alice", "user=alice"],
        ["instead", "of", "50", "user=*"],
    ]
    assert gate.asked[0].query == [("principal", "alice"), ("client_id", "")], "an empty client-id is one"


def test_effective_without_a_caller_is_wrong_use(quotagate: Command, gate: Gate):
    assert quotagate("quotas", "effective", "--url", gate.url).code == 2


def test_bucket_names_are_sent_unchanged(quotagate: Command, gate: Gate):
    gate.answers["GET", "/v1/buckets"] = (200, {"buckets": []})
    gate.answers["POST", "/v1/buckets:reset"] = (204, None)
    bucket = "listener=EXTERNAL;broker=1"
    ran = quotagate("buckets", "show", bucket, "--url", gate.url)
    assert (ran.code, ran.err) == (0, "No quota charges this bucket.\n")
    assert quotagate("buckets", "reset", bucket, "--url", gate.url).code == 0
    assert quotagate("buckets", "reset", bucket, "--quota", "request_rate", "--url", gate.url).code == 0
    assert gate.brief() == [
        ("GET", "/v1/buckets", [("bucket", bucket)]),
        ("POST", "/v1/buckets:reset", {"bucket": bucket}),
        ("POST", "/v1/buckets:reset", {"bucket": bucket, "quota": "request_rate"}),
    ]


def test_new_key_is_printed_alone(quotagate: Command, gate: Gate):
    gate.answers["POST", "/v1/keys"] = (201, {"name": "a/b", "scopes": ["read"], "key": "qg_secret"})
    gate.answers["POST", "/v1/keys/a%2Fb:rotate"] = (200, {"name": "a/b", "key": "qg_newer"})
    gate.answers["DELETE", "/v1/keys/a%2Fb"] = (204, None)
    options = ["--scope", "read", "--scope", "write", "--bound-to", "user=a-*", "--expires", "2027-01-31"]
    made = quotagate("keys", "create", "a/b", *options, "--url", gate.url)
    assert (made.code, made.out) == (0, "qg_secret\n")
    assert "not shown again" in made.err
    rotated = quotagate("keys", "rotate", "a/b", "--grace", "24h", "-o", "json", "--url", gate.url)
    assert json.loads(rotated.out)["key"] == "qg_newer"
    assert quotagate("keys", "revoke", "a/b", "--url", gate.url).code == 0
    wanted = {"scopes": ["read", "write"], "bound_to": ["user=a-*"], "expires_ms": 1_801_353_600_000}
    assert gate.brief() == [
        ("POST", "/v1/keys", {"name": "a/b", **wanted}),
        ("POST", "/v1/keys/a%2Fb:rotate", {"grace_ms": 86_400_000}),
        ("DELETE", "/v1/keys/a%2Fb"),
    ]


@pytest.mark.parametrize(
    "words", ["create a --expires soon", "rotate a --grace 5", "create", "rotate", "revoke"]
)
def test_wrong_use_of_keys_exits_with_2(quotagate: Command, gate: Gate, words):
    assert (quotagate("keys", *words.split(), "--url", gate.url).code, gate.asked) == (2, [])


def test_scopes_equal_those_of_the_service():
    assert set(keys.SCOPES) == set(PERMISSIONS)


def test_refusal_names_each_field_on_stderr(quotagate: Command, gate: Gate):
    faults = [{"field": "/request_rate/limit", "message": "must\x1b[2J be"}, {"field": "/x", "message": "no"}]
    gate.answers["PATCH", PATH] = (422, {"title": "T", "detail": "It cannot be used.", "errors": faults})
    ran = quotagate("quotas", "set", "user=alice", "request_rate=5", "--url", gate.url)
    assert (ran.code, ran.out) == (1, "")
    assert ran.err == (
        "quotagate: 422 It cannot be used.\n  /request_rate/limit: must\\x1b[2J be\n  /x: no\n"
    )


def test_option_overrides_environment_file_and_default(
    quotagate: Command, gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    gate.answers["GET", PATH] = (200, ALICE)
    get = ("quotas", "get", "user=alice")
    file = tmp_path / "config" / "quotagate" / "config.toml"
    file.parent.mkdir(parents=True)
    file.write_text(f'url = "{gate.url}/"\nkey_file = "kept"\n')
    (file.parent / "kept").write_text("of the file\n")
    other = tmp_path / "other.toml"
    other.write_text(f'url = "{gate.url}"\nkey = "of the other"\n')
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "admin.key").write_text("of the home\n")
    assert quotagate(*get).code == 0
    assert quotagate(*get, "--config", str(other)).code == 0
    monkeypatch.setenv("QUOTAGATE_KEY", "of the environment")
    assert quotagate(*get).code == 0
    assert quotagate(*get, "--key", "of the option").code == 0
    monkeypatch.delenv("QUOTAGATE_KEY")
    file.unlink()
    assert quotagate(*get, "--url", gate.url).code == 0
    monkeypatch.setenv("QUOTAGATE_URL", gate.url)
    assert quotagate(*get).code == 0
    assert [one.headers["Authorization"] for one in gate.asked] == [
        "Bearer of the file",
        "Bearer of the other",
        "Bearer of the environment",
        "Bearer of the option",
        "Bearer of the home",
        "Bearer of the home",
    ]


def test_stored_key_is_sent_only_to_its_node(quotagate: Command, gate: Gate, tmp_path: Path):
    """The file's key is for the file's node; a node given by --url must not receive it."""
    gate.answers["GET", PATH] = (401, {"detail": "This needs a key."})
    file = tmp_path / "file.toml"
    file.write_text('url = "http://elsewhere.example"\nkey = "secret"\n')
    ran = quotagate("quotas", "get", "user=alice", "--config", str(file), "--url", gate.url)
    assert gate.asked[0].headers["Authorization"] is None
    assert ran.err.splitlines()[1] == "  Give a key: --key, QUOTAGATE_KEY or a configuration file."


def test_invalid_key_is_not_shown_in_the_error(quotagate: Command, gate: Gate):
    gate.answers["GET", PATH] = (200, ALICE)
    ran = quotagate("quotas", "get", "user=alice", "--url", gate.url, "--key", "sec\nret")
    assert (ran.code, gate.asked, ran.err) == (1, [], "quotagate: the key has invalid characters\n")
    assert quotagate("quotas", "get", "user=alice", "--url", gate.url, "--key", "secret\n").code == 0
    assert gate.asked[0].headers["Authorization"] == "Bearer secret"


@pytest.mark.parametrize("problem", [{"errors": "no"}, {"errors": [1, {"message": "no"}]}, {"detail": 5}, {}])
def test_refusal_of_another_kind_of_server_is_shown(quotagate: Command, gate: Gate, problem):
    gate.answers["GET", PATH] = (418, problem)
    ran = quotagate("quotas", "get", "user=alice", "--url", gate.url)
    assert (ran.code, ran.err.startswith("quotagate: 418")) == (1, True)


def test_refused_key_is_reported_with_its_file(quotagate: Command, gate: Gate, tmp_path: Path):
    gate.answers["GET", PATH] = (401, {"detail": "The key is not valid."})
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "admin.key").write_text("of another node")
    ran = quotagate("quotas", "get", "user=alice", "--url", gate.url)
    assert ran.err == (
        f"quotagate: 401 The key is not valid.\n  The key is the one in {tmp_path}/home/admin.key.\n"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("url = ", "Invalid value"),
        ("url = 5\n", "url: must be text in quotes"),
        ('uri = "http://gate"\n', "uri: unknown; there are url, key, key_file"),
        ('key = "a"\nkey_file = "b"\n', "key or key_file, not both"),
        ('key_file = "none"\n', "key_file: "),
        ('cert_key_file = "own.key"\n', "cert_key_file goes with cert_file"),
    ],
)
def test_invalid_configuration_file_is_named(quotagate: Command, tmp_path: Path, text, message):
    file = tmp_path / "file.toml"
    file.write_text(text)
    ran = quotagate("quotas", "list", "--config", str(file))
    assert (ran.code, ran.err.startswith(f"quotagate: {file}: "), message in ran.err) == (1, True, True), (
        ran.err
    )


def test_missing_configuration_file_is_wrong_use(quotagate: Command, tmp_path: Path):
    assert quotagate("quotas", "list", "--config", str(tmp_path / "none.toml")).code == 2


def test_catalog_that_changes_between_pages_is_read_again(quotagate: Command, gate: Gate):
    """The catalog has a new version at each request, so no consistent copy can be written."""
    gate.answers["GET", "/v1/quotas"] = (200, {"quotas": [], "next_cursor": None})
    assert quotagate("quotas", "export", "--url", gate.url).code == 0
    pages = iter([(200, {"quotas": [], "next_cursor": "c"}), (200, {"quotas": [], "next_cursor": None})] * 5)

    class Changing(dict):
        def get(self, *_):
            gate.etag = f'"{len(gate.asked)}"'
            return next(pages)

    gate.answers = Changing()
    ran = quotagate("quotas", "export", "--url", gate.url)
    assert (ran.code, "changed 5 times" in ran.err, ran.out) == (1, True, "")


def test_file_too_large_for_one_apply_is_refused(quotagate: Command, gate: Gate, tmp_path: Path):
    assert (plans.MAX_BODY, plans.MAX_ALTERATIONS) == (MAX_BODY, MAX_APPLIED)
    gate.answers["GET", "/v1/quotas"] = (200, {"quotas": [], "next_cursor": None})
    file = tmp_path / "quotas.yaml"
    file.write_text(
        "quotas:\n" + "".join(f"  user={n}: {{request_rate: 1}}\n" for n in range(MAX_APPLIED + 1))
    )
    ran = quotagate("quotas", "plan", "-f", str(file), "--url", gate.url)
    assert (ran.code, len(gate.asked)) == (1, 1)
    assert "10,001 entities change" in ran.err
    assert "--only-named" in ran.err


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_script_is_printed(quotagate: Command, monkeypatch: pytest.MonkeyPatch, shell: str):
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    monkeypatch.setattr("typer.main.get_command", get_command)  # a new parser detects shells
    shown = quotagate("--show-completion", shell)
    assert (shown.code, shown.err) == (0, "")
    assert "_QUOTAGATE_COMPLETE=" in shown.out


def test_bash_completes_after_reading_the_script(tmp_path: Path):
    (tmp_path / "quotagate").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m app.run.cli "$@"\n')
    (tmp_path / "quotagate").chmod(0o755)
    script = """
        source <(quotagate --show-completion bash)
        COMP_WORDS=(quotagate quotas set user=alice req) COMP_CWORD=4
        _quotagate_completion quotagate
        echo "${COMPREPLY[@]}"
    """
    done = subprocess.run(
        [need("bash"), "-c", script],
        env={
            **os.environ,
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1",
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("request_rate= request_percentage=\n", "")


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("quotagate quo", {"quotas"}),
        ("quotagate quotas set user=alice producer_", {"producer_ids_rate=", "producer_byte_rate="}),
        ("quotagate quotas delete user=alice ", set(KEYS)),
        ("quotagate quotas get us", {"user="}),
        ("quotagate keys create a --scope ", set(keys.SCOPES)),
    ],
)
def test_shell_completes(quotagate: Command, monkeypatch: pytest.MonkeyPatch, words: str, offered: set[str]):
    """Ask as bash's completion script does: with the words and the position in the environment."""
    monkeypatch.setenv("_QUOTAGATE_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(words.count(" ")))
    asked = quotagate()
    assert set(asked.out.split()) == offered, asked.err
