"""The names of keys in the store, made in this one place.

    qg1:{user=alice}:request_rate:user=alice,client-id=etl:sampled_rate.11.1000.cluster.0    a bucket
    qg1:{user=alice}:ask:HASH                                                                a kept answer
    qg1:probe                                                                                removed at once
    qg1:order                                                                                the last call
    qg1:birth                                                                                lost with all
    qg1:resets                                                                               the last reset
    BUCKET:reset                                                                             its last reset

A cluster puts keys into slots by their hash tags, and a call takes keys of one slot. There these differ:

    qg1:{N}:order                       the last call of one slot; N is the slot's tag (app.domain.slots)
    qg1:{ask:HASH}                      an answer kept for an ask without a principal
    qg1:{volumes}:..., qg1:{log}:...    elsewhere qg1:volumes:... and qg1:log:...
    qg1:{overview}:...                  elsewhere qg1:overview:...; the samples of the overview

Names are percent-encoded, so no name can end the hash tag, and hashed when longer than 128 bytes.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

from app.domain.entity import Entity
from app.domain.ladder import AppliedQuota
from app.domain.quota import Quota
from app.domain.slots import slot_tags

PREFIX: Final = "qg1"
"""Changes with the layout of the state, so that a new script never reads an old one's keys."""

PROBE_KEY: Final = f"{PREFIX}:probe".encode()
"""A node writes and removes it to test whether the store takes writes."""

ORDER_KEY: Final = f"{PREFIX}:order".encode()
"""The number of the last call that was logged."""

BIRTH_KEY: Final = f"{PREFIX}:birth".encode()
"""Random bytes, written when they are missing: if they change, the store lost its state.

There is one for all slots: on a cluster, nodes remember no ids, so they neither read it nor renew ids.
"""

RESETS_KEY: Final = f"{PREFIX}:resets".encode()
"""The number of the last reset of any bucket that nodes may remember."""

LONGEST_NAME: Final = 128

LONGEST_TTL_MS: Final = 400 * 86_400_000
"""The longest time to live of any key that counts or logs."""


def bucket_key(applied: AppliedQuota) -> bytes:
    """The key of the bucket that a quota charges."""
    quota = applied.quota
    return key_of(short(applied.owner), quota.key, short(applied.bucket), identity_of(quota)).encode()


def key_of(owner: str, quota: str, bucket: str, identity: str) -> str:
    """The text of the key of a bucket; owner and bucket are short."""
    return f"{PREFIX}:{{{owner}}}:{quota}:{bucket}:{identity}"


def identity_of(quota: Quota) -> str:
    """The fields of a quota whose change resets the bucket, and the epoch of the last such change."""
    return ".".join(map(str, (*quota.identity, quota.epoch)))


def reset_key(bucket: bytes) -> bytes:
    """The key of the number of a bucket's last reset."""
    return bucket + b":reset"


def order_key(slot: int) -> bytes:
    """The key of the number of the last logged call in one slot of a cluster.

    >>> order_key(0), order_key(12739)
    (b'qg1:{3560}:order', b'qg1:{26349}:order')
    """
    return slot_key(slot, "order")


def slot_key(slot: int, name: str) -> bytes:
    """The key of a value that each slot of a cluster has of its own."""
    return b"%b:{%b}:%b" % (PREFIX.encode(), slot_tags()[slot], name.encode())


def probe_key(slot: int) -> bytes:
    """The key of the probe in a slot of a cluster."""
    return slot_key(slot, "probe")


def resets_key(slot: int) -> bytes:
    """The key of the number of the last reset of any bucket in a slot of a cluster."""
    return slot_key(slot, "resets")


def shared_key(name: str, *, clustered: bool) -> str:
    """The key of a value that a store has once; on a cluster, the first part of its name is a tag.

    >>> shared_key("log:nodes", clustered=False), shared_key("log:nodes", clustered=True)
    ('qg1:log:nodes', 'qg1:{log}:nodes')
    """
    if not clustered:
        return f"{PREFIX}:{name}"
    tag, colon, rest = name.partition(":")
    return f"{PREFIX}:{{{tag}}}{colon}{rest}"


def retry_key(principal: str | None, ask: bytes, *, clustered: bool = False) -> bytes:
    """The key of the answer kept for an ask with an id, by a hash of the ask and its sender.

    Args:
        clustered: give each ask without a principal a tag of its own, so that they do not share a slot.
    """
    if clustered and principal is None:
        return f"{PREFIX}:{{ask:{ask.hex()}}}".encode()
    owner = "" if principal is None else str(Entity.of(user=principal))
    return f"{PREFIX}:{{{short(owner) or '-'}}}:ask:{ask.hex()}".encode()


def short(name: str) -> str:
    """A name, or its hash if it is long.

    >>> short("user=alice"), len(short("user=" + "a" * 200))
    ('user=alice', 65)
    """
    if len(name) <= LONGEST_NAME:
        return name
    return "#" + blake2b(name.encode(), digest_size=32).hexdigest()
