"""Search over the codes against a float64 brute force over what plain lancedb reads; and a cache that is never trusted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import lancedb
import numpy as np
import pyarrow as pa
import pytest

from tdasearch import codes
from tdasearch.errors import StoreError, UsageError
from tdasearch.store import ann_build
from tdasearch.store.ann import Ann, open_ann
from tdasearch.store.documents import DocumentTable
from tests.tables import create_table, shard_rows

ROOT = Path(__file__).parents[1]
SKETCH_DIM = 64
EITHER_SCORE = pytest.mark.parametrize("score", ann_build.SCORES)
EVERY_CODE = pytest.mark.parametrize("code", codes.CODES)


def vectors(num: int, *, seed: int = 0, orders: float = 1.0, sketch_dim: int = SKETCH_DIM) -> np.ndarray:
    """Directions at random, lengths over so many orders of magnitude."""
    generator = np.random.default_rng(seed)
    lengths = 10.0 ** generator.uniform(-orders / 2, orders / 2, (num, 1))
    return (generator.standard_normal((num, sketch_dim)) * lengths).astype(np.float32)


def opened(index_path: Path, table: DocumentTable, code: str, score: str = "influence", sketch_dim: int = SKETCH_DIM) -> Ann:
    return open_ann(index_path, table.latest(), code=code, sketch_dim=sketch_dim, encoder_fingerprint="e", score=score)


class BruteForce:
    """R4: stored bytes by plain lancedb, decoded, float64, sorted by (-score, row id)."""

    def __init__(self, index_path: Path, code: str, *, score: str = "influence", sketch_dim: int = SKETCH_DIM) -> None:
        rows = lancedb.connect(str(index_path)).open_table("documents").search().with_row_id(True).to_arrow()
        coded = np.frombuffer(b"".join(rows["code"].to_pylist()), np.uint8).reshape(rows.num_rows, -1)
        self.vectors_ND = codes.decode(coded, sketch_dim=sketch_dim, code=code).astype(np.float64)
        self.divisors = np.sqrt(rows["self_influence"].to_numpy()) if score == "cosine" else np.ones(rows.num_rows)
        self.row_ids = rows["_rowid"].to_numpy().astype(np.int64)

    def search(self, query: np.ndarray, k: int, *, among: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        scores = ((self.vectors_ND @ query.astype(np.float64)).astype(np.float32) / self.divisors).astype(np.float32)
        allowed = np.ones(len(scores), bool) if among is None else np.isin(self.row_ids, among)
        order = np.lexsort((self.row_ids[allowed], -scores[allowed]))[:k]
        return scores[allowed][order], self.row_ids[allowed][order]


@EVERY_CODE
@EITHER_SCORE
@pytest.mark.parametrize("orders", [1.0, 9.0])
def test_congruent_with_brute_force(tmp_path: Path, code: str, score: str, orders: float) -> None:
    """B37, B41: inner products themselves, falling, at both ends of the ranking, with and without a filter, any k."""
    table = create_table(tmp_path, vectors(900, orders=orders), vectors(700, seed=1, orders=orders), code=code)
    ann = opened(tmp_path, table, code, score)
    reference = BruteForce(tmp_path, code, score=score)
    queries = vectors(2, seed=2, orders=8.0)
    everything = ann.snapshot.row_ids()
    for where, expected_rows in [
        (None, 1600),
        ("source = 'wiki'", 534),
        ("year = 2005", 2),
        ("year < 2030", 60),
        ("year < 0", 0),
    ]:
        row_ids = None if where is None else ann.snapshot.row_ids(where)
        assert (everything if row_ids is None else row_ids).size == expected_rows
        for k in (1, 40, 300, 5000):
            for sign in (1, -1):
                scores, found = ann.search(sign * queries, k, row_ids=row_ids)
                assert (scores.dtype, found.dtype, scores.shape) == (np.float32, np.int64, (2, min(k, expected_rows)))
                for query, query_scores, query_found in zip(queries, scores, found, strict=True):
                    best_scores, best = reference.search(sign * query, k, among=row_ids)
                    np.testing.assert_array_equal(query_found, best)
                    np.testing.assert_allclose(query_scores, best_scores, rtol=2e-7)


@EVERY_CODE
def test_congruent_at_a_thousand_dimensions(tmp_path: Path, code: str) -> None:
    table = create_table(tmp_path, vectors(1500, sketch_dim=1024), code=code, sketch_dim=1024)
    ann = opened(tmp_path, table, code, sketch_dim=1024)
    reference = BruteForce(tmp_path, code, sketch_dim=1024)
    for query in vectors(5, seed=3, sketch_dim=1024):
        for end in (query, -query):
            np.testing.assert_array_equal(ann.search(end[None], 50)[1][0], reference.search(end, 50)[1])


def test_scores_are_the_inner_products(tmp_path: Path) -> None:
    """B37: not 1 - product, not a distance."""
    rows = np.zeros((3, SKETCH_DIM), np.float32)
    rows[:, 0] = [0.3748, 3.4695, -1.468]
    scores, found = opened(tmp_path, create_table(tmp_path, rows, code="fp32"), "fp32").search(np.eye(1, SKETCH_DIM), 8)
    np.testing.assert_allclose(scores, [[3.4695, 0.3748, -1.468]], rtol=1e-6)
    assert found.tolist() == [[1, 0, 2]]


@EVERY_CODE
def test_ties_come_by_row_id_on_any_shard_count(tmp_path: Path, code: str) -> None:
    """B36: six copies, three wanted; and so many copies that none of the rows fetched at first is below the cut."""
    for num_copies in (6, 500):
        rows = vectors(1200, seed=4)
        query = rows[3] * 50
        rows[3 : 3 + num_copies] = query  # the best rows by far
        for cuts in ([], [5], [5, 8, 700]):
            index_path = tmp_path / f"{num_copies}-{len(cuts)}"
            table = create_table(index_path, *np.split(rows, cuts), code=code)
            ann = opened(index_path, table, code)
            ids = ann.snapshot.row_ids()
            for k in (1, 3, 5):
                found = ann.search(query[None], k)[1][0]
                expected = BruteForce(index_path, code).search(query, k)[1]
                np.testing.assert_array_equal(found, expected)
                np.testing.assert_array_equal(np.searchsorted(ids, found), np.arange(3, 3 + k))


@EVERY_CODE
def test_few_rows_and_none(tmp_path: Path, code: str) -> None:
    """B30: never a padding row, an empty index is an empty answer, k below 1 is the user's error."""
    table = create_table(tmp_path, code=code)
    for num_queries in (0, 1, 25):
        scores, found = opened(tmp_path, table, code).search(vectors(num_queries), 8)
        assert scores.shape == found.shape == (num_queries, 0)
    table.append_shard(shard_rows(0, vectors(5), code=code))
    ann = opened(tmp_path, table, code)
    scores, found = ann.search(vectors(3), 8)
    assert found.shape == (3, 5) and sorted(found[0].tolist()) == [0, 1, 2, 3, 4] and np.isfinite(scores).all()
    assert ann.search(vectors(0), 8)[1].shape == (0, 5)
    for k in (0, -1):
        with pytest.raises(UsageError, match=f"found {k}"):
            ann.search(vectors(1), k)


