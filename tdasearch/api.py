"""The front doors: ``build_index`` and ``open_index``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tdasearch.index import Index

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from tdasearch.indexer.readers import Corpus, Fields


def build_index(
    corpus: Corpus,
    *,
    model: str | Path | PreTrainedModel,
    path: str | Path,
    tokenizer: Any = None,
    fields: Fields | None = None,
    method: str = "ekfac",
    budget: str | int = "1KB",
    code: str = "1bit",
    modules: Sequence[str] = (),
    kinds: Sequence[str] = (),
    blocks: str | None = None,
    eigenbasis_share: float | None = None,
    window_tokens: int | None = None,
    stride: int | None = None,
    max_windows: int | None = None,
    fisher: str = "sampled",
    fit_documents: int | str | None = None,
    damping_scale: float = 0.1,
    seed: int = 0,
    shard_documents: int = 256,
    batch_tokens: int = 2048,
    memory: str | int | None = None,
    device: str = "auto",
    dtype: str = "float32",
    strict: bool = False,
    quiet: bool = False,
) -> Index:
    """Build an index over a corpus. A build that was stopped goes on when it is called again with the same arguments.

    Args:
        corpus: A JSONL, Parquet or CSV file, a folder of them or of text files, a ``datasets.Dataset``, an iterable of dicts.
        model: Hub id, local folder, or a loaded causal language model.
        path: Folder of the new index.
        tokenizer: Where it is not the model's own; needed with a loaded model.
        fields: Names of the corpus's fields.
        method: "ekfac" or "kfac".
        budget: Bytes a row, such as "1KB" (1,024).
        code: "1bit", "fp16" or "fp32".
        modules: Shell patterns of module names; by default every linear map, convolution and expert in the transformer blocks
            (of a model with peft adapters, those), not the embedding, not the head.
        kinds: Kinds of layers: "linear", "convolution", "experts", "adapter" (these by default), "norm", "embedding", "other".
        blocks: Range of blocks, such as "22:30" or "-8:".
        eigenbasis_share: Share of each eigenbasis that is kept, in (0, 1]; by default a quarter, or more where it fits.
        window_tokens: Longest run of tokens that is one row; by default 1,024, or the context where it is shorter.
        stride: Tokens from one window's start to the next's; by default seven eighths of the window.
        max_windows: At most so many windows a document; the documents that were cut are counted.
        fisher: Targets of the factors: "sampled" from the model (true Fisher) or the data's own ("empirical").
        fit_documents: How many documents the factors are fitted on, or "all"; by default a twentieth, within 1,000 to 20,000.
        damping_scale: A module's damping as a multiple of its mean eigenvalue.
        seed: Of the fit's sample, the sampled targets and the sketch.
        shard_documents: Documents written in one commit.
        batch_tokens: Tokens run at once, at most.
        memory: What the process may use, such as "8GB": fewer tokens are run at once if need be.
        device: "auto", "cpu", "cuda", ...
        dtype: Type of the weights when the model is loaded here.
        strict: Stop at the first bad row instead of reporting it.
        quiet: Show no progress.

    Returns:
        The index, opened.

    Raises:
        UsageError: An argument is out of range.
        CorpusError: The corpus is missing or empty, or holds a bad row and ``strict`` is on.
        ModelError: The model cannot be loaded.
        StoreError: The index exists already, or was begun with other arguments.
    """
    from tdasearch.indexer.build import build
    from tdasearch.indexer.job import Job
    from tdasearch.indexer.ledger import check_free
    from tdasearch.indexer.plan import BuildOptions, memory_bytes
    from tdasearch.indexer.readers import Fields, read_corpus
    from tdasearch.language_model import load_language_model

    options = BuildOptions(
        method=method,
        budget=budget,
        code=code,
        modules=tuple(modules),
        kinds=tuple(kinds),
        blocks=blocks,
        eigenbasis_share=eigenbasis_share,
        window_tokens=window_tokens,
        stride=stride,
        max_windows=max_windows,
        fisher=fisher,
        fit_documents=fit_documents,
        damping_scale=damping_scale,
        seed=seed,
        shard_documents=shard_documents,
    )
    fields = fields or Fields()
    check_free(Path(path))
    read_corpus(corpus, fields=fields)  # reads nothing yet, but says at once if there is nothing to read
    language_model = load_language_model(model, tokenizer=tokenizer, device=device, dtype=dtype)
    job = Job(
        corpus,
        language_model,
        Path(path),
        fields,
        batch_tokens=batch_tokens,
        strict=strict,
        quiet=quiet,
        memory=None if memory is None else memory_bytes(memory),
    )
    build(job, options)
    return Index(Path(path), language_model=language_model)


def open_index(
    path: str | Path, *, model: str | Path | PreTrainedModel | None = None, tokenizer: Any = None, device: str = "auto"
) -> Index:
    """Open an index. The model is loaded, and checked, at the first search.

    Args:
        path: Folder of the index.
        model: The model it was built with, where it moved or was given in memory.
        tokenizer: Its tokenizer; needed with a loaded model.
        device: Where to load the model.

    Returns:
        The index.

    Raises:
        StoreError: There is no index, or it is damaged.
    """
    index = Index(Path(path), device=device)
    if model is None:
        return index
    from tdasearch.language_model import load_language_model

    return Index(
        Path(path),
        language_model=load_language_model(model, tokenizer=tokenizer, device=device, dtype=index.manifest.model.dtype),
    )
