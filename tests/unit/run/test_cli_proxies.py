"""The command line and the environment's proxies: none for this machine, and none with this machine's key."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from app.run.commands.node.target import is_loopback
from tests.commands import Command, Gate, noting, quotagate

__all__ = ["quotagate"]

VARIABLES = ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")
LIST = ("GET", "/v1/quotas")
KEPT = "the-key-that-was-made-up"


@pytest.fixture
def gate() -> Iterator[Gate]:
    with noting() as node:
        node.answers[LIST] = (200, {"quotas": [], "next_cursor": None})
        yield node


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Gate]:
    """A proxy that every variable names, and a home with an admin key."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "admin.key").write_text(f"{KEPT}\n")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    with noting() as recording:
        for name in VARIABLES:
            monkeypatch.setenv(name, recording.url)
        yield recording


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::ffff:127.0.0.1]"])
def test_node_on_this_machine_is_reached_without_proxy(
    quotagate: Command, gate: Gate, proxy: Gate, host: str
):
    ran = quotagate("quotas", "list", "--url", gate.url.replace("127.0.0.1", host))
    assert ran.code == 0, ran.err
    [asked] = gate.asked
    assert asked.headers["Authorization"] == f"Bearer {KEPT}"
    assert proxy.asked == []


@pytest.mark.parametrize("given", [(), ("--key", "given")], ids=["kept", "given"])
def test_proxy_gets_no_key_when_the_local_node_is_down(
    quotagate: Command, proxy: Gate, given: tuple[str, ...]
):
    for url in ("http://127.0.0.1:1", "http://localhost:1", "http://[::1]:1", "https://127.0.0.1:1"):
        assert quotagate("quotas", "list", "--url", url, *given).code == 1
    assert proxy.asked == []


def test_remote_node_is_reached_by_proxy_with_a_given_key_only(quotagate: Command, proxy: Gate):
    proxy.answers["GET", "http://gate.invalid/v1/quotas"] = (200, {"quotas": [], "next_cursor": None})
    assert quotagate("quotas", "list", "--url", "http://gate.invalid").code == 0
    assert quotagate("quotas", "list", "--url", "http://gate.invalid", "--key", "given").code == 0
    without, given = proxy.asked
    assert without.headers["Authorization"] is None
    assert given.headers["Authorization"] == "Bearer given"


@pytest.mark.parametrize(
    ("url", "here"),
    [
        ("http://127.0.0.1:8080", True),
        ("https://[::1]", True),
        ("http://[::ffff:127.0.0.1]", True),
        ("http://LocalHost:8080", True),
        ("http://gate.localhost", True),
        ("http://0.0.0.0:8080", False),
        ("http://10.0.0.1", False),
        ("http://localhost.example", False),
        ("http://127.0.0.1@gate.example", False),
        ("http://127.0.0.1.example", False),
        ("nonsense", False),
        ("http://[::1", False),
    ],
)
def test_loopback_urls_are_recognized(url: str, here: bool):
    assert is_loopback(url) == here
