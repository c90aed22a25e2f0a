"""The build, as the paper reads: read the corpus, plan, fit the curvature, encode, write. ``add`` does not fit."""

from __future__ import annotations

from functools import partial

from tdasearch.capture import Capture
from tdasearch.indexer import ledger
from tdasearch.indexer.encode import encode_shard
from tdasearch.indexer.fit import fit_or_load
from tdasearch.indexer.job import Job
from tdasearch.indexer.memory import within_memory
from tdasearch.indexer.overlap import Behind, ahead
from tdasearch.indexer.plan import BuildOptions, choose_plan, cut_of, cut_of_plan
from tdasearch.indexer.staging import Staged
from tdasearch.modules import choose_modules
from tdasearch.progress import progress
from tdasearch.store.manifest import Manifest


def build(job: Job, options: BuildOptions) -> None:
    """Build an index, or go on with a build that was stopped; ``tdasearch.build_index`` says what may be chosen."""
    with ledger.writing(job.path, new=True) as begun:
        coverage = choose_modules(job.language_model.model, patterns=options.modules, kinds=options.kinds, blocks=options.blocks)
        staged = ledger.stage_corpus(job, cut_of(options, max_tokens=job.language_model.max_tokens))
        plan = choose_plan(options, coverage, max_tokens=job.language_model.max_tokens, num_documents=staged.num_documents)
        write(job, ledger.begin(job, begun, staged, coverage, plan, method=options.method), staged)


def add(job: Job) -> None:
    """Add documents to an index, or go on with an addition that was stopped."""
    with ledger.writing(job.path, new=False) as found:
        assert found is not None
        staged = ledger.stage_corpus(job, cut_of_plan(found.plan), after=found)
        write(job, ledger.begin_add(job, found, staged), staged)


def write(job: Job, manifest: Manifest, staged: Staged) -> None:
    """Encode what is staged and not yet in the table, a commit a shard; shards are read ahead and written behind."""
    job = within_memory(job, manifest.plan)
    table = ledger.open_table(job.path, manifest, staged)
    manifest, encoder = fit_or_load(job, manifest, staged)
    with (
        progress("encode", total=staged.num_tokens, unit="tok", quiet=job.quiet) as step,
        Capture(job.language_model.model, manifest.plan.modules) as capture,
        Behind() as writer,
    ):
        for windows in ahead(ledger.missing_shards(manifest, table, staged, step)):
            rows, skipped = encode_shard(windows, job, capture, encoder, code=manifest.plan.code, step=step)
            shard = windows["shard"][0].as_py()
            writer.submit(partial(ledger.write_shard, job.path, table, rows, skipped, shard=shard))
    ledger.complete(job.path, manifest, staged, table)
