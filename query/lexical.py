"""Search by words: BM25 from LanceDB's full-text index, the baseline beside influence."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tdasearch.errors import UsageError
from tdasearch.records import Hit

if TYPE_CHECKING:
    from tdasearch.index import Index

_COLUMNS = ["document_id", "text", "metadata", "window", "num_windows", "start", "end", "num_tokens", "loss", "self_influence"]


def search_text(index: Index, text: str, *, k: int, where: str | None) -> list[Hit]:
    """Find documents by words.

    Args:
        index: The opened index.
        text: The words.
        k: Documents wanted; a document stands with its best window.
        where: SQL filter, or None.

    Returns:
        Hits whose score is BM25's, ties by document id.

    Raises:
        UsageError: k below 1, or a bad filter.
    """
    if k < 1:
        raise UsageError(f"k: expected at least 1, found {k!r}")
    snapshot = index.table.latest()
    size = k
    while True:
        rows = snapshot.text_search(text, size, columns=_COLUMNS, where=where).to_pylist()
        best: dict[str, dict[str, object]] = {}
        for row in sorted(rows, key=lambda row: (-row["_score"], row["document_id"])):
            best.setdefault(row["document_id"], row)
        if len(rows) < size or len(best) >= k:
            break
        size *= 2
    hits = []
    for rank, row in enumerate(list(best.values())[:k], start=1):
        score = float(row.pop("_score"))  # type: ignore[arg-type]
        row["metadata"] = json.loads(str(row["metadata"]))
        hits.append(Hit(rank=rank, score=score, rescored=False, **row))  # type: ignore[arg-type]
    return hits
