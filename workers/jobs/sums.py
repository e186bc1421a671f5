"""A table that adds up tables: rows with equal keys become one, whose values are sums, minima or maxima."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import pyarrow as pa

SPARE_ROWS: Final = 100_000
"""Tables are added up once they have so many rows more than their sum."""


class Sums:
    """Adds up tables of one schema.

    Args:
        values: how each column that is no key is added up: ``sum``, ``min`` or ``max``. A null is a key, too.
    """

    def __init__(self, schema: pa.Schema, values: Mapping[str, str]) -> None:
        self._schema, self._values = schema, dict(values)
        self._keys = [name for name in schema.names if name not in values]
        self._tables = [schema.empty_table()]
        self._rows = self._known = 0

    def add(self, table: pa.Table) -> None:
        """Add a table."""
        self._tables.append(table.select(self._schema.names).cast(self._schema))
        self._rows += table.num_rows
        if self._rows > 2 * self._known + SPARE_ROWS:
            self.table()

    def table(self) -> pa.Table:
        """The sum of all tables."""
        whole = pa.concat_tables(self._tables)
        found = whole.group_by(self._keys, use_threads=False).aggregate(list(self._values.items()))
        found = (
            found.rename_columns([*self._keys, *self._values]).select(self._schema.names).cast(self._schema)
        )
        self._tables, self._rows, self._known = [found], found.num_rows, found.num_rows
        return found
