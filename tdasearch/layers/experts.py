"""Mixtures of experts as transformers 5 holds them: all experts' matrices in one parameter [E, O, I] a map.

No module runs for one expert, so while such a module is watched it computes its experts one after another, on the tokens that
were routed to each. Every expert has a part a map, ``<module>.gate_up_proj.3``; one that saw no token has gradient 0.

Legend: E experts, N examples, S routed (token, expert) pairs, T pairs of one expert in an example, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tdasearch.errors import CaptureError
from tdasearch.gradients import ModuleGradient, Outer
from tdasearch.layers.layer import Layer, Part, Watch, is_watched, with_ones


class ExpertMap(Layer):
    """One map of every expert.

    Args:
        name: The module's name and the parameter's.
        module: The experts.
        parameter: The parameter's name in the module.
    """

    def __init__(self, name: str, module: Any, parameter: str) -> None:
        super().__init__(name, module)
        self.parameter = parameter
        self.transposed: bool = module.is_transposed
        num_experts, out_dim, in_dim = self.weight.shape
        if self.transposed:
            out_dim, in_dim = in_dim, out_dim
        self.parts = tuple(Part(f"{name}.{e}", out_dim, in_dim + (self.bias is not None)) for e in range(num_experts))

    @property
    def weight(self) -> nn.Parameter:
        """Of all experts; asked for anew each time, as FSDP2 swaps it."""
        found: nn.Parameter = getattr(self.module, self.parameter)
        return found

    @property
    def bias(self) -> nn.Parameter | None:
        """Of all experts."""
        found: nn.Parameter | None = getattr(self.module, f"{self.parameter}_bias") if self.module.has_bias else None
        return found

    def parameters(self) -> dict[str, nn.Parameter]:
        """The weights of all experts, and their biases."""
        bias = {} if self.bias is None else {f"{self.parameter}_bias": self.bias}
        return {self.parameter: self.weight, **bias}

    def run(self, inputs_SI: Tensor, counts: list[int]) -> Tensor:
        """Apply each expert to its rows.

        Args:
            inputs_SI: Sorted by expert.
            counts: Rows of each expert.

        Returns:
            [S, O].
        """
        outputs = []
        for e, rows in enumerate(inputs_SI.split(counts)):
            weight_OI = self.weight[e].T if self.transposed else self.weight[e]
            outputs.append(nn.functional.linear(rows, weight_OI, None if self.bias is None else self.bias[e]))
        return torch.cat(outputs)

    def activations(self, kept: tuple[Tensor, ...], num_examples: int) -> Tensor:
        """Return the inputs [S, I], with the bias's column of ones."""
        return kept[0] if self.bias is None else with_ones(kept[0])

    def gradients(
        self,
        kept: tuple[Tensor, ...],
        activations: Tensor,
        output_gradient: Tensor,
        num_examples: int,
        is_token_NT: Tensor | None,
    ) -> dict[str, ModuleGradient]:
        """Sort each expert's rows into the examples that they came from."""
        _, tokens_S, counts_E, num_tokens = kept
        if int(num_tokens) % num_examples:
            raise CaptureError(
                f"module {self.name!r}: expected the same number of positions for each of {num_examples} examples, found "
                f"{int(num_tokens)} in all; run examples one by one, or leave it out"
            )
        positions = int(num_tokens) // num_examples
        counts, found = counts_E.tolist(), {}
        rows = zip(activations.split(counts), output_gradient.split(counts), tokens_S.split(counts), strict=True)
        for part, (activations_SI, gradients_SO, tokens) in zip(self.parts, rows, strict=True):
            examples = tokens // positions  # ascending: the sort by expert was stable
            per_example = torch.bincount(examples, minlength=num_examples)
            first = per_example.cumsum(0) - per_example
            place = torch.arange(len(tokens), device=tokens.device) - first[examples]
            longest = int(per_example.max()) if len(tokens) else 0
            inputs_NTI = activations_SI.new_zeros(num_examples, longest, activations_SI.shape[1])
            gradients_NTO = gradients_SO.new_zeros(num_examples, longest, gradients_SO.shape[1])
            is_position_NT = torch.zeros(num_examples, longest, dtype=torch.bool, device=tokens.device)
            inputs_NTI[examples, place], gradients_NTO[examples, place] = activations_SI, gradients_SO
            known = is_token_NT is not None and is_token_NT.numel() == int(num_tokens)
            is_position_NT[examples, place] = is_token_NT.reshape(-1)[tokens] if known else (gradients_SO != 0).any(1)  # type: ignore[union-attr]
            found[part.name] = Outer(inputs_NTI, gradients_NTO, is_position_NT)
        return dict(found)

    def parameter_gradients(self, part_name: str, gradient_NOI: Tensor) -> dict[str, Tensor]:
        """Return the expert's slice of the weights, ``gate_up_proj[3]``, and of the biases."""
        expert = part_name.rsplit(".", 1)[1]
        weight = gradient_NOI if self.bias is None else gradient_NOI[:, :, :-1]
        bias = {} if self.bias is None else {f"{self.parameter}_bias[{expert}]": gradient_NOI[:, :, -1]}
        return {f"{self.parameter}[{expert}]": weight.transpose(1, 2) if self.transposed else weight, **bias}


