"""Which buckets a binding owns, and what a bound caller may do to other buckets."""

from __future__ import annotations

import pytest

from app.domain.binding import Binding, parts_of


@pytest.mark.parametrize(
    ("binding", "bucket", "owned"),
    [
        ("user=acme", "user=acme", True),
        ("user=acme", "user=acme,client-id=etl", True),
        ("user=acme", "user=acme;broker=1", True),
        ("user=acme", "user=acme2", False),
        ("user=acme", "client-id=acme", False),
        ("user=acme", "ip=10.0.0.7", False),
        ("user=acme-*", "user=acme-etl,client-id=x", True),
        ("user=acme-*", "user=acme", False),
        ("user=*", "user=anyone", True),
        ("user=*", "client-id=anyone", False),
        ("user=a%2Cb*", "user=a%2Cb%3Bbroker%3D1", True),
        ("user=acme,client-id=etl", "user=acme,client-id=etl", True),
        ("user=acme,client-id=etl", "user=acme", False),
        ("user=acme,client-id=etl", "client-id=etl", False),
        ("client-id=etl", "user=acme,client-id=etl", True),
        ("client-id=*", "client-id=", True),
        ("ip=10.0.0.7", "ip=10.0.0.7", True),
        ("ip=10.0.0.*", "ip=10.0.0.7", True),
        ("ip=10.0.0.7", "ip=10.0.0.77", False),
        ("ip=2001:db8::7", "ip=2001%3Adb8%3A%3A%2F64", False),
        ("ip=2001:db8::*", "ip=2001%3Adb8%3A%3A%2F64", False),
        ("ip=2001:db8::7", "ip=2001%3Adb8%3A%3A7%2F128", True),
        ("ip=*", "ip=2001%3Adb8%3A%3A%2F64", True),
        ("broker=1", "broker=1", True),
        ("broker=1", "listener=EXTERNAL;broker=1", True),
        ("broker=1", "listener=EXTERNAL", False),
        ("listener=EXTERNAL", "broker=1,listener=EXTERNAL", True),
    ],
)
def test_binding_owns_a_bucket_that_has_all_its_parts(binding: str, bucket: str, owned: bool):
    assert Binding.parse(binding).owns(parts_of(bucket)) is owned
