"""Codes to a FAISS index: the form in which FAISS scans them.

``1bit``: RaBitQ around zero, the query in 8 bits (20,000 rows of 8,160 in 5.6 ms; an exact query takes 250 times as long).
``fp16``: half floats. ``fp32``: as they are. Rows are divided by one ``unit`` first, because RaBitQ (FAISS 1.15) gives rows of a
norm below 3e-4 scores that are orders of magnitude too large, and half floats end at 65,504. Filters work on all three; FAISS's
"fast scan" RaBitQ is wrong at 4,096 dimensions, and its 8-bit quantiser clips the longest rows, the most influential ones.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tdasearch import codes
from tdasearch.errors import StoreError
from tdasearch.store.columns import code_matrix
from tdasearch.store.documents import ROW_ID, Snapshot
from tdasearch.store.faiss_library import allow_threads

SCORES = ("influence", "cosine")
BATCH_VALUES = 1 << 22  # 16 MB of float32: what is decoded at a time

_QUERY_BITS = 8
_WIDEST_SCALES = 1e-15  # with squares of norms inside float32
_COLUMNS = ["code", "self_influence"]


def build(snapshot: Snapshot, *, code: str, sketch_dim: int, score: str) -> tuple[Any, float]:
    """Build the FAISS index of a snapshot's rows; beside the index itself, memory stays bounded as rows grow.

    Args:
        snapshot: The version of the table.
        code: One of ``codes.CODES``.
        sketch_dim: Coordinates of a vector.
        score: One of ``SCORES``.

    Returns:
        An IndexIDMap with the row ids, in their order, and the unit that its scores are to be multiplied by.

    Raises:
        StoreError: A code in the table is damaged.
    """
    faiss = allow_threads()
    batch_rows = max(1, BATCH_VALUES // sketch_dim)
    unit = _unit(snapshot, code=code, score=score, batch_rows=batch_rows)
    index = _empty_index(code, sketch_dim)
    index.codes.resize(snapshot.num_rows * index.code_size)  # reserves; growing batch by batch takes up to three times as much
    id_map = faiss.IndexIDMap(index)
    for batch in snapshot.batches(_COLUMNS, batch_rows=batch_rows):
        coded = code_matrix(batch["code"])
        scales = codes.scales(coded) * weights(batch, score) / unit
        if code == "1bit":
            scales = np.maximum(scales, 1)  # changes only rows that _WIDEST_SCALES leaves below the unit
        vectors = codes.decode(codes.with_scales(coded, scales), sketch_dim=sketch_dim, code=code)
        if not np.isfinite(vectors).all():
            raise StoreError(f"{snapshot.path}: a code is not finite: the table is damaged; restore it or build again")
        id_map.add_with_ids(vectors, batch[ROW_ID].to_numpy().astype(np.int64))
    return id_map, unit


def weights(rows: pa.Table, score: str) -> npt.NDArray[np.float64]:
    """What the inner product of a row's code is multiplied by.

    Args:
        rows: N rows with their ``self_influence``.
        score: One of ``SCORES``.

    Returns:
        float64 [N]: 1 for "influence"; for "cosine" one over the root of the self-influence (0 where that is not above 0).
    """
    if score == "influence":
        return np.ones(rows.num_rows)
    self_influence = rows["self_influence"].to_numpy()
    return np.where(self_influence > 0, 1 / np.sqrt(np.where(self_influence > 0, self_influence, 1.0)), 0.0)


def _empty_index(code: str, sketch_dim: int) -> Any:
    faiss = allow_threads()
    if code == "fp32":
        return faiss.IndexFlatIP(sketch_dim)
    if code == "fp16":
        return faiss.IndexScalarQuantizer(sketch_dim, faiss.ScalarQuantizer.QT_fp16, faiss.METRIC_INNER_PRODUCT)
    index = faiss.IndexRaBitQ(sketch_dim, faiss.METRIC_INNER_PRODUCT)
    index.train(np.ones((1, sketch_dim), dtype=np.float32))
    faiss.copy_array_to_vector(np.zeros(sketch_dim, dtype=np.float32), index.center)  # codes are signs around zero
    index.qb = _QUERY_BITS
    return index


def _unit(snapshot: Snapshot, *, code: str, score: str, batch_rows: int) -> float:
    # fp16: the largest scale, so that nothing overflows. 1bit: the smallest, unless the longest rows' squares would overflow.
    if code == "fp32":
        return 1.0
    smallest, largest = np.inf, 0.0
    for batch in snapshot.batches(_COLUMNS, batch_rows=batch_rows):
        scales = codes.scales(code_matrix(batch["code"])) * weights(batch, score)
        scales = scales[~(scales <= 0)]
        if not np.isfinite(scales).all():
            raise StoreError(f"{snapshot.path}: a code's scale is not finite: the table is damaged; restore it or build again")
        if scales.size:
            smallest, largest = min(smallest, float(scales.min())), max(largest, float(scales.max()))
    if not largest:
        return 1.0
    return largest if code == "fp16" else max(smallest, largest * _WIDEST_SCALES)
