"""Kafka's own spelling of commands: their requests, their output, and their refusals."""

from __future__ import annotations

import doctest
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.kafka import syntax
from app.run.commands import show, values
from tests.commands import Command, Gate, noting, quotagate

__all__ = ["quotagate"]

RATE = "max.connection.creation.rate"
OWN_RATE = "max_connection_creation_rate"
DOCUMENTATION = Path(__file__).parents[3] / "docs" / "command-line.md"
ONE = "--add-config request_rate=1"
DONE = {"entity": "user=alice", "quotas": {}, "version": 8}
NO_PAGE: dict[str, object] = {"quotas": [], "next_cursor": None}


@pytest.fixture
def gate() -> Iterator[Gate]:
    with noting() as noted:
        yield noted


@pytest.mark.parametrize("module", [syntax, values, show])
def test_doctests_pass(module):
    ran = doctest.testmod(module)
    assert (ran.failed, ran.attempted > 0) == (0, True)


ALTERS = [
    ("--add-config producer_ids_rate=50 --entity-type users --entity-name alice", "user=alice",
     {"producer_ids_rate": 50}),
    ("--add-config producer_ids_rate=50,request_rate=1.5 --user alice", "user=alice",
     {"producer_ids_rate": 50, "request_rate": 1.5}),
    ("--add-config request_rate=1 --add-config request_percentage=2 --user alice", "user=alice",
     {"request_rate": 1, "request_percentage": 2}),
    (f"--entity-type users --entity-name alice --entity-type clients --entity-name etl {ONE}",
     "user=alice,client-id=etl", {"request_rate": 1}),
    (f"--entity-type clients --entity-name etl --entity-type users --entity-default {ONE}",
     "user=*,client-id=etl", {"request_rate": 1}),
    (f"--entity-type users --entity-type clients --entity-default --entity-name etl {ONE}",
     "user=*,client-id=etl", {"request_rate": 1}),
    (f"--entity-type users --entity-default --entity-type clients --entity-default {ONE}",
     "user=*,client-id=*", {"request_rate": 1}),
    ("--user alice --client-defaults --add-config producer_byte_rate=1024.0", "user=alice,client-id=*",
     {"producer_byte_rate": 1024.0}),
    ("--user-defaults --client etl --add-config consumer_byte_rate=1", "user=*,client-id=etl",
     {"consumer_byte_rate": 1}),
    ("--client-defaults --add-config controller_mutation_rate=1", "client-id=*",
     {"controller_mutation_rate": 1}),
    ("--user a=b,c*/ü --add-config request_rate=1", "user=a%3Db%2Cc%2A%2F%C3%BC", {"request_rate": 1}),
    ("--user * --add-config request_rate=1", "user=%2A", {"request_rate": 1}),
    ("--ip ::ffff:10.0.0.7 --add-config connection_creation_rate=5", "ip=10.0.0.7",
     {"connection_creation_rate": 5}),
    ("--ip-defaults --add-config connection_creation_rate=5", "ip=*", {"connection_creation_rate": 5}),
    ("--entity-type ips --entity-default --add-config request_rate=5", "ip=*", {"request_rate": 5}),
    (f"--entity-type brokers --entity-name 1 --add-config {RATE}=100", "broker=1", {OWN_RATE: 100}),
    (f"--broker 1 --add-config {OWN_RATE}=100", "broker=1", {OWN_RATE: 100}),
    (f"--broker-defaults --add-config {RATE}=100", "broker=*", {OWN_RATE: 100}),
    (f"--broker 1 --add-config listener.name.A.B.{RATE}=9", "broker=1,listener=A.B", {OWN_RATE: 9}),
    (f"--entity-type brokers --entity-default --add-config listener.name.EXTERNAL.{RATE}=9",
     "listener=EXTERNAL", {OWN_RATE: 9}),
    (f"--broker-defaults --delete-config listener.name.*.{RATE}", "listener=*", {OWN_RATE: None}),
    ("--user alice --delete-config producer_ids_rate,request_rate", "user=alice",
     {"producer_ids_rate": None, "request_rate": None}),
    ("--user alice --add-config request_rate=1 --delete-config producer_ids_rate", "user=alice",
     {"request_rate": 1, "producer_ids_rate": None}),
]  # fmt: skip


@pytest.mark.parametrize(("words", "entity", "patch"), ALTERS)
def test_alter_sends_one_merge_patch(quotagate: Command, gate: Gate, words, entity, patch):
    gate.answers["PATCH", f"/v1/quotas/{entity}"] = (200, DONE)
    ran = quotagate("quotas", "--alter", *words.split(), "--url", gate.url)
    assert (ran.code, gate.brief()) == (0, [("PATCH", f"/v1/quotas/{entity}", patch)]), ran.err
    assert ran.out == f"Completed updating config for {syntax.title_of(entity)}.\n"


