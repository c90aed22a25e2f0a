"""Builds and additions: repeatable to the byte, and killed at any time they end as if nothing had happened."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lancedb
import numpy as np
import pytest

import tdasearch
from tests import commands, models
from tests.commands import Running

NUM_DOCUMENTS = 120
NUM_KILLS = 10
EXTRA = 40  # documents of the addition


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def manifest(index: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((index / "manifest.json").read_text())
    return read


def contents(index: Path) -> dict[tuple[str, int], tuple[Any, ...]]:
    """Every row of an index but for its metadata columns, read without tdasearch."""
    table = lancedb.connect(str(index)).open_table("documents").to_arrow()
    columns = ["document_id", "window", "text", "code", "loss", "self_influence", "metadata", "content_hash"]
    rows = list(zip(*(table[name].to_pylist() for name in columns), strict=True))
    found = {(row[0], row[1]): row[2:] for row in rows}
    assert len(found) == len(rows), "a window is there twice"
    return found


def commits(index: Path) -> int:
    """How often the table was committed to; its creation is the first."""
    folder = index / "documents.lance" / "_versions"
    return len(list(folder.glob("*.manifest"))) if folder.exists() else 0


def state(index: Path) -> str:
    return str(manifest(index)["state"]) if (index / "manifest.json").exists() else "none"


def fitted(index: Path) -> bool:
    return state(index) != "none" and manifest(index)["encoder_fingerprint"] != ""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, a corpus and an addition to it, whose documents have a field more."""
    folder = tmp_path_factory.mktemp("build")
    models.save_tiny("gpt2", folder / "model")
    texts = models.sentences(NUM_DOCUMENTS + EXTRA)
    rows = [{"id": f"d{n}", "text": text, "n": n} for n, text in enumerate(texts)]
    write_rows(folder / "docs.jsonl", rows[:NUM_DOCUMENTS])
    write_rows(folder / "more.jsonl", [{**row, "new": "yes"} for row in rows[NUM_DOCUMENTS:]])
    return folder


def build_arguments(folder: Path, index: Path) -> tuple[object, ...]:
    return ("build", folder / "docs.jsonl", "--model", folder / "model", "--index", index, "--shard-documents", 8, "-q")


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> tuple[Path, float]:
    """A build that nobody killed, and the seconds it took once all was imported."""
    for index in ("first.tda", "whole.tda"):  # the second finds files and code in memory, as all that follow
        running = Running(folder, *build_arguments(folder, folder / index))
        assert running.end() == 0, running.output
        seconds = time.monotonic() - running.started
    return folder / "whole.tda", seconds


def names(index: Path) -> set[str]:
    """What lies in an index, but for the search's cache and the lock's files, which the next writer takes over."""
    return {path.name for path in index.iterdir() if path.name != "ann" and not path.name.startswith(".writer.")}


def assert_same(index: Path, whole: Path) -> None:
    """An index is the one that an undisturbed build makes, and nothing is left over."""
    assert contents(index) == contents(whole)
    assert manifest(index) == manifest(whole)
    assert (index / "encoder.safetensors").read_bytes() == (whole / "encoder.safetensors").read_bytes()
    assert names(index) == names(whole)


def test_building_twice_gives_identical_bytes(folder: Path, undisturbed: tuple[Path, float]) -> None:
    assert_same(folder / "first.tda", undisturbed[0])


