"""The command line as a user meets it: help, round trips, what each kind of corpus gives. Errors are in test_cli_errors.py."""

from __future__ import annotations

import csv
import inspect
import json
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tdasearch
from tdasearch import cli
from tdasearch.indexer.plan import BuildOptions
from tests import models
from tests.commands import on_a_terminal, run
from tests.commands import rows as output_rows

TEXTS = models.sentences(12)
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.save_tiny("gpt2", tmp_path_factory.mktemp("models") / "gpt2")


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def documents(texts: list[str]) -> list[dict[str, Any]]:
    return [{"id": f"d{n}", "text": text, "year": 2000 + n} for n, text in enumerate(texts)]


def build(corpus: Path, model: Path, *options: object) -> tuple[Path, dict[str, Any]]:
    """Build quietly; the index and what it says of itself."""
    index = corpus.parent / "x.tda"
    result = run("build", corpus, "--model", model, "--index", index, "-q", *options)
    assert (result.exit_code, result.stdout) == (0, ""), result.stderr
    return index, output_rows("info", index)[0]


def search(index: Path, *options: object) -> list[dict[str, Any]]:
    return output_rows("search", index, "--prompt", "The old", "--completion", " fox", "-k", 100, *options)


# Help and defaults


@pytest.mark.parametrize("name", [None, *cli.main.commands])
def test_help_documents_every_command_and_option(name: str | None) -> None:
    command = cli.main.commands[name] if name else cli.main
    result = run(*([name] if name else []), "--help")
    assert (result.exit_code, result.stderr) == (0, "")
    assert command.help and command.help.split("\n")[0] in " ".join(result.stdout.split())
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            assert parameter.help and parameter.opts[-1] in result.stdout
    if name is None:
        for other in cli.main.commands.values():
            assert other.short_help and other.short_help in result.stdout  # whole, not cut with dots


BUILD_DEFAULTS = cli.build.make_context("build", ["corpus", "--model", "m", "--index", "x"]).params


@pytest.mark.parametrize("name", [field.name for field in fields(BuildOptions)])
def test_one_default_for_each_option(name: str) -> None:
    signature = inspect.signature(tdasearch.build_index).parameters
    found = {field.name: field.default for field in fields(BuildOptions)}[name]
    assert (BUILD_DEFAULTS[name], signature[name].default) == (found, found)
    help_text = next(parameter.help for parameter in cli.build.params if parameter.name == name)  # type: ignore[attr-defined]
    if found is None:
        assert "[default:" in help_text or "at most" in help_text.lower()  # what happens without it is said


def test_the_options_that_are_no_part_of_the_plan_have_one_default_too() -> None:
    signature = inspect.signature(tdasearch.build_index).parameters
    for name in ("batch_tokens", "device", "dtype", "strict", "quiet"):
        assert BUILD_DEFAULTS[name] == signature[name].default
    add = cli.add.make_context("add", ["x", "corpus"]).params
    signature = inspect.signature(tdasearch.Index.add).parameters
    assert all(add[name] == signature[name].default for name in ("strict", "quiet"))
    found = cli.search.make_context("search", ["x", "--completion", "c"]).params
    signature = inspect.signature(tdasearch.Index.search).parameters
    assert all(found[name] == signature[name].default for name in ("prompt", "k", "where", "rescore", "score"))


# The whole way, in processes of their own


