"""What capture needs to know of a kind of layer. One small class a kind; a new kind is a new class and an entry in the table.

Legend: N examples, T positions, I inputs (one more where there is a bias), O outputs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tdasearch.errors import CaptureError
from tdasearch.gradients import ModuleGradient

_recomputing: ContextVar[bool] = ContextVar("recomputing", default=False)


@contextmanager
def recomputing() -> Iterator[None]:
    """While a layer runs its module again for itself: nobody watches these runs."""
    token = _recomputing.set(True)
    try:
        yield
    finally:
        _recomputing.reset(token)


def is_watched() -> bool:
    """Whether a module's run now is one that will be differentiated by the pass that is captured."""
    return torch.is_grad_enabled() and not _recomputing.get()


Watch = Callable[["Layer", tuple[Tensor, ...], Tensor], Tensor]
"""Called in the forward pass with a layer, the tensors to keep and the output; returns the output to go on with."""


@dataclass(frozen=True, slots=True)
class Part:
    """One matrix of gradients. Most layers have one part; an expert layer has one an expert and map.

    Attributes:
        name: The module's name, with ``.`` and more where it has several parts.
        out_dim: O of gradient_NOI; of all groups together.
        in_dim: I of gradient_NOI, the bias's column included.
        factored: Whether gradients come as ``Outer``: covariances of activations and output gradients describe its curvature.
            Otherwise its Fisher is taken as diagonal.
    """

    name: str
    out_dim: int
    in_dim: int
    factored: bool = True

    @property
    def num_parameters(self) -> int:
        """Weights and biases together."""
        return self.out_dim * self.in_dim


class Layer(ABC):
    """A module whose example gradients can be captured.

    Args:
        name: Its name in ``model.named_modules()``.
        module: The module.
    """

    parts: tuple[Part, ...]
    """Its matrices of gradients."""

    reads: Hashable = None
    """Layers that read one tensor and have equal ``reads`` have equal activations: they are made once."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name = name
        self.module = module

    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that the parts cover, by their names in the module."""
        return dict(self.module.named_parameters(recurse=False))

    def attach(self, watch: Watch) -> list[AbstractContextManager[Any]]:
        """Begin to watch the module's runs.

        Args:
            watch: To be called in each run that is differentiated.

        Returns:
            Contexts: once entered, their exit undoes it.
        """

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor | None:
            if not is_watched():
                return None
            if not isinstance(output, Tensor):
                what = f"expected one tensor out of a {type(module).__name__}, found a {type(output).__name__}"
                raise CaptureError(f"module {self.name!r}: {what}; leave it out")
            return watch(self, self.keep(args, kwargs), output)

        return [self.module.register_forward_hook(hook, with_kwargs=True)]

    def keep(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor, ...]:
        """Which tensors of a run's inputs are needed to make its activations; the first argument by default."""
        return (args[0] if args else next(iter(kwargs.values())),)

    @abstractmethod
    def activations(self, kept: tuple[Tensor, ...], num_examples: int) -> Tensor:
        """Make the activations from the tensors that were kept.

        Args:
            kept: From ``keep``, detached.
            num_examples: N.

        Returns:
            What ``gradients`` takes.
        """

    @abstractmethod
    def gradients(
        self,
        kept: tuple[Tensor, ...],
        activations: Tensor,
        output_gradient: Tensor,
        num_examples: int,
        is_token_NT: Tensor | None,
    ) -> dict[str, ModuleGradient]:
        """Make the example gradients of one run.

        Args:
            kept: From ``keep``, detached.
            activations: From ``activations``.
            output_gradient: Of the module's output.
            num_examples: N.
            is_token_NT: [N, T] False at padding, where the caller knows.

        Returns:
            The gradient of each part.
        """

    @abstractmethod
    def parameter_gradients(self, part_name: str, gradient_NOI: Tensor) -> dict[str, Tensor]:
        """Bring a part's gradients into the shape of its parameters.

        Args:
            part_name: The part.
            gradient_NOI: [N, O, I].

        Returns:
            [N, *shape] for each parameter, by its name in the module; of a slice of a parameter by ``name[index]``.
        """


def by_example(name: str, tensor: Tensor, num_examples: int) -> Tensor:
    """Bring [N, ..., X] or a flattened [N * T, X] to [N, T, X].

    Args:
        name: The module, for messages.
        tensor: The tensor.
        num_examples: N.

    Returns:
        [N, T, X].

    Raises:
        CaptureError: Its rows are no multiple of N.
    """
    if tensor.dim() == 3 and tensor.shape[0] == num_examples:
        return tensor
    if tensor.dim() >= 3 and tensor.shape[0] == 1:
        raise CaptureError(
            f"module {name!r}: expected a row of outputs for each of {num_examples} examples, found one that all share, as of "
            "positions [1, T]: pass position_ids [N, T], run examples one by one, or leave it out"
        )
    rows = tensor.numel() // max(tensor.shape[-1], 1)
    if rows % num_examples:
        raise CaptureError(
            f"module {name!r}: expected the same number of positions for each of {num_examples} examples, found {rows} "
            "positions in all (as in routed experts); its examples cannot be told apart: run examples one by one, or leave it out"
        )
    return tensor.reshape(num_examples, -1, tensor.shape[-1])


def mask_for(tensor_NTX: Tensor, is_token_NT: Tensor | None) -> Tensor | None:
    """Return the mask where it belongs to these positions, None where positions are not tokens."""
    return is_token_NT if is_token_NT is not None and is_token_NT.shape == tensor_NTX.shape[:2] else None


def with_ones(inputs: Tensor) -> Tensor:
    """Append the constant input of a bias as the last column."""
    return torch.cat([inputs, inputs.new_ones(*inputs.shape[:-1], 1)], dim=-1)
