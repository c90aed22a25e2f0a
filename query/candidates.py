"""Candidates: the rows that a query looks at. All of them, or a shortlist from the codes at each end of the ranking."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tdasearch.encoder import Query

if TYPE_CHECKING:
    from tdasearch.index import Index
    from tdasearch.query.queries import SearchOptions
    from tdasearch.store.documents import Snapshot

_COLUMNS = ["document_id", "token_ids", "is_target"]
_BATCH_ROWS = 512
Shortlist = tuple[NDArray[np.int64], NDArray[np.float64]]


@dataclass(frozen=True, slots=True)
class Candidates:
    """A batch of rows and who looks at them. Legend: N rows, Q queries, E ends of the ranking (1, or 2 with opponents).

    Attributes:
        rows: ``document_id``, ``token_ids`` and ``is_target`` of each row.
        row_ids: [N] their places in the table.
        wanted_QEN: Whether row n is a candidate for end e of query q.
        code_scores_QN: Scores read off the codes, final; None where the rows are to be scored exactly.
    """

    rows: pa.Table
    row_ids: NDArray[np.int64]
    wanted_QEN: NDArray[np.bool_]
    code_scores_QN: NDArray[np.float64] | None


def candidates(
    index: Index, snapshot: Snapshot, queries: Sequence[Query], allowed: NDArray[np.int64] | None, options: SearchOptions
) -> tuple[int, Iterator[Candidates]]:
    """Find the rows that the queries have to look at.

    Args:
        index: The opened index.
        snapshot: One version of its table.
        queries: The queries, encoded.
        allowed: Row ids that the filter lets through; None lets all through.
        options: How to search.

    Returns:
        How many rows there are, and the rows in batches, read as they are asked for.
    """
    if options.rescore == "all":
        num_rows = snapshot.num_rows if allowed is None else allowed.size
        return num_rows, _everything(snapshot, (len(queries), len(options.signs)), options.where)
    if allowed is not None and not allowed.size:
        return 0, iter(())
    found = [[_shortlist(index, snapshot, query, sign, allowed, options) for sign in options.signs] for query in queries]
    num_exact = int(options.rescore)
    exact = np.unique(np.concatenate([row_ids[:num_exact] for ends in found for row_ids, _ in ends]))
    num_rest = sum(max(0, row_ids.size - num_exact) for ends in found for row_ids, _ in ends)
    return exact.size + num_rest, _shortlists(snapshot, found, exact, num_exact)


def _everything(snapshot: Snapshot, ends: tuple[int, int], where: str | None) -> Iterator[Candidates]:
    for rows in snapshot.batches(_COLUMNS, where=where, batch_rows=_BATCH_ROWS):
        yield Candidates(rows, rows["_rowid"].to_numpy().astype(np.int64), np.ones((*ends, rows.num_rows), bool), None)


def _shortlists(
    snapshot: Snapshot, found: Sequence[Sequence[Shortlist]], exact: NDArray[np.int64], num_exact: int
) -> Iterator[Candidates]:
    """The best of every shortlist, to be scored exactly for those that want them; then the rest, with the scores of the codes."""
    for start in range(0, exact.size, _BATCH_ROWS):
        row_ids = exact[start : start + _BATCH_ROWS]
        wanted_QEN = np.array([[np.isin(row_ids, own[:num_exact]) for own, _ in ends] for ends in found])
        yield Candidates(snapshot.take(row_ids, _COLUMNS), row_ids, wanted_QEN, None)
    for position, ends in enumerate(found):
        for end, (row_ids, scores) in enumerate(ends):
            rest = row_ids[num_exact:]
            wanted_QEN = np.zeros((len(found), len(ends), rest.size), bool)
            wanted_QEN[position, end] = True
            code_scores_QN = np.tile(scores[num_exact:], (len(found), 1))
            yield Candidates(snapshot.take(rest, _COLUMNS), rest, wanted_QEN, code_scores_QN)


def _shortlist(
    index: Index, snapshot: Snapshot, query: Query, sign: int, allowed: NDArray[np.int64] | None, options: SearchOptions
) -> Shortlist:
    """Row ids and code scores, best first: as many as are rescored, and enough for k documents."""
    ann = index.ann(snapshot, score=options.score)
    vector_D = query.vector_D.cpu().numpy()
    if options.score == "cosine" and query.kept_self_influence > 0:
        vector_D = vector_D / np.sqrt(query.kept_self_influence)
    size = max(int(options.rescore), options.k)
    while True:
        scores, row_ids = (found[0] for found in ann.search(sign * vector_D[None], size, row_ids=allowed))
        if len(row_ids) < size or len(set(snapshot.take(row_ids, ["document_id"])["document_id"].to_pylist())) >= options.k:
            return row_ids, sign * scores.astype(np.float64)
        size *= 2  # several windows of one document are among them
