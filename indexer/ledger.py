"""The ledger of a build: what was begun, what is committed, what is missing. A killed build goes on from here.

The unit of work is a shard. It is in the table whole or not at all, so what is missing is read off the table itself.
``manifest.json`` says what was begun, with a digest of the staged corpus: a build that goes on must have read the same documents.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from importlib.metadata import version
from os import PathLike
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from tdasearch.codes import code_bytes
from tdasearch.errors import StoreError
from tdasearch.indexer.job import Cut, Job
from tdasearch.indexer.readers import Corpus
from tdasearch.indexer.staging import Staged, stage
from tdasearch.modules import Coverage
from tdasearch.progress import Step, note, progress
from tdasearch.records import SkippedRow
from tdasearch.store.documents import DocumentTable, column_names, documents_path
from tdasearch.store.files import TEMPORARY_SUFFIX, replacing
from tdasearch.store.lock import HOLDER_NAME, LOCK_NAME, writer_lock
from tdasearch.store.manifest import CorpusRecord, Manifest, ModelRecord, Plan, manifest_path, read_manifest, write_manifest

STAGING = "staging"
SKIPPED = "skipped"
_DIFFERENCES_SHOWN = 6


def check_free(path: Path) -> None:
    """Check that a new index can be built in a folder, or that an unfinished build can go on there.

    Args:
        path: The folder; it need not be there.

    Raises:
        StoreError: There is an index already, or something else.
    """
    if manifest_path(path).exists():
        manifest = read_manifest(path)
        if manifest.state == "complete" or len(manifest.corpus) > 1:
            raise StoreError(f"{path}: an index is there already; add documents to it (tdasearch add), or choose another path")
    elif path.exists() and (not path.is_dir() or not _is_vacant(path)):
        raise StoreError(f"{path}: expected a new or empty folder for the index, found other files; choose another path")


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
    if new:
        check_free(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"{path}: the folder cannot be made: {error}; choose another path") from error
    with writer_lock(path):
        if new:
            check_free(path)  # again: another process may have been at it until now
        try:
            manifest = read_manifest(path) if not new or manifest_path(path).exists() else None
            if manifest is not None and not new and manifest.state != "complete" and len(manifest.corpus) == 1:
                raise StoreError(f"{path}: the build was stopped; run the same build again to finish it, then add")
            _remove_temporary(path)
            yield manifest
        finally:
            shutil.rmtree(path / STAGING, ignore_errors=True)  # whoever goes on stages again
            if not manifest_path(path).exists():  # nothing was begun: leave nothing behind
                _remove_if_unused(path)


def stage_corpus(job: Job, cut: Cut, *, after: Manifest | None = None) -> Staged:
    """Read the corpus into the index's staging folder, with progress.

    Args:
        job: The run.
        cut: How documents are cut.
        after: The index that is added to; its documents are not staged again.

    Returns:
        The staged corpus.
    """
    first_shard = 0
    known: Iterator[tuple[str, str]] = iter(())
    if after is not None:
        last = after.corpus[-1]
        first_shard = last.first_shard if after.state == "building" else last.first_shard + last.num_shards
        known = DocumentTable.open(documents_path(job.path)).known_contents(before_shard=first_shard)
    with progress("read", total=None, unit="char", quiet=job.quiet) as step:
        staged = stage(
            job.corpus,
            fields=job.fields,
            tokenizer=job.language_model.tokenizer,
            window_tokens=cut.window_tokens,
            stride=cut.stride,
            max_windows=cut.max_windows,
            path=job.path / STAGING,
            shard_documents=cut.shard_documents,
            first_shard=first_shard,
            known=known,
            strict=job.strict,
            progress=step,
        )
    if staged.num_skipped:
        note(f"rows skipped: {staged.num_skipped} (will be listed in {job.path / SKIPPED})", quiet=job.quiet)
    if staged.num_truncated:
        note(f"documents cut at --max-windows: {staged.num_truncated}", quiet=job.quiet)
    return staged


def begin(job: Job, manifest: Manifest | None, staged: Staged, coverage: Coverage, plan: Plan, *, method: str) -> Manifest:
    """Write down what a new build is going to be, or check that it is the one that was begun.

    Args:
        job: The run.
        manifest: What was begun, or None.
        staged: What was read of the corpus.
        coverage: The covered modules.
        plan: The plan.
        method: The recipe.

    Returns:
        The manifest of the build.

    Raises:
        StoreError: Something else was begun here.
    """
    path, language_model = job.path, job.language_model
    wanted = Manifest(
        created_by=f"tdasearch {version('tdasearch')}",
        state="building",
        method=method,
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
        corpus=[_corpus_record(job.corpus, staged)],
        fields=column_names(staged.metadata_schema.names),
    )
    if manifest is None:
        write_manifest(path, wanted)
        return wanted
    differences = _differences(replace(manifest, encoder_fingerprint="", created_by=wanted.created_by), wanted)
    if differences:
        raise StoreError(
            f"{path}: an unfinished build is there, begun otherwise: {differences}; run it as it was begun to finish it, "
            "or remove the folder to start over"
        )
    return manifest


def begin_add(job: Job, manifest: Manifest, staged: Staged) -> Manifest:
    """Write down what is going to be added, or check that it is what was begun.

    Args:
        job: The run.
        manifest: The index's manifest.
        staged: What was read of the corpus.

    Returns:
        The manifest of the addition.

    Raises:
        StoreError: Another addition was begun and not finished.
        CorpusError: A metadata value is of another kind than the index's column.
    """  # noqa: DOC502 (Staged.shard raises the one)
    path, record = job.path, _corpus_record(job.corpus, staged)
    if manifest.state == "building":
        differences = _differences(manifest.corpus[-1], record)
        if differences:
            raise StoreError(
                f"{path}: an unfinished addition is there, of another corpus ({manifest.corpus[-1].source}): {differences}; add "
                "that one again to finish it, then this one"
            )
        return manifest
    _check_metadata(path, manifest, staged)
    fields = column_names(staged.metadata_schema.names, existing=manifest.fields)
    begun = replace(manifest, state="building", corpus=[*manifest.corpus, record], fields=fields)
    write_manifest(path, begun)
    return begun


def open_table(path: Path, manifest: Manifest, staged: Staged) -> DocumentTable:
    """Open the table, made and widened as this build needs it.

    Args:
        path: The index's folder.
        manifest: What was begun.
        staged: The staged corpus, for the types of its metadata.

    Returns:
        The table.
    """
    columns = pa.schema([pa.field(manifest.fields[field.name], field.type) for field in staged.metadata_schema])
    folder = documents_path(path)
    if not manifest.encoder_fingerprint:  # nothing can have been written yet: a table here is what a killed process left
        shutil.rmtree(folder, ignore_errors=True)
        plan = manifest.plan
        return DocumentTable.create(folder, code_bytes=code_bytes(plan.code, plan.sketch_dim), metadata_columns=columns)
    table = DocumentTable.open(folder)
    present = set(table.metadata_columns.names)
    table.add_metadata_columns(pa.schema([field for field in columns if field.name not in present]))
    return table


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
        with replacing(reports / f"corpus-{len(manifest.corpus) - 1:08d}.jsonl") as temporary:
            shutil.copyfile(staged.skipped_path, temporary)
    shards = range(staged.first_shard, staged.first_shard + staged.num_shards)
    left_out = [reports / f"shard-{number:08d}.jsonl" for number in shards] if reports.exists() else []
    num_left_out = sum(len(report.read_text(encoding="utf-8").splitlines()) for report in left_out if report.exists())
    record = replace(manifest.corpus[-1], num_skipped=staged.num_skipped + num_left_out)
    shutil.rmtree(path / STAGING, ignore_errors=True)  # before the last word: a complete index has none
    write_manifest(path, replace(manifest, state="complete", corpus=[*manifest.corpus[:-1], record]))


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


def _check_metadata(path: Path, manifest: Manifest, staged: Staged) -> None:
    """Find values that do not fit the index's columns before the addition is begun: one that was begun must be able to end."""
    present = {field.name: field for field in DocumentTable.open(documents_path(path)).metadata_columns}
    columns = {field: present[column] for field, column in manifest.fields.items() if field in staged.metadata_schema.names}
    for number in range(staged.first_shard, staged.first_shard + staged.num_shards):
        staged.shard(number, metadata_columns=columns)


