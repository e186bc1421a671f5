"""No cache is keyed by traffic: caches that are keyed by input are listed here, each with its reason."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

APP: Final = Path(__file__).parents[2] / "app"

ALLOWED: Final = {
    "app/admission/metrics/metrics.py: _broker_and_listener": "labels of metrics, which are capped",
    "app/catalog/sql.py: _read": "definitions of quotas, not traffic",
    "app/domain/shape.py: _cells": "for the oracle; no decision calls it",
    "app/domain/slots.py: slot_tags": "without arguments",
    "app/http/access/access.py: _by_address": "parsed addresses",
    "app/http/check_question.py: _is_trusted": "parsed addresses of proxies",
    "app/http/host.py: parts": "parsed addresses: the names and ports by which callers reach this node",
    "app/http/access/slowdown.py: source_of": "parsed addresses",
    "app/http/faults.py: _options_of": "types of bodies",
    "app/http/faults.py: _object": "types of bodies",
    "app/http/wire.py: _normalised": "parsed addresses",
    "app/store/compiled_quota.py: _around": "parts of quotas",
}
"""The caches of functions, with the meaning of their keys.

Other memory grows with the input of callers: access keys (``app/catalog/keys.py``), known producer ids
(``app/admission/known_ids/memory.py``), fair turns (``app/admission/gathering/fair_turns.py``), counts by
caller (intake, connections, slowdown), and the tables of combinations of fields
(``app/admission/compiled.py``). The overview keeps eight answers for a second
(``app/http/routes/overview.py``).
"""
DECORATORS: Final = {"cache", "lru_cache", "cached_property"}


def caches(path: Path) -> Iterator[str]:
    """The names of a module's caches: decorated functions, and attributes that hold a cached function."""
    place = path.relative_to(APP.parent).as_posix()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.FunctionDef) and any(map(is_cache, node.decorator_list)):
            yield f"{place}: {node.name}"
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        if any(is_cache(part) for part in ast.walk(node.value)):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            yield f"{place}: {target.attr if isinstance(target, ast.Attribute) else ast.unparse(target)}"


def is_cache(node: ast.AST) -> bool:
    """Whether an expression names a cache of functools."""
    if isinstance(node, ast.Call):
        node = node.func
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return name in DECORATORS


def test_every_cache_has_its_reason() -> None:
    found = {name for path in sorted(APP.rglob("*.py")) for name in caches(path)}
    assert found == ALLOWED.keys()
