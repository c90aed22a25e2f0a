"""Queries: what may be asked, checked; and a query's gradient."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from tdasearch.capture import Capture
from tdasearch.encoder import Query
from tdasearch.errors import UsageError
from tdasearch.progress import progress
from tdasearch.records import Content
from tdasearch.tokens import UnusableContent, tokenise

if TYPE_CHECKING:
    from tdasearch.index import Index

SCORES = ("influence", "cosine")
_GROUP_BYTES = 4 << 30
"""Bound on the preconditioned gradients of the queries that share one pass over the candidates."""


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """How to search; ``Index.search`` documents each.

    Attributes:
        k: Documents wanted at each end.
        where: SQL filter on the documents, or None.
        rescore: Windows of the shortlist to rescore exactly, or "all" to score every document exactly.
        score: "influence" or "cosine".
        opponents: Whether the other end of the ranking is wanted too.
        batch_tokens: Tokens run at once.
        quiet: Show no progress.
    """

    k: int = 10
    where: str | None = None
    rescore: int | str = 200
    score: str = "influence"
    opponents: bool = True
    batch_tokens: int = 2048
    quiet: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.k, bool) or not isinstance(self.k, int) or self.k < 1:
            raise UsageError(f"k: expected at least 1, found {self.k!r}")
        if self.rescore != "all" and (isinstance(self.rescore, bool) or not isinstance(self.rescore, int) or self.rescore < 0):
            raise UsageError(f"rescore: expected a number of at least 0, or 'all', found {self.rescore!r}")
        if self.score not in SCORES:
            raise UsageError(f"score: expected one of {', '.join(SCORES)}, found {self.score!r}")
        if self.batch_tokens < 1:
            raise UsageError(f"batch_tokens: expected at least 1, found {self.batch_tokens!r}")

    @property
    def signs(self) -> tuple[int, ...]:
        """1 for proponents, -1 for opponents."""
        return (1, -1) if self.opponents else (1,)


def groups(contents: Sequence[Content], index: Index) -> Iterator[Sequence[Content]]:
    """Split the queries so that their uncompressed gradients fit a bounded memory; each group shares its passes."""
    bytes_each = 4 * index.manifest.plan.num_covered_parameters  # float32
    size = max(1, _GROUP_BYTES // bytes_each)
    for start in range(0, len(contents), size):
        yield contents[start : start + size]


def encode_queries(index: Index, capture: Capture, contents: Sequence[Content], options: SearchOptions) -> list[Query]:
    """Compute the queries' gradients, with progress.

    Args:
        index: The opened index.
        capture: Its entered capture.
        contents: The queries.
        options: How to search.

    Returns:
        Their vectors, and their preconditioned gradients where scores are to be exact.
    """
    queries = []
    with progress("queries", total=len(contents), unit="query", quiet=options.quiet, delay=2.0) as step:
        for content in contents:
            queries.append(encode_query(index, capture, content, precondition=options.rescore != 0))
            step(1)
    return queries


def encode_query(index: Index, capture: Capture, content: Content, *, precondition: bool) -> Query:
    """Compute one query's gradient with the index's encoder.

    Args:
        index: The opened index.
        capture: Its entered capture.
        content: The query.
        precondition: Whether its preconditioned gradient is wanted, for exact scores.

    Returns:
        Its vector and its preconditioned gradient.

    Raises:
        UsageError: It has no target token or no finite gradient, or is longer than the model's context (a query is never cut).
    """
    language_model = index.language_model
    try:
        tokenised = tokenise(language_model.tokenizer, content)
    except UnusableContent as error:
        raise UsageError(f"query: {error}") from error
    num_tokens = len(tokenised.token_ids)
    if num_tokens > language_model.max_tokens:
        raise UsageError(
            f"query: expected at most {language_model.max_tokens} tokens (the model's context), found {num_tokens}; "
            "shorten the prompt"
        )
    batch = language_model.batch([tokenised.token_ids], [tokenised.is_target])
    query = index.encoder.encode_query(
        capture, partial(language_model.losses, batch), num_targets=int(tokenised.is_target.sum()), precondition=precondition
    )
    if query.self_influence == 0.0:
        raise UsageError(
            "query: its gradient is exactly zero in the covered weights, so every score would be; ask about another text"
        )
    if not (math.isfinite(query.loss) and math.isfinite(query.self_influence)):
        raise UsageError(
            f"query: its gradient is not finite (loss {query.loss}), so it has no score; ask about another text, or build with "
            "a wider --dtype"
        )
    return query
