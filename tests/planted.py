"""Planting a fault in a module, to see that a comparison finds it."""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any


def planted(module: ModuleType, right: str, wrong: str, **more: object) -> dict[str, Any]:
    """Return the names of a module that is run again with `wrong` in place of `right`.

    Args:
        more: names that the fault needs and the module does not have.
    """
    source = inspect.getsource(module)
    assert source.count(right) == 1, "the fault must be planted in one place"
    names = {**vars(module), **more}
    exec(compile(source.replace(right, wrong), str(module.__file__), "exec"), names)
    return names
