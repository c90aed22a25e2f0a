"""The search, as the paper reads: encode the query, find a shortlist in the codes, rescore it exactly, return the documents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tdasearch.capture import Capture
from tdasearch.progress import progress
from tdasearch.query.candidates import candidates
from tdasearch.query.queries import SearchOptions, encode_queries, groups
from tdasearch.query.ranking import Ranking
from tdasearch.query.rescore import Rescorer
from tdasearch.query.results import hits
from tdasearch.records import Content, Hits

if TYPE_CHECKING:
    from tdasearch.index import Index


def search(index: Index, contents: Sequence[Content], options: SearchOptions) -> list[Hits]:
    """Find the documents that influenced each of the given outputs.

    Args:
        index: The opened index.
        contents: The queries.
        options: How many documents, which ones, and how exactly.

    Returns:
        One answer a query, in order; all from one version of the index.
    """
    snapshot = index.table.latest()
    allowed = None if options.where is None else snapshot.row_ids(options.where)
    answers = []
    with Capture(index.language_model.model, index.manifest.plan.modules) as capture:
        for group in groups(contents, index):
            queries = encode_queries(index, capture, group, options)
            rescorer = Rescorer(index, capture, queries, options)
            rankings = [[Ranking(options.k, sign=sign) for sign in options.signs] for _ in queries]
            num_rows, batches = candidates(index, snapshot, queries, allowed, options)
            with progress("search", total=num_rows, unit="row", quiet=options.quiet, delay=2.0) as step:
                for batch in batches:
                    exact = batch.code_scores_QN is None
                    scores_QN = rescorer.score(batch.rows, step) if batch.code_scores_QN is None else batch.code_scores_QN
                    document_ids = batch.rows["document_id"].to_numpy(zero_copy_only=False)
                    for scores_N, wanted_EN, ends in zip(scores_QN, batch.wanted_QEN, rankings, strict=True):
                        for ranking, wanted_N in zip(ends, wanted_EN, strict=True):
                            ranking.add(scores_N[wanted_N], document_ids[wanted_N], batch.row_ids[wanted_N], rescored=exact)
            answers += [hits(snapshot, query, ends) for query, ends in zip(queries, rankings, strict=True)]
    return answers
