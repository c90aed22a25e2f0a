"""The build, as the paper reads: read the corpus, plan, fit the curvature, encode, write. ``add`` is the same with fitted factors."""

from __future__ import annotations

from pathlib import Path

from tdasearch.capture import Capture
from tdasearch.codes import code_bytes
from tdasearch.encoder import Encoder
from tdasearch.indexer import ledger
from tdasearch.indexer.encode import encode_shard
from tdasearch.indexer.fit import fit_or_load
from tdasearch.indexer.plan import BuildOptions, choose_plan, window_size
from tdasearch.indexer.readers import Corpus, Fields
from tdasearch.indexer.staging import Staged
from tdasearch.language_model import LanguageModel
from tdasearch.modules import choose_modules
from tdasearch.progress import progress
from tdasearch.store.documents import DocumentTable, documents_path
from tdasearch.store.manifest import Manifest


def build(
    corpus: Corpus, language_model: LanguageModel, *, path: Path, options: BuildOptions, fields: Fields, strict: bool, quiet: bool
) -> None:
    """Build an index, or go on with a build that was stopped; ``tdasearch.build_index`` says what the arguments mean."""
    coverage = choose_modules(language_model.model, patterns=options.modules, blocks=options.blocks)
    window = window_size(options, max_tokens=language_model.max_tokens)
    with ledger.writing(path, new=True) as begun:
        staged = ledger.stage_corpus(
            corpus, language_model.tokenizer, path=path, window=window, max_windows=options.max_windows,
            shard_documents=options.shard_documents, first_shard=0, known=iter(()), fields=fields, strict=strict, quiet=quiet,
        )  # fmt: skip
        plan = choose_plan(options, coverage, max_tokens=language_model.max_tokens, num_documents=staged.num_documents)
        manifest = ledger.begin(
            path, begun, corpus=corpus, staged=staged, language_model=language_model, coverage=coverage, plan=plan, options=options
        )
        table = ledger.open_table(path, manifest, staged, code_bytes=code_bytes(plan.code, plan.sketch_dim))
        manifest, encoder = fit_or_load(path, manifest, staged, language_model, batch_tokens=options.batch_tokens, quiet=quiet)
        _encode(path, manifest, staged, table, language_model, encoder, batch_tokens=options.batch_tokens, quiet=quiet)


def add(
    corpus: Corpus, language_model: LanguageModel, *, path: Path, fields: Fields, batch_tokens: int, strict: bool, quiet: bool
) -> None:
    """Add documents to an index, or go on with an addition that was stopped; ``Index.add`` says what the arguments mean."""
    with ledger.writing(path, new=False) as found:
        assert found is not None
        plan, first_shard = found.plan, ledger.next_shard(found)
        known = DocumentTable.open(documents_path(path)).known_contents(before_shard=first_shard)
        staged = ledger.stage_corpus(
            corpus, language_model.tokenizer, path=path, window=(plan.window_tokens, plan.stride), max_windows=plan.max_windows,
            shard_documents=plan.shard_documents, first_shard=first_shard, known=known, fields=fields, strict=strict, quiet=quiet,
        )  # fmt: skip
        manifest = ledger.begin_add(path, found, corpus=corpus, staged=staged)
        table = ledger.open_table(path, manifest, staged, code_bytes=code_bytes(plan.code, plan.sketch_dim))
        manifest, encoder = fit_or_load(path, manifest, staged, language_model, batch_tokens=batch_tokens, quiet=quiet)
        _encode(path, manifest, staged, table, language_model, encoder, batch_tokens=batch_tokens, quiet=quiet)


def _encode(
    path: Path,
    manifest: Manifest,
    staged: Staged,
    table: DocumentTable,
    language_model: LanguageModel,
    encoder: Encoder,
    *,
    batch_tokens: int,
    quiet: bool,
) -> None:
    with progress("encode", total=staged.num_tokens, unit="tok", quiet=quiet) as step, Capture(language_model.model, manifest.plan.modules) as capture:
        for windows in ledger.missing_shards(manifest, table, staged, step):
            rows, skipped = encode_shard(
                windows, language_model=language_model, capture=capture, encoder=encoder, code=manifest.plan.code, batch_tokens=batch_tokens, step=step
            )  # fmt: skip
            ledger.write_shard(path, table, rows, skipped, shard=windows["shard"][0].as_py())
    ledger.complete(path, manifest, staged, table)
