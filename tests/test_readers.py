"""Any corpus to documents and reasons, with real files."""

from __future__ import annotations

import csv
import gzip
import json
import random
from collections.abc import Iterator
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tdasearch.errors import CorpusError, UsageError
from tdasearch.indexer.readers import Fields, content_hash, read_corpus
from tdasearch.indexer.readers_rows import json_text
from tdasearch.records import Content, Document, SkippedRow


def read(corpus: Any, fields: Fields | None = None) -> tuple[list[Document], list[SkippedRow]]:
    items = list(read_corpus(corpus, fields=fields or Fields()))
    return [item for item in items if isinstance(item, Document)], [item for item in items if isinstance(item, SkippedRow)]


def texts(corpus: Any) -> list[str]:
    documents, skipped = read(corpus)
    assert not skipped
    return [document.content.completion for document in documents]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"id": 1}, "expected a field 'text', 'completion' or 'messages', found 'id'"),
        ({}, "found none"),
        ({"text": None}, "'text' is null"),
        ({"text": ""}, "'text' is empty"),
        ({"text": 5}, "'text' is a number"),
        ({"text": True}, "'text' is true or false"),
        ({"text": ["a"]}, "'text' is a list"),
        ({"text": {"a": "b"}}, "'text' is an object"),
        ({"completion": ""}, "'completion' is empty"),
        ({"completion": None}, "'completion' is null"),
        ({"completion": "a", "prompt": 3}, "'prompt' is a number"),
        ({"messages": "hi"}, "'messages' is a text"),
        ({"messages": []}, "'messages' is empty"),
        ({"messages": ["hi"]}, "message 1"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant"}]}, "message 2 of 'messages' has no content"),
        ({"messages": [{"role": "user", "content": None}]}, "no content: it is null"),  # never the text "None"
        ({"messages": [{"content": "a"}]}, "without a role"),
        ({"id": "", "text": "a"}, "id is empty"),
        ({"id": ["x"], "text": "a"}, "id is a list"),
        ({"id": True, "text": "a"}, "id is true or false"),
        ({"text": "a", "meta": "\ud800"}, "surrogate"),
        ({"id": "\udcff", "text": "a"}, "0xff"),
        ({"text": "a", "image": object()}, "JSON cannot say"),
        ({"text": "a", 3: "b"}, "field's name is a number"),
        ("a text", "found a text"),
        (None, "found null"),
    ],
)
def test_a_bad_row_is_skipped_with_its_reason_and_others_stay(row: Any, reason: str) -> None:  # B48
    documents, (skipped,) = read([{"text": "before"}, row, {"text": "after", "extra": 1}])
    assert [document.content.completion for document in documents] == ["before", "after"]
    assert skipped.origin == "corpus:2"
    assert reason in skipped.reason and "\n" not in skipped.reason


def test_messages_come_before_completion_before_text() -> None:
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "tool_calls": None}]
    rows = [
        {"messages": chat, "completion": "c", "text": "t"},
        {"messages": None, "completion": "c", "prompt": "p", "text": "t"},
        {"completion": "c", "prompt": None},
        {"completion": None, "prompt": "p", "text": "t", "n": None},
    ]
    documents, skipped = read(rows)
    assert not skipped
    assert [document.content for document in documents] == [
        Content(messages=(chat[0], {"role": "assistant", "content": "b"})),
        Content("c", prompt="p"),
        Content("c"),
        Content("t"),
    ]
    assert [document.metadata for document in documents] == [
        {"completion": "c", "text": "t"},
        {"text": "t"},
        {},
        {"prompt": "p", "n": None},
    ]


def test_an_assistant_that_only_calls_tools_has_no_content() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    documents, skipped = read([{"messages": [{"role": "user", "content": "a"}, call]}])
    assert not skipped
    assert documents[0].content.messages[1] == {"role": "assistant", "tool_calls": [{"name": "f"}]}


