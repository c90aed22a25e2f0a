"""Small real tables of documents for the tests of the store."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa

from tdasearch import codes
from tdasearch.store.documents import DocumentTable, documents_path

METADATA = pa.schema([("source", pa.string()), ("year", pa.int64())])


def shard_rows(
    shard: int, vectors_ND: np.ndarray, *, code: str = "1bit", ids: list[str] | None = None, windows: list[int] | None = None
) -> pa.Table:
    """One row a vector, each a document of its own unless told otherwise; a text, and metadata that follow from the number."""
    num = len(vectors_ND)
    coded = codes.encode(vectors_ND, code)
    return pa.table(
        {
            "document_id": ids or [f"d{shard}-{number}" for number in range(num)],
            "window": pa.array(windows or [0] * num, pa.int32()),
            "num_windows": pa.array([1] * num, pa.int32()),
            "text": [f"text {number} of shard {shard}" for number in range(num)],
            "start": pa.array([0] * num, pa.int64()),
            "end": pa.array([10] * num, pa.int64()),
            "token_ids": pa.array([[1, 2, number] for number in range(num)], pa.list_(pa.int32())),
            "is_target": pa.array([[False, True, True]] * num, pa.list_(pa.bool_())),
            "num_tokens": pa.array([3] * num, pa.int32()),
            "loss": pa.array(np.arange(num) / 2),
            "self_influence": pa.array(np.square(vectors_ND.astype(np.float64)).sum(axis=1)),
            "shard": pa.array([shard] * num, pa.int32()),
            "metadata": ["{}"] * num,
            "content_hash": [f"h{shard}-{number}" for number in range(num)],
            "code": pa.array([row.tobytes() for row in coded], pa.binary(coded.shape[1])),
            "source": ["wiki" if number % 3 == 0 else "web" for number in range(num)],
            "year": pa.array([2000 + number for number in range(num)], pa.int64()),
        }
    )


def create_table(index_path: Path, *shards: np.ndarray, code: str = "1bit", sketch_dim: int = 64) -> DocumentTable:
    """A table of one shard for each matrix of vectors."""
    path = documents_path(index_path)
    table = DocumentTable.create(path, code_bytes=codes.code_bytes(code, sketch_dim), metadata_columns=METADATA)
    for number, vectors_ND in enumerate(shards):
        table.append_shard(shard_rows(number, vectors_ND, code=code))
    return table
