"""`quotagate quotas import-envoy`, and a node that enforces the written quotas."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from app.envoy.protos.ratelimit_pb2 import RateLimitResponse
from tests.envoy.calls import Client, connected, serving
from tests.envoy.ratelimit_cases import Case, Request, by_bucket, cases
from tests.service import Service

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
    assert ran.returncode == 1
    assert "limits are lost or looser than the original; --allow-looser makes the exit code 0" in ran.stderr
    said = json.loads(ran.stdout)
    assert [row["limit"] for row in said["rows"]] == ["2/day", "3/minute", "unlimited"]
    assert [(each["path"], each["what"], each["effect"]) for each in said["left_out"]] == [
        ("seen", "rate_limit", "looser")
    ]
    quotas = yaml.safe_load((tmp_path / "envoy" / "quotas.yaml").read_text(encoding="utf-8"))["quotas"]
    lint = command(tmp_path, "lint", "-f", "envoy/quotas.yaml")
    assert lint.returncode == 0, lint.stdout + lint.stderr
    with serving(tmp_path / "envoy" / "mapping.yaml") as (node, port), connected(port) as client:
        for entity, by_key in quotas.items():
            node.put(entity, **by_key)
        marketing = {"message_type": "marketing", "to_number": "1"}

        def code(entries: dict[str, str]) -> str:
            return client.code(entries, domain="messaging")

        assert [code(marketing) for _ in range(3)] == ["OK", "OK", "OVER_LIMIT"]
        assert code({**marketing, "to_number": "2"}) == "OK"
        assert [code({"to_number": "1"}) for _ in range(4)] == ["OK"] * 3 + ["OVER_LIMIT"]
        assert [code({"ldap": "x"}) for _ in range(5)] == ["OK"] * 5
        (unlimited,) = client.ask({"ldap": "x"}, domain="messaging").statuses
        assert unlimited.limit_remaining == 2**32 - 1


def imported(folder: Path, text: str, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "config.yaml").write_text(text, encoding="utf-8")
    return command(folder, "import-envoy", "config.yaml", "--out", "envoy", *options)


def test_earlier_files_are_kept_unless_forced(tmp_path: Path):
    assert imported(tmp_path, CONFIGURATION, "--allow-looser").returncode == 0
    again = imported(tmp_path, CONFIGURATION, "--allow-looser")
    assert again.returncode == 1
    assert "is there already" in again.stderr
    assert imported(tmp_path, CONFIGURATION, "--allow-looser", "--force").returncode == 0


A_DAY = "rate_limit: {unit: day, requests_per_unit: 1"


@pytest.mark.parametrize(
    ("descriptor", "effect", "code"),
    [
        ("rate_limit: {unit: day, requests_per_unit: -1}", "looser", 1),
        ("colour: red", "looser", 1),
        ("descriptors: [{value: b}]", "looser", 1),
        (f"share_threshold: maybe, value: 'a*', {A_DAY}}}", "looser", 1),
        (f"{A_DAY}, replaces: [{{name: b}}]}}", "stricter", 0),
        (f"share_threshold: true, {A_DAY}}}", "stricter", 0),
        (f"quota_mode: true, {A_DAY}}}", "same", 0),
        ("rate_limit: {unit: day}", "same", 0),
        (f"share_threshold: false, metadata: {{a: [b]}}, {A_DAY}, name: x}}", None, 0),
    ],
    ids=str,
)
def test_each_line_says_whether_the_result_is_looser_and_so_does_the_exit_code(
    tmp_path: Path, descriptor: str, effect: str | None, code: int
):
    text = f"domain: d\ndescriptors:\n  - {{key: a, {descriptor}}}\n"
    ran = imported(tmp_path, text)
    assert ran.returncode == code, ran.stdout + ran.stderr
    listed = ran.stdout.partition("Not taken:")[2].splitlines()
    assert [effect in line.split() for line in listed if line.startswith("d ")] == ([True] if effect else [])
    assert ("--allow-looser" in ran.stderr) is (code == 1)
    if code:
        written = _written(tmp_path)
        assert imported(tmp_path, text, "--allow-looser", "--force").returncode == 0
        assert _written(tmp_path) == written


def _written(folder: Path) -> list[str]:
    return [(folder / "envoy" / name).read_text(encoding="utf-8") for name in ("quotas.yaml", "mapping.yaml")]


def test_a_domain_of_two_files_is_refused_unless_domains_are_merged(tmp_path: Path):
    for name, value in (("one.yaml", "a*"), ("two.yaml", "*b")):
        text = f"domain: d\ndescriptors: [{{key: k, value: '{value}', {A_DAY}}}}}]"
        (tmp_path / name).write_text(text, encoding="utf-8")
    ran = command(tmp_path, "import-envoy", "one.yaml", "two.yaml", "--out", "envoy")
    assert ran.returncode == 1
    assert "two.yaml: the domain d came before; --merge-domains joins both" in ran.stderr
    assert not (tmp_path / "envoy").exists()
    ran = command(tmp_path, "import-envoy", "one.yaml", "two.yaml", "--out", "envoy", "--merge-domains")
    assert ran.returncode == 0, ran.stderr
    mapping = yaml.safe_load((tmp_path / "envoy" / "mapping.yaml").read_text(encoding="utf-8"))
    entries = [rule["entries"] for rule in mapping["domains"]["d"]["descriptors"]]
    assert entries == [[{"key": "k", "value": "a*"}], [{"key": "k", "value": "*b"}]]


def test_a_file_that_expands_too_much_is_refused_with_a_reason(tmp_path: Path):
    lists = [f"x{n}: &x{n} [{', '.join([f'*x{n - 1}'] * 10)}]" for n in range(1, 12)]
    ran = imported(tmp_path, "\n".join(["domain: d", "x0: &x0 [a, b, c]", *lists]))
    assert ran.returncode == 1
    assert "config.yaml: its aliases expand to more than 4,000,000 characters" in ran.stderr


def test_another_kind_of_file_is_refused_by_name(tmp_path: Path):
    (tmp_path / "config.yaml").write_text("descriptors: []", encoding="utf-8")
    ran = command(tmp_path, "import-envoy", "config.yaml", "--out", "envoy")
    assert ran.returncode == 1
    assert "config.yaml: must be a mapping with a domain" in ran.stderr


CASES = cases()
PATIENCE_S = 60
"""A sliding window lets one more pass after seconds / number; refusals are tested only if that is longer."""


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A client of a node with the quotas and the mapping of all real-looking files."""
    folder = tmp_path_factory.mktemp("imported")
    files = [str(file) for case in CASES for file in case.files]
    ran = command(folder, "import-envoy", *files, "--merge-domains", "--out", "envoy")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    quotas = folder / "envoy" / "quotas.yaml"
    with serving(folder / "envoy" / "mapping.yaml") as (node, port), connected(port) as client:
        _apply(node, folder, quotas)
        yield client


