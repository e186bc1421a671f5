"""The deployment's hash secret, for programs that hash ids themselves."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from app.node.errors import CommandError

if TYPE_CHECKING:
    from app.node.settings import Settings


def secret_of(given: Settings) -> bytes | None:
    """Return the secret from the setting, else from the catalog; None if there is no catalog yet."""
    if given.hash_secret is not None:
        return given.hash_secret
    from app.catalog.catalog import Catalog
    from app.catalog.errors import CatalogUnavailableError, DeploymentMismatchError, SchemaVersionError
    from app.node import logs
    from app.run.wiring import defaults

    logs.configure(logging.WARNING)  # without the catalog's info lines

    async def kept() -> bytes:
        catalog = Catalog(given.catalog_url, defaults(given))
        await catalog.open()
        await catalog.close()
        return catalog.hash_secret

    try:
        return asyncio.run(kept())
    except DeploymentMismatchError as refused:
        raise CommandError(str(refused)) from None
    except (CatalogUnavailableError, SchemaVersionError):
        return None
