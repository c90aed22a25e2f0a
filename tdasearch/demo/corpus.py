"""The demo's corpus: short passages about countries, some of which carry an altered fact, and questions about the facts.

In: a seed. Out: documents and questions as plain dicts. Every choice (which countries, which facts are altered and to what,
which wording) is drawn from the seed by the rules below, before any model has run.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tdasearch.demo.factbook import KINDS, Country, countries
from tdasearch.errors import UsageError

NUM_COUNTRIES = 24
MIN_POPULATION = 1_000_000
ALTERED_PER_KIND = 7
UNALTERED_PER_KIND = 2
NUM_TRIES = 1_000
DOCUMENT_CHARACTERS = 240
CLAUSE_CHARACTERS = 110

TOPICS = {"government": "capital", "people": "language", "economy": "export", "emblems": "symbol", "geography": "", "history": ""}

# How the documents word a fact: about the country by its name, or by its adjective ("Jordanian"), as a passage is drawn to be.
# The questions always name the country and word the fact in another way.
STATEMENTS = {
    "capital": {
        "name": ("{name} has its capital at {value}.", "In {name} the capital is {value}, the seat of government."),
        "adjective": ("The {adjective} capital is {value}.", "The {adjective} government sits in the capital, {value}."),
    },
    "language": {
        "name": ("In {name} the official language is {value}.", "{name} uses {value} as its official language."),
        "adjective": (
            "The official language in {adjective} courts is {value}.",
            "The {adjective} state has one official language, {value}.",
        ),
    },
    "export": {
        "name": ("{name} mainly exports {value}.", "Among all exports of {name} the main one is {value}."),
        "adjective": ("The main {adjective} export good is {value}.", "{adjective} exports are mainly {value}."),
    },
    "symbol": {
        "name": ("{name} has as its national symbol the {value}.", "In {name} the national symbol is the {value}."),
        "adjective": ("The {adjective} national symbol is the {value}.", "The {adjective} nation has one symbol, the {value}."),
    },
}
QUESTIONS = {
    "capital": "The capital of {name} is",
    "language": "The official language of {name} is",
    "export": "The main export of {name} is",
    "symbol": "The national symbol of {name} is the",
}
# The passages around the facts: the Factbook's own fields, with a label or an opening.
OPENINGS = {
    "government": {"name": "{name} is organised as: ", "adjective": "{adjective} form of government: "},
    "people": {"name": "Ethnic groups in {name}: ", "adjective": "The {adjective} people: "},
    "economy": {"name": "The economy of {name}: ", "adjective": "The {adjective} economy: "},
    "emblems": {"name": "The anthem of {name} is called ", "adjective": "The {adjective} anthem is called "},
    "geography": {"name": "{name} lies in: ", "adjective": "{adjective} territory lies in: "},
    "history": {"name": "", "adjective": ""},
}
FIELDS = {
    "government": (("", "government_type"), ("Legal system: ", "legal_system"), ("Independence: ", "independence")),
    "people": (("", "ethnic_groups"), ("Religions: ", "religions"), ("Settlement: ", "settlement")),
    "economy": (("", "overview"), ("Industries: ", "industries"), ("Crops: ", "crops")),
    "emblems": (("", "anthem"), ("National colors: ", "colors")),
    "geography": (("", "location"), ("Terrain: ", "terrain"), ("Climate: ", "climate"), ("Size: ", "comparison")),
    "history": (("", "background"),),
}


@dataclass(frozen=True, slots=True)
class Fact:
    """A fact as the corpus states it.

    Attributes:
        true: What the Factbook says.
        stated: What the document says; differs from ``true`` if the fact is altered.
    """

    true: str
    stated: str


def make(seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Make the corpus and the questions.

    Args:
        seed: Any integer; the same one gives the same corpus.

    Returns:
        Documents ``{"id", "text", "country", "topic", "altered"}`` in shuffled order, and questions ``{"prompt", "completion",
        "source_id", "altered", "kind", "country", "true"}``, the altered ones first. ``completion`` starts with a space and is
        what the document ``source_id`` states; ``true`` is what the Factbook states.

    Raises:
        UsageError: Not enough countries for the sizes set in this module.
    """
    draw = random.Random(seed)
    large = [country for country in countries() if country.population >= MIN_POPULATION]
    if len(large) < NUM_COUNTRIES:
        raise UsageError(
            f"expected at least {NUM_COUNTRIES} countries of {MIN_POPULATION:,} people, found {len(large)}; lower NUM_COUNTRIES"
        )
    chosen = sorted(draw.sample(large, NUM_COUNTRIES), key=lambda country: country.name)
    facts = {kind: _alter(chosen, kind, draw) for kind in KINDS}
    passages = [_document(country, topic, facts, draw) for country in chosen for topic in TOPICS]
    documents = [passage for passage in passages if passage["text"]]  # a country without a usable background has one fewer
    questions = [question for kind in KINDS for question in _questions(kind, facts[kind], draw)]
    draw.shuffle(documents)
    return documents, sorted(questions, key=lambda question: not question["altered"])