def test_queries_without_sense(tmp_path: Path) -> None:
    ann = opened(tmp_path, create_table(tmp_path, vectors(300)), "1bit")
    for bad in (np.nan, np.inf):
        with pytest.raises(ValueError, match="NaN or infinity"):
            ann.search(np.full((1, SKETCH_DIM), bad), 3)
    for shape in ((SKETCH_DIM,), (1, SKETCH_DIM + 8)):
        with pytest.raises(ValueError, match=r"\[Q, 64\]"):
            ann.search(np.ones(shape), 3)
    scores, found = ann.search(np.zeros((1, SKETCH_DIM)), 3)
    assert (scores.tolist(), found.tolist()) == ([[0, 0, 0]], [[0, 1, 2]])
    assert ann.search(np.zeros((1, SKETCH_DIM)), 3, row_ids=np.array([7, 9, 8, 11]))[1].tolist() == [[7, 8, 9]]
    with pytest.raises(ValueError, match="no row 300 in version"):
        ann.search(vectors(1), 3, row_ids=np.array([5, 300]))
    with pytest.raises(UsageError, match="influence or cosine"):
        open_ann(tmp_path, ann.snapshot, code="1bit", sketch_dim=64, encoder_fingerprint="e", score="dot")
    with pytest.raises(StoreError, match="expected codes of 13 bytes"):
        open_ann(tmp_path, ann.snapshot, code="1bit", sketch_dim=72, encoder_fingerprint="e")


@EVERY_CODE
def test_extreme_lengths(tmp_path: Path, code: str) -> None:
    """B20: FAISS's RaBitQ mistakes short rows for long ones, and half floats overflow; tiny and huge queries alike."""
    table = create_table(tmp_path, vectors(600, orders=30), code=code)
    ann, reference = opened(tmp_path, table, code), BruteForce(tmp_path, code)
    for factor in (1e-25, 1.0, 1e15):
        query = vectors(1, seed=5)[0] * np.float32(factor)
        for end in (query, -query):
            scores, found = ann.search(end[None], 20)
            best_scores, best = reference.search(end, 20)
            np.testing.assert_array_equal(found[0], best)
            np.testing.assert_allclose(scores[0], best_scores, rtol=2e-7)


