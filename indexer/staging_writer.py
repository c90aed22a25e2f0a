"""Writes staged windows, a row group per shard, and the list of rows that were not staged. Legend: T tokens."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from tdasearch.errors import StoreError
from tdasearch.indexer.readers_rows import json_text
from tdasearch.records import Document, SkippedRow, Window
from tdasearch.store.columns import FIXED_TYPES

WINDOW_SCHEMA = pa.schema([(name, kind) for name, kind in FIXED_TYPES if name not in ("loss", "self_influence")])
"""Columns of a staged window, in the order of the document table's; loss, self_influence and code come with the gradients."""


class StagingWriter:
    """A context in which a corpus is staged; what is not committed in it leaves no ``windows.parquet``.

    Args:
        folder: Where to write, made if missing; an earlier staging in it is removed.
        shard_documents: Documents in a shard.
        first_shard: Number of the first shard.

    Attributes:
        windows_path: The windows, there once committed.
        skipped_path: JSON lines of ``origin`` and ``reason``, there in any case.
        num_shards: Shards written.
        num_documents: Documents added.
        num_windows: Their windows.
        num_tokens: Tokens in the windows.

    Raises:
        StoreError: If the folder cannot be written.
    """

    def __init__(self, folder: Path, *, shard_documents: int, first_shard: int) -> None:
        self.windows_path = folder / "windows.parquet"
        self.skipped_path = folder / "skipped.jsonl"
        self.num_shards = self.num_documents = self.num_windows = self.num_tokens = 0
        self._first_shard = first_shard
        self._shard_documents = shard_documents
        self._temporary = folder / "windows.parquet.tmp"
        self._digest = xxhash.xxh3_128()
        self._rows: list[tuple[Any, ...]] = []
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.windows_path.unlink(missing_ok=True)
            self._skipped: TextIO = self.skipped_path.open("w", encoding="ascii")
            self._file = pq.ParquetWriter(self._temporary, WINDOW_SCHEMA, compression="zstd")
        except OSError as error:
            raise self._failed(error) from error

    def add(self, document: Document, text: str, windows: Sequence[Window], *, content_hash: str) -> None:
        """Add a document.

        Args:
            document: The document.
            text: Its whole text, which the windows' characters count in.
            windows: Its windows, at least one.
            content_hash: Hash of its content.

        Raises:
            StoreError: If the disk refuses.
        """  # noqa: DOC502
        metadata = json_text(document.metadata)
        for window in windows:
            ids = np.asarray(window.token_ids, dtype="<i4")
            targets = np.asarray(window.is_target, dtype=np.bool_)
            place = (window.number, window.num_windows, text[window.start : window.end], window.start, window.end)
            self._digest.update(json.dumps([document.document_id, *place, len(ids), metadata]).encode("ascii"))
            self._digest.update(ids.tobytes() + targets.tobytes())
            shard = self._first_shard + self.num_shards
            self._rows.append((document.document_id, *place, ids, targets, len(ids), shard, metadata, content_hash))
            self.num_tokens += len(ids)
        self.num_windows += len(windows)
        self.num_documents += 1
        if self.num_documents % self._shard_documents == 0:
            self._write_shard()

    def skip(self, row: SkippedRow) -> None:
        """List a row that is not staged.

        Args:
            row: The row.

        Raises:
            StoreError: If the disk refuses.
        """  # noqa: DOC502
        try:
            self._skipped.write(json.dumps({"origin": row.origin, "reason": row.reason}) + "\n")
        except OSError as error:
            raise self._failed(error) from error

    def commit(self) -> str:
        """Write what is left and put the file in its place.

        Returns:
            XXH3 of 128 bits over all rows in their order, in hexadecimal. The shards' size and numbers are not part of it.

        Raises:
            StoreError: If the disk refuses.
        """  # noqa: DOC502
        if self._rows:
            self._write_shard()
        try:
            self._file.close()
            self._skipped.close()
            os.replace(self._temporary, self.windows_path)
        except OSError as error:
            raise self._failed(error) from error
        return self._digest.hexdigest()

    def __enter__(self) -> StagingWriter:
        """Enter the context.

        Returns:
            The writer itself.
        """
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close the files and remove the temporary one."""
        for file in (self._file, self._skipped):
            with suppress(OSError):  # a full disk was reported already; closing only tries to write again
                file.close()
        self._temporary.unlink(missing_ok=True)

    def _write_shard(self) -> None:
        columns = [list(column) for column in zip(*self._rows, strict=True)]
        table = pa.table(dict(zip(WINDOW_SCHEMA.names, columns, strict=True)), schema=WINDOW_SCHEMA)
        try:
            self._file.write_table(table, row_group_size=table.num_rows)
        except OSError as error:
            raise self._failed(error) from error
        self._rows.clear()
        self.num_shards += 1

    def _failed(self, error: OSError) -> StoreError:
        folder = self.windows_path.parent
        return StoreError(f"cannot stage the corpus in {folder}: {error}: check the disk's free space and rights, and run again")
