"""The unchanged examples pass the gateways' own checkers and match their index."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from tests.gateways.gateway import CADDY, ENVOY, EXAMPLES, NGINX, Kind, configure


def checked(kind: Kind, folder: Path, *arguments: str) -> str:
    """The output of a gateway's checker for a copy of its example, which must be valid."""
    configure(kind, folder)
    done = subprocess.run(
        [kind.program(), *arguments],
        cwd=folder,
        env={"HOME": str(folder)},
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_nginx_finds_its_example_valid(tmp_path: Path):
    said = checked(NGINX, tmp_path, "-t", "-p", ".", "-c", "nginx.conf", "-e", "stderr")
    assert "test is successful" in said
    assert "[warn]" not in said


def test_envoy_finds_its_example_valid_and_nothing_in_it_outdated(tmp_path: Path):
    said = checked(ENVOY, tmp_path, "--mode", "validate", "-c", ENVOY.example, "--log-level", "warning")
    assert "OK" in said
    assert "eprecated" not in said


def test_caddy_finds_its_example_valid_and_well_formatted(tmp_path: Path):
    said = checked(CADDY, tmp_path, "validate", "--config", CADDY.example, "--adapter", "caddyfile")
    assert "Valid configuration" in said
    assert "not formatted" not in said


def test_the_index_names_every_example():
    index = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^\| \[`([\w-]+)/`\]\(\1/?\)", index, re.MULTILINE))
    assert {kind.name for kind in (NGINX, ENVOY, CADDY)} <= named
    assert all((EXAMPLES / name).is_dir() for name in named)


def test_files_that_the_index_names_are_there():
    index = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#:]+)\)", index)
    assert links
    for link in links:
        assert (EXAMPLES / link).exists(), link
