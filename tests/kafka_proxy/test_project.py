"""The proxy's own project: its format, its compiler's warnings, and its unit tests."""

from __future__ import annotations

import subprocess

import pytest

from tests.kafka_proxy import proxy


@pytest.mark.timeout(1800)
def test_java_project_passes_its_own_checks():
    proxy.jar()  # which knows how to wait for another run
    done = subprocess.run(
        ["make", "--no-print-directory", "-C", proxy.PROJECT, "test"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=proxy.BUILD_WITHIN_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
