"""The document ids of a corpus, on disk: memory stays flat however many there are."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from tdasearch.errors import StoreError


class Claim(NamedTuple):
    """Who has an id.

    Attributes:
        content: Hash of the document's content.
        origin: Where the document was read, or "the index" if it is there already.
    """

    content: str
    origin: str


class ClaimedIds:
    """Which document has which id; a context that removes its file in the end.

    Args:
        path: Of a temporary file, replaced if it is there.
        known: Id and content hash of the documents that the index has already.

    Raises:
        StoreError: If the file cannot be written.
    """

    def __init__(self, path: Path, *, known: Iterable[tuple[str, str]] = ()) -> None:
        self._path = path
        path.unlink(missing_ok=True)
        self._connection = sqlite3.connect(path, isolation_level=None)
        try:
            # Nothing is to survive a crash, so no journal and no sync; one transaction that is never committed.
            self._connection.execute("PRAGMA journal_mode = OFF")
            self._connection.execute("PRAGMA synchronous = OFF")
            self._connection.execute("CREATE TABLE ids (id TEXT PRIMARY KEY, content TEXT, origin TEXT) WITHOUT ROWID")
            self._connection.execute("BEGIN")
            self._connection.executemany("INSERT OR IGNORE INTO ids VALUES (?, ?, 'the index')", known)
        except sqlite3.Error as error:
            self._connection.close()
            path.unlink(missing_ok=True)
            raise self._failed(error) from error

    def claim(self, document_id: str, claim: Claim) -> Claim | None:
        """Take an id for a document.

        Args:
            document_id: The id.
            claim: Who wants it.

        Returns:
            None if it was free and is taken now, else who has it.

        Raises:
            StoreError: If the file cannot be written.
        """  # noqa: DOC501, DOC502 (_failed makes it)
        try:
            taken = self._connection.execute("INSERT OR IGNORE INTO ids VALUES (?, ?, ?)", (document_id, *claim)).rowcount
            if taken:
                return None
            row = self._connection.execute("SELECT content, origin FROM ids WHERE id = ?", (document_id,)).fetchone()
        except sqlite3.Error as error:
            raise self._failed(error) from error
        return Claim(*row)

    def __enter__(self) -> ClaimedIds:
        """Enter the context.

        Returns:
            The ids themselves.
        """
        return self

    def __exit__(self, *error: object) -> None:
        """Remove the file."""
        with suppress(sqlite3.Error):
            self._connection.close()
        self._path.unlink(missing_ok=True)

    def _failed(self, error: sqlite3.Error) -> StoreError:
        return StoreError(f"cannot keep the documents' ids in {self._path}: {error}: check the disk's free space and run again")
