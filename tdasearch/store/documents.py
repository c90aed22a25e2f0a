"""The table of documents: the source of truth of an index. One row is one window of a document, one commit is one shard.

In: Arrow tables of a shard. Out: snapshots, each pinned at one version, so that an answer never mixes two states. Rows are named
by Lance's row ids (int64, ascending in the order of the rows). This module knows nothing of models, codes or search.

LanceDB facts that this rests on (0.40): an append is one commit and survives ``kill -9`` whole or not at all; a scan returns rows
in the order of their ids; ``take_row_ids`` sorts, drops repeated and unknown ids; a filter's text after a ``;`` is ignored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import lancedb
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from lancedb.index import FTS
from lancedb.query import MatchQuery

from tdasearch.errors import StoreError, UsageError
from tdasearch.store.columns import (
    FIXED_COLUMNS,
    FIXED_TYPES,
    RowIds,
    check_metadata_columns,
    checked_shard,
    column_names,
    table_schema,
)

__all__ = ["DocumentTable", "Snapshot", "column_names", "documents_path"]

TABLE_NAME = "documents"
ROW_ID = "_rowid"
_SCAN_ROWS = 8192
_INDEX_CACHE_BYTES = 128 << 20
_METADATA_CACHE_BYTES = 16 << 20
_TEXT_INDEX_MIB = 256  # Lance writes what exceeds it to disk and merges


def documents_path(index_path: Path) -> Path:
    """Where an index keeps its table.

    Args:
        index_path: The index's folder.

    Returns:
        The table's folder.
    """
    return index_path / f"{TABLE_NAME}.lance"


class Snapshot:
    """The table as it was at one version; what is written later is not seen. Safe to share between threads.

    Attributes:
        version: The table's version.
        path: The table's folder.
    """

    def __init__(self, table: Any, path: Path) -> None:
        """Pin a handle that nobody else uses.

        Args:
            table: A LanceDB table.
            path: Its folder, for messages.
        """
        self._table = table
        self.path = path
        self.version: int = table.version
        table.checkout(self.version)

    @cached_property
    def schema(self) -> pa.Schema:
        """The columns of this version."""
        schema: pa.Schema = self._table.schema
        return schema

    @cached_property
    def num_rows(self) -> int:
        """Rows: windows, not documents."""
        return int(self._table.count_rows())

    @cached_property
    def num_documents(self) -> int:
        """Documents; one pass over the ids (the windows of a document are neighbours)."""
        return sum(1 for _ in _documents(self))

    def row_ids(self, where: str | None = None) -> RowIds:
        """Find rows by a filter.

        Args:
            where: An SQL condition on the columns; None for all rows.

        Returns:
            int64, ascending; empty if no row matches.

        Raises:
            UsageError: The condition cannot be read or evaluated.
        """  # noqa: DOC502 (_reading makes it)
        found = [batch[ROW_ID].to_numpy() for batch in self.batches([], where=where, batch_rows=_SCAN_ROWS)]
        return np.concatenate(found).astype(np.int64, copy=False) if found else np.empty(0, dtype=np.int64)

    def take(self, row_ids: npt.ArrayLike, columns: Sequence[str]) -> pa.Table:
        """Read rows by their ids.

        Args:
            row_ids: [N] row ids in any order, repeated ones allowed.
            columns: Columns to read.

        Returns:
            N rows in the order of ``row_ids``, with ``columns`` in their order.

        Raises:
            ValueError: A row id is not in this version.
        """
        ids = np.asarray(row_ids, dtype=np.int64).reshape(-1)
        unique, inverse = np.unique(ids, return_inverse=True)
        self._check_columns(columns)
        found = self.schema.empty_table().append_column(ROW_ID, pa.array([], pa.uint64()))
        if unique.size and unique[0] >= 0:
            wanted = [name for name in columns if name != ROW_ID]
            with _reading(self.path):
                found = self._table.take_row_ids(unique.tolist()).with_row_id().select(wanted).to_arrow()
        found_ids = found[ROW_ID].to_numpy().astype(np.int64)
        order = np.argsort(found_ids)
        if not np.array_equal(found_ids[order], unique):
            missing = np.setdiff1d(unique, found_ids)
            raise ValueError(f"{self.path}: version {self.version} has no row {missing[0]} ({missing.size} unknown row ids)")
        return found.select(list(columns)).take(pa.array(order[inverse]))

    def batches(self, columns: Sequence[str], where: str | None = None, batch_rows: int = 1024) -> Iterator[pa.Table]:
        """Read rows in the order of their ids, a batch at a time.

        Args:
            columns: Columns to read; ``_rowid`` is always added, as the last.
            where: An SQL condition on the columns; None for all rows.
            batch_rows: Most rows in a batch; one may have fewer.

        Yields:
            Tables of at least one row.

        Raises:
            StoreError: The table cannot be read.
        """
        self._check_columns(columns)
        query = self._table.search().with_row_id(True)
        if where is not None:
            # The newline ends a comment, the brackets make text after a semicolon an error; Lance would ignore it.
            query = query.where(f"({where}\n)")
        names = [*(name for name in columns if name != ROW_ID), ROW_ID]
        last = -1
        with _reading(self.path, where=where, schema=self.schema):
            for batch in query.select(names).to_batches(batch_size=batch_rows):
                if not batch.num_rows:
                    continue
                ids = batch.column(ROW_ID)
                if ids[0].as_py() <= last:
                    raise StoreError(f"{self.path}: rows came out of order after row {last}; check the version of lancedb")
                last = ids[-1].as_py()
                yield pa.Table.from_batches([batch]).select(names)

    def text_search(self, text: str, k: int, *, columns: Sequence[str], where: str | None = None) -> pa.Table:
        """Find rows by words: BM25 over ``text``, from the index of ``DocumentTable.index_text`` and by a scan of later rows.

        Args:
            text: The words, in no query language.
            k: Most rows.
            columns: Columns to read; ``_score`` is always added, as the last.
            where: An SQL condition on the columns; None for all rows.

        Returns:
            At most k rows, by falling ``_score``; rows without any of the words are not found.

        Raises:
            UsageError: The condition cannot be read or evaluated.
        """  # noqa: DOC502 (_reading makes it)
        self._check_columns(columns)
        words = MatchQuery(text, "text")  # type: ignore[call-arg]  # its defaults are hidden from mypy
        query = self._table.search(words, query_type="fts").limit(k)
        if where is not None:
            query = query.where(f"({where}\n)", prefilter=True)
        with _reading(self.path, where=where, schema=self.schema):
            return query.select([*columns, "_score"]).to_arrow().select([*columns, "_score"])

    def _check_columns(self, columns: Sequence[str]) -> None:
        unknown = [name for name in columns if name != ROW_ID and name not in self.schema.names]
        if unknown:
            raise ValueError(f"{self.path}: no column {unknown[0]!r}; version {self.version} has {', '.join(self.schema.names)}")


class DocumentTable:
    """The table as its one writer sees it (take ``lock.writer_lock`` first) and the source of snapshots.

    Attributes:
        path: The table's folder.
    """

    def __init__(self, table: Any, path: Path) -> None:
        """Wrap a handle; use ``create`` or ``open``.

        Args:
            table: A LanceDB table.
            path: Its folder, for messages.
        """
        self._table = table
        self.path = path
        self._shards: set[int] = set()
        self._shards_version = -1

    @classmethod
    def create(cls, path: Path, *, code_bytes: int, metadata_columns: pa.Schema) -> DocumentTable:
        """Create an empty table.

        Args:
            path: The table's folder, ``<index>/documents.lance``; see ``documents_path``.
            code_bytes: Bytes of a code.
            metadata_columns: One column a metadata field, named by ``column_names``; bool, int64, double or string.

        Returns:
            The table.

        Raises:
            StoreError: There is a table already, or it cannot be written.
        """
        schema = table_schema(code_bytes, metadata_columns)
        if path.exists():
            raise StoreError(f"{path}: exists already; open it, or choose another path for the index")
        with _writing(path, "create the table"):
            return cls(_connect(path).create_table(_name(path), schema=schema), path)

    @classmethod
    def open(cls, path: Path) -> DocumentTable:
        """Open a table.

        Args:
            path: The table's folder.

        Returns:
            The table.

        Raises:
            StoreError: There is none, it is damaged, or it is not a table of documents.
        """
        if not path.is_dir():
            raise StoreError(f"{path}: expected the table of an index, found none; check the path, or build the index")
        with _reading(path):
            table = _connect(path).open_table(_name(path))
        fixed = list(zip(table.schema.names, table.schema.types, strict=True))[: len(FIXED_COLUMNS)]
        if tuple(fixed[:-1]) != FIXED_TYPES or fixed[-1][0] != "code" or not pa.types.is_fixed_size_binary(fixed[-1][1]):
            raise StoreError(f"{path}: expected the columns {', '.join(FIXED_COLUMNS)}; found {', '.join(table.schema.names)}")
        return cls(table, path)

    @property
    def metadata_columns(self) -> pa.Schema:
        """The columns after the fixed ones, as of now."""
        self._table.checkout_latest()
        return pa.schema(list(self._table.schema)[len(FIXED_COLUMNS) :])

    def latest(self) -> Snapshot:
        """Pin the newest version.

        Returns:
            A snapshot with a handle of its own.
        """
        with _reading(self.path):
            return Snapshot(_connect(self.path).open_table(_name(self.path)), self.path)

    def committed_shards(self) -> set[int]:
        """Find the shards that are in the table: each is there whole.

        Returns:
            Their numbers.
        """
        self._table.checkout_latest()
        if self._shards_version != self._table.version:
            snapshot = self.latest()
            shards: set[int] = set()
            for batch in snapshot.batches(["shard"], batch_rows=_SCAN_ROWS):
                shards.update(pc.unique(batch["shard"]).to_pylist())
            self._shards, self._shards_version = shards, snapshot.version
        return set(self._shards)

    def known_contents(self, *, before_shard: int) -> Iterator[tuple[str, str]]:
        """Read which documents the shards below a number hold.

        Args:
            before_shard: The first shard that is left out.

        Yields:
            Each document's id and content hash, once.
        """
        yield from _documents(self.latest(), where=f"shard < {int(before_shard)}")

    def append_shard(self, rows: pa.Table) -> None:
        """Write a shard in one commit: after a crash it is there whole or not at all.

        Args:
            rows: The windows of one shard's documents: the fixed columns and any of the metadata columns (those left out are
                null), in any order. The windows of a document are neighbours.

        Raises:
            ValueError: The rows do not fit the table or are not of one shard.
            StoreError: The shard is in the table already, or it cannot be written (a full disk).
        """  # noqa: DOC502 (checked_shard raises the one)
        shards = self.committed_shards()
        shard_rows, shard = checked_shard(rows, self._table.schema)
        if shard in shards:
            raise StoreError(f"{self.path}: shard {shard} is in the table already; append what committed_shards() lacks")
        before = self._table.version
        with _writing(self.path, f"append shard {shard}"):
            self._table.add(shard_rows)
        if self._table.version == before + 1:  # no one else wrote: what is known of the shards stays true
            self._shards, self._shards_version = shards | {shard}, before + 1

    def add_metadata_columns(self, columns: pa.Schema) -> None:
        """Add columns for new metadata fields; they are null in the rows that are there.

        Args:
            columns: Columns named by ``column_names``; those that are there with the same type are left alone.

        Raises:
            ValueError: A name is taken by a column of another type.
            StoreError: The table cannot be written.
        """  # noqa: DOC502 (check_metadata_columns and _writing make them)
        present = {field.name: field.type for field in self.metadata_columns}
        new = pa.schema([pa.field(field.name, field.type) for field in columns if present.get(field.name) != field.type])
        check_metadata_columns(new, taken=self._table.schema.names)
        if len(new):
            with _writing(self.path, f"add the columns {', '.join(new.names)}"):
                self._table.add_columns(new)

    def index_text(self) -> None:
        """Index the words of all rows for ``Snapshot.text_search``, in one commit; call it after the last shard.

        Raises:
            StoreError: The table cannot be written.
        """  # noqa: DOC502 (_writing makes it)
        with _writing(self.path, "index the text"):
            self._table.checkout_latest()
            self._table.create_index("text", config=FTS(memory_limit=_TEXT_INDEX_MIB), replace=True)


def _documents(snapshot: Snapshot, *, where: str | None = None) -> Iterator[tuple[str, str]]:
    # Each document's id and content hash, once, in the order of the rows: the windows of a document are neighbours.
    previous: str | None = None
    for batch in snapshot.batches(["document_id", "content_hash"], where=where, batch_rows=_SCAN_ROWS):
        for document_id, content_hash in zip(batch["document_id"].to_pylist(), batch["content_hash"].to_pylist(), strict=True):
            if document_id != previous:
                yield document_id, content_hash
            previous = document_id


def _connect(path: Path) -> Any:
    return lancedb.connect(str(path.parent), session=_session())


@cache
def _session() -> lancedb.Session:
    # One for the process. Lance's own would keep 1 GB of manifests, each longer than the one before it (70 MB after 400 appends),
    # and 6 GB of indexes.
    return lancedb.Session(index_cache_size_bytes=_INDEX_CACHE_BYTES, metadata_cache_size_bytes=_METADATA_CACHE_BYTES)


def _name(path: Path) -> str:
    if path.suffix != ".lance":
        raise ValueError(f"{path}: expected a path ending in .lance")
    return path.stem


@contextmanager
def _reading(path: Path, *, where: str | None = None, schema: pa.Schema | None = None) -> Iterator[None]:
    # Lance's errors in our words: a filter that it cannot use is the user's to mend, the rest is the store's.
    try:
        yield
    except (ValueError, RuntimeError, OSError) as error:
        reason = str(error).split(", /")[0].split(" Valid fields are ")[0].strip()  # without the line of Lance's source
        if where is not None and schema is not None and (isinstance(error, ValueError) or "filter" in reason):
            columns = ", ".join(f"{field.name} ({field.type})" for field in schema if field.name != "code")
            raise UsageError(f"filter {where[:200]!r}: {reason}; expected an SQL condition on the columns {columns}") from error
        raise StoreError(f"{path}: the table cannot be read: {reason}; restore it, or build the index again") from error


@contextmanager
def _writing(path: Path, deed: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, RuntimeError, OSError) as error:
        reason = str(error).split(", /")[0].strip()
        advice = "what was committed before is untouched; check free space and permissions, then run again"
        raise StoreError(f"{path}: could not {deed}: {reason}; {advice}") from error
