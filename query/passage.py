"""The decisive passage: where in a document its influence on a query comes from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from tdasearch.capture import Capture
from tdasearch.query.queries import encode_query
from tdasearch.query.rescore import token_contributions
from tdasearch.records import Content, Hit
from tdasearch.tokens import tokenise

if TYPE_CHECKING:
    from tdasearch.index import Index


def decisive_passages(index: Index, query: Content, hits: Sequence[Hit], *, num_tokens: int = 8) -> list[tuple[int, int]]:
    """Find the run of tokens that contributes most to each hit's exact score (least, where the score is negative).

    Args:
        index: The opened index.
        query: The query.
        hits: Documents found for it. The text of a window is taken alone; for a document of one window that is what was scored.
        num_tokens: Tokens in the run.

    Returns:
        For each hit the first character of the passage in ``hit.text``, and one past its last.
    """
    language_model = index.language_model
    passages = []
    with Capture(language_model.model, index.manifest.plan.modules) as capture:
        asked = encode_query(index, capture, query, precondition=True)
        for hit in hits:
            tokens = tokenise(language_model.tokenizer, Content(completion=hit.text))
            contributions_T = token_contributions(language_model, capture, asked, tokens.token_ids, tokens.is_target)
            # What the model learned at position t is to predict token t + 1: the passage is of the tokens that were predicted.
            predicted_T = np.sign(hit.score) * np.concatenate([[0.0], contributions_T[:-1]])
            size = min(num_tokens, len(predicted_T))
            first = int(np.convolve(predicted_T, np.ones(size), mode="valid").argmax())
            start = int(tokens.char_end[first - 1]) if first else 0
            passages.append(_whole_words(hit.text, start, int(tokens.char_end[first + size - 1])))
    return passages


def _whole_words(text: str, start: int, end: int) -> tuple[int, int]:
    """Widen a passage to whole words, without the space before it."""
    while start < end and text[start].isspace():
        start += 1
    while start > 0 and text[start].isalnum() and text[start - 1].isalnum():
        start -= 1
    while end < len(text) and text[end].isalnum() and text[end - 1].isalnum():
        end += 1
    return start, end
