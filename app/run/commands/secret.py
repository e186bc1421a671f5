"""The deployment's hash secret, for programs of ours that hash ids themselves."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from app.run.errors import CannotRun

if TYPE_CHECKING:
    from app.run.settings import Settings


def secret_of(given: Settings) -> bytes | None:
    """The deployment's secret: the setting, else what the catalog keeps; None if there is no catalog yet."""
    if given.hash_secret is not None:
        return given.hash_secret
    from app.catalog.catalog import Catalog  # noqa: PLC0415  SQLAlchemy, only where it is needed
    from app.catalog.deployment import DeploymentRefused  # noqa: PLC0415
    from app.catalog.port import CatalogAway  # noqa: PLC0415
    from app.catalog.schema import SchemaRefused  # noqa: PLC0415
    from app.run import logs  # noqa: PLC0415
    from app.run.wiring import defaults  # noqa: PLC0415

    logs.configure(logging.WARNING)  # that the catalog was read is no news here

    async def kept() -> bytes:
        catalog = Catalog(given.catalog_url, defaults(given))
        await catalog.open()
        await catalog.close()
        return catalog.hash_secret

    try:
        return asyncio.run(kept())
    except DeploymentRefused as refused:
        raise CannotRun(str(refused)) from None
    except (CatalogAway, SchemaRefused):
        return None
