"""Build and search, end to end on tiny models: scores equal the reference, the sign is right, filters and windows work."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import tdasearch
from tdasearch.cli import main
from tdasearch.records import Content
from tests import models, reference

PROMPT, COMPLETION = "The old bridge over", " the river was closed"


@pytest.fixture(scope="module", params=models.KINDS)
def built(request, tmp_path_factory):
    """An index over 24 documents under a tiny model, built as the contract says, with the reference beside it."""
    folder = tmp_path_factory.mktemp(request.param)
    model_path = models.save_tiny(request.param, folder / "model")
    texts = models.sentences(24)
    corpus = folder / "docs.jsonl"
    rows = [{"id": f"d{n}", "text": text, "source": "wiki" if n % 3 else "web", "year": 2000 + n} for n, text in enumerate(texts)]
    corpus.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    index = tdasearch.build_index(
        str(corpus), model=str(model_path), path=folder / "x.tda", fisher="empirical", fit_documents="all", quiet=True
    )
    return index, expected_scores(index, texts, [(PROMPT, COMPLETION)])[0]


def expected_scores(index, texts, queries):
    """Exact influence [Q, N] from the float64 reference."""
    language_model = index.language_model
    tokenizer = language_model.tokenizer
    exact = reference.reference_model(language_model.model)
    names = index.manifest.plan.modules
    documents = [reference.whole_text(tokenizer(text).input_ids) for text in texts]
    asked = []
    for prompt, completion in queries:
        encoded = tokenizer(prompt + completion, return_offsets_mapping=True)
        first = next(n for n, (_, end) in enumerate(encoded.offset_mapping) if end > len(prompt))
        first = max(first, 1)
        asked.append(reference.Example(encoded.input_ids, [n >= first for n in range(len(encoded.input_ids))]))
    curvature = reference.fit(exact, documents, names)
    gradients = [[reference.module_gradients(exact, example, names) for example in group] for group in (asked, documents)]
    return reference.influences(*gradients, curvature)


def test_scores_and_order_equal_the_reference(built):
    index, expected = built
    hits = index.search(PROMPT, COMPLETION, k=24, rescore="all")
    for found, order in ((hits.proponents, 1), (hits.opponents, -1)):
        assert [hit.document_id for hit in found] == [f"d{n}" for n in np.argsort(-order * expected)]
        assert [hit.rank for hit in found] == list(range(1, 25))
        assert all(hit.rescored for hit in found)
        for hit in found:
            assert hit.score == pytest.approx(expected[int(hit.document_id[1:])], rel=1e-3)


def test_the_command_line_gives_the_same_scores(built):
    index, expected = built
    words = ["search", str(index.path), "--prompt", PROMPT, "--completion", COMPLETION, "-k", "10", "--rescore", "all", "--json"]
    result = CliRunner().invoke(main, words)
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [row["document_id"] for row in rows] == [f"d{n}" for n in np.argsort(-expected)[:10]]
    for row in rows:
        assert row["score"] == pytest.approx(expected[int(row["document_id"][1:])], rel=1e-3)


def test_a_shortlist_is_rescored_exactly_and_the_codes_alone_come_close(built):
    index, expected = built
    shortlisted = index.search(PROMPT, COMPLETION, k=3, rescore=12)
    for hit in shortlisted.proponents + shortlisted.opponents:
        assert hit.rescored
        assert hit.score == pytest.approx(expected[int(hit.document_id[1:])], rel=1e-3)
    raw = index.search(PROMPT, COMPLETION, k=24, rescore=0)
    assert not any(hit.rescored for hit in raw.proponents)
    scores = {hit.document_id: hit.score for hit in raw.proponents}
    estimates = np.array([scores[f"d{n}"] for n in range(24)])
    assert np.corrcoef(estimates, expected)[0, 1] > 0.75  # one bit a coordinate; 0.82 to 0.90 were seen
    mixed = index.search(PROMPT, COMPLETION, k=10, rescore=4).proponents
    assert [hit.rescored for hit in mixed] == [True] * 4 + [False] * 6


def test_cosine_is_influence_over_both_norms(built):
    index, expected = built
    language_model = index.language_model
    exact = reference.reference_model(language_model.model)
    texts = models.sentences(24)
    documents = [reference.whole_text(language_model.tokenizer(text).input_ids) for text in texts]
    curvature = reference.fit(exact, documents, index.manifest.plan.modules)
    norms = np.sqrt(
        reference.self_influences(
            [reference.module_gradients(exact, d, index.manifest.plan.modules) for d in documents], curvature
        )
    )
    hits = index.search(PROMPT, COMPLETION, k=24, rescore="all", score="cosine").proponents
    assert all(-1 <= hit.score <= 1 for hit in hits)
    ratios = [hit.score * norms[int(hit.document_id[1:])] / expected[int(hit.document_id[1:])] for hit in hits]
    assert np.ptp(ratios) < 1e-3 * abs(np.mean(ratios))  # what is left over is the query's own norm
    itself = index.search(completion=texts[5], k=1, rescore="all", score="cosine").proponents[0]
    assert (itself.document_id, itself.score) == ("d5", pytest.approx(1.0, abs=1e-4))
    shortlisted = index.search(completion=texts[5], k=1, rescore=0, score="cosine").proponents[0]
    assert shortlisted.document_id == "d5"


def test_filters_select_before_the_top_k(built):
    index, expected = built
    for rescore in ("all", 200, 0):
        hits = index.search(PROMPT, COMPLETION, k=5, where="source = 'web' AND year >= 2006", rescore=rescore)
        assert {hit.document_id for hit in hits.proponents} <= {"d6", "d9", "d12", "d15", "d18", "d21"}
        assert len(hits.proponents) == len(hits.opponents) == 5
        assert index.search(PROMPT, COMPLETION, where="year = 1900", rescore=rescore).proponents == []
    wanted = [n for n in np.argsort(-expected) if n % 3 == 0]
    hits = index.search(PROMPT, COMPLETION, k=3, where="source = 'web'").proponents
    assert [hit.document_id for hit in hits] == [f"d{n}" for n in wanted[:3]]
    assert hits[0].metadata == {"source": "web", "year": 2000 + wanted[0]}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"k": 0}, "k: expected at least 1"),
        ({"k": -1}, "k: expected at least 1"),
        ({"where": "nothing = 1"}, "nothing"),
        ({"where": "source ="}, "source ="),
        ({"score": "best"}, "influence, cosine"),
        ({"rescore": -1}, "rescore"),
        ({"rescore": "some"}, "rescore"),
        ({"completion": ""}, "query"),
        ({"prompt": "long " * 100}, "the model's context"),
    ],
)
def test_a_wrong_request_is_one_clear_error(built, arguments, message):
    index, _ = built
    with pytest.raises(tdasearch.UsageError, match=message.replace("(", r"\(").replace(")", r"\)")):
        index.search(**{"prompt": PROMPT, "completion": COMPLETION, **arguments})


def test_more_than_there_are(built):
    index, _ = built
    assert len(index.search(PROMPT, COMPLETION, k=100).proponents) == 24
    assert len(index.search(PROMPT, COMPLETION, k=100, rescore=0).proponents) == 24


def test_several_queries_together_answer_as_each_alone(built):
    index, _ = built
    queries = [Content(prompt=PROMPT, completion=COMPLETION), Content(completion=models.sentences(3)[2])]
    for rescore in ("all", 6):
        together = index.search_many(queries, k=4, rescore=rescore)
        for query, answer in zip(queries, together, strict=True):
            alone = index.search(query.prompt, query.completion, k=4, rescore=rescore)
            for one, other in zip(answer.proponents + answer.opponents, alone.proponents + alone.opponents, strict=True):
                assert one.document_id == other.document_id
                assert one.score == pytest.approx(other.score, rel=1e-4)


def trained(kind, texts, *, num_steps=60):
    """A tiny model that has learned the texts: their gradients then cancel, so that some speak against others."""
    model, tokenizer = models.tiny(kind)
    model.eval()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(num_steps):
        optimizer.zero_grad()
        for text in texts:
            ids = torch.tensor([tokenizer(text).input_ids])
            (model(input_ids=ids, labels=ids).loss / len(texts)).backward()
        optimizer.step()
    return model.double(), tokenizer


@pytest.mark.parametrize("kind", models.KINDS)
def test_the_sign(kind, tmp_path):
    """One gradient step on the first proponent lowers the query's loss, on the first opponent raises it (float64)."""
    texts = [
        f"The {thing} is {colour}." for thing in ("old bridge", "river", "small house", "door") for colour in ("green", "white")
    ]
    model, tokenizer = trained(kind, texts)
    with reference.FullPrecision():
        index = tdasearch.build_index(
            [{"id": f"d{n}", "text": text} for n, text in enumerate(texts)],
            model=model,
            tokenizer=tokenizer,
            path=tmp_path / "x.tda",
            fit_documents="all",
            quiet=True,
        )
        hits = index.search("The door is", " green.", k=1, rescore="all")
    assert hits.proponents[0].score > 0 > hits.opponents[0].score
    exact = reference.reference_model(model)
    names = index.manifest.plan.modules
    num_prompt = len(tokenizer("The door is").input_ids)
    ids = tokenizer("The door is green.").input_ids
    query = reference.Example(ids, [n >= num_prompt for n in range(len(ids))])
    assert hits.loss == pytest.approx(float(reference.loss(exact, query).detach()), rel=1e-9)
    language_model = index.language_model
    for hit, sign in ((hits.proponents[0], 1), (hits.opponents[0], -1)):
        gradient = reference.module_gradients(exact, reference.whole_text(tokenizer(hit.text).input_ids), names)
        assert sign * reference.influence_by_step(exact, query, gradient) > 0
        # The step that the score is about is the preconditioned one, and there the score is the loss's change itself.
        step = {name: index.encoder.factors[name].precondition(torch.from_numpy(part)).numpy() for name, part in gradient.items()}
        assert reference.influence_by_step(exact, query, step) == pytest.approx(hit.score, rel=1e-2)
    assert language_model.model is model


