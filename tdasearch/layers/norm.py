"""Norms: LayerNorm, RMSNorm in every variant, GroupNorm, and BatchNorm as evaluation uses it.

What is normalised is not computed anew: the module is run again with its weight at 1 and at 0, and the difference is what the
weight is multiplied with, whatever the norm (``w x``, ``(1 + w) x``, with a gate). That the output is so made is checked once.

Legend: N examples, T positions, C channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tdasearch.errors import CaptureError
from tdasearch.gradients import Grouped, ModuleGradient
from tdasearch.layers.layer import Layer, Part, by_example, mask_for
from tdasearch.layers.recomputed import Rerun

_CHANNELS_SECOND = (nn.GroupNorm, nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)  # [N, C, ...]
_ROUNDINGS = 64  # that the two ways of computing an output may differ by


class Norm(Layer):
    """``y_c = w_c x_c + b_c`` of normalised x; gradient_NOI is [N, C, 1], or [N, C, 2] with the bias as its last column."""

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__(name, module)
        parameters = self.parameters()
        self._shape = parameters["weight"].shape
        self.has_bias = "bias" in parameters
        self._rerun = Rerun(name, module)
        self._checked = False
        self.parts = (Part(name, self._shape.numel(), 1 + self.has_bias, factored=False),)

    def keep(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor, ...]:
        """Keep what the weight is multiplied with, in the shape of the input."""
        if isinstance(self.module, nn.modules.batchnorm._BatchNorm) and self.module.training:
            raise CaptureError(
                f"module {self.name!r}: expected a norm of one example, found a {type(self.module).__name__} in training, which "
                "mixes the examples of a batch: call its eval(), or leave it out"
            )
        tensors = self._rerun.keep(args, kwargs)
        with torch.no_grad():
            zeros = {key: torch.zeros_like(parameter) for key, parameter in self.parameters().items()}  # FSDP2 swaps them
            at_zero = self._rerun(zeros, tensors)
            normalised = self._rerun({**zeros, "weight": torch.ones_like(zeros["weight"])}, tensors) - at_zero
            if not self._checked:
                self._check(tensors, at_zero, normalised)
        return (normalised,)

    def activations(self, kept: tuple[Tensor, ...], num_examples: int) -> Tensor:
        """Return the normalised inputs [N, T, C]."""
        return self._flat(kept[0], num_examples)

    def gradients(
        self,
        kept: tuple[Tensor, ...],
        activations: Tensor,
        output_gradient: Tensor,
        num_examples: int,
        is_token_NT: Tensor | None,
    ) -> dict[str, ModuleGradient]:
        """Pair each channel's normalised input with its output gradient."""
        gradients_NTC = self._flat(output_gradient, num_examples)
        columns = [activations, torch.ones_like(activations)] if self.has_bias else [activations]
        mask = mask_for(gradients_NTC, is_token_NT)
        return {self.name: Grouped(torch.stack(columns, dim=3), gradients_NTC[..., None], mask)}

    def parameter_gradients(self, part_name: str, gradient_NOI: Tensor) -> dict[str, Tensor]:
        """Split weight and bias."""
        return {
            key: gradient_NOI[:, :, i].reshape(-1, *self._shape) for i, key in enumerate(("weight", "bias")[: 1 + self.has_bias])
        }

    def _channels_last(self, tensor: Tensor) -> Tensor:
        if isinstance(self.module, _CHANNELS_SECOND):
            return tensor.movedim(1, -1)
        return tensor if len(self._shape) == 1 else tensor.flatten(-len(self._shape))

    def _flat(self, tensor: Tensor, num_examples: int) -> Tensor:
        return by_example(self.name, self._channels_last(tensor), num_examples)

    def _check(self, tensors: tuple[Tensor, ...], at_zero: Tensor, normalised: Tensor) -> None:
        """Raise unless the module's output is what the gradients take it to be."""
        own = {key: parameter.detach() for key, parameter in self.parameters().items()}
        found = self._channels_last(self._rerun(own, tensors))
        if found.shape[-1] == self._shape.numel():
            scaled = self._channels_last(normalised) * own["weight"].flatten()
            expected = self._channels_last(at_zero) + scaled + (own["bias"].flatten() if self.has_bias else 0.0)
            rounding = max(torch.finfo(normalised.dtype).eps, torch.finfo(torch.float32).eps)
            error, size = (found - expected).abs().max(), scaled.abs().max() + found.abs().max()
            self._checked = bool(error <= _ROUNDINGS * rounding * size) or not bool(torch.isfinite(found).all())
        if not self._checked:
            raise CaptureError(
                f"module {self.name!r}: expected a norm's weight and bias to multiply and shift each channel, found that a "
                f"{type(self.module).__name__} does something else; leave it out"
            )


def norm(name: str, module: nn.Module) -> Norm | None:
    """Recognise a norm: by its class's name and its parameters, as each transformers model has a class of its own."""
    parameters = dict(module.named_parameters(recurse=False))
    is_norm = "norm" in type(module).__name__.lower() and next(module.children(), None) is None
    if not is_norm or "weight" not in parameters or not set(parameters) <= {"weight", "bias"}:
        return None
    return Norm(name, module) if len({parameter.shape for parameter in parameters.values()}) == 1 else None