def test_field_names_are_chosen_and_checked() -> None:
    documents, skipped = read([{"key": 7, "body": "a", "text": "b"}], Fields(document_id="key", text="body"))
    assert not skipped
    assert (documents[0].document_id, documents[0].content.completion, documents[0].metadata) == ("7", "a", {"text": "b"})
    for names in ({"text": "id"}, {"prompt": ""}):
        with pytest.raises(UsageError, match="different field names"):
            Fields(**names)


def test_ids_are_texts_and_the_contents_hash_without_one() -> None:  # B34
    documents, _ = read(
        [{"id": 1, "text": "a"}, {"id": "1", "text": "a"}, {"text": "a"}, {"id": None, "text": "a"}, {"text": "b"}]
    )
    ids = [document.document_id for document in documents]
    assert ids[:2] == ["1", "1"] and ids[2] == ids[3] == content_hash(Content("a")) != ids[4]
    hashes = {content_hash(content) for content in (Content("ab"), Content("b", prompt="a"), Content("", prompt="ab"))}
    assert len(hashes) == 3 and all(len(name) == 32 for name in hashes)


def test_metadata_is_every_other_field_in_json_types() -> None:
    row = {
        "text": "a",
        "n": 10**30,
        "x": np.float64(0.5),
        "k": np.int8(3),
        "v": np.array([1, 2]),
        "t": datetime(2024, 1, 2, 3, 4, 5),
        "d": date(2024, 1, 2),
        "m": Decimal("1.10"),
        "o": {"a": (1, None)},
        "nan": float("nan"),
    }
    documents, skipped = read([row])
    assert not skipped
    metadata = dict(documents[0].metadata)
    assert type(metadata["x"]) is float
    assert json.loads(json_text(metadata)) == {
        "n": 10**30,
        "x": 0.5,
        "k": 3,
        "v": [1, 2],
        "t": "2024-01-02T03:04:05",
        "d": "2024-01-02",
        "m": "1.10",
        "o": {"a": [1, None]},
        "nan": None,
    }


@settings(deadline=None, max_examples=60)
@given(rows=st.lists(st.tuples(st.text(min_size=1), st.text()), max_size=5), tabs=st.booleans())
def test_csv_cells_come_back_exactly(tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str]], tabs: bool) -> None:
    path = tmp_path_factory.mktemp("csv") / ("docs.tsv" if tabs else "docs.csv")
    with path.open("w", encoding="utf-8-sig", newline="") as stream:
        writer = csv.writer(stream, delimiter="\t" if tabs else ",", quoting=csv.QUOTE_ALL)
        writer.writerows([("text", "note"), *rows])
    documents, skipped = read(path)
    assert not skipped
    assert [(document.content.completion, document.metadata["note"] or "") for document in documents] == rows


def test_gzip_is_read_and_a_cut_one_is_an_error(tmp_path: Path) -> None:
    generator = random.Random(0)
    lines = [json.dumps({"text": generator.randbytes(40).hex()}) for _ in range(500)]
    whole = gzip.compress("\n".join(lines).encode())
    (tmp_path / "docs.jsonl.gz").write_bytes(whole)
    assert len(texts(tmp_path / "docs.jsonl.gz")) == 500
    for damaged in (whole[:-200], whole[:300] + b"\x00" * 50 + whole[350:], b"no gzip"):
        (tmp_path / "docs.jsonl.gz").write_bytes(damaged)
        with pytest.raises(CorpusError, match="cannot be read to its end"):
            read(tmp_path / "docs.jsonl.gz")
    (tmp_path / "docs.csv.gz").write_bytes(gzip.compress(b"text\na\n"))
    assert texts(tmp_path / "docs.csv.gz") == ["a"]


