"""The columns of the table of documents: their names and types, and what a shard must be to enter it.

In: metadata fields, Arrow tables. Out: column names, the table's schema, checked shards. This module knows no database.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

METADATA_TYPES = (pa.bool_(), pa.int64(), pa.float64(), pa.string())
FIXED_TYPES: tuple[tuple[str, pa.DataType], ...] = (
    ("document_id", pa.string()),
    ("window", pa.int32()),
    ("num_windows", pa.int32()),
    ("text", pa.string()),
    ("start", pa.int64()),
    ("end", pa.int64()),
    ("token_ids", pa.list_(pa.int32())),
    ("is_target", pa.list_(pa.bool_())),
    ("num_tokens", pa.int32()),
    ("loss", pa.float64()),
    ("self_influence", pa.float64()),
    ("shard", pa.int32()),
    ("metadata", pa.string()),
    ("content_hash", pa.string()),
)
FIXED_COLUMNS = (*(name for name, _ in FIXED_TYPES), "code")
RowIds = npt.NDArray[np.int64]


def table_schema(code_bytes: int, metadata_columns: pa.Schema) -> pa.Schema:
    """The table's columns.

    Args:
        code_bytes: Bytes of a code.
        metadata_columns: One column a metadata field, named by ``column_names``.

    Returns:
        The fixed columns, none of which may be null, then those of the metadata.

    Raises:
        ValueError: A metadata column has another type than bool, int64, double or string, or its name is taken.
    """  # noqa: DOC502 (check_metadata_columns raises it)
    check_metadata_columns(metadata_columns, taken=FIXED_COLUMNS)
    fixed = [pa.field(name, kind, nullable=False) for name, kind in (*FIXED_TYPES, ("code", pa.binary(code_bytes)))]
    return pa.schema([*fixed, *(pa.field(field.name, field.type) for field in metadata_columns)])


def column_names(fields: Iterable[str], *, existing: Mapping[str, str] | None = None) -> dict[str, str]:
    """Name the SQL column of each metadata field.

    A column has its field's name, except that SQL compares names without regard to case and Lance refuses some: a name that is
    empty, starts with an underscore, or equals a fixed column or an earlier field in any case gets ``metadata_`` before it (and
    ``_2``, ``_3`` ... after it, if even that is taken); a dot, a backquote or a control character becomes an underscore.

    Args:
        fields: Names of metadata fields, in the order of the columns.
        existing: Names given before, which stay as they are.

    Returns:
        The column of each field, the existing ones first.
    """
    columns = dict(existing or {})
    taken = {name.lower() for name in (*FIXED_COLUMNS, *columns.values())}
    for field in fields:
        if field in columns:
            continue
        name = "".join("_" if letter in ".`" or not letter.isprintable() else letter for letter in field)
        if not name or name.startswith("_") or name.lower() in taken:
            name = f"metadata_{name}"
        candidate, number = name, 1
        while candidate.lower() in taken:
            number += 1
            candidate = f"{name}_{number}"
        taken.add(candidate.lower())
        columns[field] = candidate
    return columns


def code_matrix(column: pa.ChunkedArray) -> npt.NDArray[np.uint8]:
    """The ``code`` column as a matrix.

    Args:
        column: N values of a fixed-size binary type of B bytes, none of them null.

    Returns:
        uint8 [N, B]; read-only where it shares the column's memory.
    """
    width: int = column.type.byte_width
    chunks = [
        np.frombuffer(chunk.buffers()[1], np.uint8, count=len(chunk) * width, offset=chunk.offset * width).reshape(-1, width)
        for chunk in column.chunks
        if len(chunk)
    ]
    if not chunks:
        return np.empty((0, width), dtype=np.uint8)
    return chunks[0] if len(chunks) == 1 else np.concatenate(chunks)


def checked_shard(rows: pa.Table, schema: pa.Schema) -> tuple[pa.Table, int]:
    """Bring a shard to the table's columns and types.

    Args:
        rows: The windows of one shard's documents; metadata columns that are left out become null.
        schema: The table's.

    Returns:
        The rows and their shard number.

    Raises:
        ValueError: The rows do not fit the table or are not one shard's.
    """
    unknown = sorted(set(rows.column_names) - set(schema.names))
    missing = [name for name in FIXED_COLUMNS if name not in rows.column_names]
    if unknown or missing or not rows.num_rows:
        found = f"missing {missing}, unknown {unknown}, {rows.num_rows} rows"
        raise ValueError(f"shard: expected rows with the columns {', '.join(schema.names)}; found {found}")
    present = set(rows.column_names)
    num = rows.num_rows
    columns = [rows[field.name].cast(field.type) if field.name in present else pa.nulls(num, field.type) for field in schema]
    table = pa.table(columns, schema=schema)
    for name in FIXED_COLUMNS:
        if table[name].null_count:
            raise ValueError(f"shard: column {name} has {table[name].null_count} nulls; every row needs a value")
    for name in ("loss", "self_influence"):
        if not pc.all(pc.is_finite(table[name])).as_py():
            raise ValueError(f"shard: column {name} has values that are not finite; leave such rows out")
    shards = pc.unique(table["shard"]).to_pylist()
    if len(shards) != 1 or shards[0] < 0:
        raise ValueError(f"shard: expected rows of one shard, numbered from 0; found {shards[:5]}")
    ids = table["document_id"].combine_chunks()
    windows = table["window"].to_numpy()
    starts = np.ones(len(ids), dtype=bool)
    starts[1:] = pc.not_equal(ids[1:], ids[:-1]).to_numpy(zero_copy_only=False)
    if int(starts.sum()) != len(pc.unique(ids)) or not (starts[1:] | (windows[1:] > windows[:-1])).all():
        raise ValueError(f"shard {shards[0]}: the windows of a document must be neighbours, ascending, each once")
    return table, int(shards[0])


def check_metadata_columns(columns: pa.Schema, *, taken: Iterable[str]) -> None:
    """Refuse metadata columns that the table cannot take.

    Args:
        columns: The columns.
        taken: Names of columns that are there.

    Raises:
        ValueError: Another type than bool, int64, double or string, or a name that is taken.
    """
    names = {name.lower() for name in taken}
    for field in columns:
        if field.type not in METADATA_TYPES:
            raise ValueError(f"metadata column {field.name!r}: expected bool, int64, double or string; found {field.type}")
        if field.name.lower() in names:
            raise ValueError(f"metadata column {field.name!r}: the name is taken (case does not count); use column_names()")
        names.add(field.name.lower())
