"""The drawings of the import graph match the code."""

from __future__ import annotations

import grimp
import pytest

from tests.import_graph import DOCUMENT, drawing, imports_inside, in_order, with_drawings


def test_drawings_are_those_of_the_code() -> None:
    document = DOCUMENT.read_text("utf-8")
    assert document.count("```mermaid") == document.count("<!-- imports of ") > 0
    assert with_drawings(document) == document, "make them anew: make drawings"


def test_no_package_has_a_circle() -> None:
    graph = grimp.build_graph("app", cache_dir=None)
    packages = [each for each in sorted(graph.modules) if graph.find_children(each)]
    assert len(packages) > 20
    for package in packages:
        in_order(imports_inside(graph, package))


def test_a_circle_is_named() -> None:
    with pytest.raises(ValueError, match=r"in a circle: (store > catalog > store|catalog > store > catalog)"):
        drawing({"run": {"store"}, "store": {"catalog"}, "catalog": {"store"}})


def test_an_arrow_that_follows_from_others_is_left_out() -> None:
    assert "a --> b\n" in drawing({"a": {"b", "c", "d"}, "b": {"c"}, "c": {"d"}, "d": set()})
