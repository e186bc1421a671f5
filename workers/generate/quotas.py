"""The quotas for generated traffic: most principals stay within them, and some exceed them."""

from __future__ import annotations

from typing import Any, Final

from app.domain.entity import Entity
from app.domain.quota import Defaults, Quota
from app.domain.quota_value import resolve

DEFINITIONS: Final[dict[str, dict[str, dict[str, Any]]]] = {
    "user=*": {
        "producer_ids_rate": {"limit": 100, "window_ms": 600_000},
        "request_rate": {"limit": 50},
        "producer_byte_rate": {"limit": 1_000_000},
    },
    "ip=*": {"connection_creation_rate": {"limit": 5}},
    "listener=*": {"max_connection_creation_rate": {"limit": 50}},
}
"""The quotas by entity, as in the body of a PUT."""


def quota(entity: str, key: str) -> Quota:
    """Return one of these quotas with all defaults applied."""
    return resolve(key, DEFINITIONS[entity][key], Entity.parse(entity), Defaults(), epoch=0)
