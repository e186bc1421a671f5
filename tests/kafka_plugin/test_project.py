"""The plugin's own project: its format, its compiler's warnings, and its unit tests."""

from __future__ import annotations

import pytest

from tests.kafka_plugin import plugin


@pytest.mark.timeout(1800)
def test_java_project_passes_its_own_checks():
    plugin.make("test")