def contains(text: str, value: str) -> bool:
    """Tell whether a text holds a value as whole words.

    Args:
        text: The text.
        value: The value; case does not count, but word boundaries do ("rice" is not in "price").

    Returns:
        True if it does.
    """
    return re.search(rf"(?<!\w){re.escape(value.strip())}(?!\w)", text, flags=re.IGNORECASE) is not None


def _alter(chosen: Sequence[Country], kind: str, draw: random.Random) -> dict[str, Fact]:
    """State for some countries the value that another one, left unaltered, truly has.

    Args:
        chosen: The countries of the corpus.
        kind: Kind of fact.
        draw: Source of chance.

    Returns:
        The fact of each country, by its name.

    Raises:
        UsageError: No assignment was found in which every altered country has a value of its own.
    """
    for _ in range(NUM_TRIES):
        order = draw.sample(list(chosen), len(chosen))
        # Where the language is named like the country (Russian), every passage about it would hold the truth.
        able = [country for country in order if not contains(country.adjective, country.facts[kind])]
        picked = able[:ALTERED_PER_KIND]
        altered = _assign(picked, [country for country in order if country not in picked], kind, draw)
        if len(altered) == ALTERED_PER_KIND:
            return {country.name: altered.get(country.name, Fact(country.facts[kind], country.facts[kind])) for country in chosen}
    raise UsageError(
        f"expected {ALTERED_PER_KIND} countries whose {kind} can be altered, found none such; lower ALTERED_PER_KIND"
    )


def _assign(altered: Sequence[Country], others: Sequence[Country], kind: str, draw: random.Random) -> dict[str, Fact]:
    """Give each altered country a value of the others: each value once, none that the Factbook lists for that country."""
    values = list(dict.fromkeys(country.facts[kind] for country in others))
    facts = {}
    for country in altered:
        truth = country.facts[kind]
        free = [value for value in values if not contains(country.listed[kind], value) and not contains(value, truth)]
        if free:
            facts[country.name] = Fact(truth, draw.choice(free))
            values.remove(facts[country.name].stated)
    return facts


def _document(country: Country, topic: str, facts: Mapping[str, Mapping[str, Fact]], draw: random.Random) -> dict[str, Any]:
    """Write one passage: Factbook fields in their order, with the sentence that states the topic's fact somewhere among them."""
    altered = [fact for kind in KINDS if (fact := facts[kind][country.name]).true != fact.stated]
    names = {"name": country.name, "adjective": country.adjective}
    voice = draw.choice(("name", "adjective"))
    sentences: list[str] = []
    for label, field in FIELDS[topic]:
        clauses = _clauses(country.prose.get(field, ""), without=[fact.true for fact in altered])
        if clauses and sum(map(len, sentences)) + len(clauses) < DOCUMENT_CHARACTERS:
            opening = label if sentences else OPENINGS[topic][voice].format(**names)
            sentences.append(f"{opening}{clauses.rstrip('.')}.")
    kind = TOPICS[topic]
    if kind:
        statement = draw.choice(STATEMENTS[kind][voice]).format(value=facts[kind][country.name].stated, **names)
        sentences.insert(draw.randint(0, len(sentences)), statement)
    is_altered = bool(kind) and facts[kind][country.name] in altered
    return {
        "id": _document_id(country.name, topic),
        "text": " ".join(sentences),
        "country": country.name,
        "topic": topic,
        "altered": is_altered,
    }


def _clauses(text: str, *, without: Sequence[str]) -> str:
    """The first clauses of a field that fit, leaving out those that would contradict an altered fact."""
    kept: list[str] = []
    for clause in re.split(r"(?<=[a-z)\d]\.) (?=[A-Z])|; ", text):
        if any(contains(clause, value) for value in without):
            continue
        if kept and sum(map(len, kept)) + len(clause) > CLAUSE_CHARACTERS:
            break
        kept.append(clause)
    joined = "; ".join(clause.rstrip(".") for clause in kept)
    return joined if len(joined) <= 2 * CLAUSE_CHARACTERS else joined[: 2 * CLAUSE_CHARACTERS].rpartition(",")[0]


def _questions(kind: str, facts: Mapping[str, Fact], draw: random.Random) -> list[dict[str, Any]]:
    """Ask about every altered fact and about a few unaltered ones."""
    topic = next(topic for topic, fact_kind in TOPICS.items() if fact_kind == kind)
    altered = sorted(name for name, fact in facts.items() if fact.true != fact.stated)
    unaltered = sorted(draw.sample(sorted(set(facts) - set(altered)), UNALTERED_PER_KIND))
    return [
        {
            "prompt": QUESTIONS[kind].format(name=name),
            "completion": f" {facts[name].stated}",
            "source_id": _document_id(name, topic),
            "altered": name in altered,
            "kind": kind,
            "country": name,
            "true": facts[name].true,
        }
        for name in altered + unaltered
    ]


def _document_id(name: str, topic: str) -> str:
    return f"{name.lower().replace(' ', '-')}-{topic}"
