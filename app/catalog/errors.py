"""Errors between this program and its catalog.

CatalogError
├── CatalogUnavailableError     the database cannot be reached, or is too slow
├── SchemaVersionError          the database is not migrated
├── DeploymentMismatchError     a setting of this node differs from the deployment's
│   ├── SecretMismatchError     the hash secret
│   └── DebtMismatchError       the longest debt
├── PreconditionError           If-Match or If-None-Match does not hold
├── QuotasNotFoundError         an entity has no quotas
├── KeyExistsError              the name of an API key is taken
├── KeyNotFoundError            there is no API key of this name
└── KeyExpiredError             an API key has expired
"""

from __future__ import annotations


class CatalogError(Exception):
    """The root of this package's exceptions."""


class CatalogUnavailableError(CatalogError):
    """The database cannot be reached, or does not answer in time; a write may or may not have been made."""


class SchemaVersionError(CatalogError):
    """This program cannot use the catalog's schema; the text names the command to run."""


class DeploymentMismatchError(CatalogError):
    """A setting of this node differs from the deployment's; the text gives the remedy."""


class SecretMismatchError(DeploymentMismatchError):
    """The hash secret of this node differs from the catalog's."""


class DebtMismatchError(DeploymentMismatchError):
    """The longest debt of this node differs from the catalog's."""


class PreconditionError(CatalogError):
    """A condition of a write does not hold: the entity, or the catalog, is at another version."""


class QuotasNotFoundError(CatalogError):
    """No quotas are set on the entity."""


class KeyExistsError(CatalogError):
    """There is already a key of this name."""


class KeyNotFoundError(CatalogError):
    """There is no key of this name."""


class KeyExpiredError(CatalogError):
    """The key has expired, so a rotated key would be expired too."""
