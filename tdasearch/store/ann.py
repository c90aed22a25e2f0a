"""Search over the codes of one version of the table: FAISS proposes, the codes themselves decide.

In: queries, float32. Out: the best rows, with scores that are exact with respect to the codes. FAISS scans the codes in a form of
its own (``ann_build``), so its scores are off by a little. More rows than asked for are therefore fetched and scored by
``codes.scores``, and more of them fetched again until the cut is clear of that error. This module knows no models.

FAISS facts that this rests on (1.15): it pads with row -1, lists ties by falling row, never returns a row whose score is NaN, and
keeps its number of threads by calling thread.

Legend: N rows, D = sketch_dim, Q queries, K results, F fetched.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tdasearch import codes
from tdasearch.errors import StoreError, UsageError
from tdasearch.store.ann_build import BATCH_VALUES, SCORES, build, weights
from tdasearch.store.ann_cache import AnnCache, CacheKey
from tdasearch.store.columns import RowIds, code_matrix
from tdasearch.store.documents import Snapshot
from tdasearch.store.faiss_library import allow_threads, faiss_module

_QUERY_BATCH = 64

Floats = npt.NDArray[np.float32]
Guesses = npt.NDArray[np.float64]
Positions = npt.NDArray[np.int64]


class Ann:
    """A search index over one snapshot; ``open_ann`` makes it. Safe to share between threads.

    Args:
        index: A FAISS IndexIDMap of the snapshot's rows, in their order, divided by ``unit``.
        snapshot: The version of the table.
        code: One of ``codes.CODES``.
        sketch_dim: D.
        score: "influence", or "cosine" for scores divided by the root of the row's self-influence.
        unit: What turns the FAISS index's scores into ours.

    Attributes:
        row_ids: int64 [N] row ids, ascending: of the row at each position of the FAISS index.
    """

    def __init__(self, index: Any, *, snapshot: Snapshot, code: str, sketch_dim: int, score: str, unit: float) -> None:
        self.snapshot = snapshot
        self.code = code
        self.sketch_dim = sketch_dim
        self.score = score
        self.row_ids: RowIds = faiss_module().vector_to_array(index.id_map)
        self._index = index
        self._unit = unit

    def search(self, queries_QD: npt.ArrayLike, k: int, *, row_ids: RowIds | None = None) -> tuple[Floats, RowIds]:
        """Find the rows with the largest scores; for the smallest, search the negated query.

        Args:
            queries_QD: [Q, D] finite queries, taken as float32.
            k: Most rows a query, from 1.
            row_ids: int64, the rows to search among (``Snapshot.row_ids`` of a filter); None for all.

        Returns:
            float32 [Q, K] scores, descending, and int64 [Q, K] row ids; K is the smaller of k and the number of rows searched. A
            score is what ``codes.scores`` gives (for "cosine", over the root of the row's self-influence). Equal scores come by
            ascending row id, at the cut too.

        Raises:
            UsageError: k is below 1.
            ValueError: The queries are not finite [Q, D], or a row id is not in the snapshot.
        """
        if k < 1:
            raise UsageError(f"k: expected 1 or more, found {k}")
        queries = np.asarray(queries_QD, dtype=np.float32)
        if queries.ndim != 2 or queries.shape[1] != self.sketch_dim:
            raise ValueError(f"queries: expected shape [Q, {self.sketch_dim}], found {list(queries.shape)}")
        if not np.isfinite(queries).all():
            raise ValueError("queries: expected finite numbers, found NaN or infinity; the query's gradient overflowed")
        among = _Among(len(self.row_ids), None if row_ids is None else self._positions(row_ids))
        k = min(k, len(among))
        found_scores = np.empty((len(queries), k), dtype=np.float32)
        found_positions = np.empty((len(queries), k), dtype=np.int64)
        for start in range(0, len(queries) if k else 0, _QUERY_BATCH):
            batch = queries[start : start + _QUERY_BATCH]
            num_fetched = max(2 * k, k + 64)
            guesses, positions = self._propose(batch, num_fetched, among)
            for number, query in enumerate(batch):
                best = self._settle(query, k, among, num_fetched, guesses[number], positions[number])
                found_scores[start + number], found_positions[start + number] = best
        return found_scores, self.row_ids[found_positions]

    def _propose(self, queries_QD: Floats, num_fetched: int, among: _Among) -> tuple[Guesses, Positions]:
        # [Q, F] FAISS's guesses at the best scores, and their positions; -1 where it would have to return every row.
        if num_fetched >= len(among):
            return np.zeros((len(queries_QD), 1)), np.full((len(queries_QD), 1), -1)
        faiss = allow_threads()
        magnitudes = np.abs(queries_QD).max(axis=1, keepdims=True).astype(np.float64)
        units = np.where(magnitudes > 0, magnitudes, 1.0)
        index = faiss.downcast_index(self._index.index)  # by position: a bitmap of row ids, which have gaps, would be huge
        guesses, positions = index.search((queries_QD / units).astype(np.float32), num_fetched, params=among.search_parameters())
        return guesses * (units * self._unit), positions

    def _settle(
        self, query_D: Floats, k: int, among: _Among, num_fetched: int, guesses: Guesses, positions: Positions
    ) -> tuple[Floats, Positions]:
        # The k best of one query; fetches more for as long as a row that was not fetched might be one of them.
        if not query_D.any():
            return np.zeros(k, dtype=np.float32), among.positions(k)
        while True:
            every_row = bool((positions < 0).any())
            if every_row:
                positions = among.positions()
            scores = self._exact(positions, query_D)
            best = np.lexsort((positions, -scores))[:k]
            # A row that was not fetched has a guess of at most the lowest fetched one, and it is taken to be off by no more than
            # twice the worst of the fetched: not proven, but a query's errors have one distribution, and its tail is short.
            if every_row or scores[best[-1]] > guesses.min() + 2 * np.abs(scores - guesses).max():
                return scores[best], positions[best]
            num_fetched *= 4
            [guesses], [positions] = self._propose(query_D[None], num_fetched, among)

    def _exact(self, positions: Positions, query_D: Floats) -> Floats:
        block = max(1, BATCH_VALUES // self.sketch_dim)
        scores = np.empty(len(positions), dtype=np.float32)
        for start in range(0, len(positions), block):
            rows = self.snapshot.take(self.row_ids[positions[start : start + block]], ["code", "self_influence"])
            part = codes.scores(code_matrix(rows["code"]), query_D[None], code=self.code, sketch_dim=self.sketch_dim)
            scores[start : start + block] = part[:, 0] * weights(rows, self.score)
        return scores

    def _positions(self, row_ids: RowIds) -> Positions:
        wanted = np.unique(np.asarray(row_ids, dtype=np.int64))
        positions = np.searchsorted(self.row_ids, wanted)
        known = positions < len(self.row_ids)
        known[known] = self.row_ids[positions[known]] == wanted[known]
        if not known.all():
            first = wanted[~known][0]
            raise ValueError(f"row_ids: no row {first} in version {self.snapshot.version}; take them from the same snapshot")
        return positions


class _Among:
    """The positions to search among: some, or all of them, which then need no list."""

    def __init__(self, num_rows: int, chosen: Positions | None) -> None:
        self._num_rows = num_rows
        self._chosen = chosen

    def __len__(self) -> int:
        return self._num_rows if self._chosen is None else len(self._chosen)

    def positions(self, count: int | None = None) -> Positions:
        # The first `count`, or all.
        return np.arange(self._num_rows if count is None else count) if self._chosen is None else self._chosen[:count]

    def search_parameters(self) -> Any:
        if self._chosen is None:
            return None
        is_chosen = np.zeros(self._num_rows, dtype=bool)
        is_chosen[self._chosen] = True
        faiss = faiss_module()
        return faiss.SearchParameters(sel=faiss.IDSelectorBitmap(np.packbits(is_chosen, bitorder="little")))


def open_ann(
    index_path: Path, snapshot: Snapshot, *, code: str, sketch_dim: int, encoder_fingerprint: str, score: str = "influence"
) -> Ann:
    """Load the search index of a snapshot from ``ann/``, or build it from the table's codes and keep it there.

    Args:
        index_path: The index's folder.
        snapshot: The version of the table to search.
        code: One of ``codes.CODES``.
        sketch_dim: Coordinates of a vector.
        encoder_fingerprint: Of the encoder that made the codes.
        score: One of ``ann_build.SCORES``: "influence", or "cosine" for scores divided by the root of the row's self-influence.

    Returns:
        The search index, mapped from the file (memory that processes share). Where the folder cannot be written it is held in
        memory, with a warning.

    Raises:
        UsageError: An unknown score.
        StoreError: The table's codes are not of this code and dimension, or are damaged.
    """
    faiss = faiss_module()
    if score not in SCORES:
        raise UsageError(f"score: expected {' or '.join(SCORES)}, found {score!r}")
    width, expected = snapshot.schema.field("code").type.byte_width, codes.code_bytes(code, sketch_dim)
    if width != expected:
        raise StoreError(
            f"{snapshot.path}: expected codes of {expected} bytes ({code}, {sketch_dim} coordinates), found {width}; "
            "manifest and table do not belong together: restore both from one copy, or build the index again"
        )
    key = CacheKey(
        table_version=snapshot.version,
        num_rows=snapshot.num_rows,
        code=code,
        sketch_dim=sketch_dim,
        score=score,
        encoder_fingerprint=encoder_fingerprint,
        faiss_version=faiss.__version__,
    )
    cache = AnnCache(index_path / "ann", key)
    loaded = cache.load()
    if loaded is None:
        built = build(snapshot, code=code, sketch_dim=sketch_dim, score=score)
        try:
            cache.save(built[0], unit=built[1])
        except (OSError, RuntimeError) as error:
            warnings.warn(
                f"{cache.path}: the search index cannot be kept ({error}); it stays in memory; the next process builds it again",
                RuntimeWarning,
                stacklevel=2,
            )
        loaded = cache.load() or built
    return Ann(loaded[0], snapshot=snapshot, code=code, sketch_dim=sketch_dim, score=score, unit=loaded[1])
