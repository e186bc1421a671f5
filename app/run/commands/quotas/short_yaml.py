"""The YAML of a mapping of descriptors, as a person would write it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import yaml


def dump(mapping: Mapping[str, Any]) -> str:
    """Return a mapping as YAML, with short lists on one line each."""
    return yaml.dump(mapping, Dumper=_ShortLines, sort_keys=False, allow_unicode=True, width=1_000)


class _ShortLines(yaml.SafeDumper):
    """Writes lists of text and of entries on one line each."""

    def represent_sequence(
        self, tag: str, sequence: Iterable[Any], flow_style: bool | None = None
    ) -> yaml.SequenceNode:
        """Represent a list; a list of rules takes a line for each field of a rule."""
        items = list(sequence)
        is_short = not any(isinstance(each, dict) and "entries" in each for each in items)
        return super().represent_sequence(tag, items, flow_style=flow_style or is_short)