def _differences(begun: Manifest | CorpusRecord, wanted: Manifest | CorpusRecord) -> str:
    """Say what differs, but for where model and corpus lie; empty if nothing does."""
    was, now = dict(_leaves(asdict(begun))), dict(_leaves(asdict(wanted)))
    names = [name for name in {**now, **was} if not name.endswith("source") and was.get(name) != now.get(name)]
    shown = [f"{name} was {_short(was.get(name))}, now {_short(now.get(name))}" for name in names[:_DIFFERENCES_SHOWN]]
    return "; ".join([*shown, "..."] if len(names) > len(shown) else shown)


def _leaves(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, item in value.items():
        if isinstance(item, dict):
            yield from _leaves(item, f"{prefix}{key}.")
        elif isinstance(item, list) and item and isinstance(item[0], dict):
            for part in item:  # a build has one corpus
                yield from _leaves(part, f"{prefix}{key}.")
        else:
            yield prefix + key, item


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 80 else text[:80] + "..."


def _write_lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    path.parent.mkdir(exist_ok=True)
    with replacing(path) as temporary:
        temporary.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _is_vacant(path: Path) -> bool:
    """Whether a folder holds nothing but hidden files and, with the lock of the build that made it, a staging folder."""
    visible = {item.name for item in path.iterdir() if not item.name.startswith(".")}
    return not visible or (visible == {STAGING} and (path / LOCK_NAME).exists())


def _remove_temporary(path: Path) -> None:
    """Remove the half-written files that killed processes left; nobody else writes here now."""
    for folder in (path, path / SKIPPED):
        for leftover in folder.glob(f".*{TEMPORARY_SUFFIX}"):
            leftover.unlink(missing_ok=True)


def _remove_if_unused(path: Path) -> None:
    """Remove the folder that a build made and then had nothing to put into; not one that holds anything else."""
    for name in (HOLDER_NAME, LOCK_NAME):
        (path / name).unlink(missing_ok=True)
    with suppress(OSError):
        path.rmdir()
