"""Any bytes get a valid name, and different odd bytes get different ones."""

from __future__ import annotations

from urllib.parse import unquote_to_bytes

from hypothesis import example, given
from hypothesis import strategies as st

from app.domain.entity import check_name
from app.envoy.names import valid_name

ODD = st.binary(min_size=1, max_size=1_000) | st.lists(
    st.sampled_from([b"%", b"%FF", b"\xff", b"\x00", b"F", "\x85".encode(), b"\xed\xa0\x80", b"a" * 300]),
    min_size=1,
    max_size=9,
).map(b"".join)


def name_of(sent: bytes) -> str:
    name = valid_name(sent.decode(errors="surrogateescape"))
    assert name is not None
    return name


@given(ODD)
@example(b"\xff" * 171)
@example(b"\xed\xb3\xbf")
def test_any_bytes_get_a_valid_name(sent: bytes):
    name = name_of(sent)
    assert check_name(name) is None
    if check_name(sent.decode(errors="surrogateescape")) is None:
        assert name == sent.decode()


@given(ODD, ODD)
@example(b"\xff", b"\xff\xff")
@example(b"%\xff", b"%25\xff")
@example(b"\xc2\x85", b"\x85")
def test_different_odd_bytes_get_different_names(one: bytes, other: bytes):
    odd = [sent for sent in (one, other) if check_name(sent.decode(errors="surrogateescape")) is not None]
    assert len({name_of(sent) for sent in odd}) == len(set(odd))


@given(ODD.filter(lambda sent: len(sent) < 171))
def test_a_spelled_name_says_which_bytes_it_is_for(sent: bytes):
    if check_name(sent.decode(errors="surrogateescape")) is not None:
        assert unquote_to_bytes(name_of(sent)) == sent


def test_an_absent_or_empty_name_stays_so():
    assert valid_name(None) is None
    assert valid_name("") == ""
