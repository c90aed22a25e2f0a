"""JSON lines and lists: every row that can be read is, and every other has its reason."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tdasearch.errors import CorpusError
from tdasearch.indexer.readers import Fields, read_corpus
from tdasearch.indexer.readers_json import json_lines
from tdasearch.indexer.readers_rows import UnusableRow
from tdasearch.records import Document, SkippedRow


def read(corpus: Any, fields: Fields | None = None) -> tuple[list[Document], list[SkippedRow]]:
    items = list(read_corpus(corpus, fields=fields or Fields()))
    return [item for item in items if isinstance(item, Document)], [item for item in items if isinstance(item, SkippedRow)]


def texts(corpus: Any) -> list[str]:
    documents, skipped = read(corpus)
    assert not skipped
    return [document.content.completion for document in documents]


def test_jsonl_recovers_every_line_it_can(tmp_path: Path) -> None:  # B47
    path = tmp_path / "docs.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"id": 1, "text": "first"}\r\n'
        b'{"id": 2, "text": "bad \xff byte"}\n'
        b"\n  \r\n"
        b'{"id": 3, "text": "lone \\ud800 half"}\n'
        b'{"id": 4, "text": "pair \\ud83d\\ude00"}\n'
        b'{"id": 5, "text": "line\xe2\x80\xa8separator, \\r\\n and \\u0000 kept "}\n'
        b'{"id": 6, "text": "twice", "text": "named"}\n'
        b'{"id": 7, "text": "nested", "meta": {"a": 1, "a": 2}}\n'
        b'[1, 2]\n"text"\nnull\n'
        b'{"id": 8, "text": "cut o'
    )
    documents, skipped = read(path)
    assert {document.document_id: document.content.completion for document in documents} == {
        "1": "first",
        "4": "pair \U0001f600",
        "5": "line\u2028separator, \r\n and \x00 kept ",
    }
    reasons = {row.origin: row.reason for row in skipped}
    assert list(reasons) == [f"docs.jsonl:{line}" for line in (2, 5, 8, 9, 10, 11, 12, 13)]
    for line, part in {2: "0xff", 5: "surrogate", 8: "'text' is there twice", 9: "'a' is there twice"}.items():
        assert part in reasons[f"docs.jsonl:{line}"]
    for line, part in {10: "a list", 11: "a text", 12: "null", 13: "cut off"}.items():
        assert part in reasons[f"docs.jsonl:{line}"]


def test_a_last_line_without_its_end_is_a_line(tmp_path: Path) -> None:
    (tmp_path / "docs.jsonl").write_bytes(b'{"text": "a"}\n{"text": "b"}')
    assert texts(tmp_path / "docs.jsonl") == ["a", "b"]


@settings(deadline=None, max_examples=150)
@given(st.binary(max_size=200).map(lambda data: data + b"\n") | st.lists(st.binary(max_size=30)).map(b"\n".join))
@example(b"[" * 100_000)
@example(b'{"text": ' + b"9" * 5000 + b"}")
@example(b'{"text": "a", "x": NaN, "y": 1e999}')
@example(b"\x0c\n\x00\n\xef\xbb\xbf\n\xff\xfe{\x00")
def test_any_bytes_give_a_row_or_a_reason_for_each_line_that_is_not_blank(data: bytes) -> None:  # B47
    found = dict(json_lines(io.BytesIO(data)))
    lines = data.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    assert list(found) == [number for number, line in enumerate(lines, start=1) if line.strip(b" \t\r\n")]
    for number, row in found.items():
        if isinstance(row, UnusableRow):
            assert str(row)
        else:
            assert repr(row) == repr(json.loads(lines[number - 1]))


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@settings(deadline=None, max_examples=100)
@given(
    rows=st.lists(st.fixed_dictionaries({"text": st.text(min_size=1)}, optional={"note": _JSON}), max_size=5),
    ascii_only=st.booleans(),
    end=st.sampled_from(["\n", "\r\n", "\n\n"]),
)
def test_texts_and_metadata_come_back_exactly(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]], ascii_only: bool, end: str
) -> None:
    path = tmp_path_factory.mktemp("json") / "docs.jsonl"
    path.write_bytes(end.join(json.dumps(row, ensure_ascii=ascii_only) for row in rows).encode())
    documents, skipped = read(path)
    assert not skipped
    assert [{"text": document.content.completion, **document.metadata} for document in documents] == rows
    as_list = path.with_suffix(".json")
    as_list.write_text(json.dumps(rows, ensure_ascii=ascii_only, indent=2), encoding="utf-8")
    assert [document.document_id for document in read(as_list)[0]] == [document.document_id for document in documents]


def test_a_json_file_is_a_list_or_lines(tmp_path: Path) -> None:
    path = tmp_path / "docs.json"
    path.write_bytes(b'\xef\xbb\xbf {"text": "a"}\n{"text": "b"}\n')
    assert texts(path) == ["a", "b"]
    path.write_bytes(
        b'\xef\xbb\xbf\n [ {"text": "a"} ,\n3, {"text": "\xff"}, {"a": 1, "a": 2}, {"text": "\\ud800"}, {"text": "b"}]\n'
    )
    documents, skipped = read(path)
    assert [document.origin for document in documents] == ["docs.json:1", "docs.json:6"]
    assert [row.origin for row in skipped] == ["docs.json:2", "docs.json:3", "docs.json:4", "docs.json:5"]
    assert "0xff" in skipped[1].reason and "twice" in skipped[2].reason
    path.write_bytes(b" [] ")
    assert texts(path) == []


@pytest.mark.parametrize(
    "damage", [b'[{"text": "a"}', b'[{"text": "a"}, {"te', b'[{"text": "a"} {"text": "b"}]', b"[1] x", b"[" * 10**5]
)
def test_a_broken_json_list_stops_with_the_files_name(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "docs.json").write_bytes(damage)
    with pytest.raises(CorpusError, match=r"docs\.json: expected a JSON list"):
        read(tmp_path / "docs.json")
