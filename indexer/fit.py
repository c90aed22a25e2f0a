"""Fitting: two passes over a sample of the corpus give every module's eigenbases and eigenvalues.

Pass one sums the covariances of activations and output gradients; pass two measures the Fisher's eigenvalues in their eigenbasis.
Both see the same targets: drawn from the model by default (the true Fisher), or the data's own (the empirical one).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc
import torch

from tdasearch.capture import Capture
from tdasearch.curvature import ModuleFactors
from tdasearch.encoder import Encoder
from tdasearch.fitting import Run, fit_runs
from tdasearch.indexer.job import Job
from tdasearch.indexer.staging import Staged
from tdasearch.language_model import Batch, LanguageModel, token_batches, uniforms_for
from tdasearch.progress import Step, progress
from tdasearch.store.factors import load_factors, save_factors
from tdasearch.store.manifest import Manifest, write_manifest


def fit_or_load(job: Job, manifest: Manifest, staged: Staged) -> tuple[Manifest, Encoder]:
    """Fit the encoder and write it down, or load the one that was fitted before.

    Args:
        job: The run.
        manifest: What was begun.
        staged: The staged corpus, for the sample.

    Returns:
        The manifest, which names the encoder now, and the encoder as it is on disk (so that a build that goes on uses the same).
    """
    plan, language_model = manifest.plan, job.language_model
    if not manifest.encoder_fingerprint:
        windows = staged.sample(plan.fit_documents, seed=plan.seed)
        num_passes = 2 if manifest.method == "ekfac" else 1
        with progress("fit", total=num_passes * pc.sum(windows["num_tokens"]).as_py(), unit="tok", quiet=job.quiet) as step:
            factors = fit_factors(
                language_model,
                windows,
                plan.modules,
                method=manifest.method,
                fisher=plan.fisher,
                damping_scale=plan.damping_scale,
                seed=plan.seed,
                batch_tokens=job.batch_tokens,
                step=step,
                quiet=job.quiet,
            )
        manifest = replace(manifest, encoder_fingerprint=save_factors(job.path, factors))
        write_manifest(job.path, manifest)
    factors = load_factors(job.path, fingerprint=manifest.encoder_fingerprint, device=language_model.device)
    return manifest, Encoder(factors, eigenbasis_share=plan.eigenbasis_share, sketch_dim=plan.sketch_dim, seed=plan.seed)


def fit_factors(
    language_model: LanguageModel,
    windows: pa.Table,
    modules: Sequence[str],
    *,
    method: str,
    fisher: str,
    damping_scale: float,
    seed: int,
    batch_tokens: int,
    step: Step,
    quiet: bool = True,
) -> dict[str, ModuleFactors]:
    """Fit the curvature of every module.

    Args:
        language_model: The model.
        windows: The sample, with columns ``token_ids`` and ``is_target``; each window is one example.
        modules: Names of the covered modules.
        method: "ekfac" or "kfac".
        fisher: "sampled" or "empirical".
        damping_scale: The damping of a module is this times its mean eigenvalue.
        seed: Of the sampled targets.
        batch_tokens: Tokens run at once.
        step: Progress; called with 2 in all for EK-FAC's two passes or 1 for K-FAC, per token.
        quiet: Show no progress of the eigendecompositions.

    Returns:
        Each module's factors, float32; modules that read one tensor share one activation eigenbasis.
    """
    batches = _batches(language_model, windows, seed=seed if fisher == "sampled" else None, batch_tokens=batch_tokens)
    runs = [Run(partial(language_model.losses, batch), batch.is_token, int(batch.is_token.sum())) for batch in batches]
    with Capture(language_model.model, modules) as capture:
        return fit_runs(capture, runs, method=method, damping_scale=damping_scale, step=step, quiet=quiet)


def _batches(language_model: LanguageModel, windows: pa.Table, *, seed: int | None, batch_tokens: int) -> list[Batch]:
    token_ids, is_target = windows["token_ids"].to_pylist(), windows["is_target"].to_pylist()
    batches = []
    for rows in token_batches([len(ids) for ids in token_ids], batch_tokens=batch_tokens):
        batch = language_model.batch([token_ids[row] for row in rows], [is_target[row] for row in rows])
        if seed is not None:
            uniforms_NT = torch.zeros(batch.is_token.shape, dtype=torch.float64)
            for position, row in enumerate(rows):
                uniforms_NT[position, : len(token_ids[row])] = torch.from_numpy(uniforms_for(token_ids[row], seed=seed))
            batch = replace(batch, uniforms=uniforms_NT.to(language_model.device))
        batches.append(batch)
    return batches