def test_the_table_is_what_it_should_be_when_read_without_tdasearch(undisturbed: tuple[Path, float]) -> None:
    table = lancedb.connect(str(undisturbed[0])).open_table("documents").to_arrow()
    assert table["document_id"].to_pylist() == [f"d{n}" for n in range(NUM_DOCUMENTS)]
    assert table["shard"].to_pylist() == [n // 8 for n in range(NUM_DOCUMENTS)]
    assert table["n"].to_pylist() == list(range(NUM_DOCUMENTS))
    assert [json.loads(text) for text in table["metadata"].to_pylist()] == [{"n": n} for n in range(NUM_DOCUMENTS)]
    assert table["text"].to_pylist() == models.sentences(NUM_DOCUMENTS + EXTRA)[:NUM_DOCUMENTS]
    for column in ("loss", "self_influence"):
        assert np.isfinite(table[column].to_numpy()).all() and (table[column].to_numpy() > 0).all()
    codes_NB = np.stack([np.frombuffer(code, np.uint8) for code in table["code"].to_pylist()])
    scales_N = codes_NB[:, :4].copy().view("<f4")[:, 0]
    assert np.isfinite(scales_N).all() and (scales_N > 0).all()
    assert 8 * (codes_NB.shape[1] - 4) == manifest(undisturbed[0])["plan"]["sketch_dim"]
    assert len(np.unique(codes_NB, axis=0)) == NUM_DOCUMENTS


def test_killed_at_ten_random_times(folder: Path, undisturbed: tuple[Path, float], tmp_path: Path) -> None:
    whole, seconds = undisturbed
    index = tmp_path / "x.tda"
    chance = random.Random(7)
    num_kills = 0
    while num_kills < NUM_KILLS:
        running = Running(tmp_path, *build_arguments(folder, index))
        time.sleep(chance.uniform(0.0, seconds))
        num_kills += running.kill()
        if state(index) == "complete":  # after how many kills, chance decides: begin another one
            assert_same(index, whole)
            shutil.rmtree(index)
    running = Running(tmp_path, *build_arguments(folder, index))
    assert running.end() == 0, running.output
    assert_same(index, whole)


POINTS = {
    "while the corpus is read": lambda index: (index / "staging" / "skipped.jsonl").exists(),
    "right after the manifest": lambda index: state(index) == "building",
    "right after the factors": lambda index: (index / "encoder.safetensors").exists(),
    "right after the fit was written down": fitted,
    "after a shard": lambda index: commits(index) >= 2,
    "after seven shards": lambda index: commits(index) >= 8,
    "after the last shard": lambda index: commits(index) >= 16,
}


@pytest.mark.parametrize("point", POINTS)
def test_killed_at_a_named_point(folder: Path, undisturbed: tuple[Path, float], tmp_path: Path, point: str) -> None:
    index = tmp_path / "x.tda"
    running = Running(tmp_path, *build_arguments(folder, index))
    running.wait_for(lambda: POINTS[point](index))
    assert running.kill(), "it was to be killed at work, and had ended"
    if "while" in point:
        assert state(index) == "none"
    else:
        assert commands.rows("info", index)[0]["state"] == "building"
    running = Running(tmp_path, *build_arguments(folder, index))
    assert running.end() == 0, running.output
    assert_same(index, undisturbed[0])


def test_an_addition_is_killed_and_goes_on(folder: Path, undisturbed: tuple[Path, float], tmp_path: Path) -> None:
    def add(name: str) -> Running:
        return Running(tmp_path, "add", tmp_path / name, folder / "more.jsonl", "-q")

    for name in ("x.tda", "whole.tda"):
        shutil.copytree(undisturbed[0], tmp_path / name)
    running = add("whole.tda")
    assert running.end() == 0, running.output
    before = commits(tmp_path / "x.tda")
    for point in (  # an addition has five shards, after a commit for the new column
        lambda: state(tmp_path / "x.tda") == "building",
        lambda: commits(tmp_path / "x.tda") > before,
        lambda: commits(tmp_path / "x.tda") > before + 1,
        lambda: commits(tmp_path / "x.tda") > before + 4,
    ):
        running = add("x.tda")
        running.wait_for(point)
        assert running.kill()
        found = contents(tmp_path / "x.tda")
        assert NUM_DOCUMENTS <= len(found) < NUM_DOCUMENTS + EXTRA and len(found) % 8 == 0  # whole shards
    assert "unfinished addition" in commands.error("add", tmp_path / "x.tda", folder / "docs.jsonl", "-q", status=1)
    assert "index is there already" in commands.error(*build_arguments(folder, tmp_path / "x.tda"), status=1)
    assert len(commands.rows("search", tmp_path / "x.tda", "--completion", " sea", "-k", 500)) == len(found)
    running = add("x.tda")
    assert running.end() == 0, running.output
    assert_same(tmp_path / "x.tda", tmp_path / "whole.tda")
    found = lancedb.connect(str(tmp_path / "x.tda")).open_table("documents").to_arrow()["new"].to_pylist()
    assert found == [None] * NUM_DOCUMENTS + ["yes"] * EXTRA


@pytest.fixture(scope="module")
def stopped(folder: Path, undisturbed: tuple[Path, float]) -> Path:
    """A build that was killed after its second shard."""
    index = folder / "stopped.tda"
    running = Running(folder, *build_arguments(folder, index))
    running.wait_for(lambda: commits(index) >= 3)
    assert running.kill()
    return index


@pytest.mark.parametrize(
    ("options", "difference"),
    [
        (["--seed", 1], "plan.seed was 0, now 1"),
        (["--method", "kfac"], "method was ekfac, now kfac"),
        (["--code", "fp16"], "plan.code was 1bit, now fp16"),
        (["--budget", "512"], "plan.sketch_dim was"),
        (["--blocks", "1"], "plan.modules was"),
        (["--dtype", "float64"], "model.dtype was float32, now float64"),
        (["--shard-documents", 9], "plan.shard_documents was 8, now 9"),
        (["--model", "other"], "model.weights_fingerprint was"),
        ("more.jsonl", "corpus.num_documents was 120, now 40"),
    ],
)
def test_another_build_is_not_gone_on_with(folder: Path, stopped: Path, options: list[object] | str, difference: str) -> None:
    models.save_tiny("gpt2", folder / "other", seed=1)
    arguments = list(build_arguments(folder, stopped))
    if isinstance(options, str):
        arguments[1] = folder / options
        options = []
    found = commits(stopped)
    message = commands.error(*arguments, *(folder / "other" if option == "other" else option for option in options), status=1)
    assert "begun otherwise" in message and difference in message
    assert commits(stopped) == found


def test_a_stopped_build_takes_no_addition_and_says_that_it_is_one(folder: Path, stopped: Path) -> None:
    assert "run the same build again" in commands.error("add", stopped, folder / "more.jsonl", status=1)
    result = commands.run("search", stopped, "--completion", " sea", "-k", 1)
    assert result.exit_code == 0
    assert result.stderr.count("Warning: ") == 1 and "not finished" in result.stderr


def test_ctrl_c_leaves_a_build_that_goes_on(folder: Path, undisturbed: tuple[Path, float], tmp_path: Path) -> None:
    index = tmp_path / "x.tda"
    running = Running(tmp_path, *build_arguments(folder, index))
    running.wait_for(lambda: commits(index) >= 3)
    assert running.interrupt() == 130
    assert running.output.endswith("\nStopped. What was committed is kept: run the same command again to go on.\n")
    assert "Traceback" not in running.output
    assert state(index) == "building" and not (index / "staging").exists()
    running = Running(tmp_path, *build_arguments(folder, index))
    assert running.end() == 0
    assert_same(index, undisturbed[0])


def test_a_second_writer_is_told_who_writes(folder: Path, undisturbed: tuple[Path, float], tmp_path: Path) -> None:
    index = tmp_path / "x.tda"
    running = Running(tmp_path, *build_arguments(folder, index))
    running.wait_for(lambda: fitted(index))
    os.kill(running.pid, signal.SIGSTOP)
    try:
        for arguments in (build_arguments(folder, index), ("add", index, folder / "more.jsonl")):
            assert f"is being written by process {running.pid} on " in commands.error(*arguments, status=1)
    finally:
        os.kill(running.pid, signal.SIGCONT)
    assert running.end() == 0
    assert_same(index, undisturbed[0])


@pytest.mark.parametrize("text", ["", '{"text": null}\n{"text": 7}\n'])
def test_a_bad_corpus_leaves_nothing_behind(folder: Path, tmp_path: Path, text: str) -> None:
    corpus = tmp_path / "bad.jsonl"
    corpus.write_text(text)
    kept = tmp_path / "kept" / ".git"
    kept.mkdir(parents=True)
    for index in (tmp_path / "x.tda", tmp_path / "kept"):
        commands.error("build", corpus, "--model", folder / "model", "--index", index, status=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.jsonl", "kept"]
    assert list((tmp_path / "kept").iterdir()) == [kept]


@pytest.fixture(scope="module")
def not_finite() -> tuple[Any, Any]:
    """A model that cannot read a tilde: its embedding is infinite."""
    model, tokenizer = models.tiny("llama")
    model.model.embed_tokens.weight.data[tokenizer("~").input_ids[0]] = float("inf")
    return model, tokenizer


@pytest.mark.parametrize("method", ["ekfac", "kfac"])
def test_a_document_without_a_finite_gradient_is_reported(not_finite: tuple[Any, Any], tmp_path: Path, method: str) -> None:
    model, tokenizer = not_finite
    rows = [{"id": f"d{n}", "text": text} for n, text in enumerate(models.sentences(30))]
    rows.insert(5, {"id": "bad", "text": "Nobody counts ~ stones."})
    index = tdasearch.build_index(
        rows, model=model, tokenizer=tokenizer, path=tmp_path / "x.tda", method=method, fit_documents="all", quiet=True
    )
    assert (index.info()["documents"], index.info()["skipped"]) == (30, 1)
    (report,) = (tmp_path / "x.tda" / "skipped").iterdir()
    (line,) = map(json.loads, report.read_text().splitlines())
    assert line["origin"] == "bad (window 0)" and "not finite" in line["reason"]
    assert len(index.search("The old", " fox", k=50).proponents) == 30
    with pytest.raises(tdasearch.UsageError, match="not finite"):
        index.search("~", " fox")


def test_its_neighbours_keep_their_codes(not_finite: tuple[Any, Any], tmp_path: Path) -> None:
    model, tokenizer = not_finite
    rows = [{"id": f"d{n}", "text": text} for n, text in enumerate(models.sentences(40))]
    index = tdasearch.build_index(
        rows[:20], model=model, tokenizer=tokenizer, path=tmp_path / "x.tda", code="fp32", budget="40KB", quiet=True
    )
    bad = {"id": "bad", "text": "Nobody counts ~ stones."}
    for batch_tokens in (1, 2048):  # each alone, and all together
        found = []
        for name, more in (("without", rows[20:]), ("with", [*rows[20:30], bad, *rows[30:]])):
            copy = tmp_path / f"{name}-{batch_tokens}.tda"
            shutil.copytree(index.path, copy)
            tdasearch.open_index(copy, model=model, tokenizer=tokenizer).add(more, batch_tokens=batch_tokens, quiet=True)
            found.append({key: np.frombuffer(row[1], "<f4") for key, row in contents(copy).items()})
        assert found[0].keys() == found[1].keys() and len(found[0]) == 40
        for key, vector in found[0].items():
            np.testing.assert_allclose(vector, found[1][key], rtol=0, atol=0 if batch_tokens == 1 else 1e-5 * abs(vector).max())


@pytest.fixture
def readable(folder: Path, undisturbed: tuple[Path, float]) -> Iterator[Path]:
    """An index and its model in folders that this process may read and not write."""
    shared = Path("/tmp") if os.geteuid() == 0 else folder
    place = shared / f"tdasearch-read-only-{os.getpid()}"
    shutil.copytree(undisturbed[0], place / "x.tda")
    shutil.copytree(folder / "model", place / "model")
    for path in (place, *place.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    if os.geteuid() == 0:
        os.seteuid(65534)  # root may write anywhere
    yield place
    if os.getuid() == 0:
        os.seteuid(0)
    for path in (place, *place.rglob("*")):
        path.chmod(0o755)
    shutil.rmtree(place)


def test_an_index_that_cannot_be_written_is_searched(folder: Path, undisturbed: tuple[Path, float], readable: Path) -> None:
    index = tdasearch.open_index(readable / "x.tda", model=readable / "model")
    with pytest.warns(RuntimeWarning, match="the search index cannot be kept .*Permission denied"):
        hits = index.search("The old", " fox", k=3).proponents
    assert len(hits) == 3
    assert not (readable / "x.tda" / "ann").exists()
    with pytest.raises(tdasearch.StoreError, match="cannot be locked"):
        index.add(folder / "more.jsonl" if os.getuid() else [{"text": "x"}], quiet=True)
