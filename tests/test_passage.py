"""The decisive passage: positions' contributions sum to the exact score, and the passage lies where they are."""

from functools import partial

import pytest

import tdasearch
from tdasearch.capture import Capture
from tdasearch.query.passage import decisive_passages
from tdasearch.query.queries import encode_query
from tdasearch.query.rescore import token_contributions
from tdasearch.records import Content
from tests import models


@pytest.mark.parametrize("kind", models.KINDS)
def test_contributions_sum_to_the_score_and_passages_lie_in_the_text(kind, tmp_path):
    model, tokenizer = models.tiny(kind)
    texts = models.sentences(10)
    index = tdasearch.build_index(
        [{"id": f"d{n}", "text": text} for n, text in enumerate(texts)],
        model=model,
        tokenizer=tokenizer,
        path=tmp_path / "x.tda",
        quiet=True,
    )
    query = Content(prompt="The old bridge", completion=" was closed")
    hits = index.search(query.prompt, query.completion, k=10, rescore="all").proponents
    with Capture(model, index.manifest.plan.modules) as capture:
        asked = encode_query(index, capture, query, precondition=True)
        contribute = partial(token_contributions, index.language_model, capture, asked)
        for hit in hits:
            ids = tokenizer(hit.text).input_ids
            found = contribute(ids, [False] + [True] * (len(ids) - 1))
            assert len(found) == len(ids)
            assert found[-1] == pytest.approx(0.0, abs=1e-9 + 1e-6 * abs(hit.score))  # nothing is predicted from the last token
            assert found.sum() == pytest.approx(hit.score, rel=1e-3)
    passages = decisive_passages(index, query, hits, num_tokens=3)
    for hit, (start, end) in zip(hits, passages, strict=True):
        assert 0 <= start < end <= len(hit.text)
        assert hit.text[start:end].strip()