def test_csv_reports_each_bad_row(tmp_path: Path) -> None:
    path = tmp_path / "docs.csv"
    path.write_bytes(
        b"\xef\xbb\xbfid,text,year\r\n"
        b'1,"two\r\nlines, ""quoted""",1990\r\n'
        b"2,too few\r\n"
        b"\r\n"
        b'3,"bad"quote,1\r\n'
        b"4,bad \xff byte,1\r\n"
        b"5,,1\r\n"
        b",no id,\r\n"
        b"6," + b"x" * 200_000 + b",1\r\n"
        b'7,"never closed,1\r\n8,lost,1\r\n'
    )
    documents, skipped = read(path)
    assert [document.origin for document in documents] == ["docs.csv:2", "docs.csv:9", "docs.csv:10"]
    assert documents[0].content.completion == 'two\r\nlines, "quoted"' and documents[0].metadata == {"year": "1990"}
    assert documents[1].document_id == content_hash(Content("no id")) and documents[1].metadata == {"year": None}
    reasons = {row.origin: row.reason for row in skipped}
    assert list(reasons) == [f"docs.csv:{line}" for line in (4, 6, 7, 8, 11)]
    for line, part in {4: "expected 3 cells", 6: "no CSV", 7: "0xff", 8: "null", 11: "lines 11 to 12"}.items():
        assert part in reasons[f"docs.csv:{line}"]


@pytest.mark.parametrize(
    ("header", "reason"), [(b"", "header"), (b"\n\na\n", "header"), (b"text,text\na,b\n", "two named 'text'")]
)
def test_a_csv_needs_a_header(tmp_path: Path, header: bytes, reason: str) -> None:
    (tmp_path / "docs.csv").write_bytes(header)
    with pytest.raises(CorpusError, match=f"docs.csv: .*{reason}"):
        read(tmp_path / "docs.csv")


def test_parquet_rows_come_back_and_null_is_not_a_text(tmp_path: Path) -> None:  # B48
    path = tmp_path / "docs.parquet"
    columns = {"text": ["a", None, ""] * 200 + ["last"], "year": [*range(600), None], "tags": [["x"]] * 601}
    pq.write_table(pa.table(columns), path, row_group_size=100)
    documents, skipped = read(path)
    assert len(documents) == 201 and len(skipped) == 400
    assert documents[-1].origin == "docs.parquet:601" and documents[-1].metadata == {"year": None, "tags": ["x"]}
    assert ["null" in row.reason for row in skipped[:2]] == [True, False]


def test_parquet_with_bytes_that_are_no_text_loses_only_those_rows(tmp_path: Path) -> None:  # B47
    path = tmp_path / "docs.parquet"
    buffers = pa.array([b"good", b"\xff", b"fine"], pa.binary()).buffers()
    pq.write_table(pa.table({"text": pa.Array.from_buffers(pa.string(), 3, buffers)}), path)
    documents, (skipped,) = read(path)
    assert [document.content.completion for document in documents] == ["good", "fine"]
    assert skipped.origin == "docs.parquet:2" and "0xff" in skipped.reason


def test_a_damaged_parquet_file_is_an_error_with_its_name(tmp_path: Path) -> None:
    path = tmp_path / "docs.parquet"
    pq.write_table(pa.table({"text": ["a" * 100] * 100}), path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(CorpusError, match=r"docs\.parquet: expected a Parquet file"):
        read(path)
    path.write_bytes(b"")
    with pytest.raises(CorpusError, match=r"docs\.parquet: expected a Parquet file"):
        read(path)
    pq.write_table(pa.table([["a"], ["b"]], names=["text", "text"]), path)
    with pytest.raises(CorpusError, match="two named 'text'"):
        read(path)


def test_a_folder_of_texts(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "c.txt").write_text("hidden")
    (tmp_path / "b" / "two.MD").write_bytes(b"# two\r\n")
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone ")
    (tmp_path / "bad.txt").write_bytes(b"a\xff")
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "picture.png").write_bytes(b"\x89")
    (tmp_path / "link").symlink_to(tmp_path / "b", target_is_directory=True)
    documents, skipped = read(tmp_path)
    assert [(document.document_id, document.content.completion) for document in documents] == [
        ("a.txt", "one "),
        ("b/two.MD", "# two\r\n"),
    ]
    assert documents[1].metadata == {"path": "b/two.MD"} and documents[1].origin == "b/two.MD"
    reasons = {row.origin: row.reason for row in skipped}
    assert list(reasons) == ["bad.txt", "empty.txt", "link", "picture.png"]
    assert texts(tmp_path / "a.txt") == ["one "]
    own, _ = read(tmp_path, Fields(document_id="path", text="body"))
    assert [document.document_id for document in own] == ["a.txt", "b/two.MD"]


