"""Curvature of the loss, factored: covariances, their eigenbases, and the eigenvalues of the Fisher in them.

Mathematics only, on the canonical layout of ``capture``. K-FAC (Martens and Grosse 2015, arXiv 1503.05671) takes the Fisher of
a module as the Kronecker product of the covariance A of its activations and the covariance S of its output gradients;
EK-FAC (George et al. 2018, arXiv 1806.03884) keeps the eigenbasis of that product and measures the eigenvalues in it.

Legend: N examples, T positions, I inputs (bias column included), O outputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tdasearch.errors import CaptureError
from tdasearch.gradients import ModuleGradient, in_chunks
from tdasearch.layers import Part
from tdasearch.rotation import between

MAX_EIGENBASIS_DIM = 16_384
"""Widest side that is decomposed; a wider one (a vocabulary) keeps its own basis: its covariance alone would be gigabytes."""


def rotated_sides(part: Part) -> tuple[bool, bool]:
    """Whether the inputs, and the outputs, of a part are rotated into an eigenbasis; else their Fisher is taken as diagonal."""
    return part.factored and part.in_dim <= MAX_EIGENBASIS_DIM, part.factored and part.out_dim <= MAX_EIGENBASIS_DIM


class Covariance:
    """The uncentred covariance ``mean_t x_t x_t^T`` of vectors that come in batches, summed in float64.

    Attributes:
        num_positions: Vectors summed.
        num_examples: Examples they came from.
    """

    def __init__(self) -> None:
        self._sum: Tensor | None = None
        self._dtype = torch.float32
        self.num_positions = 0
        self.num_examples = 0
        self._num_left_out = 0

    def add(self, vectors_NTX: Tensor, is_position_NT: Tensor) -> None:
        """Add the vectors at the positions that are not padding, but for examples with one that is not finite.

        Args:
            vectors_NTX: [N, T, X].
            is_position_NT: [N, T] bool, False on padding.
        """
        self._dtype = torch.promote_types(vectors_NTX.dtype, torch.float32)
        finite_N = (torch.isfinite(vectors_NTX).all(2) | ~is_position_NT).all(1)
        vectors = vectors_NTX[is_position_NT & finite_N[:, None]].to(self._dtype)
        product = (vectors.T @ vectors).to(torch.float64)
        self._sum = product if self._sum is None else self._sum.add_(product)
        self.num_positions += vectors.shape[0]
        self.num_examples += int(finite_N.sum())
        self._num_left_out += int((~finite_N).sum())

    def eigen(self) -> tuple[Tensor, Tensor]:
        """Decompose the covariance.

        Returns:
            Eigenvalues [X] float64, largest first, clamped at 0 (a rank-deficient covariance has slightly negative ones),
            and eigenvectors [X, X] as columns, in the vectors' type or float32 if that is narrower.

        Raises:
            CaptureError: No example was finite.
        """  # noqa: DOC502 (_check_some raises it)
        assert self._sum is not None
        _check_some(self.num_examples)
        values, vectors = torch.linalg.eigh(self._sum / max(self.num_positions, 1))  # none: an expert that saw no token
        return values.flip(0).clamp_min_(0.0), vectors.flip(1).to(self._dtype)


@dataclass(frozen=True, slots=True)
class ModuleFactors:
    """The Fisher of one module, ``(U_S x U_A) diag(eigenvalues) (U_S x U_A)^T``, and its damped inverse.

    Attributes:
        activation_eigenvectors: U_A [I, I], columns by falling eigenvalue of the activation covariance; None: the identity.
        gradient_eigenvectors: U_S [O, O], columns by falling eigenvalue of the gradient covariance; None: the identity.
        eigenvalues: [O, I], of the Fisher of the summed loss, per example.
        damping: Added to every eigenvalue; absolute, in the eigenvalues' unit.
    """

    activation_eigenvectors: Tensor | None
    gradient_eigenvectors: Tensor | None
    eigenvalues: Tensor
    damping: float

    def rotate(self, gradient_OI: Tensor) -> Tensor:
        """Bring a gradient (or a batch [N, O, I] of them) into the eigenbasis: ``U_S^T G U_A``."""
        return between(gradient_OI, self.gradient_eigenvectors, self.activation_eigenvectors)

    def rotate_back(self, rotated_OI: Tensor) -> Tensor:
        """Undo ``rotate``."""
        left, right = self.gradient_eigenvectors, self.activation_eigenvectors
        return between(rotated_OI, None if left is None else left.T, None if right is None else right.T)

    def inverse_sqrt(self) -> Tensor:
        """Return ``(eigenvalues + damping)^-1/2`` [O, I]; 0 where both are 0, as no gradient was ever seen there."""
        damped = self.eigenvalues + self.damping
        return torch.where(damped > 0, damped.rsqrt(), torch.zeros_like(damped))

    def precondition(self, gradient_OI: Tensor) -> Tensor:
        """Return ``(F + damping)^-1 G`` [O, I], exact and untruncated."""
        return self.rotate_back(self.rotate(gradient_OI) * self.inverse_sqrt().square())


class SquaredGradients:
    """EK-FAC eigenvalues of one module: the mean over examples of the squared gradient in the eigenbasis."""

    def __init__(self) -> None:
        self._sum: Tensor | None = None
        self._num_examples = 0

    def add(self, rotated: ModuleGradient, *, chunk_bytes: int = 1 << 28) -> None:
        """Add a batch of examples, but for those whose gradient is not finite.

        Args:
            rotated: Gradients in the eigenbasis.
            chunk_bytes: Bound on the memory for the gradients formed at once.
        """
        for part in in_chunks(rotated, chunk_bytes):
            squares_NOI = part.dense().square()
            squares = squares_NOI.sum(0)
            self._num_examples += squares_NOI.shape[0]
            if not torch.isfinite(squares).all():
                finite_N = torch.isfinite(squares_NOI).flatten(1).all(1)
                squares = squares_NOI[finite_N].sum(0)
                self._num_examples -= int((~finite_N).sum())
            self._sum = squares.double() if self._sum is None else self._sum.add_(squares)

    def eigenvalues(self) -> Tensor:
        """Return the mean of the squares, [O, I] float64; a CaptureError if no example was finite."""
        assert self._sum is not None
        _check_some(self._num_examples)
        return self._sum / self._num_examples


def _check_some(num_finite: int) -> None:
    if not num_finite:
        raise CaptureError(
            "expected finite activations and gradients in the sample of the fit, found none: check the model's weights, or "
            "load it in a wider type (--dtype float32)"
        )


def kfac_eigenvalues(gradient_values_O: Tensor, activation_values_I: Tensor, *, positions_per_example: float) -> Tensor:
    """K-FAC's eigenvalues, in the unit of EK-FAC's (the summed loss of an example).

    Args:
        gradient_values_O: Eigenvalues of the gradient covariance, [O], a position.
        activation_values_I: Eigenvalues of the activation covariance, [I], a position.
        positions_per_example: Mean number of positions; positions are taken as independent, so an example's Fisher is that
            many times a position's.

    Returns:
        [O, I], the outer product in that unit.
    """
    return torch.outer(gradient_values_O, activation_values_I) * positions_per_example
