"""The table of documents: whole shards, pinned snapshots, filters; read back with plain lancedb as the witness."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import lancedb
import numpy as np
import pyarrow as pa
import pytest

from tdasearch.errors import StoreError, UsageError
from tdasearch.store import documents
from tdasearch.store.columns import FIXED_COLUMNS, code_matrix
from tdasearch.store.documents import DocumentTable, column_names, documents_path
from tests.tables import METADATA, create_table, shard_rows

ROOT = Path(__file__).parents[1]


def vectors(num: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((num, 64)).astype(np.float32)


def replaced(rows: pa.Table, name: str, column: pa.Array) -> pa.Table:
    return rows.set_column(rows.column_names.index(name), name, column)


def plain_rows(index_path: Path) -> list[dict]:
    return lancedb.connect(str(index_path)).open_table("documents").search().to_arrow().to_pylist()


def test_rows_come_back_as_they_went_in(tmp_path: Path) -> None:
    table = create_table(tmp_path, vectors(5), vectors(4, 1))
    written = pa.concat_tables([shard_rows(0, vectors(5)), shard_rows(1, vectors(4, 1))])
    assert plain_rows(tmp_path) == written.to_pylist()
    snapshot = table.latest()
    assert (snapshot.num_rows, snapshot.num_documents, table.committed_shards()) == (9, 9, {0, 1})
    assert snapshot.schema.names == [*FIXED_COLUMNS, "source", "year"]
    batches = list(snapshot.batches(list(written.column_names), batch_rows=2))
    assert max(batch.num_rows for batch in batches) <= 2
    read = pa.concat_tables(batches)
    assert read.drop_columns(["_rowid"]).to_pylist() == written.to_pylist()
    np.testing.assert_array_equal(read["_rowid"].to_numpy(), snapshot.row_ids())
    np.testing.assert_array_equal(code_matrix(read["code"]), np.array([list(code) for code in written["code"].to_pylist()]))
    assert code_matrix(read["code"].slice(2, 3)).tobytes() == b"".join(written["code"].to_pylist()[2:5])


def test_an_append_is_one_commit_and_reopens(tmp_path: Path) -> None:
    table = create_table(tmp_path)
    before = table.latest()
    assert (before.num_rows, before.num_documents, before.row_ids().size, list(before.batches(["text"]))) == (0, 0, 0, [])
    table.append_shard(shard_rows(0, vectors(3)))
    table.append_shard(shard_rows(7, vectors(3)))
    again = DocumentTable.open(documents_path(tmp_path))
    assert again.latest().version == before.version + 2
    assert again.committed_shards() == {0, 7}
    assert list(again.known_contents(before_shard=7)) == [("d0-0", "h0-0"), ("d0-1", "h0-1"), ("d0-2", "h0-2")]


def test_what_lance_caches_stays_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every version has a manifest that lists all shards before it: kept, they grow with the square of their number."""
    monkeypatch.setattr(documents, "_METADATA_CACHE_BYTES", 1 << 16)
    documents._session.cache_clear()
    table = create_table(tmp_path)
    sizes = []
    for shard in range(40):
        table.append_shard(shard_rows(shard, vectors(3)))
        sizes.append(documents._session().size_bytes)
    documents._session.cache_clear()
    assert 0 < max(sizes[:4]) < 1 << 16  # the tables are read through this session
    assert max(sizes) < 1 << 17


def test_a_shard_is_written_once(tmp_path: Path) -> None:
    """B34: the same work twice adds nothing; also through another handle, whose ledger was read before."""
    table = create_table(tmp_path, vectors(3))
    other = DocumentTable.open(documents_path(tmp_path))
    assert other.committed_shards() == {0}
    table.append_shard(shard_rows(1, vectors(3)))
    for handle in (table, other):
        with pytest.raises(StoreError, match="shard 1 is in the table already"):
            handle.append_shard(shard_rows(1, vectors(3)))
    assert len(plain_rows(tmp_path)) == 6


