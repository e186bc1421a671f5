"""YAML as go-yaml 2 reads it, and its bounds. The values were compared with go-yaml 2.4.0."""

from __future__ import annotations

import pytest

from app.envoy.go_yaml import (
    MAX_ALIASED,
    MAX_DEPTH,
    GoYamlError,
    Items,
    Node,
    Pairs,
    Scalar,
    documents,
    is_null,
    named,
    text_of,
    value_of,
)


def one(text: str | bytes) -> Node:
    (found,) = documents(text)
    return found


def scalar(text: str) -> Scalar:
    found = one(text)
    assert isinstance(found, Scalar)
    return found


def fields(text: str) -> dict[str, Node]:
    found = one(text)
    assert isinstance(found, Pairs)
    return named(found, ["limit"])


def texts(text: str) -> dict[str, str]:
    return {name: text_of(node) for name, node in fields(text).items() if isinstance(node, Scalar)}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1_000", 1000),
        ("1_0_", 10),
        ("0x1F", 31),
        ("0XfF", 255),
        ("010", 8),
        ("0_7", 7),
        ("0o17", 15),
        ("0b101", 5),
        ("-0b11", -3),
        ("+7", 7),
        ("-0", 0),
        ("00", 0),
        ("08", 8.0),
        ("1e3", 1000.0),
        (".5", 0.5),
        ("5.", 5.0),
        ("-.inf", float("-inf")),
        ("9223372036854775807", 2**63 - 1),
        ("9223372036854775808", 2.0**63),
        ("0xFFFFFFFFFFFFFFFFFF", "0xFFFFFFFFFFFFFFFFFF"),
        ("9" * 5000, "9" * 5000),
        ("1e999", "1e999"),
        ("0b12", "0b12"),
        ("0x", "0x"),
        ("1:30", "1:30"),
        ("2020-01-01", "2020-01-01"),
        ("-_", "-_"),
        ("_1", "_1"),
        ("y", True),
        ("On", True),
        ("yes", True),
        ("tRue", "tRue"),
        ("NO", False),
        ("off", False),
        ("~", None),
        ("Null", None),
        ("nULL", "nULL"),
        ("'true'", "true"),
        ("'~'", "~"),
        ("''", ""),
        ("'1_000'", "1_000"),
        ("!!str 010", "010"),
        ("!!int '010'", 8),
        ("!!bool 'on'", True),
        ("!!float 5", 5.0),
        ("!!null", None),
        ("!own 5", "5"),
        ("!!binary Y2Fmw6k=", "café"),
        ("<<", "<<"),
        ("|\n  5\n", "5\n"),
    ],
    ids=lambda each: str(each)[:30],
)
def test_values(text: str, expected: bool | float | str | None):
    found = value_of(scalar(text))
    assert (type(found), found) == (type(expected), expected)


@pytest.mark.parametrize(
    "text",
    ["010", "0x10", "1_000", "true", "yes", "1.0", "1e3", "2020-01-01", "'null'", "!!str 5", "!!int 010"],
)
def test_text_is_as_it_is_spelled(text: str):
    assert text_of(scalar(text)) == text.rsplit(maxsplit=1)[-1].strip("'")


@pytest.mark.parametrize("text", ["---", "~", "null", "NULL", "!!null ''"])
def test_nulls_are_no_text(text: str):
    found = scalar(text)
    assert is_null(found)
    assert text_of(found) == ""


def test_the_last_of_equal_fields_counts_also_if_it_is_a_merged_one():
    assert texts("{a: 1, a: 2}") == {"a": "2"}
    assert texts("{<<: {a: 1, b: 1}, a: 2}") == {"a": "2", "b": "1"}
    assert texts("{a: 2, <<: {a: 1}}") == {"a": "1"}
    assert texts("{<<: [{a: 1}, {a: 2, b: 2}, {b: 3, c: 3}]}") == {"a": "1", "b": "2", "c": "3"}
    assert texts("{<<: {<<: {a: 1}, b: 2}}") == {"a": "1", "b": "2"}
    assert texts("{'<<': 1, 2: 3, true: 4}") == {"<<": "1", "2": "3", "true": "4"}


