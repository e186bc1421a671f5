"""The catalog's tables, as of the newest migration."""

from __future__ import annotations

from typing import Final

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    Computed,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
)

METADATA: Final = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    }
)

STATE: Final = Table(
    "catalog_state",
    METADATA,
    Column("id", Integer, CheckConstraint("id = 1", name="one_row"), primary_key=True, autoincrement=False),
    Column("version", BigInteger, nullable=False),
    Column("hash_secret", String(64)),
    Column("hash_secret_fingerprint", String(64)),
    Column("keys_version", BigInteger, nullable=False, server_default="0"),
    Column("max_debt_ms", BigInteger),
    Column("history_turn_ms", BigInteger),
)
"""One row. Every transaction that writes quotas begins by adding 1 to ``version``, and every transaction that
writes keys by adding 1 to ``keys_version``, so writers take turns."""

QUOTAS: Final = Table(
    "quotas",
    METADATA,
    Column("entity_hash", String(64), primary_key=True),
    Column("quota", String(64), primary_key=True),
    Column("entity", Text, nullable=False),
    Column("definition", Text),
    Column("epoch", BigInteger, nullable=False),
    Column("identity", Text, nullable=False),
    Column("version", BigInteger, nullable=False),
    Column("since_ms", BigInteger, nullable=False, server_default="0"),
    Column(
        "head", Text().with_variant(Text(collation="C"), "postgresql"), Computed("substr(entity, 1, 512)")
    ),
    Index(None, "version"),
    Index(None, "head", "entity_hash"),
)
"""One row for each quota.

A removed quota stays as a tombstone, with ``definition`` NULL: followers must see the removal, and if the
quota is set again, its earlier buckets must be known. ``since_ms`` is when the definition last changed; 0 is
unknown. The primary key has a SHA-256 of the entity, because
PostgreSQL cannot index the longest spellings (two names of 512 bytes, each byte as ``%XX``). Lists are
ordered by ``head``, which the database computes."""

HEAD_LENGTH: Final = 512
ROW: Final = tuple(each for each in QUOTAS.columns if each.computed is None)
"""The columns that are written; the others are computed."""

CHANGES: Final = Table(
    "changes",
    METADATA,
    Column("id", BigInteger().with_variant(Integer, "sqlite"), primary_key=True),
    Column("at_ms", BigInteger, nullable=False),
    Column("who", Text, nullable=False),
    Column("entity_hash", String(64), nullable=False),
    Column("entity", Text, nullable=False),
    Column("before", Text),
    Column("after", Text),
    Column("reason", Text),
    Index(None, "entity_hash", "id"),
)
"""The author, time and reason of each change. NULL in ``before`` is a creation, NULL in ``after`` a removal.
Old changes are dropped, if the settings say so; see ``app/catalog/history.py``."""

KEYS: Final = Table(
    "keys",
    METADATA,
    Column("name", String(64), primary_key=True),
    Column("digest", String(64), nullable=False),
    Column("scopes", Text, nullable=False),
    Column("bound_to", Text, nullable=False),
    Column("expires_ms", BigInteger),
    Column("created_ms", BigInteger, nullable=False),
    Column("rotated_ms", BigInteger),
    Column("former_digest", String(64)),
    Column("former_until_ms", BigInteger),
)
"""One row for each API key, with the SHA-256 of it and of the key it replaced. Revoking deletes the row."""
