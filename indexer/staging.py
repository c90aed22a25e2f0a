"""From a corpus to staged windows: read, tokenised, cut, checked for repeated ids and surveyed, once, before any gradient.

Comes in: a corpus and a tokenizer. Goes out: a folder with ``windows.parquet`` (a row per window, a row group per shard) and
``skipped.jsonl`` (what was not staged and why), and ``Staged``, which reads them. The same input gives the same rows, so a build
that was killed stages again, compares digests and goes on. Memory holds one shard. Does not know: models, vectors, the index.
"""

from __future__ import annotations

import heapq
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import xxhash

from tdasearch.errors import CorpusError, UsageError
from tdasearch.indexer.readers import Corpus, Fields, content_hash, read_corpus
from tdasearch.indexer.staging_ids import Claim, ClaimedIds
from tdasearch.indexer.staging_metadata import MetadataSurvey, metadata_column
from tdasearch.indexer.staging_writer import WINDOW_SCHEMA, StagingWriter
from tdasearch.records import Document, SkippedRow, Window
from tdasearch.store.columns import column_names
from tdasearch.tokens import Tokenised, UnusableContent, check_windows, tokenise_many, windows

_REASONS_SHOWN = 3
_BATCH_DOCUMENTS = 64  # tokenised in one call
_BATCH_CHARACTERS = 1_000_000  # read ahead at most, about


@dataclass(frozen=True, slots=True)
class Staged:
    """A staged corpus.

    Attributes:
        windows_path: Parquet, a row per window in ``WINDOW_SCHEMA``, a row group per shard.
        skipped_path: JSON lines of ``origin`` and ``reason``: rows that were not staged, duplicates too.
        first_shard: Number of the first shard.
        num_shards: Shards; their numbers go on from ``first_shard``.
        num_documents: Documents staged.
        num_windows: Their windows.
        num_tokens: Tokens in the windows.
        num_characters: Characters of the documents' texts.
        num_skipped: Rows that are no usable document, or whose id another document has.
        num_duplicates: Documents left out because their like was there, in the corpus or in the index: the same id and content.
        num_truncated: Documents of which ``max_windows`` left targets out.
        metadata_schema: SQL column of each metadata field, by the field's name, in the order first seen.
        digest: XXH3 of 128 bits over all rows in their order, in hexadecimal.
    """

    windows_path: Path
    skipped_path: Path
    first_shard: int
    num_shards: int
    num_documents: int
    num_windows: int
    num_tokens: int
    num_characters: int
    num_skipped: int
    num_duplicates: int
    num_truncated: int
    metadata_schema: pa.Schema
    digest: str

    def shard(self, number: int, *, metadata_columns: Mapping[str, pa.Field] | None = None) -> pa.Table:
        """The windows of one shard.

        Args:
            number: ``first_shard`` to ``first_shard + num_shards - 1``.
            metadata_columns: Metadata fields with the name and type of their columns. By default those of ``metadata_schema``,
                with the names that ``column_names`` gives them.

        Returns:
            The columns of ``WINDOW_SCHEMA``, then one for each metadata field, null where a document has none.

        Raises:
            UsageError: If there is no such shard.
            CorpusError: If a value is of another kind than its column.
        """  # noqa: DOC502 (CorpusError is raised by metadata_column)
        if not 0 <= number - self.first_shard < self.num_shards:
            last = self.first_shard + self.num_shards - 1
            raise UsageError(f"expected a shard of {self.first_shard} to {last}, found {number}")
        columns = metadata_columns
        if columns is None:
            names = column_names(self.metadata_schema.names)
            columns = {field.name: field.with_name(names[field.name]) for field in self.metadata_schema}
        with pq.ParquetFile(self.windows_path) as file:
            table = file.read_row_group(number - self.first_shard)
        rows = [json.loads(text) for text in table["metadata"].to_pylist()]
        for field, column in columns.items():
            table = table.append_column(column, metadata_column((row.get(field) for row in rows), column))
        return table

    def sample(self, num_documents: int, *, seed: int) -> pa.Table:
        """The windows of a random sample of documents, which depends on the documents and not on their order.

        Args:
            num_documents: Documents in the sample (all, if there are fewer). Memory holds the sample.
            seed: Another seed gives another sample. 0 or more.

        Returns:
            The columns of ``WINDOW_SCHEMA``, of the documents with the smallest XXH64 of their id under the seed, in the order of
            those hashes.

        Raises:
            UsageError: If ``num_documents`` is below 1 or ``seed`` is not in 0 to 2^64 - 1.
        """
        if num_documents < 1 or not 0 <= seed < 2**64:
            raise UsageError(f"expected num_documents >= 1 and a seed in 0..2^64-1, found {num_documents} and {seed}")
        with pq.ParquetFile(self.windows_path) as file:
            chosen = heapq.nsmallest(num_documents, _seeded_ids(file, seed))
            ids = pa.array([document_id for _, document_id in chosen], pa.string())
            parts = [WINDOW_SCHEMA.empty_table()]
            for group in range(file.num_row_groups):
                group_ids = file.read_row_group(group, columns=["document_id"])["document_id"]
                is_chosen = pc.is_in(group_ids, value_set=ids)
                if pc.any(is_chosen).as_py():
                    parts.append(file.read_row_group(group).filter(is_chosen))
        table = pa.concat_tables(parts)
        rank = pc.index_in(table["document_id"], value_set=ids).to_numpy()
        return table.take(pa.array(np.lexsort((table["window"].to_numpy(), rank))))


