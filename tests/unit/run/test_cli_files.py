"""Files of quotas: every fault with its line, one canonical way to write, and a schema that agrees."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema_rs
import pytest
import yaml

from app import quota_file
from app.domain.quota_value import Definition
from app.quota_file import read
from app.run.commands.quotas import catalog_schema, files
from tests.commands import Command, quotagate

__all__ = ["quotagate"]

SCHEMA = Path(__file__).parents[3] / "openapi" / catalog_schema.NAME
HOLDS = jsonschema_rs.validator_for(catalog_schema.document())

GOOD = """\
quotas:
  user=*:
    producer_ids_rate: 5
    request_rate: {limit: 0.5, enforcement: deny, shadow: true}
  user=a%20b,client-id=%2A:
    controller_mutation_rate:
      limit: 7
      burst: 20
  "client-id=etl": {producer_byte_rate: 1024}
  ip=2001%3Adb8%3A%3A1: &alike {connection_creation_rate: 5}
  ip=*: *alike
  broker=1,listener=EXTERNAL: {max_connection_creation_rate: 9}
  listener=*: {max_connection_creation_rate: 9}
  user=c: {producer_ids_rate: {limit: 5, window_ms: 1000, layers: {interval_ms: 500, ttl_ms: 1000}}}
"""

SEEN_BY_EDITORS = [
    ("", 1, "is empty"),
    ("# nothing\n", 1, "is empty"),
    ("- user=a\n", 1, "must be a mapping"),
    ("quotas:\n", 1, "must be a mapping of entities"),
    ("quotas: {}\nversion: 1\n", 2, "version: unknown"),
    ("quota:\n  user=a: {request_rate: 1}\n", 1, "quotas is missing"),
    ("quotas:\n  client-id=b,user=a: {request_rate: 1}\n", 2, "must be spelled user=a,client-id=b"),
    ("quotas:\n  user=a b: {request_rate: 1}\n", 2, "must be spelled user=a%20b"),
    ("quotas:\n  ip=::ffff:10.0.0.7: {request_rate: 1}\n", 2, "must be spelled ip=10.0.0.7"),
    ("quotas:\n  usr=a: {request_rate: 1}\n", 2, "unknown entity type"),
    ("quotas:\n  user=a,ip=10.0.0.7: {request_rate: 1}\n", 2, "do not go together"),
    ("quotas:\n  user=a: 5\n", 2, "must be a mapping of quotas"),
    ("quotas:\n  user=a:\n", 2, "a value is missing"),
    ("quotas:\n  user=a: {}\n", 2, "at least one quota"),
    ("quotas:\n  user=a: [1]\n", 2, "a list is not allowed"),
    ("quotas:\n  user=a:\n    request_rate: ~\n", 3, "a value is missing"),
    ("quotas:\n  user=a:\n    request_rate: 1e3\n", 3, "'1e3' means text"),
    ("quotas:\n  user=a:\n    request_rate: 08\n", 3, "'08' means text"),
    ("quotas:\n  user=a:\n    request_rate: .inf\n", 3, "'.inf' means inf"),
    ("quotas:\n  user=a:\n    request_rate: .nan\n", 3, "'.nan' means nan"),
    ("quotas:\n  user=a:\n    request_rate: '5'\n", 3, "must be a number"),
    ("quotas:\n  user=a:\n    request_rate: many\n", 3, "must be a number"),
    ("quotas:\n  user=a:\n    request_rate: !!str 5\n", 3, "'5' means text"),
    ("quotas:\n  user=a:\n    request_rate:\n      limit: 5\n      samples: 0\n", 5, "must be from 1 to 100"),
    ("quotas:\n  user=a:\n    request_rate:\n      samples: 5\n", 3, "limit is required"),
    ("quotas:\n  user=a:\n    request_rate:\n      limit: 5\n      bust: 9\n", 5, "bust unknown field"),
    ("quotas:\n  user=a:\n    request_rate:\n      limit: 5\n      burst: 9\n", 5, "of token buckets"),
    ("quotas:\n  user=a:\n    request_rate: {limit: 5, samples: 1, enforcement: deny}\n", 3, "at least 2"),
    ("quotas:\n  user=a:\n    request_rat: 5\n", 3, "unknown quota key"),
    ("quotas:\n  ip=*:\n    producer_ids_rate: 5\n", 3, "it goes on user"),
    ("quotas:\n  user=a:\n    producer_ids_rate: 5.5\n", 3, "without a fraction"),
    ("quotas:\n  user=a:\n    producer_ids_rate: -1\n", 3, "must be from 0"),
    ("quotas:\n  user=a:\n    producer_ids_rate: 500001\n", 3, "must be from 0 to 500000"),
    ("quotas:\n  user=a:\n    producer_ids_rate: {limit: 1, enforcement: delay}\n", 3, "must be 'deny'"),
    ("quotas:\n  user=a: {request_rate: {limit: {a: {b: {c: 1}}}}}\n", 2, "nested too deeply"),
    ("quotas: &all\n  user=a: *all\n", 1, "nested too deeply"),
]  # fmt: skip
"""Faults that the schema finds too."""
SEEN_BY_LINT_ALONE = [
    ("quotas:\n  user=a: {request_rate: 1\n", 3, "not YAML"),
    ("quotas:\n\tuser=a: 1\n", 2, "not YAML"),
    ("quotas:\n  user=a: " + "[" * 100_000, 2, "nested too deeply"),
    ("quotas:\n  " + "{a: " * 50_000, 2, "nested too deeply"),
    ("quotas: {}\n---\nquotas: {}\n", 2, "not YAML"),
    ("quotas:\n  user=a: {request_rate: \x07}\n", 2, "not YAML"),
    ("quotas:\n  user=a: *none\n", 2, "not YAML"),
    ("quotas:\n  user=a: {request_rate: 1}\n  user=a: {request_rate: 1}\n", 3, "duplicated, first on line 2"),
    ("quotas:\n  user=a:\n    request_rate: 1\n    request_rate: 2\n", 4, "duplicated, first on line 3"),
    ("quotas: {}\nquotas: {}\n", 2, "duplicated, first on line 1"),
    ("quotas:\n  user=a:\n    request_rate: {limit: 1, limit: 2}\n", 3, "limit: is duplicated"),
    ("quotas:\n  user=%61: {request_rate: 1}\n", 2, "must be spelled user=a"),
    ("quotas:\n  1: {request_rate: 1}\n", 2, "must be text"),
    ("quotas:\n  yes: {request_rate: 1}\n", 2, "must be text"),
    ("quotas:\n  [user=a]: {request_rate: 1}\n", 2, "must be text"),
    ("quotas:\n  user=a:\n    request_rate: 010\n", 3, "'010' means 8"),
    ("quotas:\n  user=a:\n    request_rate: 1_000\n", 3, "'1_000' means 1000"),
    ("quotas:\n  user=a:\n    request_rate: 0x10\n", 3, "'0x10' means 16"),
    ("quotas:\n  user=a:\n    request_rate: 1:30\n", 3, "'1:30' means 90"),
    ("quotas:\n  user=a:\n    request_rate: .5\n", 3, "'.5' means 0.5"),
    ("quotas:\n  user=a:\n    request_rate: +5\n", 3, "'+5' means 5"),
    ("quotas:\n  user=a:\n    request_rate: 2026-01-01\n", 3, "'2026-01-01' means"),
    ("quotas:\n  user=a:\n    request_rate: 2026-13-01\n", 3, "'2026-13-01' means a date"),
    ("quotas:\n  user=a:\n    request_rate: " + "9" * 5000, 3, "is too large"),
    ("quotas:\n  user=a:\n    request_rate: !own 5\n", 3, "is not allowed here"),
    ("quotas:\n  user=a:\n    request_rate: {limit: 5, shadow: yes}\n", 3, "'yes' means true in YAML"),
    ("quotas:\n  user=a:\n    request_rate: {limit: 5, shadow: Off}\n", 3, "'Off' means false in YAML"),
    ("quotas:\n  user=a:\n    <<: {request_rate: 1}\n", 3, "<< is not supported"),
]  # fmt: skip
"""Faults that no schema finds: YAML errors, ambiguous values, spellings, and rules across fields."""


@pytest.mark.parametrize(("text", "line", "message"), SEEN_BY_EDITORS + SEEN_BY_LINT_ALONE)
def test_lint_names_each_fault_with_its_line(quotagate: Command, tmp_path: Path, text, line, message):
    file = tmp_path / "quotas.yaml"
    file.write_text(text)
    ran = quotagate("quotas", "lint", "-f", str(file))
    assert (ran.code, ran.err) == (1, "")
    assert any(shown.startswith(f"{file}:{line}: ") and message in shown for shown in ran.out.splitlines()), (
        ran.out
    )


def test_all_faults_are_reported_at_once(quotagate: Command, tmp_path: Path):
    file = tmp_path / "quotas.yaml"
    file.write_text(
        "quotas:\n  user=a: {request_rate: 010}\n  ip=x: {}\n  user=b: {request_rate: -1, x: 2}\n"
    )
    ran = quotagate("quotas", "lint", "-f", str(file), "-o", "json")
    assert [fault["line"] for fault in json.loads(ran.out)["faults"]] == [2, 3, 4, 4]


def test_valid_file_passes_lint(quotagate: Command, tmp_path: Path):
    file = tmp_path / "quotas.yaml"
    file.write_text(GOOD)
    ran = quotagate("quotas", "lint", "-f", str(file))
    assert (ran.code, ran.err, ran.out) == (0, "", f"{file}: valid, with quotas of 8 entities.\n")
    assert HOLDS.is_valid(yaml.safe_load(GOOD))
    assert read(GOOD).quotas["user=*"] == {
        "producer_ids_rate": {"limit": 5},
        "request_rate": {"limit": 0.5, "enforcement": "deny", "shadow": True},
    }


def test_file_may_be_json():
    text = json.dumps({"quotas": {"user=a": {"request_rate": {"limit": 1}}}}, indent=2)
    assert (read(text).quotas, read(text).faults) == ({"user=a": {"request_rate": {"limit": 1}}}, [])


def test_missing_and_unreadable_files_are_reported(quotagate: Command, tmp_path: Path):
    assert quotagate("quotas", "lint").code == 2
    assert quotagate("quotas", "lint", "-f", str(tmp_path / "none.yaml")).code == 2
    file = tmp_path / "latin.yaml"
    file.write_bytes(b"quotas: \xe4")
    ran = quotagate("quotas", "lint", "-f", str(file))
    assert (ran.code, "latin.yaml" in ran.err) == (1, True)


def test_written_file_reads_back_unchanged():
    long = "user=" + "%C3%A4" * 200 + ",client-id=" + "%C3%A4" * 200
    quotas: dict[str, dict[str, Definition]] = {
        "listener=*": {"max_connection_creation_rate": {"limit": 9}},
        long: {"request_rate": {"limit": 0.00001}},
        "user=b": {"producer_ids_rate": {"limit": 5, "layers": {"interval_ms": 500, "ttl_ms": 1000}}},
        "user=*": {"request_rate": {"limit": 2**53 - 1, "shadow": True, "enforcement": "deny"}},
    }
    text = "".join(files.lines(quota_file.ordered(quotas.items()), "17"))
    assert (read(text).quotas, read(text).faults) == (quotas, [])
    assert text == "".join(files.lines(quota_file.ordered(reversed(list(quotas.items()))), "17")), (
        "the order is not stable"
    )
    assert text.splitlines()[:5] == [
        "# yaml-language-server: $schema=quotas.schema.json",
        "# The whole catalog at version 17. `quotagate quotas schema > quotas.schema.json` helps editors.",
        "quotas:",
        "  user=*:",
        "    request_rate: {limit: 9007199254740991, shadow: true, enforcement: deny}",
    ]
    assert HOLDS.is_valid(yaml.safe_load(text))


def test_empty_catalog_is_written_as_an_empty_mapping():
    text = "".join(files.lines([], "0"))
    assert (read(text).quotas, read(text).faults) == ({}, [])


def test_schema_in_the_repository_is_current(quotagate: Command):
    assert SCHEMA.read_text() == catalog_schema.text(), (
        "make it anew: python -m app.run.commands.quotas.catalog_schema"
    )
    assert quotagate("quotas", "schema").out == catalog_schema.text()


@pytest.mark.parametrize("text", [text for text, _, _ in SEEN_BY_EDITORS])
def test_schema_refuses_what_lint_refuses(text):
    assert not HOLDS.is_valid(yaml.safe_load(text))
