"""Rotation: gradients into an eigenbasis (or the leading part of one), ``U_S^T G U_A``, without forming G where that is cheaper.

Legend: N examples, T positions, I inputs, O outputs; o, i the ranks kept of O, I. A basis that is None is the identity.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tdasearch.gradients import Dense, ModuleGradient, Outer


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
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._last: tuple[Tensor, Tensor, Tensor] | None = None

    def __call__(self, gradient: ModuleGradient, left_Oo: Tensor | None, right_Ii: Tensor | None) -> ModuleGradient:
        """Rotate.

        Args:
            gradient: [N, O, I] in any form.
            left_Oo: Basis of the outputs.
            right_Ii: Basis of the inputs.

        Returns:
            ``left^T G right`` [N, o, i], factored if the gradient was.
        """
        if not isinstance(gradient, Outer):
            return Dense(between(gradient.dense().to(self.dtype), left_Oo, right_Ii))
        gradients = gradient.output_gradients_NTO.to(self.dtype)
        activations = gradient.activations_NTI
        return Outer(
            activations.to(self.dtype) if right_Ii is None else self._rotated(activations, right_Ii),
            gradients if left_Oo is None else gradients @ left_Oo,
            gradient.is_position_NT,
        )

    def _rotated(self, activations_NTI: Tensor, right_Ii: Tensor) -> Tensor:
        if self._last is None or self._last[0] is not activations_NTI or self._last[1] is not right_Ii:
            self._last = (activations_NTI, right_Ii, activations_NTI.to(self.dtype) @ right_Ii)
        return self._last[2]
