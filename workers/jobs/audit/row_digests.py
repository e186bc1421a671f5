"""A digest of each row of the log, from all of its columns: equal rows have equal digests in any file.

A null counts like a column that an older file lacks. The digests of a batch's rows add up, so their sum
does not depend on how the rows are divided into files, nor on their order.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from workers.jobs.verdicts import flags, integers, valid

Digests = NDArray[np.uint64]

_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_FACTORS: Final = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS: Final = (np.uint64(30), np.uint64(27), np.uint64(31))
_KEY_VALUE: Final = pa.list_(pa.struct([("name", pa.string()), ("amount", pa.float64())]))
"""A map as a list, which Arrow can flatten."""


def row_digests(rows: pa.Table, key: bytes) -> Digests:
    """The digest of each row, by a secret key."""
    sums = np.zeros(rows.num_rows, np.uint64)
    for name in rows.schema.names:
        sums += _mixed(_digests(rows.column(name).combine_chunks(), key), _number(name.encode(), key))
    return _mixed(sums, _GOLDEN)


def _mixed(numbers: Digests, salt: np.uint64) -> Digests:
    """Numbers spread over 64 bits (SplitMix64); 0 stays 0, since it means null."""
    mixed = np.where(numbers != 0, numbers ^ salt, np.uint64(0))
    for shift, factor in zip(_SHIFTS, _FACTORS, strict=False):
        mixed = (mixed ^ (mixed >> shift)) * factor
    last: Digests = mixed ^ (mixed >> _SHIFTS[-1])
    return last


def _number(text: bytes, key: bytes) -> np.uint64:
    """A number for a text, not 0."""
    return np.uint64(int.from_bytes(blake2b(text, digest_size=8, key=key).digest(), "big") | 1)


def _digests(column: pa.Array, key: bytes) -> Digests:
    """A number for each value of a column; 0 for null."""
    type_ = column.type
    if pa.types.is_null(type_):
        return np.zeros(len(column), np.uint64)
    if pa.types.is_map(type_):
        column, type_ = column.cast(_KEY_VALUE), _KEY_VALUE
    if pa.types.is_list(type_):
        found = _of_lists(column, key)
    elif pa.types.is_struct(type_):
        found = np.full(len(column), _GOLDEN)
        for field, values in zip(type_, column.flatten(), strict=True):
            found += _mixed(_digests(values, key), _number(field.name.encode(), key))
    elif pa.types.is_string(type_) or pa.types.is_dictionary(type_):
        found = _of_texts(column, key)
    elif pa.types.is_floating(type_):
        found = np.from_dlpack(column.fill_null(0.0)).astype(np.float64).view(np.uint64) ^ _GOLDEN
    else:
        found = (flags(column) if pa.types.is_boolean(type_) else integers(column)).astype(np.int64)
        found = found.view(np.uint64) ^ _GOLDEN
    found[~valid(column)] = 0
    return found


def _of_texts(column: pa.Array, key: bytes) -> Digests:
    encoded = column if pa.types.is_dictionary(column.type) else column.dictionary_encode()
    numbers = [_number(text.encode(), key) for text in encoded.dictionary.cast(pa.string()).to_pylist()]
    return np.array([*numbers, 0], np.uint64)[integers(encoded.indices, -1)]


def _of_lists(column: pa.Array, key: bytes) -> Digests:
    """The sums of the values of each list, each mixed with its place, and of its length."""
    sizes = integers(pc.list_value_length(column))
    ends = np.cumsum(sizes)
    place = np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - sizes, sizes)
    salt = (place.astype(np.uint64) + np.uint64(1)) * _GOLDEN
    values = _mixed(_digests(column.flatten(), key) + salt, _GOLDEN)
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(values, dtype=np.uint64)])
    length = (sizes.astype(np.uint64) + np.uint64(1)) * _FACTORS[0]
    return _mixed(sums[ends] - sums[ends - sizes] + length, _GOLDEN)
