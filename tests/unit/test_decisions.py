"""The decision records are in order, and what the documents name is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DECISIONS = ROOT / "docs" / "decisions"


def headings(page: Path) -> list[str]:
    return re.findall(r"^## .*$", page.read_text(encoding="utf-8"), re.MULTILINE)


def test_pages_are_numbered_without_gaps():
    numbers = [int(page.name[:4]) for page in sorted(DECISIONS.glob("[0-9]*.md"))]
    assert numbers == list(range(1, len(numbers) + 1))


def test_each_page_has_the_headings_of_the_template():
    wanted = headings(DECISIONS / "template.md")
    assert wanted
    for page in DECISIONS.glob("[0-9]*.md"):
        assert headings(page) == wanted, page.name
        assert page.read_text(encoding="utf-8").startswith(f"# {page.name[:4]}. "), page.name


def test_what_the_documents_name_is_there():
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        for named in re.findall(
            r"`((?:app|docs|tests|migrations)/[\w./-]*\w)`", page.read_text(encoding="utf-8")
        ):
            assert (ROOT / named).exists(), f"{page.name} names {named}"
