"""All commands with a real node, and the catalog as a file: export, plan, apply, and a killed apply."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.run.commands.quotas import files
from tests.authority import Authority
from tests.commands import Command, Ran, ask, quotagate
from tests.service import ADMIN_KEY, Service, eventually, running

__all__ = ["ask", "quotagate"]

START = """\
quotas:
  user=*:
    producer_ids_rate: 50
    request_rate: {limit: 100, enforcement: deny}
  user=alice,client-id=etl:
    producer_byte_rate: 1048576
  client-id=etl:
    request_percentage: 12.5
  ip=2001%3Adb8%3A%3A1:
    connection_creation_rate: 5
  listener=EXTERNAL:
    max_connection_creation_rate: 9
"""
MANY = 2_000


@pytest.fixture(scope="module")
def running_node() -> Iterator[Service]:
    with running() as node:
        yield node


@pytest.fixture
def node(running_node: Service) -> Service:
    """A node with an empty catalog."""
    for entity in listed(running_node):
        assert running_node.http.delete(f"/v1/quotas/{entity}").status_code == 204
    return running_node


def listed(node: Service) -> dict[str, Any]:
    """The quotas of the catalog, by entity."""
    found: dict[str, Any] = {}
    cursor = None
    while True:
        query = {"limit": 1000} | ({"cursor": cursor} if cursor else {})
        page = node.http.get("/v1/quotas", params=query).json()
        found |= {one["entity"]: one["quotas"] for one in page["quotas"]}
        cursor = page["next_cursor"]
        if cursor is None:
            return found


def rows(ran: Ran) -> list[list[str]]:
    """The cells of a table, whose columns are separated by two spaces or more."""
    assert ran.code == 0, ran.err
    return [re.split(r"\s{2,}", line.strip()) for line in ran.out.splitlines()]


def test_set_get_list_delete(ask: Command):
    assert rows(ask("quotas", "set", "user=alice", "request_rate=limit=5,enforcement=deny")) == [
        ["QUOTA", "LIMIT", "SETTINGS", "PROMISE"],
        ["request_rate", "5", "enforcement=deny", rows(ask("quotas", "get", "user=alice"))[1][3]],
    ]
    assert ask("quotas", "set", "user=alice", "request_rate=7", "producer_ids_rate=3").code == 0
    merged = {"producer_ids_rate": {"limit": 3}, "request_rate": {"limit": 7, "enforcement": "deny"}}
    assert json.loads(ask("quotas", "get", "user=alice", "-o", "json").out)["quotas"] == merged
    assert yaml.safe_load(ask("quotas", "get", "user=alice", "-o", "yaml").out)["quotas"] == merged
    assert ask("quotas", "set", "user=bob", "request_rate=1").code == 0
    assert rows(ask("quotas", "list"))[1:] == [
        ["user=alice", "producer_ids_rate", "3", "-"],
        ["user=alice", "request_rate", "7", "enforcement=deny"],
        ["user=bob", "request_rate", "1", "-"],
    ]
    assert [
        one["entity"] for one in json.loads(ask("quotas", "list", "user=bob", "-o", "json").out)["quotas"]
    ] == ["user=bob"]
    assert len(yaml.safe_load(ask("quotas", "list", "user", "--strict", "-o", "yaml").out)["quotas"]) == 2
    assert ask("quotas", "set", "user=alice", "request_rate=1", "--replace").code == 0
    assert json.loads(ask("quotas", "get", "user=alice", "-o", "json").out)["quotas"].keys() == {
        "request_rate"
    }
    assert ask("quotas", "delete", "user=alice", "request_rate").code == 0
    assert ask("quotas", "delete", "user=bob").code == 0
    gone = ask("quotas", "get", "user=bob")
    assert (gone.code, gone.out, gone.err.startswith("quotagate: 404 ")) == (1, "", True)
    assert ask("quotas", "list").out == "ENTITY  QUOTA  LIMIT  SETTINGS\n"


def test_lost_update_is_refused(ask: Command):
    version = json.loads(ask("quotas", "set", "user=a", "request_rate=1", "-o", "json").out)["version"]
    assert ask("quotas", "set", "user=a", "request_rate=2", "--if-match", str(version)).code == 0
    for change in (["set", "user=a", "request_rate=3"], ["delete", "user=a"]):
        late = ask("quotas", *change, "--if-match", str(version))
        assert (late.code, late.err.startswith("quotagate: 412 ")) == (1, True)


def test_errors_name_the_field(ask: Command):
    ran = ask("quotas", "set", "user=a", "producer_ids_rate=5.5", "request_rate=limit=1,bust=2")
    assert (ran.code, ran.out) == (1, "")
    assert "\n  /producer_ids_rate: must be an integer" in ran.err
    assert "\n  /request_rate/bust: unknown field" in ran.err


def test_history_has_the_reason(ask: Command):
    assert ask("quotas", "set", "user=a", "request_rate=1", "--reason", "läunch").code == 0
    assert ask("quotas", "delete", "user=a").code == 0
    newest, before = rows(ask("quotas", "history", "user=a", "--limit", "2"))[1:]
    assert newest[1:] == ["admin", "user=a", "request_rate 1 -> none", "-"]
    assert before[1:] == ["admin", "user=a", "request_rate none -> 1", "läunch"]
    changes = json.loads(ask("quotas", "history", "--limit", "1", "-o", "json").out)["changes"]
    assert [change["after"] for change in changes] == [None]


def test_effective_names_the_entity_of_each_limit(ask: Command):
    ask("quotas", "set", "user=*", "request_rate=50")
    ask("quotas", "set", "user=alice", "request_rate=5")
    shown = rows(ask("quotas", "effective", "--principal", "alice", "--client-id", "etl"))
    assert shown[0] == ["QUOTA", "LIMIT", "NOW", "FROM", "BUCKET"]
    assert shown[1] == ["request_rate", "5", "5", "user=alice", "user=alice"]
    assert shown[2:] == [["instead of", "50", "user=*"]]
    document = json.loads(ask("quotas", "effective", "--principal", "alice", "-o", "json").out)
    assert document["quotas"][0]["entity"] == "user=alice"
    nothing = ask("quotas", "effective", "--ip", "10.0.0.7")
    assert (nothing.code, nothing.err) == (0, "No quota applies: nothing is limited.\n")


def test_buckets_are_shown_and_reset(ask: Command):
    ask("quotas", "set", "user=*", "producer_ids_rate=2")
    asking = ("decide", "--principal", "carol", "--producer-id", "1", "--producer-id", "2")
    assert rows(ask(*asking))[0] == ["decision", "admit"]
    refused = ask("decide", "--principal", "carol", "--producer-id", "3")
    assert (refused.code, refused.out.splitlines()[1].split("  ")[-1].strip()) == (1, "1 h")
    shown = rows(ask("buckets", "show", "user=carol"))
    assert shown[0][:3] == ["QUOTA", "OBSERVED", "REMAINING"]
    assert "LIVE_LAYERS" not in shown[0]
    assert shown[1][:3] == ["producer_ids_rate", "2", "0"]
    only = ("buckets", "show", "user=carol", "--quota", "producer_ids_rate")
    assert json.loads(ask(*only, "-o", "json").out)["buckets"][0]["charged_ids"] == 2
    assert yaml.safe_load(ask(*only, "-o", "yaml").out)["buckets"][0]["remaining"] == 0
    assert ask("buckets", "reset", "user=carol", "--quota", "producer_ids_rate") == Ran(0, "", "")
    assert ask("decide", "--principal", "carol", "--producer-id", "3").code == 0
    assert ask("buckets", "show", "nobody").code == 1


def test_keys_are_created_shown_once_rotated_and_revoked(ask: Command):
    made = ask("keys", "create", "reader", "--scope", "read", "--expires", "30d")
    key = made.out.strip()
    assert made.err == "This is the key reader. It is not shown again.\n"
    assert ask("quotas", "list", "--key", key).code == 0
    refused = ask("quotas", "set", "user=a", "request_rate=1", "--key", key)
    assert (refused.code, refused.err.startswith("quotagate: 403 ")) == (1, True)
    for output in ("table", "json", "yaml"):
        shown = ask("keys", "list", "-o", output)
        assert ("reader" in shown.out, key in shown.out + shown.err) == (True, False)
    newer = json.loads(ask("keys", "rotate", "reader", "-o", "json").out)["key"]
    assert eventually(lambda: ask("quotas", "list", "--key", key).code == 1)
    assert ask("quotas", "list", "--key", newer).code == 0
    assert ask("keys", "revoke", "reader") == Ran(0, "", "")
    assert eventually(lambda: ask("quotas", "list", "--key", newer).code == 1)
    again = ask("keys", "revoke", "reader")
    assert (again.code, again.err.startswith("quotagate: 404 ")) == (1, True)


def test_quotas_in_kafkas_spelling_reach_the_catalog(ask: Command, node: Service):
    rate = "max.connection.creation.rate"
    alter = ("quotas", "--alter", "--add-config")
    pair = (
        "--entity-type",
        "users",
        "--entity-name",
        "alice",
        "--entity-type",
        "clients",
        "--entity-default",
    )
    assert ask(*alter, "producer_byte_rate=1024,request_percentage=5", *pair).code == 0
    assert ask(*alter, f"{rate}=100,listener.name.EXTERNAL.{rate}=9", "--broker", "1").code == 0
    assert ask(*alter, "connection_creation_rate=7", "--ip-defaults").code == 0
    assert listed(node) == {
        "user=alice,client-id=*": {"producer_byte_rate": {"limit": 1024}, "request_percentage": {"limit": 5}},
        "broker=1": {"max_connection_creation_rate": {"limit": 100}},
        "broker=1,listener=EXTERNAL": {"max_connection_creation_rate": {"limit": 9}},
        "ip=*": {"connection_creation_rate": {"limit": 7}},
    }
    described = ask("quotas", "--describe", *pair)
    assert described.out == (
        "Quota configs for user-principal 'alice', the default client-id are "
        "request_percentage=5.0, producer_byte_rate=1024.0\n"
    )
    assert ask("quotas", "--describe", "--broker", "1").out.splitlines() == [
        "Dynamic configs for broker 1 are:",
        f"  {rate}=100.0",
        f"  listener.name.EXTERNAL.{rate}=9.0",
    ]
    assert json.loads(ask("quotas", "--describe", "--entity-type", "ips", "-o", "json").out)["quotas"]
    assert ask("quotas", "--alter", "--delete-config", "connection_creation_rate", "--ip-defaults").code == 0
    assert "ip=*" not in listed(node)


def test_export_plan_edit_apply(ask: Command, node: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "quotas.yaml"
    file.write_text(START)
    applied = ask("quotas", "apply", "-f", str(file), "--reason", "start")  # no terminal, no question
    assert applied.out.splitlines()[-2].startswith(
        "Plan: 6 added, 0 changed, 0 removed; every bucket is kept."
    )
    assert applied.out.splitlines()[-1].startswith("Applied. The catalog is at version ")
    assert body_of(export(ask, file)) == START
    nothing = ask("quotas", "plan", "-f", str(file))
    assert (nothing.code, nothing.out.startswith("Nothing changes: ")) == (0, True)
    monkeypatch.setattr("sys.stdin", StringIO(START))
    assert ask("quotas", "plan", "-f", "-") == nothing
    edited = START.replace("producer_ids_rate: 50", "producer_ids_rate: 60")
    edited = edited.replace("{limit: 100, enforcement: deny}", "{limit: 100, enforcement: deny, samples: 21}")
    edited = edited.replace("  client-id=etl:\n    request_percentage: 12.5\n", "")
    edited = edited.replace("    producer_byte_rate: 1048576\n", "    consumer_byte_rate: 1048576\n")
    file.write_text(edited)
    before = listed(node)
    planned = ask("quotas", "plan", "-f", str(file))
    assert rows(planned)[1:-1] == [
        ["~", "user=*", "producer_ids_rate", "50", "60", "kept"],
        ["~", "user=*", "request_rate", "100 enforcement=deny", "100 enforcement=deny samples=21", "emptied"],
        ["-", "user=alice,client-id=etl", "producer_byte_rate", "1048576", "-", "kept"],
        ["+", "user=alice,client-id=etl", "consumer_byte_rate", "-", "1048576", "kept"],
        ["-", "client-id=etl", "request_percentage", "12.5", "-", "kept"],
    ]
    assert planned.out.splitlines()[-1].startswith(
        "Plan: 1 added, 2 changed, 2 removed; 1 quota empties its buckets. The catalog is at version "
    )
    assert listed(node) == before, "a plan writes nothing"
    assert ask("quotas", "apply", "-f", str(file), "--yes").code == 0
    assert body_of(export(ask, file)) == edited
    assert json.loads(ask("quotas", "plan", "-f", str(file), "-o", "json").out)["changes"] == []
    assert ask("quotas", "history", "--limit", "10").out.count(" start") >= 1


def export(ask: Command, file: Path) -> str:
    """Export the catalog to a file, which must be valid."""
    exported = ask("quotas", "export")
    assert (exported.code, exported.err) == (0, "")
    file.write_text(exported.out)
    assert ask("quotas", "lint", "-f", str(file)).code == 0
    return exported.out


def body_of(text: str) -> str:
    """A file without its comments."""
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith("#"))


def test_only_named_entities_change_on_request(ask: Command, node: Service, tmp_path: Path):
    node.put("user=other", request_rate=1)
    node.put("user=alice", request_rate=1, producer_ids_rate=2)
    file = tmp_path / "team.yaml"
    file.write_text("quotas:\n  user=alice: {request_rate: 3}\n")
    assert ask("quotas", "apply", "-f", str(file), "--yes", "--only-named").code == 0
    assert listed(node) == {
        "user=other": {"request_rate": {"limit": 1}},
        "user=alice": {"request_rate": {"limit": 3}},
    }
    assert ask("quotas", "apply", "-f", str(file), "--yes").code == 0
    assert listed(node).keys() == {"user=alice"}


def test_apply_is_refused_after_another_change(ask: Command, node: Service, tmp_path: Path):
    file = tmp_path / "quotas.yaml"
    file.write_text(START)
    planned = ask("quotas", "plan", "-f", str(file))
    version = planned.out.rstrip(".\n").rpartition(" ")[2]
    assert f"--if-match {version} " in planned.err
    node.put("user=other", request_rate=1)
    late = ask("quotas", "apply", "-f", str(file), "--yes", "--if-match", version)
    assert (late.code, late.out) == (1, "")
    assert "the catalog changed since the plan" in late.err
    assert listed(node).keys() == {"user=other"}


def test_apply_is_refused_if_the_catalog_changes_before_the_confirmation(
    ask: Command, node: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """At a terminal: another client changes the catalog before the user confirms."""
    file = tmp_path / "quotas.yaml"
    file.write_text(START)
    questions = []

    def confirm(question: str, **_: object) -> bool:
        questions.append(question)
        node.put("user=other", request_rate=1)
        return True

    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("typer.confirm", confirm)
    late = ask("quotas", "apply", "-f", str(file))
    assert questions == [f"Apply 6 changes to {node.url}?"]
    assert (late.code, "changed since the plan. Nothing was applied" in late.err) == (1, True)
    assert listed(node).keys() == {"user=other"}


def test_invalid_file_is_not_sent(ask: Command, node: Service, tmp_path: Path):
    file = tmp_path / "quotas.yaml"
    file.write_text("quotas:\n  user=alice: {request_rate: 010}\n")
    for command in (["plan"], ["apply", "--yes"]):
        ran = ask("quotas", *command, "-f", str(file))
        assert (ran.code, f"{file}:2: " in ran.err) == (1, True)
    assert listed(node) == {}


@pytest.mark.parametrize("part", [0.0, 0.5, 1.0], ids=["before its body", "within it", "after it"])
def test_killed_apply_leaves_the_old_catalog_or_the_new_one(node: Service, tmp_path: Path, part: float):
    node.put("user=old", request_rate=1)
    new = {f"user={number:05}": {"request_rate": {"limit": 1}} for number in range(MANY)}
    file = tmp_path / "quotas.yaml"
    file.write_text("".join(files.lines(list(new.items()), "1")))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        command = [sys.executable, "-m", "app.run.cli", "quotas", "apply", "-f", str(file), "--yes"]
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        client = subprocess.Popen(
            command,
            env={**os.environ, "QUOTAGATE_URL": url, "QUOTAGATE_KEY": ADMIN_KEY},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            kill_in_apply(client, listener, node.address, part)
        finally:
            client.kill()
            client.wait()

    def whole() -> bool:
        catalog = listed(node)
        assert catalog.keys() in ({"user=old"}, new.keys()), f"a mixture of {len(catalog)}"
        return catalog.keys() == new.keys()

    if part == 1.0:
        eventually(whole)
    else:
        assert not whole()


def kill_in_apply(
    client: subprocess.Popen[bytes], listener: socket.socket, node: tuple[str, int], part: float
) -> None:
    """Relay between a client and its node; kill the client after this part of its last request."""
    listener.settimeout(60)
    with listener.accept()[0] as near, socket.create_connection(node) as far:
        near.settimeout(60)
        silent = threading.Event()

        def back() -> None:
            while received := far.recv(65536):
                if not silent.is_set():
                    near.sendall(received)

        answers = threading.Thread(target=back)
        answers.start()
        stream, passed, until = b"", 0, None
        while until is None or passed < until:
            received = near.recv(65536)
            assert received, f"the client ended with {client.wait()}"
            stream += received
            start = [found.start() for found in re.finditer(rb"POST /v1/quotas:apply", stream)]
            head = stream.find(b"\r\n\r\n", start[1]) if len(start) == 2 else -1
            if head >= 0:
                length = re.search(rb"(?i)content-length: (\d+)", stream[start[1] : head])
                assert length is not None
                until = head + 4 + int(int(length[1]) * part)
                silent.set()
            elif len(start) == 2:
                continue  # the rest of its head is still to come
            far.sendall(stream[passed:until])
            passed = len(stream[:until])
        client.kill()
        client.wait()
        far.shutdown(socket.SHUT_RDWR)
        answers.join()


def test_node_that_requires_client_certificates(
    quotagate: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The configuration file names the CA and the client's certificate; without either, requests fail."""
    authority = Authority(tmp_path)
    server = authority.certify("server", san="IP:127.0.0.1")
    own = authority.certify("operator")
    over_tls = {
        "QUOTAGATE_TLS_CERT": str(server.cert),
        "QUOTAGATE_TLS_KEY": str(server.key),
        "QUOTAGATE_TLS_CLIENT_CA": str(authority.ca),
    }
    file = tmp_path / "config.toml"
    names = (
        f'ca_file = "{authority.ca.name}"\ncert_file = "{own.cert.name}"\ncert_key_file = "{own.key.name}"\n'
    )
    with running(environment=over_tls, trust=authority.trusted(own)) as node:
        file.write_text(f'url = "{node.url}"\nkey = "{ADMIN_KEY}"\n{names}')
        assert quotagate("quotas", "set", "user=a", "request_rate=1", "--config", str(file)).code == 0
        file.write_text(f'url = "{node.url}"\nkey = "{ADMIN_KEY}"\nca_file = "{authority.ca.name}"\n')
        nothing_to_show = quotagate("quotas", "list", "--config", str(file))
        stranger = quotagate("quotas", "list", "--url", node.url, "--key", ADMIN_KEY)
    for ran in (nothing_to_show, stranger):
        assert (ran.code, ran.out, "Traceback" in ran.err) == (1, "", False)
    assert "certificate verify failed" in stranger.err
    file.write_text('ca_file = "none.pem"\n')
    wrong = quotagate("quotas", "list", "--config", str(file))
    assert (wrong.code, "cannot be used" in wrong.err) == (1, True)
