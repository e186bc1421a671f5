"""The JSON schema of a file of quotas, generated from the code, for completion and checks in editors."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final

from app.domain.entity import COMBINATIONS, TYPES
from app.domain.quota import KEYS

NAME: Final = "quotas.schema.json"
_WORD: Final = "(?:[A-Za-z0-9._~-]|%[0-9A-F]{2})+"
_NAME: Final = rf"(?:\*|{_WORD})"


def document() -> dict[str, Any]:
    """Return the schema: each entity allows the quotas that fit its types.

    A schema cannot express all rules; `quotagate quotas lint` checks all of them.
    """
    # Imported here, as it takes half a second.
    from app.http.openapi.quotas import COMPONENTS

    values = COMPONENTS["QuotaSet"]["properties"]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Quotas of Quotagate",
        "description": "What `quotagate quotas export` writes, and plan, apply and lint read.",
        "type": "object",
        "required": ["quotas"],
        "additionalProperties": False,
        "properties": {
            "quotas": {
                "type": "object",
                "description": "Quotas by entity as it is spelled canonically: user=alice,client-id=etl. "
                "* is the default, and every byte but letters, digits and -._~ is written %XX.",
                "patternProperties": {
                    _pattern(types): {"$ref": f"#/$defs/{'+'.join(types)}"} for types in _combinations()
                },
                "additionalProperties": False,
            }
        },
        "$defs": {
            **{"+".join(types): _set(types) for types in _combinations()},
            **{key: values[key] for key in KEYS},
        },
    }


def text() -> str:
    """Return the schema as the text of a file."""
    return json.dumps(document(), indent=2, ensure_ascii=False) + "\n"


def _combinations() -> list[tuple[str, ...]]:
    return sorted(COMBINATIONS, key=lambda types: (len(types), [TYPES.index(type_) for type_ in types]))


def _pattern(types: tuple[str, ...]) -> str:
    name = _WORD if types == ("broker", "listener") else _NAME
    return f"^{','.join(f'{type_}={name}' for type_ in types)}$"


def _set(types: tuple[str, ...]) -> dict[str, Any]:
    fitting = [row.name for row in KEYS.values() if types in row.entities]
    return {
        "type": "object",
        "minProperties": 1,
        "additionalProperties": False,
        "properties": {key: {"$ref": f"#/$defs/{key}"} for key in fitting},
    }


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(text(), encoding="utf-8")
