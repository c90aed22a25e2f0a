"""The manifest: written whole, and nothing wrong in it gets past reading."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from tdasearch.errors import StoreError
from tdasearch.store.manifest import CorpusRecord, Manifest, ModelRecord, Plan, manifest_path, read_manifest, write_manifest

MODEL = ModelRecord(
    source="gpt2", weights_fingerprint="w", tokenizer_fingerprint="t", num_parameters=1000, max_tokens=1024, dtype="float32"
)
PLAN = Plan(
    modules=["h.0.attn", "h.0.mlp"],
    num_covered_parameters=800,
    eigenbasis_share=0.5,
    sketch_dim=8160,
    code="1bit",
    window_tokens=512,
    stride=384,
    max_windows=None,
    damping_scale=0.1,
    fisher="sampled",
    fit_documents=100,
    seed=0,
    budget_bytes=1024,
    shard_documents=1000,
)
CORPUS = CorpusRecord(
    source="docs.jsonl",
    first_shard=0,
    num_shards=3,
    num_documents=2500,
    num_windows=2600,
    num_tokens=10**12,
    num_characters=4 * 10**12,
    num_skipped=1,
    num_duplicates=0,
    num_truncated=0,
    digest="d",
)
MANIFEST = Manifest(
    created_by="tdasearch 0",
    state="complete",
    method="ekfac",
    model=MODEL,
    plan=PLAN,
    encoder_fingerprint="0f" * 32,
    corpus=[CORPUS, replace(CORPUS, first_shard=3)],
    fields={"source": "source", "Text": "metadata_Text"},
)


@pytest.mark.parametrize(
    "manifest",
    [MANIFEST, replace(MANIFEST, state="building", encoder_fingerprint="", corpus=[], plan=replace(PLAN, max_windows=4))],
)
def test_round_trip(tmp_path: Path, manifest: Manifest) -> None:
    write_manifest(tmp_path, manifest)
    assert read_manifest(tmp_path) == manifest
    write_manifest(tmp_path, manifest)
    assert os.listdir(tmp_path) == ["manifest.json"]  # no temporary file is left
    value = json.loads(manifest_path(tmp_path).read_text(encoding="ascii"))
    assert value["format_version"] == 1 and value == asdict(manifest)


def put(value: dict[str, Any], path: str, new: object) -> None:
    *parents, last = path.split(".")
    for parent in parents:
        value = value[int(parent) if isinstance(value, list) else parent]
    value[last] = new


@pytest.mark.parametrize(
    ("path", "new"),
    [
        ("format_version", "1"),
        ("format_version", True),
        ("state", "done"),
        ("state", ["complete"]),
        ("method", ""),
        ("encoder_fingerprint", ""),
        ("encoder_fingerprint", "../../etc/passwd"),
        ("model.num_parameters", 0),
        ("model.max_tokens", -1),
        ("model", None),
        ("model.extra", 1),
        ("plan.modules", "h.0"),
        ("plan.modules", [1]),
        ("plan.modules", ["a", "a"]),
        ("plan.num_covered_parameters", 1001),
        ("plan.eigenbasis_share", 0),
        ("plan.eigenbasis_share", float("nan")),
        ("plan.eigenbasis_share", "0.5"),
        ("plan.sketch_dim", 2**40),
        ("plan.sketch_dim", 8161),
        ("plan.sketch_dim", 8160.0),
        ("plan.sketch_dim", 10**30),
        ("plan.code", "pickle"),
        ("plan.window_tokens", 0),
        ("plan.stride", 513),
        ("plan.max_windows", 0),
        ("plan.max_windows", False),
        ("plan.damping_scale", float("inf")),
        ("plan.damping_scale", -0.1),
        ("plan.fisher", ""),
        ("plan.seed", -1),
        ("plan.budget_bytes", 2**31),
        ("corpus", {}),
        ("corpus.0.num_tokens", -1),
        ("corpus.1.first_shard", 2),
        ("corpus.0.digest", None),
        ("fields", {"a": "x", "b": "X"}),
        ("fields", {"a": 1}),
    ],
)
def test_hostile_values_are_refused_by_name(tmp_path: Path, path: str, new: object) -> None:
    value = asdict(MANIFEST)
    put(value, path, new)
    manifest_path(tmp_path).write_text(json.dumps(value))
    name = re.sub(r"corpus\.(\d)", r"corpus[\1]", path.removesuffix(".extra"))
    with pytest.raises(StoreError, match=re.escape(name)):
        read_manifest(tmp_path)


@pytest.mark.parametrize("path", ["format_version", "plan", "plan.seed", "corpus", "model.dtype"])
def test_missing_fields_are_refused(tmp_path: Path, path: str) -> None:
    value = asdict(MANIFEST)
    *parents, last = path.split(".")
    del (value[parents[0]] if parents else value)[last]
    manifest_path(tmp_path).write_text(json.dumps(value))
    with pytest.raises(StoreError, match=last):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: "null",
        lambda text: "[" * 100_000,
        lambda text: '{"state": ' + "9" * 10_000 + "}",
        lambda text: text.replace('"seed": 0', '"seed": 0, "seed": 1'),
        lambda text: text.encode().replace(b"gpt2", b"\xff"),
    ],
)
def test_no_manifest_but_something_else(tmp_path: Path, change: Callable[[str], str | bytes]) -> None:
    changed = change(json.dumps(asdict(MANIFEST)))
    manifest_path(tmp_path).write_bytes(changed if isinstance(changed, bytes) else changed.encode())
    with pytest.raises(StoreError, match=r"manifest\.json"):
        read_manifest(tmp_path)


def test_other_versions_say_what_to_do(tmp_path: Path) -> None:
    for version, advice in [(2, "update tdasearch"), (0, "build the index again")]:
        manifest_path(tmp_path).write_text(json.dumps({"format_version": version, "new": {}}))
        with pytest.raises(StoreError, match=f"expected format version 1, found {version}; {advice}"):
            read_manifest(tmp_path)
    with pytest.raises(StoreError, match="found no manifest.json"):
        read_manifest(tmp_path / "typo")


def test_a_failed_write_keeps_the_old(tmp_path: Path) -> None:
    write_manifest(tmp_path, MANIFEST)
    with pytest.raises(StoreError, match="plan.stride"):
        write_manifest(tmp_path, replace(MANIFEST, plan=replace(PLAN, stride=0)))
    assert read_manifest(tmp_path) == MANIFEST
    with pytest.raises(StoreError, match="cannot be written"):
        write_manifest(tmp_path / "missing", MANIFEST)
    assert os.listdir(tmp_path) == ["manifest.json"]