def test_windows_of_a_document_count_once(tmp_path: Path) -> None:
    table = create_table(tmp_path)
    table.append_shard(shard_rows(0, vectors(4), ids=["a", "a", "b", "c"], windows=[0, 2, 0, 1]))
    table.append_shard(shard_rows(1, vectors(2), ids=["e", "d"]))
    assert (table.latest().num_rows, table.latest().num_documents) == (6, 5)
    assert [document_id for document_id, _ in table.known_contents(before_shard=2)] == ["a", "b", "c", "e", "d"]


@pytest.mark.parametrize(
    ("ids", "windows"), [(["a", "b", "a"], [0, 0, 1]), (["a", "a", "b"], [0, 0, 0]), (["a", "a", "b"], [1, 0, 0])]
)
def test_windows_out_of_order_are_refused(tmp_path: Path, ids: list[str], windows: list[int]) -> None:
    with pytest.raises(ValueError, match="neighbours, ascending, each once"):
        create_table(tmp_path).append_shard(shard_rows(0, vectors(3), ids=ids, windows=windows))


def test_rows_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    table, rows = create_table(tmp_path), shard_rows(0, vectors(3))
    not_finite = pa.array([0.0, float("nan"), 1.0])
    for broken, message in [
        (rows.drop_columns(["text"]), "missing \\['text'\\]"),
        (rows.append_column("surprise", pa.array([1, 2, 3])), "unknown \\['surprise'\\]"),
        (rows.slice(0, 0), "0 rows"),
        (replaced(rows, "loss", not_finite), "loss"),
        (replaced(rows, "shard", pa.array([0, 0, 1], pa.int32())), "one shard"),
        (replaced(rows, "text", pa.array(["a", None, "b"])), "text has 1 nulls"),
        (replaced(rows, "code", pa.array([b"1"] * 3, pa.binary(1))), "size"),
    ]:
        with pytest.raises(ValueError, match=message):
            table.append_shard(broken)
    assert table.latest().num_rows == 0
    table.append_shard(rows.drop_columns(["year"]).select([*reversed(rows.drop_columns(["year"]).column_names)]))
    assert [row["year"] for row in plain_rows(tmp_path)] == [None] * 3


def test_a_snapshot_does_not_see_later_writes(tmp_path: Path) -> None:
    """B39: a version is pinned; the next ``latest`` sees what another handle wrote."""
    reader = create_table(tmp_path, vectors(3))
    snapshot = reader.latest()
    writer = DocumentTable.open(documents_path(tmp_path))
    writer.append_shard(shard_rows(1, vectors(3)))
    writer.add_metadata_columns(pa.schema([("language", pa.string())]))
    assert (snapshot.num_rows, snapshot.row_ids().size, snapshot.row_ids("year >= 2000").size) == (3, 3, 3)
    assert "language" not in snapshot.schema.names
    newer = reader.latest()
    assert (newer.num_rows, newer.version, "language" in newer.schema.names) == (6, snapshot.version + 2, True)
    with pytest.raises(ValueError, match="no row"):
        snapshot.take(newer.row_ids()[-1:], ["text"])


def test_take_keeps_the_order_given(tmp_path: Path) -> None:
    snapshot = create_table(tmp_path, vectors(3), vectors(3, 1)).latest()
    row_ids = snapshot.row_ids()
    wanted = row_ids[[5, 0, 3, 0, 5]]
    taken = snapshot.take(wanted, ["text", "document_id"])
    assert taken.column_names == ["text", "document_id"]
    assert taken["document_id"].to_pylist() == ["d1-2", "d0-0", "d1-0", "d0-0", "d1-2"]
    assert snapshot.take(wanted, ["_rowid"])["_rowid"].to_pylist() == wanted.tolist()
    assert snapshot.take(np.empty(0, np.int64), ["text"]).num_rows == 0
    for unknown in (-1, 77, 9 << 32):
        with pytest.raises(ValueError, match="no row"):
            snapshot.take([row_ids[0], unknown], ["text"])
    with pytest.raises(ValueError, match="no column 'nope'"):
        snapshot.take(row_ids, ["nope"])


