"""Settings that all nodes of a deployment must share; the catalog keeps them in its row of state."""

from __future__ import annotations

from secrets import token_bytes

from sqlalchemy import update

from app.catalog import schema
from app.catalog.errors import DebtMismatchError, SecretMismatchError
from app.catalog.sql import Sql
from app.catalog.tables import STATE
from app.domain.digest import fingerprint


async def agree_on_secret(database: Sql, given: bytes | None) -> bytes:
    """The deployment's hash secret: from the settings, if it has the catalog's fingerprint, or the catalog.

    Raises:
        SecretMismatchError: this node has another secret, or none although the deployment was given one.
    """
    offered = token_bytes(32) if given is None else given
    agreed, kept = await database.agree(
        hash_secret_fingerprint=fingerprint(offered), hash_secret=offered.hex() if given is None else None
    )
    if given is not None and agreed != fingerprint(given):
        raise SecretMismatchError(
            "QUOTAGATE_HASH_SECRET is not the secret that this catalog was first started with: "
            "every producer id seen so far would be new again. Set the old secret, or use a new catalog."
        )
    if given is not None:
        return given
    if kept is None:
        raise SecretMismatchError(
            "this catalog was first started with a QUOTAGATE_HASH_SECRET: give every node the same one."
        )
    return bytes.fromhex(kept)


async def agree_on_debt(database: Sql, mine_ms: int) -> None:
    """Check that this node has the same longest debt as the deployment, whose first node sets it.

    Raises:
        DebtMismatchError: the deployment has another value; the text gives the remedy.
    """
    (agreed_ms,) = await database.agree(max_debt_ms=mine_ms)
    if mine_ms != agreed_ms:
        raise DebtMismatchError(
            f"QUOTAGATE_MAX_DEBT is {_iso(mine_ms)} here and {_iso(agreed_ms)} in this deployment. Give "
            "every node the same one; to change it for all, stop them all, run `quotagate migrate "
            "--max-debt` with the new value, and start them with it."
        )


def adopt_debt(database_url: str, max_debt_ms: int) -> None:
    """Change the deployment's longest debt, which nodes must have from their next start on.

    Raises:
        CatalogUnavailableError: the database cannot be reached.
    """
    with schema.connect(database_url, purpose="written") as connection:
        schema.await_other_migrations(connection)
        connection.execute(update(STATE).values(max_debt_ms=max_debt_ms))


def _iso(ms: int) -> str:
    """A duration as the setting spells it.

    >>> _iso(3_600_000), _iso(90_500), _iso(600_000)
    ('PT1H', 'PT90.5S', 'PT10M')
    """
    for unit, unit_ms in (("H", 3_600_000), ("M", 60_000)):
        if ms % unit_ms == 0:
            return f"PT{ms // unit_ms}{unit}"
    return f"PT{ms / 1000:.15g}S"
