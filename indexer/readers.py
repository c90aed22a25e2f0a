"""Any corpus as a stream of documents: files, folders, Hugging Face datasets, iterables of rows.

Comes in: a corpus. Goes out: ``Document`` and ``SkippedRow``, lazily and in a fixed order. Nothing is dropped without a
``SkippedRow`` but blank lines and hidden files. Does not know: tokens, models, storage.
"""

from __future__ import annotations

import codecs
import gzip
import io
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias, cast

from tdasearch.errors import CorpusError
from tdasearch.indexer.readers_json import is_json_list, json_lines, json_list
from tdasearch.indexer.readers_rows import Fields, Rows, UnusableRow, content_hash, document_from_row
from tdasearch.indexer.readers_tables import csv_rows, parquet_rows
from tdasearch.records import Document, SkippedRow

__all__ = ["Corpus", "Fields", "content_hash", "read_corpus"]

Corpus: TypeAlias = str | os.PathLike[str] | Iterable[Any]
"""A path, or rows: see ``read_corpus``."""

_Items = Iterator[Document | SkippedRow]


def read_corpus(corpus: Corpus, *, fields: Fields) -> Iterator[Document | SkippedRow]:
    """Read a corpus.

    Args:
        corpus: One of

            * a file of rows: ``.jsonl``, ``.ndjson``, ``.json`` (a list, or a value a line), ``.csv``, ``.tsv`` (each also
              with ``.gz``) or ``.parquet``;
            * a folder, its files in the order of their paths: of such files, or, if there is none, of texts (``.txt``,
              ``.md``), each one document whose id and ``path`` field are its path in the folder;
            * a text file: one document;
            * a ``datasets.Dataset`` or ``IterableDataset``, or the folder of ``save_to_disk``;
            * an iterable of rows, such as a list of dicts or a generator.
        fields: Names of the fields that hold the content.

    Returns:
        Documents, and the rows that are none with the reason, in the corpus's order, read as they are asked for.

    Raises:
        CorpusError: At once if the corpus is missing or of no kind above; while reading if a file is damaged as a whole.
    """  # noqa: DOC502 (raised by the parts below)
    if isinstance(corpus, str | os.PathLike):
        path = Path(corpus)
        if path.is_dir():
            return _folder(path, fields)
        if not path.exists():
            raise CorpusError(f"expected a corpus at {path}, found nothing there: check the path")
        return _file(path, path.name, fields)
    if isinstance(corpus, Mapping | bytes) or not isinstance(corpus, Iterable):
        hint = f": choose one of its parts {', '.join(map(repr, corpus))}" if isinstance(corpus, Mapping) else ""
        raise CorpusError(f"expected a path, a dataset or an iterable of rows, found a {type(corpus).__name__}{hint}")
    if type(corpus).__module__.partition(".")[0] == "datasets":
        return _documents(enumerate(cast(Any, corpus).with_format(None), start=1), "dataset", fields)
    return _documents(enumerate(corpus, start=1), "corpus", fields)


def _documents(rows: Iterable[tuple[int, object]], name: str, fields: Fields) -> _Items:
    for place, row in rows:
        origin = f"{name}:{place}"
        if isinstance(row, UnusableRow):
            yield SkippedRow(origin, str(row))
        else:
            yield document_from_row(row, origin=origin, fields=fields)


def _json_rows(path: Path) -> Rows:
    with _open(path) as stream:
        yield from json_list(stream) if is_json_list(stream) else json_lines(stream)


def _json_line_rows(path: Path) -> Rows:
    with _open(path) as stream:
        yield from json_lines(stream)


def _csv_rows(path: Path, *, delimiter: str = ",") -> Rows:
    with _open(path) as stream, io.TextIOWrapper(stream, "utf-8-sig", errors="surrogateescape", newline="") as text:
        yield from csv_rows(text, delimiter=delimiter)


def _tsv_rows(path: Path) -> Rows:
    return _csv_rows(path, delimiter="\t")


