"""The columns of assertions: the fields of the type, of which the same may be empty."""

from __future__ import annotations

from types import NoneType
from typing import get_args, get_type_hints

from app.domain.assertion import COLUMNS, Assertion


def test_columns_may_be_null_where_the_fields_may_be_none():
    hints = get_type_hints(Assertion)
    assert {name: may_be_null for name, (_, may_be_null) in COLUMNS.items()} == {
        name: NoneType in get_args(hint) for name, hint in hints.items()
    }
