"""What goes wrong on the command line is said in one line: exit status 2 for a wrong request, 1 for a failure."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import models
from tests.commands import error, run

QUERY = ("--prompt", "The old", "--completion", " fox")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, a corpus, an index, and things that are none of these."""
    folder = tmp_path_factory.mktemp("errors")
    models.save_tiny("gpt2", folder / "model")
    rows = [{"id": f"d{n}", "text": text, "year": n} for n, text in enumerate(models.sentences(8))]
    (folder / "docs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "empty.jsonl").touch()
    (folder / "bad.jsonl").write_text('{"text": 3}\n{"text": null}\n{cut\n{"text": ""}\n')
    (folder / "mixed.jsonl").write_text('{"text": "Good."}\n{"text": 3}\n')
    (folder / "chat.jsonl").write_text('{"messages": [{"role": "assistant", "content": "Hi."}]}\n')
    (folder / "program.py").write_text("pass\n")
    (folder / "nothing").mkdir()
    for name, left_out in (("no-weights", "model.safetensors"), ("no-tokenizer", "tokenizer*")):
        shutil.copytree(folder / "model", folder / name, ignore=shutil.ignore_patterns(left_out))
    result = run("build", folder / "docs.jsonl", "--model", folder / "model", "--index", folder / "x.tda", "-q")
    assert result.exit_code == 0, result.stderr
    return folder


def fails(folder: Path, arguments: tuple[object, ...], *, status: int, message: str) -> None:
    """Run in a folder; the error must match, and nothing in the folder may change."""
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if not path.name.startswith(".writer")}
    previous = Path.cwd()
    os.chdir(folder)
    try:
        found = error(*arguments, status=status)
    finally:
        os.chdir(previous)
    assert re.search(message, found), found
    after = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if not path.name.startswith(".writer")}
    assert after.keys() == before.keys()
    assert {path for path, time in after.items() if before[path] != time and path.is_file()} == set()


@pytest.mark.parametrize(
    ("corpus", "message"),
    [
        ("missing.jsonl", "expected a corpus at missing.jsonl, found nothing there"),
        ("empty.jsonl", "expected at least one usable document, found none; rows skipped: 0"),
        ("bad.jsonl", r"rows skipped: 4; bad.jsonl:1: .* a number.*; bad.jsonl:2: .* null; bad.jsonl:3: no JSON.*; \.\.\.; mend"),
        ("program.py", r"expected a file that ends in \.jsonl, .* found program.py"),
        ("nothing", "found none among 0"),
        ("chat.jsonl", "expected a tokenizer with a chat template"),
    ],
)
def test_corpora(folder: Path, corpus: str, message: str) -> None:
    fails(folder, ("build", corpus, "--model", "model", "--index", "new.tda"), status=1, message=message)
    fails(folder, ("add", "x.tda", corpus), status=1, message=message)


def test_strict_stops_at_the_first_bad_row(folder: Path) -> None:
    message = "mixed.jsonl:2: the field 'text' is a number.*strict"
    fails(folder, ("build", "mixed.jsonl", "--model", "model", "--index", "new.tda", "--strict"), status=1, message=message)
    fails(folder, ("add", "x.tda", "mixed.jsonl", "--strict"), status=1, message=message)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("./missing", r"model './missing': expected a folder .* or a hub id, found nothing there"),
        ("deep/down/missing", "found nothing there"),
        ("docs.jsonl", "found a file"),
        ("nothing", "found no config.json in it"),
        ("no-weights", "model 'no-weights' cannot be loaded .* with safetensors weights"),
        ("no-tokenizer", "tokenizer of 'no-tokenizer' cannot be loaded: its vocabulary is empty"),
        ("someone/something", r"found no such folder, nothing of that name fetched before, and no way to the hub \(.*offline"),
    ],
)
def test_models(folder: Path, model: str, message: str) -> None:
    fails(folder, ("build", "docs.jsonl", "--model", model, "--index", "new.tda"), status=1, message=message)