def test_building_in_batches_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table, query = create_table(tmp_path, vectors(500), vectors(300, seed=1)), vectors(1, seed=2)
    whole = opened(tmp_path, table, "1bit").search(query, 40)
    digest = cache_files(tmp_path)[0].read_bytes()
    for path in cache_files(tmp_path):
        path.unlink()
    monkeypatch.setattr(ann_build, "BATCH_VALUES", 7 * SKETCH_DIM)
    np.testing.assert_array_equal(opened(tmp_path, table, "1bit").search(query, 40)[1], whole[1])
    assert cache_files(tmp_path)[0].read_bytes() == digest


def cache_files(index_path: Path) -> list[Path]:
    return sorted((index_path / "ann").iterdir())


@EVERY_CODE
def test_a_cache_is_used_again(tmp_path: Path, code: str) -> None:
    table, query = create_table(tmp_path, vectors(300), code=code), vectors(1, seed=2)
    first = opened(tmp_path, table, code).search(query, 40)
    written = [(path.name, path.stat().st_mtime_ns) for path in cache_files(tmp_path)]
    assert [name for name, _ in written] == ["v2.influence.faiss", "v2.influence.json"]
    again = opened(tmp_path, table, code).search(query, 40)
    np.testing.assert_array_equal(first, again)
    assert [(path.name, path.stat().st_mtime_ns) for path in cache_files(tmp_path)] == written
    opened(tmp_path, table, code, "cosine")
    assert len(cache_files(tmp_path)) == 4


def damage(kind: str, faiss_path: Path, sidecar_path: Path) -> None:
    whole, sidecar = faiss_path.read_bytes(), json.loads(sidecar_path.read_text())
    if kind == "truncated":
        faiss_path.write_bytes(whole[:-100])
    elif kind == "sidecar cut":
        sidecar_path.write_text(sidecar_path.read_text()[:30])
    elif kind == "sidecar of something else":
        sidecar_path.write_text("[1, 2]")
    elif kind == "hostile unit":
        sidecar_path.write_text(json.dumps({**sidecar, "unit": "1"}))
    elif kind == "another index":
        faiss_path.write_bytes(b"IxFI" + whole[4:])
    else:
        place = {"flipped header": 9, "flipped body": len(whole) // 2, "flipped end": len(whole) - 1}[kind]
        faiss_path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x40]) + whole[place + 1 :])


@EVERY_CODE
@pytest.mark.parametrize(
    "kind",
    [
        "truncated",
        "flipped header",
        "flipped body",
        "flipped end",
        "another index",
        "sidecar cut",
        "sidecar of something else",
        "hostile unit",
    ],
)
def test_a_damaged_cache_is_rebuilt_and_never_searched(tmp_path: Path, code: str, kind: str) -> None:
    table, query = create_table(tmp_path, vectors(300), code=code), vectors(1, seed=2)
    opened(tmp_path, table, code)
    faiss_path, sidecar_path = cache_files(tmp_path)
    whole = faiss_path.read_bytes()
    damage(kind, faiss_path, sidecar_path)
    with pytest.warns(RuntimeWarning, match="built again from the table"):
        found = opened(tmp_path, table, code).search(query, 40)[1]
    np.testing.assert_array_equal(found[0], BruteForce(tmp_path, code).search(query[0], 40)[1])
    assert faiss_path.read_bytes() == whole
    assert cache_files(tmp_path) == [faiss_path, sidecar_path]


@pytest.mark.parametrize("change", [{"encoder_fingerprint": "f"}, {"faiss_version": "1.0"}, {"num_rows": 299}, {"code": "fp16"}])
def test_a_cache_of_something_else_is_rebuilt(tmp_path: Path, change: dict[str, object]) -> None:
    table = create_table(tmp_path, vectors(300))
    opened(tmp_path, table, "1bit")
    faiss_path, sidecar_path = cache_files(tmp_path)
    right = sidecar_path.read_text()
    sidecar_path.write_text(json.dumps({**json.loads(right), **change}))
    faiss_path.write_bytes(b"other")
    opened(tmp_path, table, "1bit")
    assert sidecar_path.read_text() == right


def test_a_stale_cache_is_rebuilt_and_removed(tmp_path: Path) -> None:
    """B39: a search index follows its snapshot; the one opened before keeps answering for its own version."""
    table, query = create_table(tmp_path, vectors(300)), vectors(1, seed=2)
    old = opened(tmp_path, table, "1bit")
    before = old.search(query, 400)[1]
    table.append_shard(shard_rows(1, query * 50))
    abandoned, fresh = tmp_path / "ann" / ".v1.faiss.dead.tmp", tmp_path / "ann" / ".v9.faiss.alive.tmp"
    for path in (abandoned, fresh):
        path.touch()
    os.utime(abandoned, (time.time() - 7200,) * 2)
    new = opened(tmp_path, table, "1bit")
    assert [path.name for path in cache_files(tmp_path)] == [".v9.faiss.alive.tmp", "v3.influence.faiss", "v3.influence.json"]
    assert new.search(query, 1)[1].tolist() == [[1 << 32]]  # the row that was appended
    np.testing.assert_array_equal(old.search(query, 400)[1], before)
    # An old one does not remove a newer one.
    open_ann(tmp_path, old.snapshot, code="1bit", sketch_dim=64, encoder_fingerprint="e")
    assert "v3.influence.faiss" in [path.name for path in cache_files(tmp_path)]


