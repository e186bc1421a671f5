"""Text of an answer cannot steer a terminal, hide, or change its direction, in any format of output."""

from __future__ import annotations

import json
import unicodedata
from typing import Final

import yaml
from hypothesis import given
from hypothesis import strategies as st

from app.run.commands import show
from app.terminal import plain

HOSTILE: Final = "\x1b]0;title\x07\x7f\x85\x9b31m\u061c\u200b\u200f\u2028\u202e\u2066\u2069\ufeff\U000e0041"
DOCUMENT: Final = {HOSTILE: [{"reason": f"a{HOSTILE}b\nc", "limit": 5}], "plain": "ü 日本 🙂"}
UNSEEN: Final = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Unicode's categories of characters that are not seen: controls, formats, surrogates, line separators."""


def assert_safe(text: str) -> None:
    assert not [
        hex(ord(each)) for each in text if each != "\n" and unicodedata.category(each) in UNSEEN - {"Cf"}
    ]
    assert not set(text) & set(HOSTILE) - set("]0;titlem31A")


@given(st.recursive(st.text() | st.none(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_json_and_yaml_read_back_the_same(document: object):
    for written in (show.as_json(document), show.as_yaml(document)):
        assert_safe(written)
    assert json.loads(show.as_json(document)) == document
    assert yaml.safe_load(show.as_yaml(document)) == document


def test_hostile_text_is_escaped_and_other_text_is_not():
    for written in (show.as_json(DOCUMENT), show.as_yaml(DOCUMENT), plain(HOSTILE)):
        assert_safe(written)
    assert "日本 🙂" in show.as_json(DOCUMENT)
    assert "日本 🙂" in show.as_yaml(DOCUMENT)
    assert json.loads(show.as_json(DOCUMENT)) == DOCUMENT
    assert yaml.safe_load(show.as_yaml(DOCUMENT)) == DOCUMENT
