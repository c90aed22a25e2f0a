"""Layers whose module is run again to know more of it: any module's parameters, by one small backward pass an example.

Slow, and right for whatever the module computes, as long as it computes each example by itself.

Legend: N examples, T positions, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

from tdasearch.errors import CaptureError
from tdasearch.gradients import Dense, ModuleGradient
from tdasearch.layers.layer import Layer, Part, recomputing


class Rerun:
    """Runs a module again on the tensors of an earlier run, with other parameters.

    Args:
        name: The module's name, for messages.
        module: The module.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        self._name = name
        self._module = module
        self._rest: tuple[list[Any], pytree.TreeSpec] | None = None

    def keep(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor, ...]:
        """Take the tensors out of a call's arguments; all else must be the same in each call.

        Args:
            args: Positional arguments.
            kwargs: Keyword arguments.

        Returns:
            The tensors.

        Raises:
            CaptureError: Another argument than in an earlier run.
        """
        leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
        rest = [None if isinstance(leaf, Tensor) else (leaf,) for leaf in leaves]
        if self._rest is None:
            self._rest = (rest, spec)
        elif self._rest != (rest, spec):
            raise CaptureError(f"module {self._name!r}: expected the same arguments but for tensors in each run; leave it out")
        return tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))

    def __call__(self, parameters: dict[str, Tensor], tensors: tuple[Tensor, ...]) -> Tensor:
        """Run.

        Args:
            parameters: To be used instead of the module's own, by name.
            tensors: From ``keep``.

        Returns:
            The output.
        """
        assert self._rest is not None
        rest, spec = self._rest
        given = iter(tensors)
        args, kwargs = pytree.tree_unflatten([next(given) if leaf is None else leaf[0] for leaf in rest], spec)
        with recomputing():
            output: Tensor = functional_call(self._module, parameters, args, kwargs)
        return output


class Recomputed(Layer):
    """Any parameters of a module: each has a part, of which the first dimension is O and the others are I.

    Args:
        name: The module's name.
        module: The module.
        parameters: Those that are captured, by their names in the module.
    """

    def __init__(self, name: str, module: nn.Module, parameters: dict[str, nn.Parameter]) -> None:
        super().__init__(name, module)
        self._parameters = parameters
        self._shapes = {
            f"{name}.{key}": (parameter.shape[0], parameter[0].numel()) if parameter.dim() else (1, 1)
            for key, parameter in parameters.items()
        }
        self._rerun = Rerun(name, module)
        self.parts = tuple(Part(part, *shape, factored=False) for part, shape in self._shapes.items())

    def parameters(self) -> dict[str, nn.Parameter]:
        """The captured parameters."""
        return self._parameters

    def keep(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor, ...]:
        """Keep every tensor of the call."""
        for name, module in self.module.named_modules():
            if module.training and isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
                raise CaptureError(
                    f"module {self.name!r}: expected no dropout inside, found {name or 'the module'} dropping, so its run "
                    "cannot be repeated; set its p to 0 while capturing, or leave the module out"
                )
        return self._rerun.keep(args, kwargs)

    def activations(self, kept: tuple[Tensor, ...], num_examples: int) -> Tensor:
        """Nothing is made of the inputs."""
        return kept[0]

    def gradients(
        self,
        kept: tuple[Tensor, ...],
        activations: Tensor,
        output_gradient: Tensor,
        num_examples: int,
        is_token_NT: Tensor | None,
    ) -> dict[str, ModuleGradient]:
        """Run each example again, and back."""
        if output_gradient.shape[0] % num_examples:
            raise CaptureError(
                f"module {self.name!r}: expected outputs for each of {num_examples} examples, found {output_gradient.shape[0]} "
                "rows in all; leave it out"
            )
        found: dict[str, list[Tensor]] = {part: [] for part in self._shapes}
        for n in range(num_examples):
            one = tuple(_rows(tensor, n, num_examples, output_gradient.shape[0]) for tensor in kept)
            current = {key: self.module.get_parameter(key) for key in self._parameters}  # FSDP2 swaps them
            leaves = {key: parameter.detach().requires_grad_() for key, parameter in current.items()}
            with torch.enable_grad():
                output = self._rerun({key: leaf for key, leaf in leaves.items()}, one)
                gradient = _rows(output_gradient, n, num_examples, output_gradient.shape[0])
                made = torch.autograd.grad(output, list(leaves.values()), gradient.to(output.dtype), allow_unused=True)
            for (part, shape), leaf, value in zip(self._shapes.items(), leaves.values(), made, strict=True):
                found[part].append((torch.zeros_like(leaf) if value is None else value).reshape(shape))
        return {part: Dense(torch.stack(rows)) for part, rows in found.items()}

    def parameter_gradients(self, part_name: str, gradient_NOI: Tensor) -> dict[str, Tensor]:
        """Give the parameter its shape back."""
        key = part_name[len(self.name) + 1 :]
        return {key: gradient_NOI.reshape(-1, *self._parameters[key].shape)}


def _rows(tensor: Tensor, n: int, num_examples: int, num_rows: int) -> Tensor:
    """Example n's rows of a tensor that has some for each; a tensor that all share as it is."""
    if tensor.dim() == 0 or tensor.shape[0] != num_rows:
        return tensor
    size = num_rows // num_examples
    return tensor[n * size : (n + 1) * size]


def other(name: str, module: nn.Module) -> Recomputed | None:
    """Take any module that has parameters of its own and no modules inside."""
    parameters = dict(module.named_parameters(recurse=False))
    if not parameters or next(module.children(), None) is not None:
        return None
    return Recomputed(name, module, parameters)
