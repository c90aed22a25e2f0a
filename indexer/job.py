"""What one run of a build or an addition is given, passed on as one thing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tdasearch.errors import UsageError
from tdasearch.indexer.readers import Corpus, Fields
from tdasearch.language_model import LanguageModel


@dataclass(frozen=True, slots=True)
class Job:
    """A run. None of this changes what the index is to be: that is in the plan.

    Attributes:
        corpus: The documents.
        language_model: The model.
        path: The index's folder.
        fields: Names of the corpus's fields.
        batch_tokens: Tokens run at once.
        strict: Stop at the first bad row instead of reporting it.
        quiet: Show no progress.
        memory: Bytes that the process may use: fewer tokens are run at once if need be; None: no bound but ``batch_tokens``.
    """

    corpus: Corpus
    language_model: LanguageModel
    path: Path
    fields: Fields
    batch_tokens: int
    strict: bool
    quiet: bool
    memory: int | None = None

    def __post_init__(self) -> None:
        if self.batch_tokens < 1:
            raise UsageError(f"batch_tokens: expected at least 1, found {self.batch_tokens!r}")


@dataclass(frozen=True, slots=True)
class Cut:
    """How documents are cut into windows, and windows gathered into shards.

    Attributes:
        window_tokens: Most tokens in a window.
        stride: Tokens from one window's start to the next.
        max_windows: Most windows of a document; None for all.
        shard_documents: Documents in a shard.
    """

    window_tokens: int
    stride: int
    max_windows: int | None
    shard_documents: int
