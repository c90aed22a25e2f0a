"""Exact rescoring: fresh gradients of candidate windows against the uncompressed, preconditioned gradients of the queries.

Legend: N windows, T positions, I inputs, O outputs, Q queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from tdasearch.capture import Capture
from tdasearch.encoder import Query
from tdasearch.errors import UsageError
from tdasearch.gradients import Dense, ModuleGradient, in_chunks, size_of
from tdasearch.language_model import Bools, Ints, LanguageModel, token_batches
from tdasearch.operations import inner_products, position_contributions
from tdasearch.progress import Step
from tdasearch.rotation import Rotation

if TYPE_CHECKING:
    from tdasearch.index import Index
    from tdasearch.query.queries import SearchOptions

_CHUNK_BYTES = 1 << 28
"""Bound on the weight gradients that are formed at once."""


class Rescorer:
    """Scores windows exactly against a few queries.

    Args:
        index: The opened index.
        capture: Its entered capture.
        queries: The queries; their preconditioned gradients are taken over, not copied.
        options: The kind of score, and how many tokens to run at once.
    """

    def __init__(self, index: Index, capture: Capture, queries: Sequence[Query], options: SearchOptions) -> None:
        self._language_model = index.language_model
        self._encoder = index.encoder
        self._capture = capture
        self._batch_tokens = options.batch_tokens
        self._cosine = options.score == "cosine"
        self._num_queries = len(queries)
        self._queries = queries
        self._query_norms_Q = np.sqrt([query.self_influence for query in queries])

    @cached_property
    def _preconditioned(self) -> dict[str, Tensor]:
        """All queries' preconditioned gradients [Q, O, I] of each module."""
        return {name: torch.stack([query.preconditioned.pop(name) for query in self._queries]) for name in self._capture.parts}

    def score(self, rows: pa.Table, step: Step) -> NDArray[np.float64]:
        """Score windows.

        Args:
            rows: Their ``token_ids`` and ``is_target``.
            step: Progress, called with the number of windows done.

        Returns:
            [Q, N] ``g_q^T (F + damping)^-1 g_n``; for cosine, divided by the root of both sides' exact self-influence.
        """
        token_ids, is_target = rows["token_ids"].to_pylist(), rows["is_target"].to_pylist()
        scores_QN = np.zeros((self._num_queries, len(token_ids)))
        for part in token_batches([len(ids) for ids in token_ids], batch_tokens=self._batch_tokens):
            batch = self._language_model.batch([token_ids[row] for row in part], [is_target[row] for row in part])
            scores = torch.zeros(len(part), self._num_queries, dtype=torch.float64, device=self._language_model.device)
            norms = torch.zeros(len(part), dtype=torch.float64, device=self._language_model.device)
            consume = partial(self._consume, scores, norms, Rotation(self._encoder.dtype))
            self._capture.backward(partial(self._language_model.losses, batch), consume, is_token_NT=batch.is_token)
            scores_QN[:, part] = scores.T.cpu().numpy()
            if self._cosine:
                scores_QN[:, part] /= np.outer(self._query_norms_Q, norms.sqrt().cpu().numpy())
            step(len(part))
        return scores_QN

    def _consume(self, scores: Tensor, norms: Tensor, rotation: Rotation, name: str, gradient: ModuleGradient) -> None:
        scores += inner_products(gradient, Dense(self._preconditioned[name]), chunk_bytes=_CHUNK_BYTES)
        if self._cosine:
            factors, start = self._encoder.factors[name], 0
            rotated = rotation(gradient, factors.gradient_eigenvectors, factors.activation_eigenvectors)
            for part in in_chunks(rotated, _CHUNK_BYTES):
                whitened_NOI = part.dense() * factors.inverse_sqrt()
                norms[start : start + part.num_examples] += whitened_NOI.square().sum((1, 2))
                start += part.num_examples


def token_contributions(
    language_model: LanguageModel, capture: Capture, query: Query, token_ids: Ints, is_target: Bools
) -> NDArray[np.float64]:
    """Split a window's exact score over its positions.

    Args:
        language_model: The model.
        capture: Its entered capture.
        query: The query.
        token_ids: [T] the window.
        is_target: [T] which of its tokens the loss is taken on.

    Returns:
        [T] float64; position t is the place where the model read token t (and predicted token t + 1). They sum to the score.
    """
    sums: list[Tensor] = []

    def consume(name: str, gradient: ModuleGradient) -> None:
        if size_of(gradient).num_positions != len(token_ids):
            raise UsageError(
                f"module {name!r}: its positions are not the document's tokens, so its score cannot be split over them"
            )
        sums.append(position_contributions(gradient, query.preconditioned[name])[0].double())

    batch = language_model.batch([token_ids], [is_target])
    capture.backward(partial(language_model.losses, batch), consume, is_token_NT=batch.is_token)
    total: Tensor = torch.stack(sums).sum(0)
    return total.cpu().numpy()