def test_build_add_search_info_in_a_shell(model: Path, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "docs.jsonl", documents(TEXTS))
    write_jsonl(tmp_path / "more.jsonl", [{"id": "new", "text": "The old fox sees the sea.", "language": "en"}])

    def shell(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tdasearch", *map(str, arguments)]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        return done

    built = shell("build", "docs.jsonl", "--model", model, "--index", "x.tda")
    assert built.stdout == ""
    for label in ("read: ", "fit: ", "encode: ", "x.tda: documents: 12, windows: 12 of "):
        assert label in built.stderr
    assert "Loading weights" not in built.stderr
    added = run("add", tmp_path / "x.tda", tmp_path / "more.jsonl", "-q")  # in this process: the other two cost seconds each
    assert (added.exit_code, added.stdout) == (0, "")
    found = shell("search", "x.tda", "--prompt", "The old", "--completion", " fox", "-k", 13)
    assert found.stderr == ""
    rows = [json.loads(line) for line in found.stdout.splitlines()]
    assert [row["rank"] for row in rows] == list(range(1, 14))
    assert {"rank", "score", "document_id", "text", "metadata", "rescored"} <= rows[0].keys()
    assert [row["score"] for row in rows] == sorted((row["score"] for row in rows), reverse=True)
    assert {row["document_id"]: row["metadata"] for row in rows}["new"] == {"language": "en"}
    again = output_rows("search", tmp_path / "x.tda", "--prompt", "The old", "--completion", " fox", "-k", 13, "--json")
    # Another process may sum in another order (threads, the route of a product), so float32 scores agree up to rounding.
    assert [row.pop("score") for row in rows] == pytest.approx([row.pop("score") for row in again], rel=1e-5)
    assert rows == again


def test_what_info_says(model: Path, tmp_path: Path) -> None:
    _, info = build(write_jsonl(tmp_path / "docs.jsonl", documents(TEXTS)), model, "--budget", "512", "--blocks", "1")
    assert (info["documents"], info["windows"], info["state"], info["method"]) == (12, 12, "complete", "ekfac")
    assert info["bytes_per_document"] <= 512 == info["plan"]["budget_bytes"]
    assert all(name.startswith("transformer.h.1.") for name in info["plan"]["modules"])
    assert 0 < info["covered_parameters"] == info["plan"]["num_covered_parameters"] < info["model"]["num_parameters"]
    assert info["model"]["source"] == str(model)
    assert info["columns"] == {"year": "year"}
    assert "expected_fidelity" in info


def test_opponents_filters_and_scores(model: Path, tmp_path: Path) -> None:
    index, _ = build(write_jsonl(tmp_path / "docs.jsonl", documents(TEXTS)), model)
    proponents, opponents = search(index), search(index, "--opponents")
    assert [row["document_id"] for row in proponents] == [row["document_id"] for row in reversed(opponents)]
    assert {row["document_id"] for row in search(index, "--where", "year >= 2010")} == {"d10", "d11"}
    assert search(index, "--where", "year = 1900") == []
    assert not any(row["rescored"] for row in search(index, "--rescore", 0))
    assert all(row["rescored"] for row in search(index, "--rescore", "all"))
    assert all(-1 <= row["score"] <= 1 for row in search(index, "--score", "cosine"))
    assert search(index) == proponents  # the same question has the same answer


# Every kind of corpus


def test_parquet(model: Path, tmp_path: Path) -> None:
    stamps = pa.array([1, None, 3], pa.timestamp("s"))
    pq.write_table(pa.table({"id": [1, 2, 3], "text": TEXTS[:3], "when": stamps}), tmp_path / "docs.parquet")
    index, _ = build(tmp_path / "docs.parquet", model)
    found = {row["document_id"]: row for row in search(index)}
    assert {name: row["text"] for name, row in found.items()} == {str(n + 1): TEXTS[n] for n in range(3)}
    assert found["1"]["metadata"] == {"when": "1970-01-01T00:00:01"}


def test_csv_with_other_field_names(model: Path, tmp_path: Path) -> None:
    with (tmp_path / "docs.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["key", "question", "answer", "note"])
        writer.writerows([f"k{n}", "Who? ", text, "a, b"] for n, text in enumerate(TEXTS[:3]))
    names = ["--id-field", "key", "--prompt-field", "question", "--completion-field", "answer"]
    index, _ = build(tmp_path / "docs.csv", model, *names)
    found = {row["document_id"]: row for row in search(index)}
    assert {name: row["text"] for name, row in found.items()} == {f"k{n}": "Who? " + TEXTS[n] for n in range(3)}
    assert found["k1"]["metadata"] == {"note": "a, b"}


def test_a_folder_of_texts(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.txt").write_text(TEXTS[0], encoding="utf-8")
    (folder / "deep" / "b.md").write_text("\ufeff" + TEXTS[1], encoding="utf-8")
    (folder / "picture.png").write_bytes(b"\x89PNG")
    index, info = build(folder, model)
    assert {row["document_id"]: row["text"] for row in search(index)} == {"a.txt": TEXTS[0], "deep/b.md": TEXTS[1]}
    assert info["skipped"] == 1
    assert search(index, "--where", "path = 'deep/b.md'")[0]["metadata"] == {"path": "deep/b.md"}


def test_conversations(model: Path, tmp_path: Path) -> None:
    chat = tmp_path / "chat"
    shutil.copytree(model, chat)
    (chat / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    turns = [[{"role": "user", "content": "Say."}, {"role": "assistant", "content": text}] for text in TEXTS[:4]]
    bad = {"id": "bad", "conversation": [{"role": "user", "content": "Nobody answers."}]}
    rows = [*({"id": f"c{n}", "conversation": messages} for n, messages in enumerate(turns)), bad]
    index, info = build(write_jsonl(tmp_path / "chat.jsonl", rows), chat, "--messages-field", "conversation")
    found = {row["document_id"]: row["text"] for row in search(index)}
    assert found == {f"c{n}": f"user: Say.\nassistant: {text}\n" for n, text in enumerate(TEXTS[:4])}
    assert info["skipped"] == 1


# Nothing is dropped silently


def reports(index: Path) -> dict[str, str]:
    lines = [line for path in sorted((index / "skipped").iterdir()) for line in path.read_text().splitlines()]
    return {row["origin"]: row["reason"] for row in map(json.loads, lines)}


def test_bad_rows_and_repeated_ids_are_reported(model: Path, tmp_path: Path) -> None:
    bad = ['{"id": "x", "text": 7}', '{"id": "x", "text": null}', '{"id": "x"}', "{cut", '{"id": "x", "text": ""}']
    again = [{"id": "d0", "text": "Another text."}, {"id": "d1", "text": TEXTS[1]}]
    corpus = write_jsonl(tmp_path / "docs.jsonl", [*documents(TEXTS[:6]), *bad, *again, {"id": "last", "text": TEXTS[7]}])
    index, info = build(corpus, model)
    assert (info["documents"], info["skipped"], info["duplicates"]) == (7, 6, 1)
    found = reports(index)
    assert found.keys() == {f"docs.jsonl:{line}" for line in range(7, 14)}
    for line, reason in {
        7: "a number",
        8: "null",
        9: "expected a field",
        10: "no JSON",
        11: "empty",
        12: "differs",
        13: "duplicate",
    }.items():
        assert reason in found[f"docs.jsonl:{line}"]
    assert info["skipped_path"] == str(index / "skipped")
    result = run("add", index, corpus)
    assert result.exit_code == 0
    assert "added: 0, now documents: 7, " in result.stderr and "rows skipped: 6, duplicates: 8" in result.stderr
    assert len(search(index)) == output_rows("info", index)[0]["documents"] == 7


def test_an_addition_brings_columns_and_refuses_taken_ids(model: Path, tmp_path: Path) -> None:
    index, _ = build(write_jsonl(tmp_path / "docs.jsonl", documents(TEXTS[:6])), model)
    run("add", index, tmp_path / "docs.jsonl", "-q")  # adds nothing, and has a report of its own
    rows = [{"id": "d0", "text": "Another text."}, {"id": "n", "text": TEXTS[8], "year": None, "Text": "x", "tags": ["a"]}]
    assert run("add", index, write_jsonl(tmp_path / "more.jsonl", rows), "-q").exit_code == 0
    assert "the index" in reports(index)["more.jsonl:1"] and "duplicate" in reports(index)["docs.jsonl:1"]
    info = output_rows("info", index)[0]
    assert info["columns"] == {"year": "year", "Text": "metadata_Text", "tags": "tags"}
    assert [corpus["num_documents"] for corpus in info["corpus"]] == [6, 0, 1]
    for where in ("metadata_Text = 'x'", "tags = '[\"a\"]'", "year IS NULL"):
        assert [row["document_id"] for row in search(index, "--where", where)] == ["n"]


def test_a_value_of_another_kind_leaves_the_index_as_it_was(model: Path, tmp_path: Path) -> None:
    index, before = build(write_jsonl(tmp_path / "docs.jsonl", documents(TEXTS[:6])), model)
    wrong = write_jsonl(tmp_path / "wrong.jsonl", [{"id": "w", "text": TEXTS[8], "year": "unknown"}])
    result = run("add", index, wrong, "-q")
    assert result.exit_code == 1 and "expected int64 in the column 'year'" in result.stderr
    assert output_rows("info", index)[0] == before
    right = write_jsonl(tmp_path / "right.jsonl", [{"id": "w", "text": TEXTS[8], "year": 7}])
    assert run("add", index, right, "-q").exit_code == 0


def test_cut_documents_are_counted(model: Path, tmp_path: Path) -> None:
    rows = [{"id": "long", "text": " ".join(TEXTS)}, {"id": "short", "text": TEXTS[0]}]
    corpus = write_jsonl(tmp_path / "docs.jsonl", rows)
    index, info = build(corpus, model, "--window", 32, "--stride", 24, "--max-windows", 3)
    assert (info["documents"], info["windows"], info["truncated"], info["skipped"]) == (2, 4, 1, 0)
    where = "document_id = 'long'"
    assert search(index, "--where", where)[0]["num_windows"] > 3  # it has more than are in the index
    assert search(index, "--where", f'{where} AND "window" > 2') == []
    shutil.rmtree(index)
    result = run("build", corpus, "--model", model, "--index", index, "--max-windows", 1)
    assert "documents cut at --max-windows: 1" in result.stderr
    shutil.rmtree(index)
    assert build(corpus, model)[1]["truncated"] == 0


def test_texts_and_metadata_come_out_as_they_went_in(model: Path, tmp_path: Path) -> None:
    row = {
        "id": 'a "b"\n<c>',
        "text": "\u4f60\u597d \u2028 \U0001f600 e\u0301\r\n [bold]x[/bold]",
        "v": [1, {"k": None}],
        "n": 2**70,
    }
    nan = '{"id": "nan", "text": "Not a number.", "v": NaN}'
    index, _ = build(write_jsonl(tmp_path / "docs.jsonl", [*documents(TEXTS[:4]), row, nan]), model)
    found = {line["document_id"]: line for line in search(index)}  # strict JSON: NaN would be refused
    assert found[row["id"]]["text"] == row["text"]
    assert found[row["id"]]["metadata"] == {"v": row["v"], "n": row["n"]}
    assert found["nan"]["metadata"] == {"v": None}


# On a terminal


def test_tables_on_a_terminal(model: Path, tmp_path: Path) -> None:
    rows = [*documents(TEXTS[:4]), {"id": "odd", "text": "[red]The old fox[/red] " + 40 * "long ", "note": 300 * "x"}]
    index, _ = build(write_jsonl(tmp_path / "docs.jsonl", rows), model, "--max-windows", 2)
    shown = on_a_terminal(tmp_path, "search", index, "--prompt", "The old", "--completion", " fox", "-k", 5)
    assert "Proponents" in shown and "5 of 5 scores exact" in shown and "[red]The" in shown
    assert all(len(line) <= 80 for line in shown.splitlines())
    assert shown.count("x") < 200
    shown = on_a_terminal(tmp_path, "info", index)
    assert "5 in 6 windows" in shown and "year, note" in shown
    assert "encode: 100%" in on_a_terminal(
        tmp_path, "build", tmp_path / "docs.jsonl", "--model", model, "--index", tmp_path / "y"
    )
    assert json.loads(on_a_terminal(tmp_path, "info", index, "--json"))["documents"] == 5
