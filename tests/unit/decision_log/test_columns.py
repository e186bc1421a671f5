"""The columns of the decision log fit the batches that nodes send and the quotas of the domain."""

from __future__ import annotations

import math

import msgspec
import pytest

from app.decision_log import columns
from app.decision_log.batch import LoggedLimit, LoggedQuota, LoggedVerdict, Row, Sibling
from app.domain.quota import Layers, Quota


def names(of: tuple[columns.Column, ...]) -> set[str]:
    return {column.name for column in of}


def test_batch_fields_are_columns():
    change = names(columns.CHANGE)
    assert set(Row.__struct_fields__) - change <= names(columns.COLUMNS)
    assert change <= set(Row.__struct_fields__)
    assert set(LoggedVerdict.__struct_fields__) - {"ids"} <= names(columns.VERDICT)
    assert LoggedLimit.__struct_fields__ == tuple(column.name for column in columns.LIMITED_BY)
    assert Sibling._fields == tuple(column.name for column in columns.SIBLING)
    assert LoggedQuota.__struct_fields__ == (
        *columns.QUOTA,
        "applied_as",
    )  # a verdict has its own enforcement


def test_added_columns_are_nullable():
    added = {name: column for name, column in columns.by_name().items() if column.since > columns.OLDEST}
    assert {"batch_rows", "siblings", "verdicts.max_debt"} <= set(added)
    assert all(column.nullable for column in added.values())
    assert max(column.since for column in added.values()) == columns.VERSION


def test_later_columns_are_at_the_end():
    for struct in (columns.COLUMNS, columns.VERDICT, columns.LIMITED_BY, columns.CHANGE, columns.SIBLING):
        versions = [column.since for column in struct]
        assert versions == sorted(versions)


@pytest.mark.parametrize(
    "quota",
    [
        Quota("request_rate", 5.5, "sampled_rate", "delay", shadow=True, samples=3, sample_ms=500, epoch=9),
        Quota("controller_mutation_rate", 5, "token_bucket", "deny", burst=7.5, max_debt=100.0),
        Quota(
            "producer_ids_rate", 5, "producer_ids", "deny", window_ms=60_000, layers=Layers(20_000, 80_000)
        ),
        Quota("request_rate", 1, "sampled_rate", "delay", max_debt=math.inf, layers=Layers(1, 2)),
    ],
)
def test_quota_fields_describe_a_whole_quota(quota: Quota):
    fields = columns.quota_fields(quota, "user=*", "user=alice")
    assert set(fields) == set(columns.QUOTA)
    described = columns.as_quota(msgspec.structs.asdict(LoggedQuota(**fields)))
    assert columns.quota_fields(described, "user=*", "user=alice") == fields
    assert (described.key, described.limit, described.max_debt) == (quota.key, quota.limit, quota.max_debt)