def test_a_folder_of_shards_is_read_in_order_and_reports_what_it_passes_over(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text('{"text": "3"}\n')
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "2.csv").write_text("text\n2\n")
    pq.write_table(pa.table({"text": ["1"]}), tmp_path / "a" / "1.parquet")
    (tmp_path / "README.md").write_text("about")
    documents, (skipped,) = read(tmp_path)
    assert [document.content.completion for document in documents] == ["1", "2", "3"]
    assert documents[0].origin == "a/1.parquet:1"
    assert skipped.origin == "README.md" and "not read" in skipped.reason


@pytest.mark.parametrize("name", ["missing.jsonl", "model.bin", "noending", "docs.parquet.gz", "empty"])
def test_what_is_no_corpus_is_an_error_at_once(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    if name not in ("missing.jsonl", "empty"):
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(CorpusError, match="expected"):
        read_corpus(str(tmp_path / name), fields=Fields())


@pytest.mark.parametrize("corpus", [5, None, b"text", {"text": "a"}])
def test_what_is_not_rows_is_an_error_at_once(corpus: Any) -> None:
    with pytest.raises(CorpusError, match="expected a path, a dataset or an iterable"):
        read_corpus(corpus, fields=Fields())


def test_a_generator_is_read_lazily_and_its_own_errors_pass() -> None:
    def rows() -> Iterator[dict[str, str]]:
        yield {"text": "a"}
        raise RuntimeError("the source broke")

    items = read_corpus(rows(), fields=Fields())
    assert isinstance(next(items), Document)
    with pytest.raises(RuntimeError, match="the source broke"):
        next(items)


def test_datasets_in_memory_saved_and_as_a_choice_of_parts(tmp_path: Path) -> None:
    rows = {"id": ["x", "y"], "text": ["a", None], "vector": [[1.0], [2.0]]}
    dataset = datasets.Dataset.from_dict(rows).with_format("numpy")
    dataset.save_to_disk(tmp_path / "saved")
    for corpus in (dataset, tmp_path / "saved"):
        (document,), (skipped,) = read(corpus)
        assert (document.document_id, document.metadata) == ("x", {"vector": [1.0]})
        assert skipped.origin.endswith(":2") and "null" in skipped.reason
    parts = datasets.DatasetDict({"train": dataset})
    with pytest.raises(CorpusError, match="'train'"):
        read(parts)
    parts.save_to_disk(tmp_path / "parts")
    with pytest.raises(CorpusError, match="several datasets"):
        read(tmp_path / "parts")


def test_a_stream_of_shards_with_a_map_step_is_the_same_each_time(tmp_path: Path) -> None:  # B50
    for shard in range(4):
        lines = [json.dumps({"id": f"{shard}-{row}", "text": f"text {row}"}) for row in range(500)]
        (tmp_path / f"{shard}.jsonl").write_text("\n".join(lines))
    stream = datasets.load_dataset(
        "json", data_files=str(tmp_path / "*.jsonl"), split="train", streaming=True, cache_dir=str(tmp_path)
    )
    mapped = stream.map(lambda row: {"text": row["text"].upper()})
    first, second = ([document.document_id for document in read(mapped)[0]] for _ in range(2))
    assert first == second
    assert sorted(first) == sorted(document.document_id for document in read(tmp_path)[0])
    assert read(mapped)[0][7].content.completion == "TEXT 7"
