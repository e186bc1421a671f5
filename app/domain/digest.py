"""Hashes of producer ids: a keyed digest, spread by mmh3 over the bytes that give an id's cells."""

from __future__ import annotations

import re
from hashlib import blake2b, sha256
from typing import Final

import mmh3

DECIMAL: Final = re.compile("0|-?[1-9][0-9]{0,18}")
INT64: Final = range(-(2**63), 2**63)
SEEDS: Final = (0x51A7E001, 0x51A7E002)


def as_id(text: str) -> int | str:
    """The id in a text: a signed 64-bit integer if the text is its canonical decimal, else the text.

    >>> as_id("4711"), as_id("-1"), as_id("007"), as_id("9223372036854775808")
    (4711, -1, '007', '9223372036854775808')
    """
    return number if DECIMAL.fullmatch(text) and (number := int(text)) in INT64 else text


def secret_of(text: str) -> bytes:
    """Parse the deployment secret from a setting.

    Raises:
        ValueError: the text is not a secret.
    """
    if not re.fullmatch(r"[0-9a-fA-F]{64}", text):
        raise ValueError("must be 32 bytes, written as 64 hexadecimal digits")
    return bytes.fromhex(text)


def digest(secret: bytes, principal: str, producer_id: int | str) -> bytes:
    """The digest of a principal's id: 8 bytes of BLAKE2b, keyed with the deployment secret (32 bytes).

    It covers principal, 0x00, kind and id. The key prevents crafted collisions, which Murmur alone allows
    under any seed. A collision for one principal is not one for another.
    """
    kind = f"i{producer_id}" if isinstance(producer_id, int) else f"s{producer_id}"
    return blake2b(f"{principal}\0{kind}".encode(), digest_size=8, key=secret).digest()


def spread(digested: bytes) -> bytes:
    """Spread a digest over 32 bytes (eight little-endian words) by mmh3 (x64, 128 bits) with two seeds."""
    return mmh3.mmh3_x64_128_digest(digested, SEEDS[0]) + mmh3.mmh3_x64_128_digest(digested, SEEDS[1])


def fingerprint(secret: bytes) -> str:
    """A hash that identifies a secret; safe to store and show."""
    return sha256(b"quotagate" + secret).hexdigest()
