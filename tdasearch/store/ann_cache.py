"""The FAISS index of one version of the table, kept in ``ann/``: a disposable copy, used only if it is provably the right one.

FAISS loads a file with a flipped byte without a word and may crash on a flipped header, so a file is opened only if its SHA-256
is the one that its JSON sidecar names, and if the sidecar names the table's version, the code and the encoder.
"""

from __future__ import annotations

import json
import math
import re
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tdasearch.store.faiss_library import faiss_module
from tdasearch.store.files import TEMPORARY_SUFFIX, replacing, sha256_of

_ABANDONED_SECONDS = 3600  # a temporary file that nobody has written to for so long was left by a killed process


@dataclass(frozen=True)
class CacheKey:
    """What a cached index must belong to.

    Attributes:
        table_version: The version of the table.
        num_rows: Its rows.
        code: One of ``codes.CODES``.
        sketch_dim: Coordinates of a vector.
        score: One of ``ann_build.SCORES``.
        encoder_fingerprint: Of the encoder that made the codes.
        faiss_version: The FAISS that writes and reads the file.
    """

    table_version: int
    num_rows: int
    code: str
    sketch_dim: int
    score: str
    encoder_fingerprint: str
    faiss_version: str


class AnnCache:
    """The two files of one cached index: ``v<table version>.<score>.faiss`` and ``.json``.

    Attributes:
        folder: ``<index>/ann``.
        key: What the index must belong to.
        path: The FAISS file.
        sidecar_path: What it is, and its SHA-256.
    """

    def __init__(self, folder: Path, key: CacheKey) -> None:
        """Name the files; nothing is read or written yet.

        Args:
            folder: ``<index>/ann``.
            key: What the index must belong to.
        """
        self.folder = folder
        self.key = key
        self.path = folder / f"v{key.table_version}.{key.score}.faiss"
        self.sidecar_path = self.path.with_suffix(".json")

    def load(self) -> tuple[Any, float] | None:
        """Open the cached index, mapped into memory.

        Returns:
            The FAISS index and the unit of its scores; None if there is none that belongs to the key and is whole, with a warning
            if it was damaged.
        """
        try:
            sidecar = json.loads(self.sidecar_path.read_text(encoding="utf-8"))
            unit = sidecar.pop("unit")
            digest = sidecar.pop("sha256")
            if sidecar != asdict(self.key):
                return None
            if not (type(unit) is float and 0 < unit < math.inf):
                self._warn(f"unit {str(unit)[:50]}")
                return None
            if digest != sha256_of(self.path):
                self._warn("its SHA-256 is not the one in its sidecar")
                return None
            faiss = faiss_module()
            index = faiss.read_index(str(self.path), faiss.IO_FLAG_MMAP_IFC)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, RuntimeError, AttributeError, KeyError, TypeError) as error:
            self._warn(f"{type(error).__name__}: {error}")
            return None
        expected = (self.key.sketch_dim, self.key.num_rows, faiss.METRIC_INNER_PRODUCT)
        if type(index) is not faiss.IndexIDMap or (index.d, index.ntotal, index.metric_type) != expected:
            self._warn("not the index that its sidecar names")
            return None
        return index, unit

    def _warn(self, reason: str) -> None:
        warnings.warn(f"{self.path}: damaged ({reason}); not used but built again from the table", RuntimeWarning, stacklevel=4)

    def save(self, index: Any, *, unit: float) -> None:
        """Write the index, then its sidecar, each whole or not at all; then remove caches of older versions.

        Args:
            index: The FAISS index.
            unit: The unit of its scores.

        Raises:
            OSError: The folder cannot be written (on a full disk FAISS raises a RuntimeError); nothing half-written stays.
        """  # noqa: DOC502 (the calls raise it)
        self.folder.mkdir(exist_ok=True)
        with replacing(self.path) as temporary:
            faiss_module().write_index(index, str(temporary))
            digest = sha256_of(temporary)
        with replacing(self.sidecar_path) as temporary:
            sidecar = {**asdict(self.key), "unit": unit, "sha256": digest}
            temporary.write_text(json.dumps(sidecar, indent=2) + "\n", encoding="ascii")
        self._remove_stale()

    def _remove_stale(self) -> None:
        """Older versions, and temporary files of killed processes; who has one of them open keeps what was opened."""
        for path in self.folder.iterdir():
            version = re.fullmatch(r"v(\d+)\..*\.(faiss|json)", path.name)
            old = version is not None and int(version[1]) < self.key.table_version
            try:
                if old or (path.suffix == TEMPORARY_SUFFIX and time.time() - path.stat().st_mtime > _ABANDONED_SECONDS):
                    path.unlink(missing_ok=True)
            except FileNotFoundError:
                continue  # another process removed it
