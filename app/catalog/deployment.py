"""What every node of a deployment has to have the same, kept in the catalog's one row of state."""

from __future__ import annotations

from sqlalchemy import update

from app.catalog import schema
from app.catalog.port import CatalogAway
from app.catalog.sql import AWAY, driver_url
from app.catalog.tables import STATE


class DeploymentRefused(Exception):
    """A setting of this node is not the deployment's."""


class SecretRefused(DeploymentRefused):
    """The hash secret of this node is not the catalog's."""


class DebtRefused(DeploymentRefused):
    """The longest debt of this node is not the catalog's."""


def check_debt(mine_ms: int, agreed_ms: int) -> None:
    """Refuse a node that would forgive another part of a debt than the others do.

    Raises:
        DebtRefused: with what to do about it.
    """
    if mine_ms != agreed_ms:
        raise DebtRefused(
            f"QUOTAGATE_MAX_DEBT is {_iso(mine_ms)} here and {_iso(agreed_ms)} in this deployment. Give "
            "every node the same one; to change it for all, stop them all, run `quotagate migrate "
            "--max-debt` with the new value, and start them with it."
        )


def adopt_debt(database_url: str, max_debt_ms: int) -> None:
    """Make this the deployment's longest debt, by which nodes start from now on.

    Raises:
        CatalogAway: the database cannot be reached.
    """
    try:
        with schema.connect(database_url) as connection:
            connection.execute(update(STATE).values(max_debt_ms=max_debt_ms))
    except AWAY as error:
        name = driver_url(database_url, asynchronous=False).render_as_string(hide_password=True)
        raise CatalogAway(f"the catalog at {name} cannot be written: {error}") from error


def _iso(ms: int) -> str:
    """A duration as the setting spells it.

    >>> _iso(3_600_000), _iso(90_500), _iso(600_000)
    ('PT1H', 'PT90.5S', 'PT10M')
    """
    for unit, unit_ms in (("H", 3_600_000), ("M", 60_000)):
        if ms % unit_ms == 0:
            return f"PT{ms // unit_ms}{unit}"
    return f"PT{ms / 1000:.15g}S"