class Experts(Layer):
    """The experts of a block: two maps, with the module's own activation and gate between them."""

    def __init__(self, name: str, module: Any) -> None:
        super().__init__(name, module)
        first = "gate_up_proj" if module.has_gate else "up_proj"
        self.maps = (ExpertMap(f"{name}.{first}", module, first), ExpertMap(f"{name}.down_proj", module, "down_proj"))
        self.parts = self.maps[0].parts + self.maps[1].parts

    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters of both maps."""
        return self.maps[0].parameters() | self.maps[1].parameters()

    def attach(self, watch: Watch) -> list[AbstractContextManager[Any]]:
        """Let the module compute expert by expert while it is watched."""
        module: Any = self.module
        if getattr(module, "_is_expert_parallel", False):
            raise CaptureError(
                f"module {self.name!r}: expected all experts on one device, found them spread (expert parallel): load the model "
                "without it, or leave the module out"
            )

        def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            if not is_watched():
                original: Tensor = type(module).forward(module, hidden_states, top_k_index, top_k_weights)
                return original
            return self._run(watch, hidden_states, top_k_index, top_k_weights)

        @contextmanager
        def replaced() -> Iterator[None]:
            module.forward = forward
            try:
                yield
            finally:
                del module.forward

        return [replaced()]

    def _run(self, watch: Watch, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        module: Any = self.module
        num_choices = top_k_index.shape[-1]
        experts_S, order_S = top_k_index.reshape(-1).sort(stable=True)
        tokens_S = order_S // num_choices
        counts_E = torch.bincount(experts_S, minlength=module.num_experts)
        counts, num_tokens = counts_E.tolist(), torch.tensor(hidden.shape[0])
        first, second = self.maps

        def applied(layer: ExpertMap, inputs_SI: Tensor) -> Tensor:
            return watch(layer, (inputs_SI, tokens_S, counts_E, num_tokens), layer.run(inputs_SI, counts))

        outputs = applied(first, hidden[tokens_S])
        outputs = applied(second, module._apply_gate(outputs) if module.has_gate else module.act_fn(outputs))
        if module.has_post_expert_norm:
            outputs = module.post_expert_norm(outputs)
        weighted = outputs * top_k_weights.reshape(-1)[order_S][:, None]
        summed = torch.empty_like(weighted).index_copy(0, order_S, weighted)  # back into the order of the tokens
        return summed.view(hidden.shape[0], num_choices, -1).sum(1).to(hidden.dtype)

    def activations(self, kept: tuple[Tensor, ...], num_examples: int) -> Tensor:
        """Its maps have activations; it has none itself."""
        raise NotImplementedError

    def gradients(
        self,
        kept: tuple[Tensor, ...],
        activations: Tensor,
        output_gradient: Tensor,
        num_examples: int,
        is_token_NT: Tensor | None,
    ) -> dict[str, ModuleGradient]:
        """Its maps have gradients; it has none itself."""
        raise NotImplementedError

    def parameter_gradients(self, part_name: str, gradient_NOI: Tensor) -> dict[str, Tensor]:
        """As of the map that the part belongs to."""
        mine = self.maps[0] if part_name.startswith(self.maps[0].name + ".") else self.maps[1]
        return mine.parameter_gradients(part_name, gradient_NOI)


_CONTRACT = ("_apply_gate", "has_gate", "has_bias", "has_post_expert_norm", "is_transposed", "num_experts", "down_proj")


def experts(name: str, module: nn.Module) -> Experts | None:
    """Recognise experts by what transformers' ``use_experts_implementation`` promises of a class."""
    if all(hasattr(module, attribute) for attribute in _CONTRACT) and getattr(module.down_proj, "ndim", 0) == 3:
        return Experts(name, module)
    return None