def test_a_long_document_is_found_by_its_best_window(tmp_path):
    model, tokenizer = models.tiny("llama")
    sentences = models.sentences(40)
    needle = sentences[39]
    long = " ".join([*sentences[:12], needle, *sentences[12:20]])
    corpus = [{"id": "long", "text": long}, *({"id": f"s{n}", "text": text} for n, text in enumerate(sentences[20:38]))]
    index = tdasearch.build_index(
        corpus,
        model=model,
        tokenizer=tokenizer,
        path=tmp_path / "x.tda",
        window_tokens=40,
        stride=32,
        fit_documents="all",
        quiet=True,
    )
    assert index.info()["windows"] > index.info()["documents"] == 19
    for rescore in ("all", 200):
        hits = index.search(completion=needle, k=19, rescore=rescore).proponents
        assert [hit.document_id for hit in hits].count("long") == 1
        hit = next(hit for hit in hits if hit.document_id == "long")
        assert hit.text == long[hit.start : hit.end]
        assert hit.num_windows > 1
        others = index.search(
            completion=needle, k=19, rescore=rescore, where=f"document_id = 'long' AND \"window\" <> {hit.window}"
        )
        assert others.proponents[0].score < hit.score


def test_bm25_finds_words(built):
    index, _ = built
    text = models.sentences(24)[7]
    hits = index.search_text(text, k=3)
    assert hits[0].document_id == "d7"
    assert hits[0].score >= hits[1].score > 0
    assert index.search_text("zzzz qqqq") == []
    assert index.search_text('C++ ("quoted") AND OR * \' -- ;', k=2) is not None
    assert all(hit.metadata["source"] == "web" for hit in index.search_text(text, k=5, where="source = 'web'"))


