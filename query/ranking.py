"""Ranking: the k best documents at both ends, kept while scores stream past. Memory is bounded by k.

A document's score is that of its best window: the highest for proponents, the lowest for opponents. Ties go by document id.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Ranked:
    """A window that stands for its document.

    Attributes:
        score: Its score.
        document_id: Its document.
        row_id: Its row in the table.
        rescored: Whether the score is exact.
    """

    score: float
    document_id: str
    row_id: int
    rescored: bool


class Ranking:
    """The documents with the highest scores so far (or, with ``sign`` -1, the lowest).

    Args:
        k: How many to keep.
        sign: 1 for proponents, -1 for opponents.
    """

    def __init__(self, k: int, *, sign: int) -> None:
        self._k = k
        self._sign = sign
        self._best: dict[str, Ranked] = {}

    def add(
        self, scores: NDArray[np.floating], document_ids: NDArray[np.object_], row_ids: NDArray[np.int64], *, rescored: bool
    ) -> None:
        """Take more windows into account.

        Args:
            scores: [N] scores.
            document_ids: [N] their documents.
            row_ids: [N] their rows in the table.
            rescored: Whether the scores are exact; exact ones come first, as the two are not on quite the same scale.
        """
        held = self.result()
        floor = self._sign * held[-1].score if len(held) == self._k and held[-1].rescored == rescored else -np.inf
        for position in np.flatnonzero(self._sign * scores >= floor):
            ranked = Ranked(float(scores[position]), document_ids[position], int(row_ids[position]), rescored)
            best = self._best.get(ranked.document_id)
            if best is None or self._key(ranked) < self._key(best):
                self._best[ranked.document_id] = ranked
        self._best = {ranked.document_id: ranked for ranked in self.result()}

    def result(self) -> list[Ranked]:
        """Return the k best, best first."""
        return sorted(self._best.values(), key=self._key)[: self._k]

    def _key(self, ranked: Ranked) -> tuple[bool, float, str, int]:
        return (not ranked.rescored, -self._sign * ranked.score, ranked.document_id, ranked.row_id)
