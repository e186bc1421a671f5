"""The bytes that a node takes in before it answers, by caller and in all."""

from __future__ import annotations

import pytest

from app.admission.errors import OverloadedError
from app.http.server.intake import Intake


def test_caller_with_too_many_bytes_is_shed_but_others_are_not():
    intake = Intake(of_caller=100, of_all=150)
    with intake.request("a") as one, intake.request("a") as two, intake.request("b") as other:
        one.add(60)
        two.add(40)
        with pytest.raises(OverloadedError, match="caller_bytes"):
            two.add(1)
        other.add(50)
        with pytest.raises(OverloadedError, match="node_bytes"):
            other.add(1)
    assert intake.total == 0


def test_answered_requests_free_their_bytes():
    intake = Intake(of_caller=100)
    for _ in range(3):
        with intake.request("a") as taken:
            taken.add(100)
    with intake.request("a") as taken, pytest.raises(OverloadedError):
        taken.add(101)
    with intake.request("a") as taken:
        taken.add(100)
