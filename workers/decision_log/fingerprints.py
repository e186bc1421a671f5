"""Which secrets made the digests of a file: their fingerprints, in the file's metadata."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Final

import pyarrow as pa

from workers.decision_log.schema import texts_of

KEY: Final = b"quotagate.secrets"
"""Under this key of a file's metadata stand the fingerprints, as JSON; older files do not say any."""


def with_secrets(schema: pa.Schema, secrets: Iterable[str]) -> pa.Schema:
    """A schema whose metadata says the secrets too, if any is known."""
    said = sorted(secrets)
    if not said:
        return schema
    return schema.with_metadata({**(schema.metadata or {}), KEY: json.dumps(said).encode()})


def secrets_of(path: str, metadata: Mapping[bytes, bytes] | None) -> frozenset[str]:
    """The fingerprints that a file says, none for an older one.

    Raises:
        BadFile: what stands there are none.
    """
    return frozenset(texts_of(path, metadata, KEY, "fingerprints of secrets"))
