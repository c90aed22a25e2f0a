"""Fitting: two passes over a sample of the corpus give every module's eigenbases and eigenvalues.

Pass one sums the covariances of activations and output gradients; pass two measures the Fisher's eigenvalues in their eigenbasis.
Both see the same targets: drawn from the model by default (the true Fisher), or the data's own (the empirical one).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from tdasearch.capture import Capture
from tdasearch.curvature import (
    MAX_EIGENBASIS_DIM,
    Covariance,
    ModuleFactors,
    SquaredGradients,
    kfac_eigenvalues,
    rotated_sides,
)
from tdasearch.encoder import Encoder
from tdasearch.gradients import ModuleGradient, Outer
from tdasearch.indexer.job import Job
from tdasearch.indexer.staging import Staged
from tdasearch.language_model import Batch, LanguageModel, token_batches, uniforms_for
from tdasearch.layers import Part
from tdasearch.progress import Step, progress
from tdasearch.rotation import Rotation
from tdasearch.store.factors import load_factors, save_factors
from tdasearch.store.manifest import Manifest, write_manifest

METHODS = ("ekfac", "kfac")


@dataclass(frozen=True, slots=True)
class Bases:
    """Eigenbases of one module's covariances, with their eigenvalues (largest first); None where a side keeps its own basis."""

    activation_values: Tensor | None
    activation_eigenvectors: Tensor | None
    gradient_values: Tensor | None
    gradient_eigenvectors: Tensor | None
    positions_per_example: float


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
    with Capture(language_model.model, modules) as capture:
        bases, squares = _fit_bases(capture, language_model, batches, step, method=method, quiet=quiet)
        if method == "kfac":
            eigenvalues = {
                name: _kfac(part) if name not in squares else squares[name].eigenvalues() for name, part in bases.items()
            }
        else:
            eigenvalues = _fit_eigenvalues(capture, language_model, batches, bases, step)
    return {name: _damped(name, bases[name], eigenvalues[name], damping_scale) for name in bases}


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


def _fit_bases(
    capture: Capture, language_model: LanguageModel, batches: list[Batch], step: Step, *, method: str, quiet: bool
) -> tuple[dict[str, Bases], dict[str, SquaredGradients]]:
    """Pass one. K-FAC needs no second one: of parts that are not rotated on both sides, it measures the eigenvalues here."""
    rotated = {name: _sides(part) for name, part in capture.parts.items()}
    activations: dict[str, Covariance] = {}
    gradients = {name: Covariance() for name, (_, right) in rotated.items() if right}
    squares = {name: SquaredGradients() for name, sides in rotated.items() if method == "kfac" and not all(sides)}
    reads: dict[str, str] = {}  # part -> the part whose activation covariance it shares
    for batch in batches:
        previous: list[Any] = [None, ""]

        def consume(name: str, gradient: ModuleGradient, previous: list[Any] = previous) -> None:
            if name in squares:
                squares[name].add(gradient)
            if isinstance(gradient, Outer) and rotated[name][0]:
                if gradient.activations_NTI is not previous[0]:
                    previous[:] = [gradient.activations_NTI, name]
                    activations.setdefault(name, Covariance()).add(gradient.activations_NTI, gradient.positions())
                reads[name] = previous[1]
            if isinstance(gradient, Outer) and rotated[name][1]:
                gradients[name].add(gradient.output_gradients_NTO, gradient.positions())

        capture.backward(partial(language_model.losses, batch), consume, is_token_NT=batch.is_token)
        step(int(batch.is_token.sum()))
    with progress("decompose", total=len(activations) + len(gradients), unit="covariance", quiet=quiet) as decomposed:

        def eigen(covariance: Covariance | None) -> tuple[Tensor | None, Tensor | None]:
            if covariance is None:
                return None, None
            found = covariance.eigen()
            decomposed(1)
            return found

        shared = {name: eigen(activations.pop(name)) for name in list(activations)}  # popped: its memory is free again
        bases = {}
        for name in capture.parts:
            covariance = gradients.pop(name, None)
            positions = 1.0 if covariance is None else covariance.num_positions / max(covariance.num_examples, 1)
            bases[name] = Bases(*shared.get(reads.get(name, ""), (None, None)), *eigen(covariance), positions)
    return bases, squares


def _sides(part: Part) -> tuple[bool, bool]:
    wide = [dim for dim in (part.in_dim, part.out_dim) if dim > MAX_EIGENBASIS_DIM]
    if part.factored and wide:
        warnings.warn(
            f"module {part.name!r}: a side of {wide[0]} is too wide for an eigenbasis ({wide[0] ** 2 * 8 / 1e9:.0f} GB) and "
            "keeps its own; leave the module out (--modules) if that is not wanted",
            stacklevel=2,
        )
    return rotated_sides(part)


def _kfac(part: Bases) -> Tensor:
    assert part.gradient_values is not None and part.activation_values is not None
    return kfac_eigenvalues(part.gradient_values, part.activation_values, positions_per_example=part.positions_per_example)


def _fit_eigenvalues(
    capture: Capture, language_model: LanguageModel, batches: list[Batch], bases: dict[str, Bases], step: Step
) -> dict[str, Tensor]:
    squares = {name: SquaredGradients() for name in capture.parts}
    dtype = torch.promote_types(next(language_model.model.parameters()).dtype, torch.float32)
    for batch in batches:
        rotation = Rotation(dtype)

        def consume(name: str, gradient: ModuleGradient, rotation: Rotation = rotation) -> None:
            part = bases[name]
            squares[name].add(rotation(gradient, part.gradient_eigenvectors, part.activation_eigenvectors))

        capture.backward(partial(language_model.losses, batch), consume, is_token_NT=batch.is_token)
        step(int(batch.is_token.sum()))
    return {name: part.eigenvalues() for name, part in squares.items()}


def _damped(name: str, bases: Bases, eigenvalues: Tensor, damping_scale: float) -> ModuleFactors:
    damping = damping_scale * float(eigenvalues.mean())
    if damping == 0.0:
        warnings.warn(
            f"module {name!r}: the sample's gradients are all zero there, so it has no curvature and will not count; fit on more "
            "documents (--fit-documents) or choose other modules (--modules)",
            stacklevel=2,
        )
    rotated = bases.gradient_eigenvectors if bases.gradient_eigenvectors is not None else bases.activation_eigenvectors
    single = rotated is None or rotated.dtype == torch.float32
    return ModuleFactors(
        activation_eigenvectors=bases.activation_eigenvectors,
        gradient_eigenvectors=bases.gradient_eigenvectors,
        eigenvalues=eigenvalues.float() if single else eigenvalues,
        damping=damping,
    )