def test_reason_is_sent_as_a_header(quotagate: Command, gate: Gate):
    gate.answers["PATCH", "/v1/quotas/user=alice"] = (204, None)
    words = ["--user", "alice", "--delete-config", "request_rate", "--reason", "wégen"]
    assert quotagate("quotas", "--alter", *words, "--url", gate.url).code == 0
    assert gate.asked[0].headers["X-Reason"].encode("latin-1").decode() == "wégen"


def test_limits_of_a_broker_and_its_listeners_change_atomically(quotagate: Command, gate: Gate):
    """Two entities: one request, conditional on the version that was read, with their unchanged quotas."""
    now = {"entity": "broker=1", "quotas": {OWN_RATE: {"limit": 7, "samples": 21}}}
    gate.answers["GET", "/v1/quotas"] = (200, NO_PAGE)
    gate.answers["GET", "/v1/quotas/broker=1"] = (200, now)
    gate.answers["POST", "/v1/quotas:apply"] = (200, {"version": 8, "changes": []})
    config = f"{RATE}=100,listener.name.EXTERNAL.{RATE}=9"
    ran = quotagate("quotas", "--alter", "--broker", "1", "--add-config", config, "--url", gate.url)
    assert ran.code == 0, ran.err
    assert [one.path for one in gate.asked[1:3]] == [
        "/v1/quotas/broker=1",
        "/v1/quotas/broker=1,listener=EXTERNAL",
    ]
    assert gate.asked[3].headers["If-Match"] == gate.etag
    assert gate.asked[3].body == {
        "alterations": [
            {"entity": "broker=1", "quotas": {OWN_RATE: {"limit": 100, "samples": 21}}},
            {"entity": "broker=1,listener=EXTERNAL", "quotas": {OWN_RATE: {"limit": 9}}},
        ]
    }


DESCRIBES = [
    ("--user alice", [(["user=alice"], True)]),
    ("--entity-type users", [(["user"], True)]),
    ("--entity-type users --entity-default", [(["user=*"], True)]),
    ("--entity-type users --entity-name alice --entity-type clients", [(["user=alice", "client-id"], True)]),
    ("--entity-type clients --entity-type users", [(["user", "client-id"], True)]),
    ("--client-defaults --user-defaults", [(["user=*", "client-id=*"], True)]),
    ("--ip 10.0.0.7", [(["ip=10.0.0.7"], True)]),
    ("--entity-type ips", [(["ip"], True)]),
    ("--broker 1", [(["broker=1"], False)]),
    ("--broker-defaults", [(["broker=*"], False), (["listener"], True)]),
    ("--entity-type brokers", [(["broker"], False), (["listener"], True)]),
]


@pytest.mark.parametrize(("words", "lists"), DESCRIBES)
def test_describe_requests_only_the_named_entities(quotagate: Command, gate: Gate, words, lists):
    gate.answers["GET", "/v1/quotas"] = (200, NO_PAGE)
    ran = quotagate("quotas", "--describe", *words.split(), "--url", gate.url)
    assert ran.code == 0, ran.err
    asked = [[(name, said) for name, said in one.query if name in {"match", "strict"}] for one in gate.asked]
    assert asked == [
        [("match", one) for one in match] + ([("strict", "true")] if strict else [])
        for match, strict in lists
    ]


def test_describe_prints_the_format_of_kafka(quotagate: Command, gate: Gate):
    found = [
        {"entity": "user=alice,client-id=etl", "quotas": {"producer_byte_rate": {"limit": 1024}}},
        {
            "entity": "user=*",
            "quotas": {"request_rate": {"limit": 1.5, "samples": 21}, "mutations": {"limit": 5}},
        },
        {"entity": "ip=*", "quotas": {"connection_creation_rate": {"limit": 7}}},
        {"entity": "broker=1", "quotas": {OWN_RATE: {"limit": 100}}},
        {"entity": "broker=1,listener=EXTERNAL", "quotas": {OWN_RATE: {"limit": 9}}},
        {"entity": "listener=*", "quotas": {OWN_RATE: {"limit": 8, "shadow": True}}},
        {"entity": "broker=%2A", "quotas": {OWN_RATE: {"limit": 7}}},
    ]
    gate.answers["GET", "/v1/quotas"] = (200, {"quotas": found, "next_cursor": None})
    ran = quotagate("quotas", "--describe", "--user", "alice", "--url", gate.url)
    assert ran.out.splitlines() == [
        "Quota configs for user-principal 'alice', client-id 'etl' are producer_byte_rate=1024.0",
        "Quota configs for the default user-principal are request_rate=1.5 (samples=21), mutations=5.0",
        "Quota configs for the default ip are connection_creation_rate=7.0",
        "Dynamic configs for broker 1 are:",
        f"  {RATE}=100.0",
        f"  listener.name.EXTERNAL.{RATE}=9.0",
        "Default configs for brokers in the cluster are:",
        f"  listener.name.*.{RATE}=8.0 (shadow=yes)",
        "Dynamic configs for broker * are:",
        f"  {RATE}=7.0",
    ]


