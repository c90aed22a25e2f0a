"""Which SQL column each metadata field becomes, and the columns' values.

A row's metadata is kept exactly as JSON text; the columns exist to filter on. Legend: N windows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa

from tdasearch.errors import CorpusError
from tdasearch.indexer.readers_rows import json_text

MAX_FIELDS = 1000
_INT64 = range(-(2**63), 2**63)
_TYPES = {
    frozenset({"bool"}): pa.bool_(),
    frozenset({"int64"}): pa.int64(),
    frozenset({"double"}): pa.float64(),
    frozenset({"int64", "double"}): pa.float64(),
}


class MetadataSurvey:
    """The kinds of value that each metadata field was seen to hold, in the order in which fields were first seen."""

    def __init__(self) -> None:
        self._kinds: dict[str, set[str]] = {}

    def see(self, metadata: Mapping[str, Any]) -> None:
        """Take note of one document's metadata.

        Args:
            metadata: Plain values by field.

        Raises:
            CorpusError: If there are more than ``MAX_FIELDS`` fields by now.
        """
        for name, value in metadata.items():
            kinds = self._kinds.setdefault(name, set())
            if value is not None:
                kinds.add(_kind(value))
        if len(self._kinds) > MAX_FIELDS:
            raise CorpusError(
                f"expected at most {MAX_FIELDS} metadata fields, each of which becomes a column; found more, such as "
                f"{list(self._kinds)[-1]!r}: put fields whose names vary under one field, as an object"
            )

    def schema(self) -> pa.Schema:
        """Columns by field name.

        Returns:
            bool, int64, double (also for a mixture of whole and other numbers), else string.
        """
        return pa.schema([pa.field(name, _TYPES.get(frozenset(kinds), pa.string())) for name, kinds in self._kinds.items()])


def metadata_column(values: Iterable[Any], column: pa.Field) -> pa.Array:
    """One SQL column.

    Args:
        values: [N] plain values of one metadata field.
        column: Name and type: bool, int64, double or string.

    Returns:
        [N] the values. In a string column texts are as they are and other values are JSON.

    Raises:
        CorpusError: If a value is of another kind than the column, which an earlier corpus decided.
    """
    kinds = {kind for types, arrow in _TYPES.items() if arrow == column.type for kind in types}
    cells: list[Any] = []
    for value in values:
        if value is None:
            cells.append(None)
        elif kinds and _kind(value) in kinds:
            cells.append(float(value) if column.type == pa.float64() else value)  # Arrow refuses 2**53 + 1 as a double
        elif kinds:
            raise CorpusError(
                f"expected {column.type} in the column {column.name!r}, as in the index so far, found {json_text(value)}: "
                "mend the value, rename the field, or build a new index"
            )
        else:
            cells.append(value if isinstance(value, str) else json_text(value))
    return pa.array(cells, type=column.type)


def _kind(value: object) -> str:
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        return "int64" if value in _INT64 else "text"
    return "double" if isinstance(value, float) else "text"
