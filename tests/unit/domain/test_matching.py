"""Filters on entities: which combinations of types they match."""

from __future__ import annotations

import pytest

from app.domain.errors import EntityError
from app.domain.matching import Filter


def test_filter_matches_entities_with_more_types_unless_it_is_strict():
    assert Filter.parse(["user"]).combinations() == [("user",), ("user", "client-id")]
    assert Filter.parse(["user"], strict=True).combinations() == [("user",)]
    both = Filter.parse(["client-id", "user=a"], strict=True)
    assert both.combinations() == [("user", "client-id")]


def test_match_names_one_type():
    with pytest.raises(EntityError, match="a match has one type"):
        Filter.parse(["user=a,client-id=b"])