BOTH = {"producer_byte_rate": 1024, "consumer_byte_rate": 2048}
BLANKS = [
    ["--add-config", "producer_byte_rate = 1024 , consumer_byte_rate = 2048"],
    ["--add-config", " producer_byte_rate =1024,\tconsumer_byte_rate= 2048\n"],
    ["--add-config", "producer_byte_rate=[1024],consumer_byte_rate= [ 2048 ] "],
    ["--add-config", ",producer_byte_rate=1024, ,consumer_byte_rate=2048,"],
    ["--add-config", "producer_byte_rate = 1024", "--add-config", " consumer_byte_rate = 2048"],
]


@pytest.mark.parametrize("words", BLANKS, ids=" ".join)
def test_blanks_and_brackets_are_trimmed_as_in_kafka(quotagate: Command, gate: Gate, words):
    gate.answers["PATCH", "/v1/quotas/user=alice"] = (200, DONE)
    ran = quotagate("quotas", "--alter", *words, "--user", "alice", "--url", gate.url)
    assert (ran.code, gate.brief()) == (0, [("PATCH", "/v1/quotas/user=alice", BOTH)]), ran.err


def test_blanks_between_deleted_keys_are_trimmed(quotagate: Command, gate: Gate):
    gate.answers["PATCH", "/v1/quotas/user=alice"] = (200, DONE)
    words = ["--delete-config", " producer_byte_rate , consumer_byte_rate ", "--user", "alice"]
    assert quotagate("quotas", "--alter", *words, "--url", gate.url).code == 0
    assert gate.asked[0].body == dict.fromkeys(BOTH)


def test_fields_in_brackets_belong_to_one_quota(quotagate: Command, gate: Gate):
    gate.answers["PATCH", "/v1/quotas/user=alice"] = (200, DONE)
    config = "request_rate = [limit=5,samples=21], producer_byte_rate = 7"
    ran = quotagate("quotas", "--alter", "--user", "alice", "--add-config", config, "--url", gate.url)
    assert ran.code == 0, ran.err
    assert gate.asked[0].body == {"request_rate": {"limit": 5, "samples": 21}, "producer_byte_rate": 7}


FILES = [
    "producer_byte_rate=1024\nconsumer_byte_rate=2048\n",
    "# quotas\n\n! more\nproducer_byte_rate : 1024\r\n  consumer_byte_rate   2048",
    "producer_byte_rate = \\\n    1024\nconsumer_byte_rate=[2048]",
    "producer\\u005fbyte_rate=1024\nconsumer_byte_rate=20\\\n48",
]


@pytest.mark.parametrize("text", FILES)
def test_quotas_of_a_properties_file_are_set(quotagate: Command, gate: Gate, tmp_path: Path, text: str):
    gate.answers["PATCH", "/v1/quotas/user=alice"] = (200, DONE)
    file = tmp_path / "quotas.properties"
    file.write_text(text)
    words = ["--alter", "--user", "alice", "--add-config-file", str(file), "--url", gate.url]
    ran = quotagate("quotas", *words)
    assert (ran.code, gate.brief()) == (0, [("PATCH", "/v1/quotas/user=alice", BOTH)]), ran.err
    assert quotagate("quotas", *words, "--add-config", "request_rate=1").code == 2


def test_wrong_line_of_a_properties_file_is_named(quotagate: Command, gate: Gate, tmp_path: Path):
    file = tmp_path / "quotas.properties"
    file.write_text("producer_byte_rate=1024\n\nlog.retention.ms=\\\n 5\n")
    words = ["--alter", "--user", "alice", "--add-config-file", str(file), "--url", gate.url]
    ran = quotagate("quotas", *words)
    said = "".join(ran.err.replace("│", "").split())
    assert (ran.code, "quotas.properties:3:Invalidconfigurationkey" in said, gate.asked) == (2, True, [])


