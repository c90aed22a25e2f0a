"""Fitting: the curvature of every part from batches of example gradients, of any model and loss.

EK-FAC (George et al. 2018, arXiv 1806.03884) takes two passes, one for the eigenbases and one for the eigenvalues in them; K-FAC
(Martens and Grosse 2015, arXiv 1503.05671) takes the first one. Knows nothing of text or storage.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

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
from tdasearch.gradients import ModuleGradient, Outer
from tdasearch.layers import Part
from tdasearch.progress import Step, progress
from tdasearch.rotation import Rotation

METHODS = ("ekfac", "kfac")


@dataclass(frozen=True, slots=True)
class Bases:
    """Eigenbases of one module's covariances, with their eigenvalues (largest first); None where a side keeps its own basis."""

    activation_values: Tensor | None
    activation_eigenvectors: Tensor | None
    gradient_values: Tensor | None
    gradient_eigenvectors: Tensor | None
    positions_per_example: float


@dataclass(frozen=True, slots=True)
class Run:
    """One batch of the fit.

    Attributes:
        losses: Runs the model on it, returns losses_N.
        is_token_NT: [N, T] False at padding; None: positions with a gradient.
        size: What progress is told when it is done.
    """

    losses: Callable[[], Tensor]
    is_token_NT: Tensor | None
    size: int


def fit_runs(
    capture: Capture, runs: Sequence[Run], *, method: str, damping_scale: float, step: Step, quiet: bool = True
) -> dict[str, ModuleFactors]:
    """Fit the curvature of every part, of any model and loss.

    Args:
        capture: The entered capture of the modules.
        runs: The batches, each run once for K-FAC and twice for EK-FAC.
        method: "ekfac" or "kfac".
        damping_scale: The damping of a part is this times its mean eigenvalue.
        step: Progress, called with the size of each run.
        quiet: Show no progress of the eigendecompositions.

    Returns:
        Each part's factors; modules that read one tensor share one activation eigenbasis.
    """
    bases, squares = _fit_bases(capture, runs, step, method=method, quiet=quiet)
    if method == "kfac":
        eigenvalues = {name: _kfac(part) if name not in squares else squares[name].eigenvalues() for name, part in bases.items()}
    else:
        eigenvalues = _fit_eigenvalues(capture, runs, bases, step)
    return {name: _damped(name, bases[name], eigenvalues[name], damping_scale) for name in bases}


def _fit_bases(
    capture: Capture, runs: Sequence[Run], step: Step, *, method: str, quiet: bool
) -> tuple[dict[str, Bases], dict[str, SquaredGradients]]:
    """Pass one. K-FAC needs no second one: of parts that are not rotated on both sides, it measures the eigenvalues here."""
    rotated = {name: _sides(part) for name, part in capture.parts.items()}
    activations: dict[str, Covariance] = {}
    gradients = {name: Covariance() for name, (_, right) in rotated.items() if right}
    squares = {name: SquaredGradients() for name, sides in rotated.items() if method == "kfac" and not all(sides)}
    reads: dict[str, str] = {}  # part -> the part whose activation covariance it shares
    for run in runs:
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

        capture.backward(run.losses, consume, is_token_NT=run.is_token_NT)
        step(run.size)
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


def _fit_eigenvalues(capture: Capture, runs: Sequence[Run], bases: dict[str, Bases], step: Step) -> dict[str, Tensor]:
    squares = {name: SquaredGradients() for name in capture.parts}
    dtype = torch.promote_types(next(capture.model.parameters()).dtype, torch.float32)
    for run in runs:
        rotation = Rotation(dtype)

        def consume(name: str, gradient: ModuleGradient, rotation: Rotation = rotation) -> None:
            part = bases[name]
            squares[name].add(rotation(gradient, part.gradient_eigenvectors, part.activation_eigenvectors))

        capture.backward(run.losses, consume, is_token_NT=run.is_token_NT)
        step(run.size)
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
