"""A corpus to staged windows, with real files and a real tokenizer."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import textwrap
import tracemalloc
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers import models as tokenizer_models
from transformers import PreTrainedTokenizerFast

from tdasearch.errors import CorpusError, ModelError, StoreError, UsageError
from tdasearch.indexer.readers import Fields
from tdasearch.indexer.staging import Staged, stage
from tdasearch.indexer.staging_metadata import MAX_FIELDS, metadata_column
from tdasearch.indexer.staging_writer import WINDOW_SCHEMA


@cache
def tokenizer() -> Any:
    core = Tokenizer(tokenizer_models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        ["a text of words and more words"], trainers.BpeTrainer(vocab_size=280, initial_alphabet=alphabet, show_progress=False)
    )
    return PreTrainedTokenizerFast(tokenizer_object=core)


def staged(corpus: Any, path: Path, **changes: Any) -> Staged:
    settings: dict[str, Any] = {
        "fields": Fields(),
        "tokenizer": tokenizer(),
        "window_tokens": 16,
        "stride": 12,
        "max_windows": None,
        "path": path,
        "shard_documents": 3,
        "first_shard": 0,
    }
    return stage(corpus, **{**settings, **changes})


def rows(num_documents: int, *, seed: int = 0) -> list[dict[str, Any]]:
    generator = random.Random(seed)
    words = ["text", "of", "words", "\U0001f600", "more"]
    return [
        {"id": f"d{number}", "text": f"{number} " + " ".join(generator.choices(words, k=generator.randrange(1, 30))), "n": number}
        for number in range(num_documents)
    ]


def skipped(found: Staged) -> dict[str, str]:
    return {row["origin"]: row["reason"] for row in map(json.loads, found.skipped_path.read_text().splitlines())}


def all_rows(found: Staged) -> list[dict[str, Any]]:
    numbers = range(found.first_shard, found.first_shard + found.num_shards)
    return [row for number in numbers for row in found.shard(number).to_pylist()]


def test_shards_hold_the_documents_in_order_with_texts_that_tile(tmp_path: Path) -> None:
    corpus = rows(10)
    found = staged(corpus, tmp_path, first_shard=5)
    assert (found.num_documents, found.num_shards, found.num_skipped, found.num_duplicates, found.num_truncated) == (
        10,
        4,
        0,
        0,
        0,
    )
    assert found.num_characters == sum(len(row["text"]) for row in corpus)
    assert [len(set(found.shard(number)["document_id"].to_pylist())) for number in range(5, 9)] == [3, 3, 3, 1]
    windows = all_rows(found)
    assert found.num_windows == len(windows) and found.num_tokens == sum(row["num_tokens"] for row in windows)
    assert list(dict.fromkeys(row["document_id"] for row in windows)) == [row["id"] for row in corpus]
    for document in corpus:
        own = [row for row in windows if row["document_id"] == document["id"]]
        assert [row["window"] for row in own] == list(range(own[0]["num_windows"]))
        assert own[0]["start"] == 0 and own[-1]["end"] == len(document["text"])
        num_tokens = len(tokenizer()(document["text"])["input_ids"])
        assert sum(sum(row["is_target"]) for row in own) == num_tokens - 1
        for row in own:
            assert row["text"] == document["text"][row["start"] : row["end"]]
            assert len(row["token_ids"]) == len(row["is_target"]) == row["num_tokens"] <= 16
            assert row["n"] == document["n"] and json.loads(row["metadata"]) == {"n": document["n"]}
    assert found.shard(5).schema == WINDOW_SCHEMA.append(pa.field("n", pa.int64()))
    assert set(found.shard(6)["shard"].to_pylist()) == {6}
    with pq.ParquetFile(found.windows_path) as file:
        assert file.num_row_groups == 4 and file.metadata.row_group(0).column(0).compression == "ZSTD"
    for number in (4, 9):
        with pytest.raises(UsageError, match="expected a shard of 5 to 8"):
            found.shard(number)


def test_the_same_corpus_gives_the_same_bytes_and_another_does_not(tmp_path: Path) -> None:
    first, again = staged(rows(7), tmp_path / "a"), staged(iter(rows(7)), tmp_path / "b")
    assert first.digest == again.digest and first.windows_path.read_bytes() == again.windows_path.read_bytes()
    changes = [
        (rows(7, seed=1), {}),
        (rows(7)[::-1], {}),
        (rows(7)[:6], {}),
        ([{**row, "n": 0} for row in rows(7)], {}),
        (rows(7), {"window_tokens": 15}),
        (rows(7), {"stride": 11}),
        (rows(7), {"max_windows": 1}),
    ]
    digests = {staged(corpus, tmp_path / "c", **settings).digest for corpus, settings in changes}
    assert len(digests) == len(changes) and first.digest not in digests


def test_bad_rows_are_listed_and_counted_or_stop_a_strict_build(tmp_path: Path) -> None:  # B47, B48, B05
    path = tmp_path / "docs.jsonl"
    path.write_bytes(b'{"text": "good words"}\n{"text": null}\n{"text": "a"}\n{"text": "bad \xff"}\n{"text": "more words"}\n')
    found = staged(path, tmp_path / "s")
    assert (found.num_documents, found.num_skipped) == (2, 3)
    reasons = skipped(found)
    assert list(reasons) == ["docs.jsonl:2", "docs.jsonl:3", "docs.jsonl:4"]
    assert "null" in reasons["docs.jsonl:2"] and "single token" in reasons["docs.jsonl:3"]
    with pytest.raises(CorpusError, match=r"docs\.jsonl:2: .*null.*strict"):
        staged(path, tmp_path / "s", strict=True)
    assert (
        not found.windows_path.exists()
        and not list((tmp_path / "s").glob("*.tmp"))
        and not list((tmp_path / "s").glob("*.sqlite"))
    )


def test_one_id_with_the_same_content_is_a_duplicate_with_another_a_clash(tmp_path: Path) -> None:  # B34
    (tmp_path / "a.jsonl").write_text('{"id": 1, "text": "one text"}\n{"id": "2", "text": "two text"}\n')
    (tmp_path / "b.jsonl").write_text('{"id": "1", "text": "one text", "n": 1}\n{"id": 2, "text": "other text"}\n')
    found = staged(tmp_path, tmp_path / ".staged")
    assert (found.num_documents, found.num_duplicates, found.num_skipped) == (2, 1, 1)
    assert [row["text"] for row in all_rows(found)] == ["one text", "two text"]
    reasons = skipped(found)
    assert "duplicate" in reasons["b.jsonl:1"] and "a.jsonl:1" in reasons["b.jsonl:1"]
    assert "a.jsonl:2" in reasons["b.jsonl:2"] and "content differs" in reasons["b.jsonl:2"]
    with pytest.raises(CorpusError, match=r"b\.jsonl:2: .*a\.jsonl:2"):
        staged(tmp_path, tmp_path / ".staged", strict=True)


def test_a_row_that_is_skipped_takes_no_id(tmp_path: Path) -> None:
    found = staged([{"id": 1, "text": "a"}, {"id": 1, "text": "a good text"}], tmp_path)
    assert (found.num_documents, found.num_skipped, found.num_duplicates) == (1, 1, 0)


def test_a_second_run_adds_nothing(tmp_path: Path) -> None:  # B34
    first = staged(rows(5), tmp_path / "a")
    known = {(row["document_id"], row["content_hash"]) for row in all_rows(first)}
    second = staged(rows(7), tmp_path / "b", known=iter(known), first_shard=2, strict=True)
    assert (second.num_documents, second.num_duplicates, second.num_skipped) == (2, 5, 0)
    assert {row["document_id"] for row in all_rows(second)} == {"d5", "d6"}
    assert "the index" in skipped(second)["corpus:1"]
    nothing = staged(rows(5), tmp_path / "c", known=known)
    assert (nothing.num_documents, nothing.num_shards, nothing.num_duplicates, nothing.num_windows) == (0, 0, 5, 0)
    assert nothing.sample(3, seed=0).num_rows == 0


def test_an_id_of_the_index_with_another_text_is_refused(tmp_path: Path) -> None:  # B34
    first = staged(rows(3), tmp_path / "a")
    known = {(row["document_id"], row["content_hash"]) for row in all_rows(first)}
    other = [{"id": "d1", "text": "quite another text"}, *rows(4)[3:]]
    second = staged(other, tmp_path / "b", known=known)
    assert (second.num_documents, second.num_skipped) == (1, 1)
    assert "the index already, whose content differs" in skipped(second)["corpus:1"]
    with pytest.raises(CorpusError, match="content differs"):
        staged(other, tmp_path / "c", known=known, strict=True)


def test_a_corpus_without_a_usable_document_says_why(tmp_path: Path) -> None:
    corpus = [{"text": None}, {"text": 1}, {"text": "a"}, {"text": ""}]
    with pytest.raises(
        CorpusError, match=r"found none; rows skipped: 4; corpus:1: .*null; corpus:2: .*number.*; corpus:3: .*single"
    ):
        staged(corpus, tmp_path)
    assert len((tmp_path / "skipped.jsonl").read_text().splitlines()) == 4
    with pytest.raises(CorpusError, match="found none; rows skipped: 0"):
        staged([], tmp_path)


def test_documents_that_max_windows_cuts_are_counted(tmp_path: Path) -> None:  # B23
    corpus = [
        {"text": "short text"},
        {"text": "words and more " * 30},
        {"prompt": "words and more " * 30, "completion": "the end"},
    ]
    whole, cut = staged(corpus, tmp_path / "a"), staged(corpus, tmp_path / "b", max_windows=1)
    assert (whole.num_truncated, cut.num_truncated) == (0, 1)
    assert cut.num_documents == cut.num_windows == 3
    assert whole.num_characters == cut.num_characters
    assert all_rows(cut)[2]["text"].endswith("the end") and all_rows(cut)[2]["window"] > 0


def test_metadata_columns_have_the_narrowest_type_that_holds_all_values(tmp_path: Path) -> None:
    values: dict[str, list[Any]] = {
        "bool": [True, False, None],
        "int": [1, -(2**63), None],
        "double": [1, 2.5, 2**53 + 1],
        "text": ["a", None, "b"],
        "huge": [1, 2**63, None],
        "mixed": ["wiki", 3, {"a": [1]}],
        "flag_or_int": [True, 1, None],
        "list": [[1], [2], None],
        "null": [None, None, None],
        "Text": ["x", "y", "z"],
        "a.b": [float("nan"), 1.0, None],
    }
    corpus = [{"text": f"text {i}", **{name: column[i] for name, column in values.items() if name != "text"}} for i in range(3)]
    found = staged(corpus, tmp_path)
    types = {field.name: str(field.type) for field in found.metadata_schema}
    del values["text"]
    assert list(types) == list(values)
    assert types == {
        **dict.fromkeys(values, "string"),
        "bool": "bool",
        "int": "int64",
        "double": "double",
        "a.b": "double",
    }
    table = found.shard(0)
    assert table.column_names[len(WINDOW_SCHEMA) :][-2:] == ["metadata_Text", "a_b"]  # as the table of documents names them
    columns = table.to_pydict()
    assert columns["int"] == values["int"] and columns["double"] == [1.0, 2.5, float(2**53)]
    assert columns["huge"] == ["1", str(2**63), None]
    assert columns["mixed"] == ["wiki", "3", '{"a":[1]}'] and columns["flag_or_int"] == ["true", "1", None]
    exact = [json.loads(text) for text in columns["metadata"]]
    assert [row["huge"] for row in exact] == values["huge"] and [row["mixed"] for row in exact] == values["mixed"]
    assert exact[0]["a.b"] is None


def test_columns_that_an_earlier_corpus_decided_are_kept_or_refused(tmp_path: Path) -> None:
    found = staged([{"text": "a text", "year": "about 1990", "n": 1}], tmp_path)
    table = found.shard(0, metadata_columns={"n": pa.field("N", pa.float64()), "year": pa.field("year", pa.string())})
    assert table["N"].to_pylist() == [1.0] and table.column_names[-2:] == ["N", "year"]
    with pytest.raises(CorpusError, match="expected int64 in the column 'year'.*about 1990"):
        found.shard(0, metadata_columns={"year": pa.field("year", pa.int64())})
    assert metadata_column([], pa.field("x", pa.int64())).type == pa.int64()


def test_metadata_fields_without_end_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="metadata fields"):
        staged([{"text": f"text {number}", f"field {number}": 1} for number in range(MAX_FIELDS + 1)], tmp_path)


def test_a_sample_depends_on_the_documents_and_not_on_their_order(tmp_path: Path) -> None:
    corpus = rows(40)
    found = staged(corpus, tmp_path / "a")
    other_order = staged(corpus[::-1], tmp_path / "b", shard_documents=7)
    sample = found.sample(9, seed=3)
    assert len(set(sample["document_id"].to_pylist())) == 9
    columns = [name for name in WINDOW_SCHEMA.names if name != "shard"]
    assert sample.select(columns).equals(other_order.sample(9, seed=3).select(columns))
    chosen = set(sample["document_id"].to_pylist())
    everything = [row for row in all_rows(found) if row["document_id"] in chosen]
    assert sorted((row["document_id"], row["window"]) for row in everything) == sorted(
        zip(sample["document_id"].to_pylist(), sample["window"].to_pylist(), strict=True)
    )
    assert chosen != set(found.sample(9, seed=4)["document_id"].to_pylist())
    assert chosen < set(found.sample(10, seed=3)["document_id"].to_pylist())
    assert found.sample(10**6, seed=0).num_rows == found.num_windows
    for num_documents, seed in ((0, 0), (1, -1), (1, 2**64)):
        with pytest.raises(UsageError):
            found.sample(num_documents, seed=seed)


def test_progress_counts_the_staged_characters(tmp_path: Path) -> None:
    seen: list[int] = []
    found = staged([*rows(150), rows(1)[0]], tmp_path, progress=seen.append)
    assert len(seen) == 150 and sum(seen) == found.num_characters


@pytest.mark.parametrize(
    "change",
    [{"shard_documents": 0}, {"first_shard": -1}, {"window_tokens": 1}, {"stride": 0}, {"stride": 17}, {"max_windows": 0}],
)
def test_settings_out_of_range_are_refused_before_reading(tmp_path: Path, change: dict[str, int]) -> None:
    def untouched() -> Iterator[dict[str, str]]:
        raise AssertionError("the corpus was read")
        yield {}

    with pytest.raises(UsageError, match="expected"):
        staged(untouched(), tmp_path / "new", **change)
    assert not (tmp_path / "new").exists()


def test_conversations_without_a_template_stop_the_build(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="chat template"):
        staged([{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}], tmp_path)


def test_an_interrupted_stream_stages_the_same_when_run_again(tmp_path: Path) -> None:  # B50, R6
    def interrupted() -> Iterator[dict[str, Any]]:
        yield from rows(200)
        raise KeyboardInterrupt

    shards = [f"{number}" for number in range(4)]
    stream = datasets.IterableDataset.from_generator(
        lambda names: (row | {"id": f"{name}-{row['id']}"} for name in names for row in rows(500)), gen_kwargs={"names": shards}
    ).map(lambda row: {"text": row["text"].upper()})
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            staged(interrupted(), tmp_path / "s", shard_documents=64)
        assert not (tmp_path / "s" / "windows.parquet").exists()
    resumed = staged(stream, tmp_path / "s", shard_documents=256)
    straight = staged(stream, tmp_path / "t", shard_documents=256)
    assert resumed.digest == straight.digest
    with pq.ParquetFile(resumed.windows_path) as file:
        ids = file.read(columns=["document_id"])["document_id"].to_pylist()
    assert sorted(set(ids)) == sorted(f"{name}-d{number}" for name in shards for number in range(500))


def test_a_full_disk_is_a_store_error_and_leaves_no_half_file(tmp_path: Path) -> None:  # R7
    script = f"""
        import random, resource, signal, sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from pathlib import Path
        from test_staging import staged
        from tdasearch.errors import StoreError
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))
        generator = random.Random(0)
        corpus = ({{"text": generator.randbytes(300).hex()}} for _ in range(400))
        try:
            staged(corpus, Path({str(tmp_path)!r}), shard_documents=20)
        except StoreError as error:
            print(error)
    """
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr
    assert "free space" in done.stdout and str(tmp_path) in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["skipped.jsonl"]


def test_a_folder_that_cannot_be_made_is_a_store_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot stage"):
        staged(rows(1), tmp_path / "file" / "folder")


def test_memory_stays_flat_as_the_corpus_grows(tmp_path: Path) -> None:
    def peak(num_documents: int) -> int:
        corpus = ({"id": f"{number:06}", "text": f"{number} words and more words " * 20} for number in range(num_documents))
        tracemalloc.start()
        try:
            staged(corpus, tmp_path, shard_documents=16)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak(64)  # imports and caches
    assert peak(512) < 1.5 * peak(128)  # four times the documents; other threads allocate a little now and then