@pytest.mark.parametrize("listener", ["SASL_SSL", "sasl_plaintext", "SCRAM-INTERNAL", "secret"])
def test_name_of_a_listener_is_no_credential(quotagate: Command, gate: Gate, listener: str):
    path = f"/v1/quotas/broker=1,listener={listener}"
    gate.answers["PATCH", path] = (200, DONE)
    config = f"listener.name.{listener}.max.connection.creation.rate = 5"
    words = ["--alter", "--broker", "1", "--add-config", config, "--url", gate.url]
    ran = quotagate("quotas", *words)
    assert (ran.code, [one.path for one in gate.asked]) == (0, [path]), ran.err
    assert (
        quotagate("quotas", *words, "--add-config", f"listener.name.{listener}.sasl.jaas.config=x").code == 2
    )


CREDENTIALS = [
    ["--add-config", "SCRAM-SHA-256=[iterations=8192,password=hunter2]"],
    ["--add-config", "scram-sha-512=[password=hunter2]"],
    ["--add-config", "SCRAM-SHA-256 = [ iterations=8192 , password=hunter2 ] , SCRAM-SHA-512=[password=x]"],
    ["--add-config", "producer_byte_rate=1024, Scram-Sha-256 =[password=hunter2], consumer_byte_rate=5"],
    ["--add-config", "SCRAM-SHA-256=[iterations=8192,password=hunter2"],
    ["--add-config", "SCRAM-SHA-256=iterations=8192,password=hunter2]"],
    ["--add-config", "producer_byte_rate=5", "--add-config", "SCRAM-SHA-256=[password=hunter2]"],
    ["--delete-config", "SCRAM-SHA-256"],
    ["--delete-config", "producer_byte_rate, SCRAM-SHA-512=[password=hunter2]"],
    ["--add-config", "sasl.jaas.config=PlainLoginModule required password=hunter2"],
    ["--add-config", "password=hunter2"],
    ["--add-config-file", "SCRAM-SHA-256=[iterations=8192,password=hunter2]\n"],
    ["--add-config-file", "request_rate=5\nSCRAM-SHA-512 : \\\n [password=hunter2]\n"],
    ["--add-config-file", "ssl.keystore.password=hunter2\n"],
]


@pytest.mark.parametrize("words", CREDENTIALS, ids=" ".join)
def test_credentials_are_refused_and_not_shown(quotagate: Command, gate: Gate, tmp_path: Path, words):
    if words[0] == "--add-config-file":
        file = tmp_path / "added.properties"
        file.write_text(words[1])
        words = [words[0], str(file)]
    for entity in ("--user alice", "--entity-type users --entity-name alice", "--entity-type users", ""):
        ran = quotagate("quotas", "--alter", *words, *entity.split(), "--url", gate.url)
        assert (ran.code, gate.asked) == (2, []), ran.err
        assert "credentials are not quotas" in ran.err
        assert "hunter2" not in ran.out + ran.err


@pytest.mark.parametrize(
    "words",
    ["set user=alice SCRAM-SHA-256=[password=hunter2]", "delete user=alice SCRAM-SHA-256=[password=hunter2]"],
)
def test_credentials_are_refused_by_set_and_delete(quotagate: Command, gate: Gate, words: str):
    ran = quotagate("quotas", *words.split(), "--url", gate.url)
    assert (ran.code, gate.asked, "credentials are not quotas" in ran.err) == (2, [], True)
    assert "hunter2" not in ran.err


COPIED = [
    ("--bootstrap-server kafka:9092", "--bootstrap-server is not used"),
    ("--bootstrap-server=me:hunter2@kafka-1:9092,kafka-2:9092", "--bootstrap-server is not used"),
    ("--zookeeper zk:2181/kafka", "--zookeeper is not used"),
    ("--bootstrap-controller kafka:9093 --command-config hunter2.properties",
     "--bootstrap-controller and --command-config are not used"),
    ("--zookeeper zk:2181 --zk-tls-config-file hunter2", "--zookeeper and --zk-tls-config-file are not used"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "said"), COPIED)
@pytest.mark.parametrize("output", ["table", "json"])
def test_options_for_the_way_to_kafka_are_accepted_and_noted(
    quotagate: Command, gate: Gate, words: str, said: str, output: str
):
    gate.answers["PATCH", "/v1/quotas/user=alice"] = (200, DONE)
    gate.answers["GET", "/v1/quotas"] = (200, NO_PAGE)
    alter = f"--alter --add-config request_rate=5 --entity-type users --entity-name alice --force {words}"
    describe = f"{words} --describe --all --entity-type users"
    for command in (alter, describe):
        ran = quotagate("quotas", *command.split(), "-o", output, "--url", gate.url)
        assert ran.code == 0, ran.err
        assert ran.err == f"{said}: the quotas are those of the node {gate.url}.\n"
        assert said not in ran.out
    assert [one.method for one in gate.asked] == ["PATCH", "GET"]


