"""The names of leases: which key they belong to, also between nodes of two versions."""

from __future__ import annotations

import re

import pytest
from msgspec import Struct

from app.admission.leases.names import LeaseName, Names, seal, unseal
from app.domain.ask import AMOUNTS, COUNTS
from app.http.openapi.leases import paths

SECRET = b"secret"
ALICE: Names = ("alice", None, None, None, None)


class FormerName(Struct, frozen=True, array_like=True):
    """The name of a lease as the previous version had it."""

    lease: bytes
    key: str | None
    names: Names
    granted: dict[str, float]
    holds: bool


def test_lease_is_of_the_key_created_then():
    name = LeaseName(bytes(16), "gateway", ALICE, {"requests": 5}, True, 1_000)
    assert name.is_of("gateway", 1_000)
    assert not name.is_of("gateway", 1_001), "a later key of the same name"
    assert not name.is_of("other", 1_000)
    assert not name.is_of("gateway", None)


@pytest.mark.parametrize("created_ms", [1_000, 2_000, None])
def test_lease_of_the_previous_version_goes_by_the_name_of_the_key(created_ms: int | None):
    former = FormerName(bytes(16), "gateway", ALICE, {"requests": 5}, True)
    name = unseal(seal(former, SECRET), SECRET)  # type: ignore[arg-type]
    assert name is not None
    assert name.is_of("gateway", created_ms)
    assert not name.is_of("other", created_ms)


def test_previous_version_reads_the_names_of_this_one(monkeypatch: pytest.MonkeyPatch):
    text = seal(LeaseName(bytes(16), "gateway", ALICE, {"requests": 5}, True, 1_000), SECRET)
    monkeypatch.setattr("app.admission.leases.names.LeaseName", FormerName)
    read: object = unseal(text, SECRET)
    assert read == FormerName(bytes(16), "gateway", ALICE, {"requests": 5}, True)


def test_longest_name_is_one_that_the_openapi_document_describes():
    (parameter,) = paths(timed=False)["/v1/leases/{lease}"]["delete"]["parameters"]
    schema = parameter["schema"]
    names: Names = ("p" * 512, "c" * 512, "::ffff:255.255.255.255", "b" * 512, "l" * 512)
    granted = dict.fromkeys((*COUNTS, *AMOUNTS), 1e300)
    longest = seal(LeaseName(bytes(16), "k" * 64, names, granted, True, 2**53), SECRET)
    assert re.fullmatch(schema["pattern"], longest)
    assert len(longest) <= schema["maxLength"]
