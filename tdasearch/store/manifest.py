"""``manifest.json``: what an index is, and what it was made with. Written whole, checked in every field when it is read.

Anyone may have edited the file: a wrong type, a number out of range, an unknown or missing field, or another format version is a
``StoreError`` that names the field, never a surprise later.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tdasearch.codes import CODES, code_bytes
from tdasearch.errors import StoreError, UsageError
from tdasearch.store.files import replacing

FILE_NAME = "manifest.json"
FORMAT_VERSION = 1
STATES = ("building", "complete")
FISHERS = ("sampled", "empirical")
_MAX_BYTES = 64 << 20  # a manifest has kilobytes; this bounds what a hostile one can cost
_MAX_INT = 2**63 - 1


@dataclass(frozen=True)
class ModelRecord:
    """The model that an index was built with.

    Attributes:
        source: Hub id or path, as given; for people.
        weights_fingerprint: Of the weights.
        tokenizer_fingerprint: Of the tokenizer.
        num_parameters: All parameters, tied ones once.
        max_tokens: Longest input of the model.
        dtype: Of the weights, as in ``float32``.
    """

    source: str
    weights_fingerprint: str
    tokenizer_fingerprint: str
    num_parameters: int
    max_tokens: int
    dtype: str


@dataclass(frozen=True)
class Plan:
    """How documents become codes.

    Attributes:
        modules: Names of the modules whose gradients are kept.
        num_covered_parameters: Their parameters.
        eigenbasis_share: Share of each eigenbasis that is kept, in (0, 1].
        sketch_dim: Coordinates of a vector.
        code: One of ``codes.CODES``.
        window_tokens: Most tokens in a window.
        stride: Tokens from one window's start to the next.
        max_windows: Most windows of a document; None for all.
        damping_scale: Damping over the mean eigenvalue.
        fisher: One of ``FISHERS``.
        fit_documents: Documents in the sample of the fit.
        seed: Of the sample, the sampled targets and the sketch.
        budget_bytes: Most bytes of a code.
        shard_documents: Documents in a shard.
    """

    modules: list[str]
    num_covered_parameters: int
    eigenbasis_share: float
    sketch_dim: int
    code: str
    window_tokens: int
    stride: int
    max_windows: int | None
    damping_scale: float
    fisher: str
    fit_documents: int
    seed: int
    budget_bytes: int
    shard_documents: int


@dataclass(frozen=True)
class CorpusRecord:
    """One corpus of an index: the first by ``build``, the others by ``add``.

    Attributes:
        source: Path or kind of the corpus; for people.
        first_shard: Its first shard.
        num_shards: Its shards, from ``first_shard`` on.
        num_documents: Documents indexed.
        num_windows: Rows in the table.
        num_tokens: Tokens of its documents.
        num_characters: Characters of its documents.
        num_skipped: Rows that were not indexed.
        num_duplicates: Rows that were there already.
        num_truncated: Documents cut at ``max_windows``.
        digest: Of ids and tokens: a resumed build must find the same.
    """

    source: str
    first_shard: int
    num_shards: int
    num_documents: int
    num_windows: int
    num_tokens: int
    num_characters: int
    num_skipped: int
    num_duplicates: int
    num_truncated: int
    digest: str


@dataclass(frozen=True)
class Manifest:
    """An index.

    Attributes:
        created_by: The program and its version.
        state: One of ``STATES``.
        method: The recipe, as in ``ekfac``.
        model: The model.
        plan: How documents become codes.
        encoder_fingerprint: SHA-256 of ``encoder.safetensors``; "" while building, before the fit.
        corpus: Its corpora, in the order of their shards.
        fields: The SQL column of each metadata field.
        format_version: Of the index on disk.
    """

    created_by: str
    state: str
    method: str
    model: ModelRecord
    plan: Plan
    encoder_fingerprint: str
    corpus: list[CorpusRecord]
    fields: dict[str, str] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION


def manifest_path(index_path: Path) -> Path:
    """Where an index keeps its manifest.

    Args:
        index_path: The index's folder.

    Returns:
        The path of ``manifest.json``.
    """
    return index_path / FILE_NAME


def write_manifest(index_path: Path, manifest: Manifest) -> None:
    """Write the manifest whole or not at all (temporary file, fsync, rename, fsync of the folder).

    Args:
        index_path: The index's folder; it must exist.
        manifest: What to write.

    Raises:
        StoreError: It cannot be written, or reading would refuse it; the one that was there stays.
    """
    path = manifest_path(index_path)
    text = json.dumps(dataclasses.asdict(manifest), indent=2) + "\n"
    _parse(text, path)
    try:
        with replacing(path) as temporary:
            temporary.write_text(text, encoding="ascii")
    except OSError as error:
        raise StoreError(f"{path}: cannot be written: {error}; check free space and permissions, then run again") from error


def read_manifest(index_path: Path) -> Manifest:
    """Read and check the manifest.

    Args:
        index_path: The index's folder.

    Returns:
        The manifest.

    Raises:
        StoreError: There is none, it has another format version, or a field is not what it must be.
    """
    path = manifest_path(index_path)
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise StoreError(f"{path}: expected a few kilobytes, found {path.stat().st_size} bytes; restore it from a copy")
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise StoreError(f"{index_path}: expected an index, found no {FILE_NAME}; check the path, or build the index") from error
    except (OSError, UnicodeDecodeError) as error:
        raise StoreError(f"{path}: cannot be read: {error}") from error
    return _parse(text, path)


def _parse(text: str, path: Path) -> Manifest:
    try:
        value = json.loads(text, object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path}: expected JSON, found {error}; restore it from a copy") from error
    version = value.get("format_version") if isinstance(value, dict) else None
    if type(version) is int and version != FORMAT_VERSION:
        upgrade = "update tdasearch" if version > FORMAT_VERSION else "build the index again"
        raise StoreError(f"{path}: expected format version {FORMAT_VERSION}, found {version}; {upgrade}")
    try:
        manifest = typing.cast(Manifest, _typed(Manifest, value, "manifest"))
        for name, holds, expected, found in _ranges(manifest):
            if not holds:
                raise ValueError(f"{name}: expected {expected}, found {str(found)[:100]!r}")
    except ValueError as error:
        raise StoreError(f"{path}: {error}; restore the file from a copy, or build the index again") from error
    return manifest


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key that is given twice in one object")
    return result


def _typed(kind: Any, value: Any, name: str) -> Any:
    # The JSON value as a value of the annotated type; a ValueError that names the field if it is none.
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        expected = typing.get_type_hints(kind)
        if not isinstance(value, dict) or set(value) != set(expected):
            found = sorted(value) if isinstance(value, dict) else type(value).__name__
            raise ValueError(f"{name}: expected an object with the fields {', '.join(expected)}; found {str(found)[:300]}")
        return kind(**{key: _typed(expected[key], value[key], f"{name}.{key}") for key in expected})
    if origin is types.UnionType:
        return None if value is None else _typed(arguments[0], value, name)
    if origin is list and isinstance(value, list):
        return [_typed(arguments[0], item, f"{name}[{number}]") for number, item in enumerate(value)]
    if origin is dict and isinstance(value, dict):
        return {key: _typed(arguments[1], item, f"{name}[{key!r}]") for key, item in value.items()}
    if kind is float and type(value) in (int, float) and abs(value) <= _MAX_INT and math.isfinite(value):
        return float(value)
    if kind is int and type(value) is int and abs(value) <= _MAX_INT:
        return value
    if kind is str and type(value) is str:
        return value
    raise ValueError(f"{name}: expected {getattr(origin or kind, '__name__', kind)}, found {str(value)[:100]!r}")


def _ranges(manifest: Manifest) -> Iterator[tuple[str, bool, str, object]]:
    # What the types do not say: (field, whether it holds, what was expected, what was found).
    model, plan = manifest.model, manifest.plan
    yield "state", manifest.state in STATES, " or ".join(STATES), manifest.state
    yield "method", manifest.method != "", "a name", manifest.method
    fitted = re.fullmatch("[0-9a-f]{64}", manifest.encoder_fingerprint) is not None
    unfitted = manifest.encoder_fingerprint == "" and manifest.state == "building"
    yield "encoder_fingerprint", fitted or unfitted, "a SHA-256 (empty only while building)", manifest.encoder_fingerprint
    for name in ("num_parameters", "max_tokens"):
        yield f"model.{name}", getattr(model, name) >= 1, "1 or more", getattr(model, name)
    yield "plan.modules", len(set(plan.modules)) == len(plan.modules) and "" not in plan.modules, "names, each once", plan.modules
    covered = plan.num_covered_parameters
    yield "plan.num_covered_parameters", 0 <= covered <= model.num_parameters, "0 to the model's", covered
    yield "plan.eigenbasis_share", 0 < plan.eigenbasis_share <= 1, "above 0, at most 1", plan.eigenbasis_share
    yield "plan.code", plan.code in CODES, " or ".join(CODES), plan.code
    yield "plan.sketch_dim", _has_code(plan) and plan.sketch_dim < 2**31, "one that the code can have", plan.sketch_dim
    for name in ("window_tokens", "budget_bytes", "shard_documents"):
        yield f"plan.{name}", 1 <= getattr(plan, name) < 2**31, "1 to 2^31 - 1", getattr(plan, name)
    yield "plan.stride", 1 <= plan.stride <= plan.window_tokens, "1 to window_tokens", plan.stride
    yield "plan.max_windows", plan.max_windows is None or plan.max_windows >= 1, "1 or more, or null", plan.max_windows
    yield "plan.damping_scale", plan.damping_scale >= 0, "0 or more", plan.damping_scale
    yield "plan.fisher", plan.fisher in FISHERS, " or ".join(FISHERS), plan.fisher
    for name in ("fit_documents", "seed"):
        yield f"plan.{name}", getattr(plan, name) >= 0, "0 or more", getattr(plan, name)
    next_shard = 0
    for number, corpus in enumerate(manifest.corpus):
        for name, value in dataclasses.asdict(corpus).items():
            yield f"corpus[{number}].{name}", not isinstance(value, int) or value >= 0, "0 or more", value
        yield f"corpus[{number}].first_shard", corpus.first_shard == next_shard, f"{next_shard}", corpus.first_shard
        next_shard += corpus.num_shards
    columns = [column.lower() for column in manifest.fields.values()]
    yield "fields", len(set(columns)) == len(columns) and "" not in columns, "another column for each field", manifest.fields


def _has_code(plan: Plan) -> bool:
    try:
        return code_bytes(plan.code, plan.sketch_dim) > 0
    except UsageError:
        return False
