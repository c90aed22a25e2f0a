"""One writer at a time: a lock on an index that the system releases when its holder dies, however it dies."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from filelock import FileLock, Timeout

from tdasearch.errors import StoreError

LOCK_NAME = ".writer.lock"
HOLDER_NAME = ".writer.json"


@contextmanager
def writer_lock(index_path: Path) -> Iterator[None]:
    """Hold the only right to write an index; readers are not kept out.

    Args:
        index_path: The index's folder; it must exist.

    Yields:
        Nothing; the lock is held inside the block.

    Raises:
        StoreError: Another process (or another block of this one) is writing the index, or there is no such folder.
    """
    if not index_path.is_dir():
        raise StoreError(f"{index_path}: expected the folder of an index, found none; check the path")
    lock = FileLock(index_path / LOCK_NAME)
    holder_path = index_path / HOLDER_NAME
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise StoreError(f"{index_path}: is being written by {_holder(holder_path)}; wait for it, or stop it") from None
    except (OSError, NotImplementedError) as error:
        raise StoreError(f"{index_path}: cannot be locked for writing: {error}; check its permissions") from error
    try:
        started = datetime.now().astimezone().isoformat(timespec="seconds")
        # Beside the lock, not in it: whoever asks for the lock may truncate its file. Only read while the lock is held.
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "started": started}
        holder_path.write_text(json.dumps(holder), encoding="ascii")
        yield
    finally:
        holder_path.unlink(missing_ok=True)
        lock.release()


def _holder(holder_path: Path) -> str:
    try:
        holder = json.loads(holder_path.read_text(encoding="ascii"))
        return f"process {holder['pid']} on {holder['host']} since {holder['started']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
