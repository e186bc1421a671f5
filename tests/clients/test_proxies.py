"""Proxies of the environment: the hand-made clients use them for other machines, never for this one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from quotagate_client import Unreachable
from quotagate_client.proxies import is_here
from tests.clients.both import Caller
from tests.clients.scripted import ADMITTED, Script, answer, serving

Make = Callable[..., Caller]
VARIABLES = ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")


@pytest.fixture(autouse=True)
def proxy(monkeypatch: pytest.MonkeyPatch):
    """A proxy that all proxy variables name; it records what it receives."""
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    with serving() as recording:
        recording.plays(answer(ADMITTED))
        for name in VARIABLES:
            monkeypatch.setenv(name, recording.url)
        yield recording


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_node_on_this_machine_is_asked_without_a_proxy(make: Make, script: Script, proxy: Script, host: str):
    script.plays(answer(ADMITTED))
    caller = make(script.url.replace("127.0.0.1", host), key="secret")
    assert caller("decide", usage={"requests": 1}).decision == "admit"
    assert len(script.requests) == 1
    assert proxy.requests == []


def test_absent_local_node_is_not_looked_for_through_the_proxy(make: Make, proxy: Script):
    with pytest.raises(Unreachable):
        make("http://127.0.0.1:1", key="secret")("decide", usage={"requests": 1})
    assert proxy.requests == []


def test_another_machine_is_asked_through_the_proxy(make: Make, proxy: Script):
    assert make("http://gate.invalid")("decide", usage={"requests": 1}).decision == "admit"
    [request] = proxy.requests
    assert request.path == "http://gate.invalid/v1/decisions"


@pytest.mark.parametrize(
    ("url", "here"),
    [
        ("http://127.0.0.1:8080", True),
        ("http://127.9.9.9", True),
        ("https://[::1]:8080", True),
        ("http://[::ffff:127.0.0.1]", True),
        ("http://LOCALHOST", True),
        ("http://gate.localhost", True),
        ("http://10.0.0.1", False),
        ("http://gate.example", False),
        ("http://localhost.example", False),
        ("http://127.0.0.1.example", False),
        ("http://user@gate.example", False),
    ],
)
def test_this_machine_is_known_by_its_names(url: str, here: bool):
    assert is_here(url) == here
