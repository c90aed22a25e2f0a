"""Convolutions over 1, 2 or 3 dimensions, with stride, padding, dilation and groups; and transposed ones.

A convolution is a linear map of patches: at each place of the output, the patch of the input that is seen there.

Legend: N examples, L places, G groups, I inputs of a group (a patch, and 1 for a bias), O outputs of a group.
"""

from __future__ import annotations

from typing import cast

import torch.nn.functional as F
from torch import Tensor, nn

from tdasearch.errors import CaptureError
from tdasearch.gradients import Grouped, ModuleGradient, Outer
from tdasearch.layers.layer import Layer, Part, mask_for, with_ones

Plain = nn.Conv1d | nn.Conv2d | nn.Conv3d
Transposed = nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d


def patches(inputs: Tensor, kernel: tuple[int, ...], stride: tuple[int, ...], dilation: tuple[int, ...]) -> Tensor:
    """Cut out the patch seen at each place.

    Args:
        inputs: [N, C, *places], padded already.
        kernel: Size along each dimension.
        stride: From one patch to the next.
        dilation: From one element of a patch to the next.

    Returns:
        [N, L..., C, K...]: for each place the patch of each channel; a view.
    """
    dims = len(kernel)
    for d in range(dims):
        inputs = inputs.unfold(2 + d, dilation[d] * (kernel[d] - 1) + 1, stride[d])[..., :: dilation[d]]
    return inputs.movedim(1, 1 + dims)


def grouped(patches_: Tensor, num_groups: int, num_examples: int) -> Tensor:
    """Bring patches [R, L..., C, K...] to [N, L, G, I], where the R rows belong to N examples."""
    dims = (patches_.dim() - 2) // 2
    rows = patches_.flatten(1 + dims).flatten(1, dims)  # [R, L, C * K]
    return rows.reshape(num_examples, -1, num_groups, rows.shape[2] // num_groups)


class Convolution(Layer):
    """``y = W * x + b``; the bias is the last column of the matrix of a patch."""

    module: Plain

    def __init__(self, name: str, module: Plain) -> None:
        super().__init__(name, module)
        self.has_bias = module.bias is not None
        in_dim = module.weight[0].numel() + self.has_bias
        self.parts = (Part(name, module.out_channels, in_dim, factored=module.groups == 1),)

    def activations(self, kept: tuple[Tensor, ...], num_examples: int) -> Tensor:
        """Return the patches [N, L, G, I]."""
        conv, inputs = self.module, kept[0]
        _check_batched(self.name, inputs, len(conv.kernel_size))
        mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
        padded = F.pad(inputs, conv._reversed_padding_repeated_twice, mode=mode)
        cut = patches(padded, conv.kernel_size, conv.stride, conv.dilation)
        patches_NLGI = grouped(cut, conv.groups, num_examples)
        return with_ones(patches_NLGI) if self.has_bias else patches_NLGI

    def gradients(
        self,
        kept: tuple[Tensor, ...],
        activations: Tensor,
        output_gradient: Tensor,
        num_examples: int,
        is_token_NT: Tensor | None,
    ) -> dict[str, ModuleGradient]:
        """Pair the patches with the output gradients."""
        gradients_NLGO = _places(output_gradient, self.module.groups, num_examples)
        return {self.name: _paired(activations, gradients_NLGO, is_token_NT)}

    def parameter_gradients(self, part_name: str, gradient_NOI: Tensor) -> dict[str, Tensor]:
        """Split off the bias, and give the weight its shape."""
        weight = gradient_NOI[:, :, :-1] if self.has_bias else gradient_NOI
        bias = {"bias": gradient_NOI[:, :, -1]} if self.has_bias else {}
        return {"weight": weight.reshape(-1, *self.module.weight.shape), **bias}


class TransposedConvolution(Layer):
    """The adjoint of a convolution: the patches are cut out of the output gradient.

    Gradient_NOI is a patch by the inputs, for each group. The bias, one number for each output channel, does not fit into it:
    it is a part of its own.
    """

    module: Transposed

    def __init__(self, name: str, module: Transposed) -> None:
        super().__init__(name, module)
        groups = module.groups
        parts = [Part(name, module.weight[0].numel() * groups, module.in_channels // groups, factored=groups == 1)]
        if module.bias is not None:
            parts.append(Part(f"{name}.bias", module.out_channels, 1))
        self.parts = tuple(parts)

    def activations(self, kept: tuple[Tensor, ...], num_examples: int) -> Tensor:
        """Return the inputs [N, L, G, I]."""
        _check_batched(self.name, kept[0], len(self.module.kernel_size))
        return _places(kept[0], self.module.groups, num_examples)

    def gradients(
        self,
        kept: tuple[Tensor, ...],
        activations: Tensor,
        output_gradient: Tensor,
        num_examples: int,
        is_token_NT: Tensor | None,
    ) -> dict[str, ModuleGradient]:
        """Pair the inputs with the patches of the output gradient."""
        conv = self.module
        padding = cast(tuple[int, ...], conv.padding)
        padded = F.pad(output_gradient, [p for one in reversed(padding) for p in (one, one)])
        cut = patches(padded, conv.kernel_size, conv.stride, conv.dilation)
        for d, size in enumerate(kept[0].shape[2:]):  # output_padding may leave room for a patch that no input made
            cut = cut.narrow(1 + d, 0, size)
        found: dict[str, ModuleGradient] = {
            self.name: _paired(activations, grouped(cut, conv.groups, num_examples), None),
        }
        if conv.bias is not None:
            gradients_NLO = _places(output_gradient, 1, num_examples)[:, :, 0]
            found[f"{self.name}.bias"] = Outer(gradients_NLO.new_ones(*gradients_NLO.shape[:2], 1), gradients_NLO)
        return found

    def parameter_gradients(self, part_name: str, gradient_NOI: Tensor) -> dict[str, Tensor]:
        """Give the weight, or the bias, its shape."""
        if part_name != self.name:
            return {"bias": gradient_NOI[:, :, 0]}
        by_group = gradient_NOI.unflatten(1, (self.module.groups, -1)).transpose(2, 3)
        return {"weight": by_group.reshape(-1, *self.module.weight.shape)}


def _places(tensor: Tensor, num_groups: int, num_examples: int) -> Tensor:
    """Bring [R, C, *places] to [N, L, G, C / G]."""
    rows = tensor.flatten(2).transpose(1, 2)
    return rows.reshape(num_examples, -1, num_groups, rows.shape[2] // num_groups)


def _paired(activations_NLGI: Tensor, gradients_NLGO: Tensor, is_token_NT: Tensor | None) -> ModuleGradient:
    mask = mask_for(gradients_NLGO, is_token_NT)
    if gradients_NLGO.shape[2] == 1:
        return Outer(activations_NLGI[:, :, 0], gradients_NLGO[:, :, 0], mask)
    return Grouped(activations_NLGI, gradients_NLGO, mask)


def _check_batched(name: str, inputs: Tensor, dims: int) -> None:
    if inputs.dim() != dims + 2:
        raise CaptureError(
            f"module {name!r}: expected inputs [N, C, *places] with {dims} dimensions of places, found shape {list(inputs.shape)}"
        )


def convolution(name: str, module: nn.Module) -> Convolution | TransposedConvolution | None:
    """Recognise a convolution; subclasses only where they keep its forward."""
    if isinstance(module, Plain) and type(module).forward in {kind.forward for kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d)}:
        return Convolution(name, module)
    transposed = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
    if isinstance(module, transposed) and type(module).forward in {kind.forward for kind in transposed}:
        return TransposedConvolution(name, module)
    return None