def stage(
    corpus: Corpus,
    *,
    fields: Fields,
    tokenizer: Any,
    window_tokens: int,
    stride: int,
    max_windows: int | None,
    path: Path,
    shard_documents: int,
    first_shard: int = 0,
    known: Iterable[tuple[str, str]] = (),
    strict: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Staged:
    """Read a corpus once and write its windows, shard by shard.

    Of documents with one id the first is kept, and one that is in the index before all. Another of the same content is a
    duplicate (also if its metadata differs); one of other content is a clash and skipped. Both are listed.

    Args:
        corpus: As for ``read_corpus``.
        fields: Names of the fields that hold the content.
        tokenizer: A fast transformers tokenizer.
        window_tokens: As for ``tokens.windows``.
        stride: As for ``tokens.windows``.
        max_windows: As for ``tokens.windows``.
        path: Folder to write, made if missing; an earlier staging in it is replaced.
        shard_documents: Documents in a shard; the last may have fewer.
        first_shard: Number of the first shard.
        known: Id and content hash of the documents that are in the index.
        strict: Stop at the first row that is skipped. Duplicates do not count.
        progress: Called with the number of characters just staged.

    Returns:
        What was staged. There may be no document if all are in the index already.

    Raises:
        CorpusError: If the corpus cannot be read, has no usable document, or a row is skipped while ``strict``.
        UsageError: If a setting is out of its range.
        ModelError: If the tokenizer is not fast or lacks a chat template that the corpus needs.
        StoreError: If the folder cannot be written.
    """  # noqa: DOC502 (all but UsageError are raised by the parts below)
    check_windows(window_tokens=window_tokens, stride=stride, max_windows=max_windows)
    if shard_documents < 1 or first_shard < 0:
        raise UsageError(f"expected shard_documents >= 1 and first_shard >= 0, found {shard_documents} and {first_shard}")
    items = read_corpus(corpus, fields=fields)
    tally = _Tally()
    with (
        StagingWriter(path, shard_documents=shard_documents, first_shard=first_shard) as writer,
        ClaimedIds(path / "ids.sqlite", known=known) as ids,
    ):
        for item in _tokenised(items, tokenizer):
            if isinstance(item, SkippedRow):
                tally.skip(item, writer, strict=strict)
                continue
            document, tokens = item
            claim = Claim(content_hash(document.content), document.origin)
            owner = ids.claim(document.document_id, claim)
            if owner is not None:
                tally.repeat(document, claim, owner, writer, strict=strict)
                continue
            cut = windows(tokens, window_tokens=window_tokens, stride=stride, max_windows=max_windows)
            writer.add(document, tokens.text, cut, content_hash=claim.content)
            tally.add(document, tokens, cut)
            if progress is not None:
                progress(len(tokens.text))
        tally.check_some(writer.num_documents)
        digest = writer.commit()
    return Staged(
        windows_path=writer.windows_path,
        skipped_path=writer.skipped_path,
        first_shard=first_shard,
        num_shards=writer.num_shards,
        num_documents=writer.num_documents,
        num_windows=writer.num_windows,
        num_tokens=writer.num_tokens,
        num_characters=tally.num_characters,
        num_skipped=tally.num_skipped,
        num_duplicates=tally.num_duplicates,
        num_truncated=tally.num_truncated,
        metadata_schema=tally.metadata.schema(),
        digest=digest,
    )


class _Tally:
    """What was seen: counts, kinds of metadata, and the first reasons why rows were skipped."""

    def __init__(self) -> None:
        self.num_characters = self.num_skipped = self.num_duplicates = self.num_truncated = 0
        self.metadata = MetadataSurvey()
        self._first_skipped: list[SkippedRow] = []

    def add(self, document: Document, tokens: Tokenised, cut: Sequence[Window]) -> None:
        self.metadata.see(document.metadata)
        self.num_characters += len(tokens.text)
        self.num_truncated += int(sum(sum(window.is_target) for window in cut) < tokens.is_target.sum())

    def skip(self, row: SkippedRow, writer: StagingWriter, *, strict: bool) -> None:
        if strict:
            raise CorpusError(f"{row.origin}: {row.reason} (strict: mend the row, or build without strict to skip it)")
        writer.skip(row)
        self.num_skipped += 1
        if len(self._first_skipped) < _REASONS_SHOWN:
            self._first_skipped.append(row)

    def repeat(self, document: Document, claim: Claim, owner: Claim, writer: StagingWriter, *, strict: bool) -> None:
        name = f"the id {document.document_id!r}"
        if claim.content != owner.content:
            row = SkippedRow(claim.origin, f"{name} is that of {owner.origin} already, whose content differs: rename one")
            self.skip(row, writer, strict=strict)
            return
        writer.skip(
            SkippedRow(claim.origin, f"duplicate: {name} and its content are in {owner.origin}, which is kept with its metadata")
        )
        self.num_duplicates += 1

    def check_some(self, num_documents: int) -> None:
        if num_documents or self.num_duplicates:
            return
        first = "".join(f"; {row.origin}: {row.reason}" for row in self._first_skipped)
        more = "; ..." if self.num_skipped > len(self._first_skipped) else ""
        advice = "mend the rows, or name their fields" if first else "check that this is the right one"
        raise CorpusError(
            f"the corpus: expected at least one usable document, found none; rows skipped: {self.num_skipped}{first}{more}; "
            f"{advice}"
        )


def _tokenised(items: Iterator[Document | SkippedRow], tokenizer: Any) -> Iterator[SkippedRow | tuple[Document, Tokenised]]:
    """Each item in its order, documents with their tokens; a document without a target token becomes a skipped row."""
    while batch := list(_batch(items)):
        documents = [item for item in batch if isinstance(item, Document)]
        tokenised = iter(tokenise_many(tokenizer, [document.content for document in documents]))
        for item in batch:
            if isinstance(item, SkippedRow):
                yield item
                continue
            tokens = next(tokenised)
            if isinstance(tokens, UnusableContent):
                yield SkippedRow(item.origin, str(tokens))
            else:
                yield item, tokens


def _batch(items: Iterator[Document | SkippedRow]) -> Iterator[Document | SkippedRow]:
    num_characters = 0
    for item in itertools.islice(items, _BATCH_DOCUMENTS):
        yield item
        if isinstance(item, Document):
            content = item.content
            num_characters += len(content.prompt) + len(content.completion) + sum(len(str(part)) for part in content.messages)
        if num_characters >= _BATCH_CHARACTERS:
            return


def _seeded_ids(file: pq.ParquetFile, seed: int) -> Iterator[tuple[int, str]]:
    for group in range(file.num_row_groups):
        ids = file.read_row_group(group, columns=["document_id"])["document_id"].to_pylist()
        for document_id in dict.fromkeys(ids):
            yield xxhash.xxh64_intdigest(document_id.encode("utf-8"), seed=seed), document_id
