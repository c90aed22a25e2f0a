"""Rotation: gradients into an eigenbasis (or the leading part of one), ``U_S^T G U_A``, by rotating G or what it is made of.

Legend: N examples, T positions, I inputs, O outputs; o, i the ranks kept of O, I. A basis that is None is the identity.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tdasearch import route_work
from tdasearch.cost_model import Route, cheaper
from tdasearch.gradients import Dense, ModuleGradient, Outer, converted, device_of, size_of

_CHUNK_BYTES = 1 << 28
"""Bound on the matrices that are formed before they are rotated; a batch with more is rotated before it is multiplied."""


def between(gradient_OI: Tensor, left_Oo: Tensor | None, right_Ii: Tensor | None) -> Tensor:
    """Multiply matrices from both sides.

    Args:
        gradient_OI: [O, I] or a batch [N, O, I].
        left_Oo: [O, o], or None for the identity.
        right_Ii: [I, i], or None for the identity.

    Returns:
        ``left^T G right`` [o, i] or [N, o, i].
    """
    half = gradient_OI if left_Oo is None else left_Oo.T @ gradient_OI
    return half if right_Ii is None else half @ right_Ii


class Rotation:
    """Rotates one pass's gradients; activations that several modules read (q, k, v; gate, up) are rotated once.

    Capture hands such modules the same activations object, and they share one basis tensor; they follow each other.

    Args:
        dtype: Of the result: that of the bases.
        route: "factored": rotate the factors, multiply later. "dense": multiply, then rotate the matrices; cheaper for modules
            that are narrower than the examples are long. None: the one that the cost model predicts to be faster. The results
            differ by rounding.
    """

    def __init__(self, dtype: torch.dtype, *, route: Route | None = None) -> None:
        self.dtype = dtype
        self.route = route
        self._last: tuple[Tensor, Tensor, Tensor] | None = None

    def __call__(self, gradient: ModuleGradient, left_Oo: Tensor | None, right_Ii: Tensor | None) -> ModuleGradient:
        """Rotate.

        Args:
            gradient: [N, O, I] in any form.
            left_Oo: Basis of the outputs.
            right_Ii: Basis of the inputs.

        Returns:
            ``left^T G right`` [N, o, i]; by the factored route in factors.
        """
        if not isinstance(gradient, Outer) or self._chosen(gradient, left_Oo, right_Ii) == "dense":
            return Dense(between(converted(gradient, self.dtype).dense(), left_Oo, right_Ii))
        gradients = gradient.output_gradients_NTO.to(self.dtype)
        activations = gradient.activations_NTI
        return Outer(
            activations.to(self.dtype) if right_Ii is None else self._rotated(activations, right_Ii),
            gradients if left_Oo is None else gradients @ left_Oo,
            gradient.is_position_NT,
        )

    def _chosen(self, gradient: Outer, left_Oo: Tensor | None, right_Ii: Tensor | None) -> Route:
        if self.route is not None:
            return self.route
        size = size_of(gradient)
        if size.num_elements * self.dtype.itemsize > _CHUNK_BYTES:
            return "factored"
        ranks = (basis if basis is None else basis.shape[1] for basis in (left_Oo, right_Ii))
        arguments = (size, *ranks, self._is_rotated(gradient.activations_NTI, right_Ii), self.dtype.itemsize)
        return cheaper(route_work.rotation, *arguments, device=device_of(gradient), dtype=self.dtype)

    def _is_rotated(self, activations_NTI: Tensor, right_Ii: Tensor | None) -> bool:
        return self._last is not None and self._last[0] is activations_NTI and self._last[1] is right_Ii

    def _rotated(self, activations_NTI: Tensor, right_Ii: Tensor) -> Tensor:
        if self._last is None or not self._is_rotated(activations_NTI, right_Ii):
            self._last = (activations_NTI, right_Ii, activations_NTI.to(self.dtype) @ right_Ii)
        return self._last[2]
