"""The cost of a request of Envoy in the API process: over gRPC, and as the check of ``ext_authz``."""

from __future__ import annotations

import subprocess
import sys
from array import array
from pathlib import Path
from statistics import median

import pytest

from tests.bench import generator
from tests.bench.generator import Load
from tests.envoy.calls import serving
from tests.report import say
from tests.service import Service

pytestmark = pytest.mark.bench

ROUNDS, SECONDS = 5, 4.0
ROOT = Path(__file__).parents[2]
CHECK = b"GET /v1/check HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Quotagate-Principal: user-0\r\n\r\n"


def processor_s(pid: int) -> float:
    """The processor time of a process, in seconds."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text(encoding="utf-8").split()[0]) for thread in threads) / 1e9


def by_grpc(node: Service, port: int, descriptors: int) -> float:
    """Microseconds of the node for a request over gRPC."""
    before = processor_s(node.pid)
    command = [sys.executable, "-m", "tests.bench.grpc_load", str(port), str(SECONDS), str(descriptors)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return (processor_s(node.pid) - before) / int(ran.stdout) * 1e6


def by_check(node: Service) -> float:
    """Microseconds of the node for a check."""
    load = Load(
        address=node.address,
        request=CHECK,
        sequence=array("I", [0]),
        warm_s=0.5,
        seconds=SECONDS,
        programs=(node.pid,),
    )
    return generator.processor_us(load)


def test_processor_time_of_a_request_of_envoy():
    with serving() as (node, port):
        node.put("user=*", request_rate=1e9)
        one, four, check = [], [], []
        for _ in range(ROUNDS):
            check.append(by_check(node))
            one.append(by_grpc(node, port, 1))
            four.append(by_grpc(node, port, 4))
    say(f"/v1/check: {median(check):.0f} us; gRPC with one descriptor: {median(one):.0f} us,")
    say(f"with four: {median(four):.0f} us ({median(one) / median(check):.1f} and")
    say(f"{median(four) / median(check):.1f} times a check; medians of {ROUNDS} rounds)")
    assert median(check) < median(one)
