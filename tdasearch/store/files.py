"""Files that are there whole or not at all, also after a crash or a full disk."""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TEMPORARY_SUFFIX = ".tmp"


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Write a file under a temporary name beside it, then give it its name in one step.

    Args:
        path: The file to create or to replace.

    Yields:
        A path in the same folder that no other process uses, to be written by the caller. If the block ends well it is synced
        and renamed to ``path``; if it raises it is removed and ``path`` is untouched.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}{TEMPORARY_SUFFIX}")
    try:
        temporary.touch()
        mode = temporary.stat().st_mode  # what this user's new files get; some writers make theirs for the owner alone
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.chmod(mode)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    _sync_folder(path.parent)


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's bytes, read in blocks.

    Args:
        path: The file.

    Returns:
        64 hexadecimal digits.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync_folder(folder: Path) -> None:
    """Make a rename survive a power cut; Windows cannot open folders and does not need it."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