REFUSED = [
    ("--alter --describe --user alice", "--alter or --describe"),
    ("--user alice --add-config request_rate=1", "--alter or --describe"),
    ("--alter --user alice", "--add-config or --delete-config"),
    ("--alter --add-config request_rate=1", "--entity-type users"),
    ("--describe", "--entity-type users"),
    ("--describe --user alice --add-config request_rate=1", "go with --alter"),
    ("--alter --entity-type users --add-config request_rate=1", "--entity-name NAME or --entity-default"),
    ("--alter --entity-name alice --add-config request_rate=1", "--entity-type before each name"),
    (f"--alter --entity-type topics --entity-name a {ONE}", "users, clients, ips, brokers"),
    ("--alter --user alice --entity-type clients --entity-default --add-config request_rate=1", "not both"),
    ("--alter --user alice --user-defaults --add-config request_rate=1", "named once"),
    ("--alter --user alice --ip 10.0.0.7 --add-config request_rate=1", "only users and clients"),
    ("--describe --ip-defaults --client etl", "only users and clients"),
    ("--alter --user alice --broker 1 --add-config request_rate=1", "only users and clients"),
    ("--alter --ip gate.example --add-config request_rate=1", "not a host name"),
    ("--alter --user alice --add-config request_rate", "KEY=NUMBER"),
    ("--alter --user alice --add-config request_rate=many", "write a number"),
    ("--alter --user alice --add-config producer_byte_rate", "--add-config: write"),
    ("--alter --user alice --add-config request_rate=5,=6", "--add-config, part 2: write"),
    ("--alter --user alice --add-config request_rate=[]", "KEY=NUMBER"),
    ("--alter --user alice --add-config request_rate=1,request_percentag=5", "did you mean request_perc"),
    ("--alter --user alice --add-config request_rate=010", "write a number"),
    ("--alter --user alice --add-config request_rate=1_000", "write a number"),
    ("--alter --user alice --add-config request_rate=null", "--delete-config request_rate"),
    ("--alter --user alice --add-config request_rate=1,request_rate=2", "given twice"),
    ("--alter --user alice --add-config request_rate=1 --delete-config request_rate", "given twice"),
    ("--alter --user alice --delete-config request_rate=1", "takes keys without values"),
    ("--alter --user alice --add-config request_rte=1", "use one of producer_ids_rate"),
    ("--alter --user alice --add-config connection_creation_rate=1", "it goes on ip"),
    ("--alter --client etl --add-config producer_ids_rate=1", "it goes on user"),
    ("--alter --ip-defaults --add-config producer_byte_rate=1", "it goes on user"),
    (f"--alter --user alice --add-config {RATE}=1", "--entity-type brokers"),
    ("--alter --broker 1 --add-config request_rate=1", f"brokers have {RATE}"),
    (f"--alter --broker 1 --add-config listener.name.*.{RATE}=1", "takes no default"),
    ("--describe --ip gate.example", "not a host name"),
    ("--describe --entity-type users --entity-name=", "empty name"),
    ("--user alice list", "go after the command"),
    ("-o json list", "go after the command"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "right"), REFUSED)
def test_wrong_options_exit_with_2_and_a_hint(quotagate: Command, gate: Gate, words, right):
    ran = quotagate("quotas", *words.split(), "--url", gate.url)
    said = " ".join(ran.err.replace("│", " ").split())
    assert (ran.code, right in said, gate.asked) == (2, True, []), said


def test_quotas_without_arguments_shows_help(quotagate: Command):
    ran = quotagate("quotas")
    assert "Usage: quotagate quotas" in ran.out + ran.err


def test_commands_of_the_documentation_work(quotagate: Command, gate: Gate):
    class Anything(dict):
        def get(self, *_):
            return 200, NO_PAGE

    gate.answers = Anything()
    lines = [
        line for line in DOCUMENTATION.read_text().splitlines() if line.startswith("quotagate quotas --")
    ]
    assert len(lines) == 6
    for line in lines:
        ran = quotagate(*shlex.split(line)[1:], "--url", gate.url)
        assert ran.code == 0, f"{line}\n{ran.err}"
    assert gate.asked[4].path == "/v1/quotas/listener=EXTERNAL"
