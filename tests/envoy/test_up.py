"""`quotagate up` with the rate-limit service: one command, and Envoy can ask."""

from __future__ import annotations

from pathlib import Path

from tests.envoy.calls import connected
from tests.ports import free_port
from tests.system.test_up import Running


def test_up_answers_envoy_on_a_port_of_its_own(tmp_path: Path):
    port, envoy = free_port(), free_port()
    running = Running(tmp_path / "home", port, QUOTAGATE_ENVOY_PORT=str(envoy))
    try:
        running.ready()
        assert f"Envoy's rate-limit service listens on port {envoy}." in running.logged()
        with connected(envoy) as client:
            assert client.health() == "SERVING"
            assert client.code({"principal": "alice"}) == "OK"
        assert running.end() == 0
    finally:
        running.http.close()
        running.up.kill()
        running.up.wait()