def _apply(node: Service, folder: Path, quotas: Path) -> None:
    where = ["--url", node.url, "--key", node.admin_key]
    ran = command(folder, "apply", "--only-named", "--yes", "-f", str(quotas), *where)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def _status(client: Client, asked: Request, hits: int = 1) -> RateLimitResponse.DescriptorStatus:
    (found,) = client.ask(asked.entries, domain=asked.domain, hits=hits).statuses
    return found


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_requests_of_real_looking_files_get_the_documented_answer(gateway: Client, case: Case):
    for each in case.requests:
        if each.limit is None:
            found = _status(gateway, each, 2**32 - 1)
            assert (found.code, found.limit_remaining) == (RateLimitResponse.OK, 2**32 - 1), each
            assert not found.HasField("current_limit"), each
    for requests in by_bucket(case.requests).values():
        _assert_shared(gateway, requests)


def _assert_shared(client: Client, requests: list[Request]) -> None:
    """Assert that requests share one bucket, unused so far, with the limit of the table."""
    first, *_ = requests
    limit = first.limit
    assert limit is not None
    unit = RateLimitResponse.RateLimit.Unit.Value(limit.unit.upper())
    all_at_once = _status(client, first, limit.number or 1)
    assert (all_at_once.current_limit.requests_per_unit, all_at_once.current_limit.unit) == (
        limit.number,
        unit,
    )
    assert (all_at_once.code == RateLimitResponse.OK) is (limit.number > 0), first
    for each in requests:
        found = _status(client, each)
        assert (found.current_limit.requests_per_unit, found.current_limit.unit) == (limit.number, unit), each
        if limit.is_shadow:
            assert found.code == RateLimitResponse.OK, each
        elif limit.seconds >= PATIENCE_S * limit.number:
            assert (found.code, found.limit_remaining) == (RateLimitResponse.OVER_LIMIT, 0), each
