"""Tests for nginx only: its own 403 next to the check's, and a check location that clients cannot reach."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gateways import gateway as gateways
from tests.gateways.gateway import NGINX, Gateway
from tests.service import Service


@pytest.fixture(scope="module")
def nginx(node: Service, site: int) -> Iterator[Gateway]:
    """Run nginx with an access rule besides the check."""
    rule = {"    location / {": "    location / {\n        deny 127.0.0.5;"}
    with gateways.running(NGINX, node.address[1], site, NGINX.patience, rule) as gateway:
        yield gateway


def test_own_rule_of_nginx_is_not_reported_as_throttling(nginx: Gateway):
    answer = nginx.ask("alice", source="127.0.0.5")
    assert answer.status_code == 403
    assert "x-site" not in answer.headers
    assert nginx.ask("alice").status_code == 200


def test_check_location_is_not_reachable_from_outside(nginx: Gateway):
    answer = nginx.ask("alice", "/.quotagate-check")
    assert answer.status_code == 404
    assert "x-site" not in answer.headers
