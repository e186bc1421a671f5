"""`quotagate quotas import-envoy`, and a node that enforces what it wrote."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import yaml

from tests.envoy.calls import connected, serving

CONFIGURATION = """
domain: messaging
descriptors:
  - key: message_type
    value: marketing
    descriptors:
      - key: to_number
        rate_limit: {unit: day, requests_per_unit: 2}
  - key: to_number
    rate_limit: {unit: minute, requests_per_unit: 3}
  - key: ldap
    rate_limit: {unlimited: true}
  - key: seen
    rate_limit: {unit: fortnight, requests_per_unit: 3}
"""


def command(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-P", "-m", "app.run.cli", "quotas", *arguments]
    return subprocess.run(program, cwd=folder, capture_output=True, text=True, check=False, timeout=120)


def test_an_import_is_enforced(tmp_path: Path):
    (tmp_path / "config.yaml").write_text(CONFIGURATION, encoding="utf-8")
    ran = command(tmp_path, "import-envoy", "config.yaml", "--out", "envoy", "-o", "json")
    assert ran.returncode == 0, ran.stderr
    said = json.loads(ran.stdout)
    assert [row["limit"] for row in said["rows"]] == ["2/day", "3/minute", "unlimited"]
    assert [(each["path"], each["what"]) for each in said["left_out"]] == [("seen", "rate_limit")]
    quotas = yaml.safe_load((tmp_path / "envoy" / "quotas.yaml").read_text(encoding="utf-8"))["quotas"]
    lint = command(tmp_path, "lint", "-f", "envoy/quotas.yaml")
    assert lint.returncode == 0, lint.stdout + lint.stderr
    with serving(tmp_path / "envoy" / "mapping.yaml") as (node, port), connected(port) as client:
        for entity, its in quotas.items():
            node.put(entity, **its)
        marketing = {"message_type": "marketing", "to_number": "1"}

        def code(entries: dict[str, str]) -> str:
            return client.code(entries, domain="messaging")

        assert [code(marketing) for _ in range(3)] == ["OK", "OK", "OVER_LIMIT"]
        assert code({**marketing, "to_number": "2"}) == "OK"
        assert [code({"to_number": "1"}) for _ in range(4)] == ["OK"] * 3 + ["OVER_LIMIT"]
        assert [code({"ldap": "x"}) for _ in range(5)] == ["OK"] * 5
        (unlimited,) = client.ask({"ldap": "x"}, domain="messaging").statuses
        assert unlimited.limit_remaining == 2**32 - 1


def test_earlier_files_are_kept_unless_forced(tmp_path: Path):
    (tmp_path / "config.yaml").write_text(CONFIGURATION, encoding="utf-8")
    assert command(tmp_path, "import-envoy", "config.yaml", "--out", "envoy").returncode == 0
    again = command(tmp_path, "import-envoy", "config.yaml", "--out", "envoy")
    assert again.returncode == 1
    assert "is there already" in again.stderr
    assert command(tmp_path, "import-envoy", "config.yaml", "--out", "envoy", "--force").returncode == 0


def test_another_kind_of_file_is_refused_by_name(tmp_path: Path):
    (tmp_path / "config.yaml").write_text("descriptors: []", encoding="utf-8")
    ran = command(tmp_path, "import-envoy", "config.yaml", "--out", "envoy")
    assert ran.returncode == 1
    assert "config.yaml: must be a mapping with a domain" in ran.stderr