def test_equal_documents_tie_by_id(tmp_path):
    model, tokenizer = models.tiny("gpt2")
    same = models.sentences(1)[0]
    corpus = [{"id": name, "text": same} for name in ("f", "b", "e", "a", "d", "c")] + [
        {"id": f"z{n}", "text": text} for n, text in enumerate(models.sentences(8)[1:])
    ]
    for shard_documents in (2, 100):
        index = tdasearch.build_index(
            corpus,
            model=model,
            tokenizer=tokenizer,
            path=tmp_path / f"{shard_documents}.tda",
            shard_documents=shard_documents,
            quiet=True,
        )
        found = index.search(completion=same, k=3, rescore=0).proponents
        assert math.isclose(found[0].score, found[2].score, rel_tol=1e-4)
        assert len({hit.document_id for hit in found} & set("abcdef")) == 3


def test_an_index_finds_its_model_again_and_refuses_another(tmp_path):
    model_path = models.save_tiny("gpt2", tmp_path / "model")
    other_path = models.save_tiny("gpt2", tmp_path / "other", seed=1)
    tdasearch.build_index([{"text": text} for text in models.sentences(8)], model=model_path, path=tmp_path / "x.tda", quiet=True)
    assert len(tdasearch.open_index(tmp_path / "x.tda").search(PROMPT, COMPLETION, k=2).proponents) == 2
    with pytest.raises(tdasearch.ModelError, match="other weights"):
        tdasearch.open_index(tmp_path / "x.tda", model=other_path).search(PROMPT, COMPLETION)
    model, _ = models.tiny("gpt2")
    _, tokenizer = models.tiny("gpt2", bos=True)
    with pytest.raises(tdasearch.ModelError, match="other tokenizer"):
        tdasearch.open_index(tmp_path / "x.tda", model=model, tokenizer=tokenizer).search(PROMPT, COMPLETION)
    factors = Path(tmp_path / "x.tda" / "encoder.safetensors")
    content = factors.read_bytes()
    factors.write_bytes(content[:-8] + bytes(8))
    with pytest.raises(tdasearch.StoreError, match="expected SHA-256"):
        tdasearch.open_index(tmp_path / "x.tda").search(PROMPT, COMPLETION)
