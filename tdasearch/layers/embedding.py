"""Tables of vectors: ``nn.Embedding``, and ``nn.EmbeddingBag`` that sums or averages.

Legend: N examples, T positions, O width of a vector, V rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from tdasearch.errors import CaptureError
from tdasearch.gradients import Lookup, ModuleGradient
from tdasearch.layers.layer import Layer, Part, Watch, by_example, mask_for
from tdasearch.layers.recomputed import Rerun


class Embedding(Layer):
    """A table whose row v is read at the positions of token v; gradient_NOI is [N, O, V]."""

    module: nn.Embedding | nn.EmbeddingBag

    def __init__(self, name: str, module: nn.Embedding | nn.EmbeddingBag) -> None:
        super().__init__(name, module)
        self.num_rows, width = module.weight.shape
        self.parts = (Part(name, width, self.num_rows, factored=False),)

    def attach(self, watch: Watch) -> list[AbstractContextManager[Any]]:
        """Refuse what changes the gradient behind the reader's back, then watch."""
        wrong = [option for option in ("scale_grad_by_freq", "max_norm") if getattr(self.module, option)]
        if isinstance(self.module, nn.EmbeddingBag) and self.module.mode == "max":
            wrong.append("mode='max'")
        if wrong:
            raise CaptureError(
                f"module {self.name!r}: expected a table whose gradient is a sum over its reads, found {' and '.join(wrong)}; "
                "leave it out"
            )
        return super().attach(watch)

    def keep(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor, ...]:
        """Keep the indices; of a bag its weights too."""
        given = dict(zip(("input", "offsets", "per_sample_weights"), args, strict=False)) | dict(kwargs)
        indices, weights = given["input"], given.get("per_sample_weights")
        if given.get("offsets") is not None or (isinstance(self.module, nn.EmbeddingBag) and indices.dim() != 2):
            raise CaptureError(
                f"module {self.name!r}: expected bags as rows of one tensor [N, T], found offsets: pad them with padding_idx, "
                "or leave it out"
            )
        return (indices,) if weights is None else (indices, weights)

    def activations(self, kept: tuple[Tensor, ...], num_examples: int) -> Tensor:
        """Return the indices as they are."""
        return kept[0]

    def gradients(
        self,
        kept: tuple[Tensor, ...],
        activations: Tensor,
        output_gradient: Tensor,
        num_examples: int,
        is_token_NT: Tensor | None,
    ) -> dict[str, ModuleGradient]:
        """Give each read its output gradient; the row at ``padding_idx`` gets none."""
        padding = self.module.padding_idx
        if isinstance(self.module, nn.EmbeddingBag):
            output_gradient = self._spread(kept, output_gradient)
        gradients_NTO = by_example(self.name, output_gradient, num_examples)
        indices_NT = activations.reshape(gradients_NTO.shape[:2])
        if padding is not None:
            gradients_NTO = gradients_NTO * (indices_NT != padding)[:, :, None]
        return {self.name: Lookup(indices_NT, gradients_NTO, self.num_rows, mask_for(gradients_NTO, is_token_NT))}

    def _spread(self, kept: tuple[Tensor, ...], gradients_BO: Tensor) -> Tensor:
        """From bags to the reads in them, [B, T, O]."""
        indices_BT = kept[0]
        counted_BT = torch.ones_like(indices_BT, dtype=gradients_BO.dtype)
        if self.module.padding_idx is not None:
            counted_BT = (indices_BT != self.module.padding_idx).to(gradients_BO.dtype)
        if self.module.mode == "mean":
            counted_BT = counted_BT / counted_BT.sum(1, keepdim=True).clamp_min(1.0)
        if len(kept) == 2:
            counted_BT = counted_BT * kept[1]
        return counted_BT[:, :, None] * gradients_BO[:, None, :]

    def parameter_gradients(self, part_name: str, gradient_NOI: Tensor) -> dict[str, Tensor]:
        """A table's rows are vectors: transpose."""
        return {"weight": gradient_NOI.transpose(1, 2)}


class ScaledEmbedding(Embedding):
    """A table whose vectors are multiplied by a constant (Gemma): found by reading a table of ones."""

    def __init__(self, name: str, module: nn.Embedding) -> None:
        super().__init__(name, module)
        self._rerun = Rerun(name, module)

    def keep(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor, ...]:
        """Keep the indices and their vectors' scale."""
        indices = super().keep(args, kwargs)
        tensors = self._rerun.keep(args, kwargs)
        with torch.no_grad():
            return (*indices, self._rerun({"weight": torch.ones_like(self.module.weight)}, tensors))

    def gradients(
        self,
        kept: tuple[Tensor, ...],
        activations: Tensor,
        output_gradient: Tensor,
        num_examples: int,
        is_token_NT: Tensor | None,
    ) -> dict[str, ModuleGradient]:
        """As of the table, scaled."""
        return super().gradients(kept, activations, output_gradient * kept[1], num_examples, is_token_NT)


def embedding(name: str, module: nn.Module) -> Embedding | None:
    """Recognise a table; subclasses only where they keep its forward."""
    plain = (nn.Embedding, nn.EmbeddingBag)
    if isinstance(module, plain) and type(module).forward in {kind.forward for kind in plain}:
        return Embedding(name, module)
    if isinstance(module, nn.Embedding) and hasattr(module, "embed_scale"):  # transformers' classes call it so
        return ScaledEmbedding(name, module)
    return None
