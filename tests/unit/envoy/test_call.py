"""The message of a gRPC call, in parts as they may arrive."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.envoy.call import MessageReader, RefusedCallError, StatusCode, timeout_s


def read(sent: bytes, cuts: list[int]) -> bytes:
    """The message in these bytes, cut at these places."""
    reader = MessageReader()
    places = sorted({0, len(sent), *(cut % (len(sent) + 1) for cut in cuts)})
    for start, end in pairwise(places):
        reader.feed(sent[start:end])
    return reader.message()


CUTS = st.lists(st.integers(0, 2_000), max_size=20)


@given(st.binary(max_size=1_000), CUTS)
def test_message_is_the_same_wherever_it_is_split(message: bytes, cuts: list[int]):
    assert read(b"\0" + len(message).to_bytes(4, "big") + message, cuts) == message


@given(st.binary(max_size=300), CUTS, st.integers(1, 300))
def test_incomplete_and_further_messages_are_refused(message: bytes, cuts: list[int], cut: int):
    sent = b"\0" + len(message).to_bytes(4, "big") + message
    for wrong in (sent[: max(len(sent) - cut, 0)], sent + b"\0" * cut):
        with pytest.raises(RefusedCallError) as caught:
            read(wrong, cuts)
        assert caught.value.code is StatusCode.INVALID_ARGUMENT


@given(st.binary(max_size=12).filter(lambda sent: not re.fullmatch(rb"[0-9]{1,8}[HMSmun]", sent)))
def test_wrong_timeout_is_refused(sent: bytes):
    with pytest.raises(RefusedCallError) as caught:
        timeout_s(sent)
    assert caught.value.code is StatusCode.INVALID_ARGUMENT