def test_a_cache_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    table, query = create_table(tmp_path, vectors(300)), vectors(1, seed=2)
    (tmp_path / "ann").write_text("in the way")
    with pytest.warns(RuntimeWarning, match="cannot be kept"):
        ann = opened(tmp_path, table, "1bit")
    np.testing.assert_array_equal(ann.search(query, 5)[1][0], BruteForce(tmp_path, "1bit").search(query[0], 5)[1])
    assert (tmp_path / "ann").read_text() == "in the way"


def test_a_full_disk_is_a_warning(tmp_path: Path) -> None:
    """B45, R7: FAISS fails half-way through its file; the answer comes all the same and nothing half-written stays."""
    create_table(tmp_path, vectors(3000))
    script = """
        import resource, sys
        from pathlib import Path
        import numpy as np
        from tdasearch.store.ann import open_ann
        from tdasearch.store.documents import DocumentTable, documents_path
        path = Path(sys.argv[1])
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
        snapshot = DocumentTable.open(documents_path(path)).latest()
        ann = open_ann(path, snapshot, code="1bit", sketch_dim=64, encoder_fingerprint="")
        print(ann.search(np.ones((1, 64)), 7)[1].shape)
    """
    done = run(script, tmp_path)
    assert done.stdout == "(1, 7)\n" and "cannot be kept" in done.stderr
    assert cache_files(tmp_path) == []


def test_a_code_that_is_not_finite_is_reported(tmp_path: Path) -> None:
    table, rows = create_table(tmp_path), shard_rows(0, vectors(3))
    broken = [b"\x00\x00\xc0\x7f" + code[4:] for code in rows["code"].to_pylist()]
    place = rows.column_names.index("code")
    table.append_shard(rows.set_column(place, "code", pa.array(broken, rows.schema.field("code").type)))
    with pytest.raises(StoreError, match="not finite"):
        opened(tmp_path, table, "1bit")


def run(script: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr
    return done


def test_threads_beside_torch(tmp_path: Path) -> None:
    """B55: two OpenMP runtimes in one process, loaded in either order, and eight threads that search at once."""
    table = create_table(tmp_path, vectors(500))
    expected = [opened(tmp_path, table, "1bit").search(vectors(5, seed=seed), 9)[1].tolist() for seed in range(8)]
    script = """
        import json, sys
        from concurrent.futures import ThreadPoolExecutor
        from pathlib import Path
        from tdasearch.store.documents import DocumentTable, documents_path
        from tests.test_ann import opened, vectors
        torch.ones(300, 300) @ torch.ones(300, 300)
        path = Path(sys.argv[1])
        ann = opened(path, DocumentTable.open(documents_path(path)), "1bit")
        with ThreadPoolExecutor(8) as threads:
            found = list(threads.map(lambda seed: ann.search(vectors(5, seed=seed), 9)[1].tolist(), range(8)))
        print(json.dumps(found))
    """
    with ThreadPoolExecutor(2) as processes:
        orders = [f"import {order}\n{textwrap.dedent(script)}" for order in ("torch, faiss", "faiss, torch")]
        for done in processes.map(lambda ordered: run(ordered, tmp_path, OMP_NUM_THREADS="2"), orders):
            assert json.loads(done.stdout) == expected


def test_missing_or_doubled_wheels_are_named(tmp_path: Path) -> None:
    script = """
        import sys
        from tdasearch.errors import TdasearchError
        from tdasearch.store.faiss_library import faiss_module
        if sys.argv[1:]:
            sys.path.append(sys.argv[1])
        else:
            sys.modules["faiss"] = None
        try:
            faiss_module()
        except TdasearchError as error:
            print(error)
    """
    assert "install tdasearch[cpu] or tdasearch[gpu]" in run(script).stdout
    for wheel in ("faiss_cpu", "faiss_gpu"):
        (tmp_path / f"{wheel}-1.15.1.dist-info").mkdir()
        (tmp_path / f"{wheel}-1.15.1.dist-info" / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {wheel}\nVersion: 1.15.1\n"
        )
    assert "expected one of faiss-cpu and faiss-gpu, found both" in run(script, tmp_path).stdout