def test_a_hub_that_does_not_answer_is_not_asked_for_a_minute() -> None:
    code = "from tdasearch.model_source import must_stay_local; must_stay_local('someone/something')"
    environment = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"}
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert "ModelError: model 'someone/something': found no such folder" in done.stderr
    assert time.monotonic() - started < 20


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("build", "docs.jsonl", "--model", "model", "--index", "x.tda"), "an index is there already"),
        (("build", "docs.jsonl", "--model", "model", "--index", "model"), "expected a new or empty folder .* found other files"),
        (("build", "docs.jsonl", "--model", "model", "--index", "docs.jsonl"), "expected a new or empty folder"),
        (("build", "docs.jsonl", "--model", "model", "--index", "docs.jsonl/x"), "the folder cannot be made"),
        (("search", "missing.tda", *QUERY), "missing.tda: expected an index, found no manifest.json"),
        (("add", "missing.tda", "docs.jsonl"), "missing.tda: expected an index, found no manifest.json"),
        (("info", "model"), "model: expected an index, found no manifest.json"),
    ],
)
def test_indexes(folder: Path, arguments: tuple[object, ...], message: str) -> None:
    fails(folder, arguments, status=1, message=message)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-k", 0], "k: expected at least 1, found 0"),
        (["-k", "many"], "'many' is not a valid integer; see tdasearch search --help"),
        (["--where", "year ="], "filter 'year =': .*expected an SQL condition on the columns document_id .*year"),
        (["--where", "nothing = 1"], "No field named nothing.*year"),
        (["--where", ""], "filter ''"),
        (["--where", "1; DROP TABLE documents"], "filter '1; DROP"),
        (["--prompt", "long " * 100], "expected at most 64 tokens .the model's context., found"),
        (["--completion", ""], "query"),
        (["--rescore", "some"], "expected a number or 'all', found 'some'"),
        (["--rescore", -1], "rescore: expected a number of at least 0"),
        (["--score", "best"], "score: expected one of influence, cosine, found 'best'"),
        (["--device", "toaster"], "device: expected auto, cpu, .* found 'toaster'"),
        (["--color", "red"], "No such option"),
    ],
)
def test_questions(folder: Path, options: list[object], message: str) -> None:
    fails(folder, ("search", "x.tda", *QUERY, *options), status=2, message=message)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--method", "magic"], "method: expected one of ekfac, kfac, found 'magic'"),
        (["--code", "2bit"], "code: expected one of 1bit, fp16, fp32, found '2bit'"),
        (["--fisher", "exact"], "fisher: expected one of sampled, empirical"),
        (["--blocks", "first"], "blocks: expected a range such as 22:30"),
        (["--blocks", "7:"], "no module was chosen .* the model has 2 blocks"),
        (["--modules", "*.nothing"], "no module was chosen by patterns"),
        (["--budget", "a lot"], "budget: expected bytes a document such as 1KB"),
        (["--budget", "-1"], "budget: expected bytes"),
        (["--budget", "1TB"], "budget: expected bytes"),
        (["--budget", "0"], "too small"),
        (["--budget", "9999999MB"], "budget: expected less than"),
        (["--eigenbasis-share", 0], "eigenbasis_share: expected above 0 and at most 1"),
        (["--eigenbasis-share", 1.5], "eigenbasis_share: expected above 0 and at most 1"),
        (["--window", 65], "window: expected 2 to 64 tokens .the model's context., found 65"),
        (["--window", 1], "window: expected 2 to 64"),
        (["--window", 32, "--stride", 33], "stride: expected 1 to 32"),
        (["--stride", 0], "stride: expected 1 to 64"),
        (["--max-windows", 0], "max_windows: expected from 1"),
        (["--max-windows", 2**70], "max_windows: expected from 1"),
        (["--fit-documents", 0], "fit_documents: expected a number of at least 1, or 'all'"),
        (["--fit-documents", "some"], "expected a number or 'all', found 'some'"),
        (["--damping-scale", 0], "damping_scale: expected above 0"),
        (["--damping-scale", "inf"], "damping_scale: expected above 0"),
        (["--damping-scale", "nan"], "damping_scale: expected above 0"),
        (["--seed", -1], "seed: expected from 0"),
        (["--shard-documents", 0], "shard_documents: expected from 1"),
        (["--shard-documents", 2**40], "shard_documents: expected from 1"),
        (["--batch-tokens", 0], "batch_tokens: expected at least 1"),
        (["--dtype", "int8"], "dtype: expected one of float32"),
        (["--device", "toaster"], "device: expected auto"),
        (["--id-field", "text"], "five different field names"),
        (["--text-field", ""], "five different field names"),
        (["--window", "wide"], "is not a valid integer"),
    ],
)
def test_build_options(folder: Path, options: list[object], message: str) -> None:
    arguments = ("build", "docs.jsonl", "--model", "model", "--index", "new.tda", *options)
    fails(folder, arguments, status=2, message=message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("build", "docs.jsonl"), "Missing option '--model'; see tdasearch build --help"),
        (("search", "x.tda"), "Missing option '--completion'"),
        (("add", "x.tda"), "Missing argument 'CORPUS'"),
        (("info",), "Missing argument 'PATH'"),
        (("fetch",), "No such command 'fetch'"),
        (("--fast", "info"), "No such option"),
    ],
)
def test_what_is_missing_or_unknown(folder: Path, arguments: tuple[object, ...], message: str) -> None:
    fails(folder, arguments, status=2, message=message)


def test_an_index_and_its_model_belong_together(folder: Path, tmp_path: Path) -> None:
    models.save_tiny("gpt2", tmp_path / "model")
    arguments = ("build", folder / "docs.jsonl", "--model", tmp_path / "model", "--index", tmp_path / "x.tda", "-q")
    assert run(*arguments).exit_code == 0
    question = ("search", tmp_path / "x.tda", *QUERY)
    answer = run(*question).stdout
    (tmp_path / "model").rename(tmp_path / "moved")
    assert "found nothing there: check the path; if it moved, say where it is now: --model" in error(*question, status=1)
    assert run(*question, "--model", tmp_path / "moved").stdout == answer
    models.save_tiny("gpt2", tmp_path / "model", seed=1)
    for refused in (question, ("add", tmp_path / "x.tda", folder / "docs.jsonl")):
        assert "was built with other weights" in error(*refused, status=1)
    shutil.rmtree(tmp_path / "model")
    models.save_tiny("gpt2", tmp_path / "model", bos=True)
    for refused in (question, ("add", tmp_path / "x.tda", folder / "docs.jsonl")):
        assert "was built with other tokenizer" in error(*refused, status=1)


def test_a_filter_that_matches_nothing_is_no_error(folder: Path) -> None:
    for rescore in ("all", 0, 200):
        result = run("search", folder / "x.tda", *QUERY, "--where", "year > 100", "--rescore", rescore)
        assert (result.exit_code, result.stdout) == (0, "")
