"""Draws the import graph in ``docs/architecture.md``, from the code (`make drawings`).

Each drawing shows the packages and modules directly inside one package. Arrows point from importer to import.
An arrow that follows from others is left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Final

import grimp

DOCUMENT: Final = Path(__file__).parents[1] / "docs" / "architecture.md"
_DRAWING: Final = re.compile(r"(<!-- imports of (?P<package>[a-z.]+) -->\n).*?(<!-- end -->)", re.DOTALL)

Imports = dict[str, set[str]]
"""For each package or module, the others that it imports."""


def imports_inside(graph: grimp.ImportGraph, package: str) -> Imports:
    """Return the imports between the packages and modules directly inside a package."""
    depth = package.count(".") + 2

    def parts() -> Iterator[tuple[str, str]]:
        """Each module, with the child of the package that contains it."""
        for module in graph.modules:
            if module.startswith(f"{package}."):
                yield module, module.split(".")[depth - 1]

    found: Imports = {child: set() for _, child in parts()}
    for module, child in parts():
        for imported in graph.find_modules_directly_imported_by(module):
            if imported.startswith(f"{package}.") and (other := imported.split(".")[depth - 1]) != child:
                found[child].add(other)
    return found


def in_order(imports: Imports) -> list[str]:
    """Return the names in topological order: importers come first.

    Raises:
        ValueError: there is a circle.
    """
    try:
        return [*TopologicalSorter({name: sorted(imports[name]) for name in sorted(imports)}).static_order()][
            ::-1
        ]
    except CycleError as circle:
        raise ValueError(f"Imports go in a circle: {' > '.join(circle.args[1])}") from None


def essential(imports: Imports) -> Imports:
    """Return the imports without those that follow from others."""
    reached: Imports = {}
    for name in reversed(in_order(imports)):
        reached[name] = imports[name].union(*(reached[other] for other in imports[name]))
    return {
        name: {
            other
            for other in direct
            if not any(other in reached[third] for third in direct if third != other)
        }
        for name, direct in imports.items()
    }


def drawing(imports: Imports) -> str:
    """Return the drawing in Mermaid's language.

    >>> print(drawing({"http": {"domain", "admission"}, "admission": {"domain"}, "domain": set()}), end="")
    flowchart TD
        http --> admission
        admission --> domain
    """
    kept = essential(imports)
    lines = [f"    {name} --> {' & '.join(sorted(kept[name]))}" for name in in_order(imports) if kept[name]]
    return "\n".join(["flowchart TD", *lines, ""])


def with_drawings(document: str) -> str:
    """Return a document with all its drawings made from the present code."""
    graph = grimp.build_graph("app", cache_dir=None)

    def drawn(found: re.Match[str]) -> str:
        made = drawing(imports_inside(graph, found["package"]))
        return f"{found[1]}```mermaid\n{made}```\n{found[3]}"

    return _DRAWING.sub(drawn, document)


if __name__ == "__main__":
    DOCUMENT.write_text(with_drawings(DOCUMENT.read_text("utf-8")), "utf-8")
