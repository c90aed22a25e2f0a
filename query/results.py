"""Results: ranked windows to hits that a person can read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from tdasearch.encoder import Query
from tdasearch.query.ranking import Ranked, Ranking
from tdasearch.records import Hit, Hits

if TYPE_CHECKING:
    from tdasearch.store.documents import Snapshot

_COLUMNS = ["text", "metadata", "window", "num_windows", "start", "end", "num_tokens", "loss", "self_influence"]


def hits(snapshot: Snapshot, query: Query, rankings: Sequence[Ranking]) -> Hits:
    """Fetch the documents of a ranking.

    Args:
        snapshot: The version of the table that was searched.
        query: The query.
        rankings: Proponents first, then opponents where they were wanted.

    Returns:
        The answer.
    """
    ends = [_fetch(snapshot, ranking.result()) for ranking in rankings]
    return Hits(
        proponents=ends[0],
        opponents=ends[1] if len(ends) > 1 else [],
        loss=query.loss,
        num_targets=query.num_targets,
    )


def _fetch(snapshot: Snapshot, ranked: Sequence[Ranked]) -> list[Hit]:
    rows = snapshot.take(np.array([found.row_id for found in ranked], dtype=np.int64), _COLUMNS).to_pylist()
    found_hits = []
    for number, (found, row) in enumerate(zip(ranked, rows, strict=True), start=1):
        row["metadata"] = json.loads(row["metadata"])
        found_hits.append(Hit(rank=number, score=found.score, document_id=found.document_id, rescored=found.rescored, **row))
    return found_hits