def test_a_further_structure_changes_what_it_names():
    found = fields("{<<: {limit: {unit: day, number: 1}, other: {x: 1}}, limit: {number: 2}, other: {y: 2}}")
    limit, other = found["limit"], found["other"]
    assert isinstance(limit, Pairs)
    assert isinstance(other, Pairs)
    assert [text_of(v) for v in named(limit).values() if isinstance(v, Scalar)] == ["day", "2"]
    assert list(named(other)) == ["y"]
    assert is_null(fields("{limit: {unit: day}, limit: }")["limit"])


def test_aliases_are_their_anchors_and_anchors_may_come_again():
    found = fields("{a: &x 1, b: *x, c: &x 2, d: *x}")
    assert [text_of(v) for v in found.values() if isinstance(v, Scalar)] == ["1", "1", "2", "2"]
    with pytest.raises(GoYamlError, match="has no anchor before it"):
        documents("a: &x 1\n---\nb: *x")


def test_documents():
    assert [is_null(each) for each in documents("---\n# none\n---\na: 1\n...\n---\nb\n")] == [
        True,
        False,
        False,
    ]
    assert documents("") == []
    for encoded in ("\ufeffa: é".encode(), "\ufeffa: é\r\n".encode("utf-16-le"), b"a:\t\xc3\xa9"):
        found = one(encoded)
        assert isinstance(found, Pairs)
        assert [text_of(v) for v in named(found).values() if isinstance(v, Scalar)] == ["é"]


@pytest.mark.parametrize(
    "text", ["!!int five", "!!int 1.5", "!!int true", "!!bool 1", "!!float x", "!!null x"]
)
def test_tags_must_fit(text: str):
    with pytest.raises(GoYamlError, match="with the tag !!"):
        value_of(scalar(text))


def bomb(levels: int, width: int) -> str:
    lists = [f"  - &a{n} [{', '.join([f'*a{n - 1}'] * width)}]" for n in range(1, levels)]
    return "\n".join(["all:", f"  - &a0 [{', '.join('x' * width)}]", *lists])


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (bomb(10, 10), f"its aliases expand to more than {MAX_ALIASED:,} characters"),
        (bomb(250, 2), "its aliases expand to more than"),
        ("a: &a {k: v}\nb: [" + "*a, " * (MAX_ALIASED // 50 + 1) + "]", "its aliases expand to more than"),
        (
            "\n".join(["- &a0 x", *(f"- &a{n} [*a{n - 1}]" for n in range(1, 400))]),
            f"more than {MAX_DEPTH} deep",
        ),
        (f"a: &a {'x' * 100_000}\nb: [{'*a, ' * 50}]", "its aliases expand to more than"),
        ("[" * 200_000, f"more than {MAX_DEPTH} deep"),
        ("{a: " * 200_000, f"more than {MAX_DEPTH} deep"),
        ("- " * 20_000, f"more than {MAX_DEPTH} deep"),
        ("a: &a {b: *a}", "the alias in line 1 is part of its own anchor"),
        ("a: &a\n  <<: *a", "the alias in line 2 is part of its own anchor"),
    ],
    ids=[
        "lists",
        "doubling",
        "many",
        "chain",
        "long text",
        "flow",
        "flow mappings",
        "block",
        "recursion",
        "merge",
    ],
)
def test_what_is_too_much_is_refused(text: str, fault: str):
    with pytest.raises(GoYamlError, match=fault):
        documents(text)


def test_many_aliases_of_a_large_file_are_no_bomb():
    made = "\n".join(["- &a {k: v, l: {m: n}}", *["- {<<: *a, k: w}"] * 20_000])
    assert isinstance(one(made), Items)