_ROW_READERS: dict[str, Callable[[Path], Rows]] = {
    ".jsonl": _json_line_rows,
    ".ndjson": _json_line_rows,
    ".json": _json_rows,
    ".csv": _csv_rows,
    ".tsv": _tsv_rows,
    ".parquet": parquet_rows,
}
_TEXT_KINDS = (".txt", ".md")


def _kind(path: Path) -> str:
    """The ending that says how a file is read: its last, before ``.gz``."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes[-1:] == [".gz"] and suffixes[-2:-1] != [".parquet"]:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def _file(path: Path, name: str, fields: Fields) -> _Items:
    kind = _kind(path)
    if kind in _TEXT_KINDS:
        return _text_file(path, name)
    if kind not in _ROW_READERS:
        known = ", ".join((*_ROW_READERS, *_TEXT_KINDS))
        raise CorpusError(f"expected a file that ends in {known} (or .gz after it), found {path}: convert or rename it")
    return _read_whole(path, name, fields, _ROW_READERS[kind])


def _read_whole(path: Path, name: str, fields: Fields, rows: Callable[[Path], Rows]) -> _Items:
    """All rows of a file; what is wrong with the file as a whole is said with its name."""
    try:
        yield from _documents(rows(path), name, fields)
    except CorpusError as error:
        raise CorpusError(f"{path}: {error}") from error
    except (OSError, EOFError, zlib.error) as error:
        raise CorpusError(f"{path} cannot be read to its end ({error}): fetch or write it again") from error


def _open(path: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path, "rb")) if path.suffix.lower() == ".gz" else path.open("rb")


def _text_file(path: Path, name: str) -> _Items:
    try:
        with _open(path) as stream:
            text = stream.read().removeprefix(codecs.BOM_UTF8).decode("utf-8")
    except UnicodeDecodeError as error:
        yield SkippedRow(name, f"byte 0x{error.object[error.start]:02x} at {error.start} is no UTF-8")
    except (OSError, EOFError, zlib.error) as error:
        yield SkippedRow(name, f"cannot be read: {error}")
    else:
        yield document_from_row({"id": name, "text": text, "path": name}, origin=name, fields=Fields())


def _folder(folder: Path, fields: Fields) -> _Items:
    if (folder / "dataset_dict.json").exists():
        raise CorpusError(f"{folder} holds several datasets: give the folder of one of them")
    if (folder / "state.json").exists() and (folder / "dataset_info.json").exists():
        return _saved_dataset(folder, fields)
    files = list(_walk(folder))
    kinds = {name: _kind(path) for name, path in files}
    readable = _ROW_READERS.keys() if any(kind in _ROW_READERS for kind in kinds.values()) else set(_TEXT_KINDS)
    if not any(kind in readable for kind in kinds.values()):
        known = ", ".join((*_ROW_READERS, *_TEXT_KINDS))
        raise CorpusError(f"expected files that end in {known} in the folder {folder}, found none among {len(files)}")
    return _folder_items(files, kinds, set(readable), fields)


def _folder_items(files: list[tuple[str, Path]], kinds: Mapping[str, str], readable: set[str], fields: Fields) -> _Items:
    for name, path in files:
        if path.is_dir():
            yield SkippedRow(name, "a link to a folder is not followed")
        elif kinds[name] in readable:
            yield from _file(path, name, fields)
        else:
            known = ", ".join(sorted(readable))
            yield SkippedRow(name, f"not read: in this folder only files that end in {known} are")


def _walk(folder: Path) -> Iterator[tuple[str, Path]]:
    """Files and links to folders with their paths in the folder, in the order of those; hidden ones are left out."""
    found = []
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        links = [name for name in folders if (Path(parent) / name).is_symlink()]
        found += [Path(parent) / name for name in (*files, *links) if not name.startswith(".")]
    yield from sorted((path.relative_to(folder).as_posix(), path) for path in found)


def _saved_dataset(folder: Path, fields: Fields) -> _Items:
    try:
        from datasets import load_from_disk
    except ImportError as error:
        raise CorpusError(f"{folder} is a saved dataset: install the package datasets to read it") from error
    return _documents(enumerate(load_from_disk(str(folder)), start=1), folder.name, fields)
