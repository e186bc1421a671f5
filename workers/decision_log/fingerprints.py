"""The fingerprints of the secrets that made the digests in a file, kept in its metadata."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Final

import pyarrow as pa

from workers.decision_log.schema import texts_of

KEY: Final = b"quotagate.secrets"
"""The key of a file's metadata that holds the fingerprints, as JSON; older files have none."""


def with_secrets(schema: pa.Schema, secrets: Iterable[str]) -> pa.Schema:
    """A schema with the fingerprints of these secrets in its metadata, if there are any."""
    said = sorted(secrets)
    if not said:
        return schema
    return schema.with_metadata({**(schema.metadata or {}), KEY: json.dumps(said).encode()})


def secrets_of(path: str, metadata: Mapping[bytes, bytes] | None) -> frozenset[str]:
    """The fingerprints in a file's metadata; empty for a file of an older version.

    Raises:
        BadFileError: it holds something else.
    """
    return frozenset(texts_of(path, metadata, KEY, "fingerprints of secrets"))
