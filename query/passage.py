"""The decisive passage: where in a document its influence on a query comes from."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tdasearch.capture import Capture
from tdasearch.query.queries import encode_query
from tdasearch.query.rescore import position_contributions
from tdasearch.records import Content, Hit
from tdasearch.tokens import tokenise

if TYPE_CHECKING:
    from tdasearch.index import Index


def decisive_passage(index: Index, query: Content, hit: Hit, *, num_tokens: int = 12) -> tuple[int, int]:
    """Find the run of tokens that contributes most to a hit's exact score (least, where the score is negative).

    Args:
        index: The opened index.
        query: The query.
        hit: A document found for it. The text of its window is taken alone; for a document of one window that is what was scored.
        num_tokens: Tokens in the run.

    Returns:
        First character of the passage in ``hit.text``, and one past its last.
    """
    tokenised = tokenise(index.language_model.tokenizer, Content(completion=hit.text))
    with Capture(index.language_model.model, index.manifest.plan.modules) as capture:
        asked = encode_query(index, capture, query, precondition=True)
        contributions_T = position_contributions(index.language_model, capture, asked, tokenised.token_ids, tokenised.is_target)
    size = min(num_tokens, len(contributions_T))
    sums = np.convolve(np.sign(hit.score) * contributions_T, np.ones(size), mode="valid")
    first = int(sums.argmax())
    start = int(tokenised.char_end[first - 1]) if first else 0
    return start, int(tokenised.char_end[first + size - 1])