def test_filters(tmp_path: Path) -> None:
    snapshot = create_table(tmp_path, vectors(7), vectors(7, 1)).latest()
    rows = plain_rows(tmp_path)
    for where, holds in [
        ("source = 'wiki'", lambda row: row["source"] == "wiki"),
        ("year > 2003 AND source <> 'wiki'", lambda row: row["year"] > 2003 and row["source"] != "wiki"),
        ("document_id = 'd1-6' -- the last", lambda row: row["document_id"] == "d1-6"),
        ("text = 'a;b'", lambda row: False),
        ("year > 2003 or shard = 1", lambda row: row["year"] > 2003 or row["shard"] == 1),
    ]:
        found = snapshot.row_ids(where)
        assert found.dtype == np.int64
        np.testing.assert_array_equal(found, snapshot.row_ids()[[holds(row) for row in rows]])


@pytest.mark.parametrize(
    "where",
    [
        "nope = 1",
        "year >",
        "",
        "1",
        "year = 'x' y",
        "text > 5",
        "shard/0 = 1",
        "shard = 0; drop table documents",
        "a" * 5000,
        "\ud800",
    ],
)
def test_bad_filters_say_which_columns_there_are(tmp_path: Path, where: str) -> None:
    with pytest.raises(UsageError, match=r"document_id \(string\), .*year \(int64\)"):
        create_table(tmp_path, vectors(2)).latest().row_ids(where)


def test_columns_are_named_apart() -> None:
    fields = ["source", "Text", "code", "Source", "", "_rowid", "a.b", "a`b", "metadata_code", "unicode \u00e9", "line\nbreak"]
    columns = column_names(fields)
    assert list(columns) == fields
    assert list(columns.values()) == [
        "source", "metadata_Text", "metadata_code", "metadata_Source", "metadata_", "metadata__rowid", "a_b", "metadata_a_b",
        "metadata_metadata_code", "unicode \u00e9", "line_break",
    ]  # fmt: skip
    assert len({name.lower() for name in [*columns.values(), *FIXED_COLUMNS]}) == len(fields) + len(FIXED_COLUMNS)
    assert column_names(["TEXT", "Text"], existing={"Text": "metadata_Text"}) == {
        "Text": "metadata_Text",
        "TEXT": "metadata_TEXT_2",
    }


def test_every_named_column_can_be_stored_and_filtered(tmp_path: Path) -> None:
    columns = column_names(["Text", "", "_rowid", "a.b", "a`b", "unicode \u00e9", "select", "Capital", '"quoted"'])
    table = DocumentTable.create(
        documents_path(tmp_path), code_bytes=12, metadata_columns=pa.schema([(name, pa.int64()) for name in columns.values()])
    )
    rows = shard_rows(0, vectors(2)).drop_columns(["source", "year"])
    rows = replaced(rows, "code", pa.array([bytes(12)] * 2, pa.binary(12)))
    for name in columns.values():
        rows = rows.append_column(name, pa.array([1, 2]))
    table.append_shard(rows)
    for name in columns.values():
        assert table.latest().row_ids(f"`{name}` = 2").tolist() == [1]
    assert table.latest().row_ids("Capital = 2").tolist() == [1]


def test_columns_for_new_fields(tmp_path: Path) -> None:
    table = create_table(tmp_path, vectors(2))
    version = table.latest().version
    table.add_metadata_columns(METADATA)
    assert table.latest().version == version  # nothing new, nothing written
    table.add_metadata_columns(pa.schema([("source", pa.string()), ("score", pa.float64()), ("ok", pa.bool_())]))
    assert table.metadata_columns.names == ["source", "year", "score", "ok"]
    table.append_shard(shard_rows(1, vectors(1)).append_column("ok", pa.array([True])))
    assert [row["ok"] for row in plain_rows(tmp_path)] == [None, None, True]
    for columns in ([("year", pa.string())], [("Text", pa.string())], [("list", pa.list_(pa.int8()))]):
        with pytest.raises(ValueError, match="metadata column"):
            table.add_metadata_columns(pa.schema(columns))


