"""The ledger of a build: what was begun, what is committed, what is missing. A killed build goes on from here.

The unit of work is a shard. It is in the table whole or not at all, so what is missing is read off the table itself. ``manifest.json`` says
what was begun, with a digest of the staged corpus: a build that goes on must have read the same documents.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from importlib.metadata import version
from os import PathLike
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from tdasearch.errors import StoreError
from tdasearch.indexer.plan import BuildOptions
from tdasearch.indexer.readers import Corpus, Fields
from tdasearch.indexer.staging import Staged, stage
from tdasearch.language_model import LanguageModel
from tdasearch.modules import Coverage
from tdasearch.progress import Step, note, progress
from tdasearch.records import SkippedRow
from tdasearch.store.documents import DocumentTable, column_names, documents_path
from tdasearch.store.files import replacing
from tdasearch.store.lock import writer_lock
from tdasearch.store.manifest import CorpusRecord, Manifest, ModelRecord, Plan, manifest_path, read_manifest, write_manifest

STAGING = "staging"
SKIPPED = "skipped"


@contextmanager
def writing(path: Path, *, new: bool) -> Iterator[Manifest | None]:
    """Hold an index for writing.

    Args:
        path: The index's folder; made if it is missing and a new index is to be built.
        new: Whether a new index is to be built, or an old one is to be added to.

    Yields:
        The manifest found there; None if there is none yet.

    Raises:
        StoreError: There is an index already, or none, or another writer.
    """
    found = manifest_path(path).exists()
    if new and not found:
        if path.exists() and (not path.is_dir() or any(item.name not in (STAGING,) and item.name[0] != "." for item in path.iterdir())):
            raise StoreError(f"{path}: expected a new or empty folder for the index, found other files; choose another path")
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"{path}: the folder cannot be made: {error}; choose another path") from error
    with writer_lock(path):
        try:
            manifest = read_manifest(path) if not new or manifest_path(path).exists() else None
            if manifest is not None and new and (manifest.state == "complete" or len(manifest.corpus) > 1):
                raise StoreError(f"{path}: an index is there already; add documents to it (tdasearch add), or choose another path")
            if manifest is not None and not new and manifest.state != "complete" and len(manifest.corpus) == 1:
                raise StoreError(f"{path}: the build was stopped; run the same build again to finish it, then add")
            yield manifest
        finally:
            if not manifest_path(path).exists():  # nothing was begun: leave nothing behind
                shutil.rmtree(path / STAGING, ignore_errors=True)
    if not manifest_path(path).exists():
        _remove_if_unused(path)


def stage_corpus(
    corpus: Corpus,
    tokenizer: Any,
    *,
    path: Path,
    window: tuple[int, int],
    max_windows: int | None,
    shard_documents: int,
    first_shard: int,
    known: Iterator[tuple[str, str]],
    fields: Fields,
    strict: bool,
    quiet: bool,
) -> Staged:
    """Read the corpus into the index's staging folder, with progress.

    Args:
        corpus: The documents.
        tokenizer: The model's tokenizer.
        path: The index's folder.
        window: Window and stride, in tokens.
        max_windows: At most so many windows a document.
        shard_documents: Documents in a shard.
        first_shard: Number of the first shard.
        known: Id and content hash of each document in the index.
        fields: Names of the corpus's fields.
        strict: Stop at the first bad row.
        quiet: Show no progress.

    Returns:
        The staged corpus.
    """
    with progress("read", total=None, unit="char", quiet=quiet) as step:
        staged = stage(
            corpus,
            fields=fields,
            tokenizer=tokenizer,
            window_tokens=window[0],
            stride=window[1],
            max_windows=max_windows,
            path=path / STAGING,
            shard_documents=shard_documents,
            first_shard=first_shard,
            known=known,
            strict=strict,
            progress=step,
        )
    if staged.num_skipped or staged.num_truncated:
        note(f"{staged.num_skipped} rows skipped (see {path / SKIPPED}), {staged.num_truncated} documents cut at --max-windows.", quiet=quiet)
    return staged


def begin(
    path: Path, manifest: Manifest | None, *, corpus: Corpus, staged: Staged, language_model: LanguageModel, coverage: Coverage, plan: Plan, options: BuildOptions
) -> Manifest:
    """Write down what a new build is going to be, or check that it is the one that was begun.

    Args:
        path: The index's folder.
        manifest: What was begun, or None.
        corpus: The corpus, for its name.
        staged: What was read of it.
        language_model: The model.
        coverage: The covered modules.
        plan: The plan.
        options: The user's choices.

    Returns:
        The manifest of the build.

    Raises:
        StoreError: Something else was begun here.
    """
    wanted = Manifest(
        created_by=f"tdasearch {version('tdasearch')}",
        state="building",
        method=options.method,
        model=ModelRecord(
            source=language_model.source,
            weights_fingerprint=language_model.weights_fingerprint,
            tokenizer_fingerprint=language_model.tokenizer_fingerprint,
            num_parameters=coverage.num_parameters,
            max_tokens=language_model.max_tokens,
            dtype=language_model.dtype,
        ),
        plan=plan,
        encoder_fingerprint="",
        corpus=[_corpus_record(corpus, staged)],
        fields=column_names(staged.metadata_schema.names),
    )
    if manifest is None:
        write_manifest(path, wanted)
        return wanted
    _check_same(path, asdict(replace(manifest, encoder_fingerprint="", created_by=wanted.created_by)), asdict(wanted))
    return manifest


def begin_add(path: Path, manifest: Manifest, *, corpus: Corpus, staged: Staged) -> Manifest:
    """Write down what is going to be added, or check that it is what was begun.

    Args:
        path: The index's folder.
        manifest: The index's manifest.
        corpus: The corpus, for its name.
        staged: What was read of it.

    Returns:
        The manifest of the addition.

    Raises:
        StoreError: Another addition was begun and not finished.
    """
    record = _corpus_record(corpus, staged)
    if manifest.state == "building":
        _check_same(path, asdict(manifest.corpus[-1]), asdict(record))
        return manifest
    fields = column_names(staged.metadata_schema.names, existing=manifest.fields)
    begun = replace(manifest, state="building", corpus=[*manifest.corpus, record], fields=fields)
    write_manifest(path, begun)
    return begun


def open_table(path: Path, manifest: Manifest, staged: Staged, *, code_bytes: int) -> DocumentTable:
    """Open the table, made and widened as this build needs it.

    Args:
        path: The index's folder.
        manifest: What was begun.
        staged: The staged corpus, for the types of its metadata.
        code_bytes: Bytes of a code.

    Returns:
        The table.
    """
    columns = pa.schema([pa.field(manifest.fields[field.name], field.type) for field in staged.metadata_schema])
    folder = documents_path(path)
    if not manifest.encoder_fingerprint:  # nothing can have been written yet: a table here is what a killed process left
        shutil.rmtree(folder, ignore_errors=True)
        return DocumentTable.create(folder, code_bytes=code_bytes, metadata_columns=columns)
    table = DocumentTable.open(folder)
    present = set(table.metadata_columns.names)
    table.add_metadata_columns(pa.schema([field for field in columns if field.name not in present]))
    return table


def next_shard(manifest: Manifest) -> int:
    """Number of the first shard of the next addition, or of the one that was begun."""
    last = manifest.corpus[-1]
    return last.first_shard if manifest.state == "building" else last.first_shard + last.num_shards


def missing_shards(manifest: Manifest, table: DocumentTable, staged: Staged, step: Step) -> Iterator[pa.Table]:
    """Read the staged shards that are not in the table yet.

    Args:
        manifest: What was begun.
        table: The table.
        staged: The staged corpus.
        step: Progress, told the tokens of the shards that are there already.

    Yields:
        The windows of one shard, metadata columns included.
    """
    types = {field.name: field.type for field in table.metadata_columns}
    columns = {field: pa.field(manifest.fields[field], types[manifest.fields[field]]) for field in staged.metadata_schema.names}
    committed = table.committed_shards()
    for number in range(staged.first_shard, staged.first_shard + staged.num_shards):
        windows = staged.shard(number, metadata_columns=columns)
        if number in committed:
            step(pc.sum(windows["num_tokens"]).as_py())
        else:
            yield windows


def write_shard(path: Path, table: DocumentTable, rows: pa.Table, skipped: Sequence[SkippedRow], *, shard: int) -> None:
    """Report what was left out of a shard, then commit the rest.

    Args:
        path: The index's folder.
        table: The table.
        rows: The rows.
        skipped: Windows left out.
        shard: The shard's number.
    """
    if skipped:
        _write_lines(path / SKIPPED / f"shard-{shard:08d}.jsonl", [asdict(row) for row in skipped])
    if rows.num_rows:
        table.append_shard(rows)


def complete(path: Path, manifest: Manifest, staged: Staged, table: DocumentTable) -> None:
    """Close a build: reports in place, words indexed, manifest complete, staging gone.

    Args:
        path: The index's folder.
        manifest: What was begun.
        staged: The staged corpus.
        table: The table.
    """
    table.index_text()
    reports = path / SKIPPED
    if staged.num_skipped or staged.num_duplicates:
        reports.mkdir(exist_ok=True)
        with replacing(reports / f"corpus-{staged.first_shard:08d}.jsonl") as temporary:
            shutil.copyfile(staged.skipped_path, temporary)
    shards = range(staged.first_shard, staged.first_shard + staged.num_shards)
    left_out = [reports / f"shard-{number:08d}.jsonl" for number in shards] if reports.exists() else []
    num_left_out = sum(len(report.read_text(encoding="utf-8").splitlines()) for report in left_out if report.exists())
    record = replace(manifest.corpus[-1], num_skipped=staged.num_skipped + num_left_out)
    write_manifest(path, replace(manifest, state="complete", corpus=[*manifest.corpus[:-1], record]))
    shutil.rmtree(path / STAGING, ignore_errors=True)


def _corpus_record(corpus: Corpus, staged: Staged) -> CorpusRecord:
    return CorpusRecord(
        source=str(Path(corpus).resolve()) if isinstance(corpus, str | PathLike) else f"({type(corpus).__name__} in memory)",
        first_shard=staged.first_shard,
        num_shards=staged.num_shards,
        num_documents=staged.num_documents,
        num_windows=staged.num_windows,
        num_tokens=staged.num_tokens,
        num_characters=staged.num_characters,
        num_skipped=staged.num_skipped,
        num_duplicates=staged.num_duplicates,
        num_truncated=staged.num_truncated,
        digest=staged.digest,
    )


def _check_same(path: Path, begun: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    differences = [
        f"{name} was {_short(begun[name])}, now {_short(wanted[name])}" for name in wanted if name != "source" and begun[name] != wanted[name]
    ]
    if differences:
        raise StoreError(
            f"{path}: an unfinished build is there, begun otherwise: {'; '.join(differences)}; run it as it was begun to finish it, "
            "or remove the folder to start over"
        )


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 200 else text[:200] + "..."


def _write_lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    path.parent.mkdir(exist_ok=True)
    with replacing(path) as temporary:
        temporary.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _remove_if_unused(path: Path) -> None:
    """Remove the folder that a build made and then had nothing to put into."""
    if path.is_dir() and all(item.name.startswith(".") for item in path.iterdir()):
        shutil.rmtree(path, ignore_errors=True)
