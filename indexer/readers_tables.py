"""Rows of Parquet and CSV files, one at a time.

Comes in: a path or a text stream. Goes out: ``(place, row)``, where a row that cannot be read is an ``UnusableRow`` with the
reason. Does not know: which fields a row should have.
"""

from __future__ import annotations

import csv
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

import pyarrow as pa
import pyarrow.parquet as pq

from tdasearch.errors import CorpusError
from tdasearch.indexer.readers_rows import Rows, UnusableRow

_BATCH_ROWS = 256  # texts of 1 MB stay well within memory, and short ones read at full speed
_MAX_CELL_CHARACTERS = 2**31 - 1


def parquet_rows(path: Path) -> Rows:
    """Rows of a Parquet file, a few hundred in memory at a time.

    Args:
        path: The file.

    Yields:
        The row's number from 1 and its fields, or the reason why they cannot be read.

    Raises:
        CorpusError: If the file is no Parquet, is damaged, or has two columns of one name.
    """
    try:
        with pq.ParquetFile(path) as file:
            _check_names(file.schema_arrow.names)
            number = itertools.count(1)
            for batch in file.iter_batches(batch_size=_BATCH_ROWS):
                for row in _batch_rows(batch):
                    yield next(number), row
    except (pa.ArrowException, OSError) as error:
        raise CorpusError(f"expected a Parquet file, but it cannot be read: {error}: write it again") from error


def csv_rows(stream: TextIO, *, delimiter: str) -> Rows:
    """Rows of a CSV file with a header: comma or tab, cells quoted with ``"`` where they hold a line's end or a quote.

    An empty cell is null, as CSV cannot tell it from a missing one. Every other value is text.

    Args:
        stream: The file, opened with ``newline=""`` and ``errors="surrogateescape"``.
        delimiter: Between cells.

    Yields:
        The line where the row begins (from 1, the header's) and its fields, or the reason why they cannot be read.

    Raises:
        CorpusError: If there is no header, or it names two columns alike.
    """  # noqa: DOC201 (the bare return ends the rows)
    if csv.field_size_limit() < _MAX_CELL_CHARACTERS:
        csv.field_size_limit(_MAX_CELL_CHARACTERS)  # a setting of the whole process; 131,072 characters without it
    reader = csv.reader(stream, delimiter=delimiter, strict=True)
    try:
        header = next(reader, [])
    except csv.Error as error:
        raise CorpusError(f"expected a header of column names in the first line, found no CSV: {error}") from error
    if not header:
        raise CorpusError("expected a header of column names in the first line, found none: add one")
    _check_names(header)
    while True:
        line = reader.line_num + 1
        try:
            cells = next(reader, None)
        except csv.Error as error:
            yield line, UnusableRow(f"no CSV in lines {line} to {reader.line_num}: {error}")
            continue
        if cells is None:
            return
        if len(cells) == len(header):
            yield line, {name: cell or None for name, cell in zip(header, cells, strict=True)}
        elif cells:
            yield line, UnusableRow(f"expected {len(header)} cells as in the header, found {len(cells)}")


def _batch_rows(batch: pa.RecordBatch) -> list[object]:
    try:
        return list(batch.to_pylist())
    except UnicodeDecodeError:  # a text column may hold any bytes: find the rows that do
        return [_single_row(batch.slice(place, 1)) for place in range(batch.num_rows)]


def _single_row(batch: pa.RecordBatch) -> object:
    try:
        return batch.to_pylist()[0]
    except UnicodeDecodeError as error:
        return UnusableRow(f"byte 0x{error.object[error.start]:02x} of a text column is no UTF-8")


def _check_names(names: Sequence[str]) -> None:
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise CorpusError(f"expected columns of different names, found two named {repeated!r}: rename one")