def test_words_are_found(tmp_path: Path) -> None:
    table = create_table(tmp_path, vectors(7))
    table.index_text()
    table.append_shard(shard_rows(1, vectors(7)))  # not indexed; found by a scan
    snapshot = table.latest()
    found = snapshot.text_search('6 "AND (', 10, columns=["document_id"])
    assert found.column_names == ["document_id", "_score"]
    assert sorted(found["document_id"].to_pylist()) == ["d0-6", "d1-6"] and min(found["_score"].to_pylist()) > 0
    assert snapshot.text_search("6", 10, columns=["document_id"], where="shard = 1")["document_id"].to_pylist() == ["d1-6"]
    assert snapshot.text_search("absent", 10, columns=["text"]).num_rows == 0
    with pytest.raises(UsageError, match="columns"):
        snapshot.text_search("6", 10, columns=["text"], where="nope = 1")
    table.index_text()
    assert table.latest().text_search("shard", 100, columns=["text"]).num_rows == 14


def test_a_table_is_neither_replaced_nor_invented(tmp_path: Path) -> None:
    create_table(tmp_path)
    with pytest.raises(StoreError, match="exists already"):
        create_table(tmp_path)
    with pytest.raises(StoreError, match="found none"):
        DocumentTable.open(documents_path(tmp_path / "typo"))
    assert not (tmp_path / "typo").exists()
    lancedb.connect(str(tmp_path / "other")).create_table("documents", data=[{"a": 1}])
    with pytest.raises(StoreError, match="expected the columns"):
        DocumentTable.open(documents_path(tmp_path / "other"))


@pytest.mark.parametrize("folder", ["_versions", "data"])
def test_a_truncated_table_is_an_error(tmp_path: Path, folder: str) -> None:
    create_table(tmp_path, vectors(5))
    for path in (documents_path(tmp_path) / folder).iterdir():
        path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(StoreError, match="documents.lance"):
        DocumentTable.open(documents_path(tmp_path)).latest().row_ids("year > 0")


WRITER = """
    import resource, sys
    from pathlib import Path
    import numpy as np
    from tdasearch.store.documents import DocumentTable, documents_path
    from tests.tables import shard_rows
    table = DocumentTable.open(documents_path(Path(sys.argv[1])))
    first = max(table.committed_shards(), default=-1) + 1
    if len(sys.argv) > 2:
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), int(sys.argv[2])))
    print("ready", flush=True)
    for shard in range(first, first + 10_000):
        table.append_shard(shard_rows(shard, np.random.default_rng(shard).standard_normal((200, 64)).astype(np.float32)))
"""


def start_writer(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(WRITER), *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_killed_appends_leave_whole_shards(tmp_path: Path) -> None:
    """B43, R6: after SIGKILL the table is a whole prefix of the shards, and goes on from there."""
    create_table(tmp_path)
    committed: set[int] = set()
    for delay in (0.003, 0.041, 0.107):
        writer = start_writer(tmp_path)
        assert writer.stdout is not None and writer.stdout.readline() == "ready\n"
        time.sleep(delay)
        writer.kill()
        writer.communicate()
        assert writer.returncode == -signal.SIGKILL
        rows = plain_rows(tmp_path)
        shards = [row["shard"] for row in rows]
        found = DocumentTable.open(documents_path(tmp_path)).committed_shards()
        assert found == set(shards) == set(range(len(found))) and found >= committed
        assert all(shards.count(shard) == 200 for shard in found)
        assert len({row["document_id"] for row in rows}) == len(rows)
        committed = found
    assert committed


def test_a_full_disk_spoils_nothing(tmp_path: Path) -> None:
    """B45, R7: old rows stay readable, the message names the path, and a rerun works."""
    create_table(tmp_path, vectors(5))
    writer = start_writer(tmp_path, 4096)
    _, errors = writer.communicate()
    assert writer.returncode == 1 and "StoreError" in errors and "could not append shard 1" in errors and str(tmp_path) in errors
    table = DocumentTable.open(documents_path(tmp_path))
    assert table.committed_shards() == {0} and len(plain_rows(tmp_path)) == 5
    table.append_shard(shard_rows(1, vectors(200)))
    assert len(plain_rows(tmp_path)) == 205
