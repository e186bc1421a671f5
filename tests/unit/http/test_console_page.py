"""The console's page: its foreign files are those of the package, and each fault of a store has a remedy."""

from __future__ import annotations

import re
from hashlib import sha256
from pathlib import Path

import app
from app.http.console import FOLDER, kept
from app.store import redis

APP = Path(app.__file__).parent


def test_foreign_files_are_those_that_their_page_names() -> None:
    folder = FOLDER / "uplot"
    named = dict(re.findall(r"`([\w.]+)` \| `([0-9a-f]{64})`", (folder / "README.md").read_text()))
    found = {each.name: sha256(each.read_bytes()).hexdigest() for each in folder.iterdir()}
    del found["README.md"]
    assert found == named
    assert "MIT" in (folder / "LICENSE").read_text()


def test_page_has_everything_in_it() -> None:
    page = kept().body.decode()
    assert "{{" not in page
    assert page.count("<script>") == page.count("</script>") == 2
    assert "(v1.6.32)" in page


def test_each_fault_of_a_store_has_a_remedy() -> None:
    script = (FOLDER / "overview.js").read_text()
    block = script.partition("const REMEDIES = {")[2].partition("};")[0]
    remedies = set(re.findall(r"^  (\w+): ", block, re.MULTILINE))
    sources = [
        each.read_text() for folder in ("store", "admission") for each in APP.joinpath(folder).rglob("*.py")
    ]
    raised = {word for text in sources for word in re.findall(r"\b(?:StoreError|Fault)\(\s*\"(\w+)\"", text)}
    known = raised | {word for _, word in redis._BY_TYPE} | {*redis._BY_TEXT.values()}
    assert known >= {"connection", "full", "disk_full"}
    assert known - remedies <= {"contention"}, (
        "contention is of the record of volumes, and no state of a store"
    )
    assert remedies <= known
