"""Linear maps: ``nn.Linear`` and GPT-2's ``Conv1D``, whose weight lies transposed.

Legend: N examples, T positions, I inputs (one more where there is a bias), O outputs.
"""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn

from tdasearch.gradients import ModuleGradient, Outer
from tdasearch.layers.layer import Layer, Part, by_example, mask_for, with_ones


class Linear(Layer):
    """``y = W a + b``; the bias is a last column of W."""

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__(name, module)
        self.transposed = not isinstance(module, nn.Linear)
        if isinstance(module, nn.Linear):
            out_dim, in_dim = module.out_features, module.in_features
        else:
            in_dim, out_dim = cast(Tensor, module.weight).shape
        self.has_bias = module.bias is not None
        self.reads = ("linear", self.has_bias)
        self.parts = (Part(name, out_dim, in_dim + self.has_bias),)

    def activations(self, kept: tuple[Tensor, ...], num_examples: int) -> Tensor:
        """Return the inputs by example, with the bias's column of ones."""
        inputs_NTI = by_example(self.name, kept[0], num_examples)
        return with_ones(inputs_NTI) if self.has_bias else inputs_NTI

    def gradients(
        self,
        kept: tuple[Tensor, ...],
        activations: Tensor,
        output_gradient: Tensor,
        num_examples: int,
        is_token_NT: Tensor | None,
    ) -> dict[str, ModuleGradient]:
        """Pair the activations with the output gradients."""
        gradients_NTO = by_example(self.name, output_gradient, num_examples)
        return {self.name: Outer(activations, gradients_NTO, mask_for(gradients_NTO, is_token_NT))}

    def parameter_gradients(self, part_name: str, gradient_NOI: Tensor) -> dict[str, Tensor]:
        """Split off the bias, and transpose where the weight is."""
        weight = gradient_NOI[:, :, :-1] if self.has_bias else gradient_NOI
        bias = {"bias": gradient_NOI[:, :, -1]} if self.has_bias else {}
        return {"weight": weight.transpose(1, 2) if self.transposed else weight, **bias}


def linear(name: str, module: nn.Module) -> Linear | None:
    """Recognise a linear map: ``nn.Linear`` (subclasses only where they keep its forward) or ``Conv1D``."""
    if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
        return Linear(name, module)
    if type(module).__name__ == "Conv1D" and hasattr(module, "nf"):  # transformers' own class: not imported, recognised
        return Linear(name, module)
    return None
