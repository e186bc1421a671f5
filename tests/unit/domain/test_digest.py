"""The fingerprint of a secret, by which jobs recognise the secret of a log."""

from __future__ import annotations

from hashlib import sha256

from app.domain.digest import fingerprint


def test_fingerprint_belongs_to_one_secret_and_does_not_show_it():
    one, other = b"s" * 32, b"t" * 32
    assert fingerprint(one) == fingerprint(bytes(one)) != fingerprint(other)
    assert fingerprint(one) not in (one.hex(), sha256(one).hexdigest())
