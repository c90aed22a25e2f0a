"""The encoder: an example's gradient to one vector whose inner products are influence.

    phi(x) = sketch( concat_m (eigenvalues_m + damping_m)^-1/2 * (U_S^T G U_A)[:o_m, :i_m] )

The same map serves documents and queries, so ``<phi(query), phi(document)>`` estimates ``g_q^T (F + damping)^-1 g_d``. The
uncompressed form, by which a shortlist is rescored, is ``Query.preconditioned``. This file knows nothing of text or storage.

Legend: N examples, T positions, I inputs, O outputs, D index dimensions; o, i the ranks kept of O, I.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tdasearch.capture import Capture
from tdasearch.cost_model import Route
from tdasearch.curvature import ModuleFactors
from tdasearch.gradients import ModuleGradient
from tdasearch.rotation import Rotation
from tdasearch.sketch import Sketch

Losses = Callable[[], Tensor]


@dataclass(frozen=True, slots=True)
class Encoded:
    """A batch of examples, encoded.

    Attributes:
        vectors_ND: [N, D], in the factors' type (float32).
        losses_N: [N] summed loss of each example, nats.
        self_influence_N: [N] ``|phi|^2`` before the sketch: influence on itself in the coordinates that are kept.
    """

    vectors_ND: Tensor
    losses_N: Tensor
    self_influence_N: Tensor


@dataclass(frozen=True, slots=True)
class Query:
    """One query's gradient, in the two forms that a search needs.

    Attributes:
        vector_D: [D], for the codes.
        preconditioned: ``(F + damping)^-1 G`` [O, I] of each module, untruncated and uncompressed; empty if not asked for.
        loss: Summed loss over the query's target tokens, nats.
        self_influence: ``g^T (F + damping)^-1 g``, exact.
        kept_self_influence: The same in the coordinates that the index keeps.
        num_targets: Number of target tokens.
    """

    vector_D: Tensor
    preconditioned: dict[str, Tensor]
    loss: float
    self_influence: float
    kept_self_influence: float
    num_targets: int


def rank(dim: int, eigenbasis_share: float) -> int:
    """Return how many of ``dim`` eigenvectors are kept: the share, rounded up."""
    return max(1, math.ceil(dim * eigenbasis_share))


def ranks(factors: ModuleFactors, eigenbasis_share: float) -> tuple[int, int]:
    """Return the ranks (o, i) that are kept of a module: all coordinates of a side that is not rotated, as they have no order."""
    out_dim, in_dim = factors.eigenvalues.shape
    return (
        out_dim if factors.gradient_eigenvectors is None else rank(out_dim, eigenbasis_share),
        in_dim if factors.activation_eigenvectors is None else rank(in_dim, eigenbasis_share),
    )


class Encoder:
    """Encodes gradients with fitted factors.

    Args:
        factors: Each covered module's curvature.
        eigenbasis_share: Share of each eigenbasis kept, strongest first, in (0, 1].
        sketch_dim: D.
        seed: Of the sketch.
        route: How gradients are rotated, as in ``Rotation``. By default the cost model chooses, for each module and batch, by
            what this machine measured: a coordinate within a rounding error of 0 may then get another sign in its code elsewhere.
            A forced route rules that part of the rounding out.
    """

    def __init__(
        self,
        factors: Mapping[str, ModuleFactors],
        *,
        eigenbasis_share: float,
        sketch_dim: int,
        seed: int,
        route: Route | None = None,
    ) -> None:
        self.factors = dict(factors)
        eigenvalues = next(iter(self.factors.values())).eigenvalues
        self.dtype = eigenvalues.dtype
        self.ranks = {name: ranks(part, eigenbasis_share) for name, part in self.factors.items()}
        self.sketch_dim = sketch_dim
        self._route = route
        num_coordinates = {name: o * i for name, (o, i) in self.ranks.items()}
        self.sketch = Sketch(num_coordinates, sketch_dim=sketch_dim, seed=seed, device=eigenvalues.device)
        kept: dict[int, Tensor] = {}
        self._kept_eigenvectors: dict[str, tuple[Tensor | None, Tensor | None]] = {}
        self._signed_scale: dict[str, Tensor] = {}
        for name, (o, i) in self.ranks.items():
            scale = self.factors[name].inverse_sqrt()[:o, :i]
            left, right = self.factors[name].gradient_eigenvectors, self.factors[name].activation_eigenvectors
            self._kept_eigenvectors[name] = (
                None if left is None else left[:, :o],
                None if right is None else kept.setdefault(id(right), right[:, :i]),
            )
            self._signed_scale[name] = scale * self.sketch.signs(name).view(o, i).to(scale)

    def encode(self, capture: Capture, losses: Losses) -> Encoded:
        """Encode a batch of documents.

        Args:
            capture: The entered capture of the encoder's modules.
            losses: Runs the model on the batch, returns losses_N.

        Returns:
            Vectors, losses and self-influence.
        """
        sums: dict[str, Tensor] = {}
        rotation = Rotation(self.dtype, route=self._route)

        def consume(name: str, gradient: ModuleGradient) -> None:
            rotated_Noi = rotation(gradient, *self._kept_eigenvectors[name]).dense()
            self._add(sums, name, (rotated_Noi * self._signed_scale[name]).flatten(1))

        losses_N = capture.backward(losses, consume)
        return Encoded(sums["vectors"], losses_N, sums["self_influence"])

    def encode_query(self, capture: Capture, losses: Losses, *, num_targets: int, precondition: bool = True) -> Query:
        """Encode one query, and precondition its gradient without truncating or compressing it.

        Args:
            capture: The entered capture of the encoder's modules.
            losses: Runs the model on a batch of one, returns losses_N with N = 1.
            num_targets: Number of its target tokens, passed on.
            precondition: Whether the preconditioned gradient is wanted: two products as wide as the weights, a module.

        Returns:
            The query's vector and its preconditioned gradient.
        """
        sums: dict[str, Tensor] = {}
        preconditioned: dict[str, Tensor] = {}
        exact = []
        rotation = Rotation(self.dtype, route=self._route)

        def consume(name: str, gradient: ModuleGradient) -> None:
            o, i = self.ranks[name]
            part = self.factors[name]
            rotated_OI = rotation(gradient, part.gradient_eigenvectors, part.activation_eigenvectors).dense()[0]
            inverse_sqrt = part.inverse_sqrt()
            whitened_OI = rotated_OI * inverse_sqrt
            exact.append(whitened_OI.square().sum())
            if precondition:
                preconditioned[name] = part.rotate_back(whitened_OI * inverse_sqrt)
            self._add(sums, name, (rotated_OI[:o, :i] * self._signed_scale[name]).reshape(1, -1))

        losses_N = capture.backward(losses, consume)
        return Query(
            vector_D=sums["vectors"][0],
            preconditioned=preconditioned,
            loss=float(losses_N[0]),
            self_influence=float(torch.stack(exact).sum()),
            kept_self_influence=float(sums["self_influence"][0]),
            num_targets=num_targets,
        )

    def _add(self, sums: dict[str, Tensor], name: str, signed_NC: Tensor) -> None:
        if not sums:
            sums["vectors"] = signed_NC.new_zeros(signed_NC.shape[0], self.sketch_dim)
            sums["self_influence"] = signed_NC.new_zeros(signed_NC.shape[0])
        sums["self_influence"] += signed_NC.square().sum(1)
        self.sketch.add(sums["vectors"], name, signed_NC)
