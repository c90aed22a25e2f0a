"""Capture: the activations and output gradients of linear modules, example by example, with every weight frozen.

In comes a causal or any other ``nn.Module``, the names of its linear maps, and a function that runs it and returns one loss an
example. Out go, module by module while the backward pass runs, the two factors of every example's weight gradient
``G_n = sum_t g_nt a_nt^T``. No weight gradient is ever computed, and the graph begins at the first captured module.
This file knows nothing of text, curvature or storage.

Legend: N examples, T positions, I inputs (one more, a column of ones, where the module has a bias), O outputs.
The one canonical layout: ``activations_NTI``, ``output_gradients_NTO``, ``gradient_NOI``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tdasearch.errors import CaptureError

Consume = Callable[[str, Tensor, Tensor], None]
"""Called with a module's name, activations_NTI and output_gradients_NTO, once a module and pass."""


@dataclass(frozen=True, slots=True)
class LinearMap:
    """What capture needs to know of one module.

    Attributes:
        name: Its name in ``model.named_modules()``.
        in_dim: I, the column for the bias included.
        out_dim: O.
        has_bias: Whether the last of the I inputs is the constant 1.
    """

    name: str
    in_dim: int
    out_dim: int
    has_bias: bool

    @property
    def num_parameters(self) -> int:
        """Weights and biases together."""
        return self.in_dim * self.out_dim


def linear_map(name: str, module: nn.Module) -> LinearMap | None:
    """Describe ``module`` if its weight gradient is ``sum_t g_t a_t^T``, else return None.

    Accepted are ``nn.Linear`` (subclasses only where they keep its forward) and GPT-2's ``Conv1D``, whose weight lies transposed.

    Args:
        name: The module's name, for messages.
        module: Any module.

    Returns:
        Its description, or None if it is not such a map.
    """
    if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
        has_bias = module.bias is not None
        return LinearMap(name, module.in_features + has_bias, module.out_features, has_bias)
    if type(module).__name__ == "Conv1D" and hasattr(module, "nf"):  # transformers' own class: not imported, recognised
        weight = cast(Tensor, module.weight)
        return LinearMap(name, weight.shape[0] + 1, weight.shape[1], True)
    return None


class Capture:
    """Context in which a model is frozen and the chosen modules are watched; the model is handed back as it came.

    Args:
        model: The model. Its modes, ``requires_grad`` flags, hooks and the random state are restored on exit.
        names: Modules to capture, each a linear map that runs exactly once in a forward pass.

    Raises:
        CaptureError: A name is missing or is not a linear map.
    """

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        self.model = model
        self.maps: dict[str, LinearMap] = {}
        modules = dict(model.named_modules())
        for name in names:
            found = linear_map(name, modules[name]) if name in modules else None
            if found is None:
                what = type(modules[name]).__name__ if name in modules else "no module of that name"
                raise CaptureError(f"module {name!r}: expected a linear map, found {what}; choose other modules")
            self.maps[name] = found
        self._modules = {name: modules[name] for name in names}
        self._handles: list[RemovableHandle] = []
        self._pending: dict[str, Tensor] = {}
        self._received: set[str] = set()
        self._consume: Consume | None = None
        self._num_examples = 0
        self._last_input: tuple[Tensor, bool, Tensor] | None = None

    def __enter__(self) -> Capture:
        self._requires_grad = [(parameter, parameter.requires_grad) for parameter in self.model.parameters()]
        self._training = [(module, module.training) for module in self.model.modules()]
        self._rng = torch.get_rng_state()
        self._cuda_rng = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
        for parameter, _ in self._requires_grad:
            parameter.requires_grad_(False)
        self.model.eval()
        for name, module in self._modules.items():
            self._handles.append(module.register_forward_hook(self._forward_hook(name)))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._forget()
        for parameter, flag in self._requires_grad:
            parameter.requires_grad_(flag)
        for module, flag in self._training:
            module.training = flag
        torch.set_rng_state(self._rng)
        if self._cuda_rng is not None:
            torch.cuda.set_rng_state_all(self._cuda_rng)

    def backward(self, losses: Callable[[], Tensor], consume: Consume) -> Tensor:
        """Run the model once forward and once backward, and hand each module's factors to ``consume``.

        Args:
            losses: Runs the model on one batch and returns losses_N, one an example; example n's loss depends on example n only.
            consume: Receives the factors, last module first. Positions beyond an example's end have zero output gradients.

        Returns:
            losses_N, detached.

        Raises:
            CaptureError: A module did not run exactly once forward and once backward.
        """
        if not self._handles:
            raise CaptureError("expected the capture to be entered (with Capture(...) as capture), found it closed")
        self._forget()
        with torch.enable_grad():
            losses_N = losses()
            missing = [name for name in self._modules if name not in self._pending]
            if missing:
                raise CaptureError(
                    f"{len(missing)} of {len(self._modules)} modules never ran forward, the first is {missing[0]!r}; a model "
                    "under torch.compile hides its modules (pass the original), otherwise choose modules that this model uses"
                )
            self._consume, self._num_examples = consume, losses_N.shape[0]
            if losses_N.requires_grad:
                losses_N.sum().backward()
        missing = [name for name in self._modules if name not in self._received]
        self._forget()
        if missing:
            raise CaptureError(
                f"no gradient reached {len(missing)} of {len(self._modules)} modules, the first is {missing[0]!r}; the loss does "
                "not depend on it: choose other modules"
            )
        return losses_N.detach()

    def _forget(self) -> None:
        self._pending.clear()
        self._received = set()
        self._consume = None
        self._last_input = None

    def _forward_hook(self, name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            if not torch.is_grad_enabled():
                return
            if name in self._pending:
                raise CaptureError(f"module {name!r} ran twice in one forward pass; its uses cannot be told apart: leave it out")
            self._pending[name] = self._activations(inputs[0], self.maps[name].has_bias)
            if not output.requires_grad:
                output.requires_grad_(True)  # every weight is frozen: the graph begins at the first captured module
            output.register_hook(lambda gradient: self._receive(name, gradient))

        return hook

    def _activations(self, inputs: Tensor, has_bias: bool) -> Tensor:
        """Detach, append the ones of a bias, and give modules that read one tensor (q, k, v) the same object."""
        if self._last_input is not None and self._last_input[0] is inputs and self._last_input[1] == has_bias:
            return self._last_input[2]
        activations = inputs.detach()
        if has_bias:
            activations = torch.cat([activations, activations.new_ones(*activations.shape[:-1], 1)], dim=-1)
        self._last_input = (inputs, has_bias, activations)
        return activations

    def _receive(self, name: str, gradient: Tensor) -> None:
        activations = self._pending.pop(name, None)
        if activations is None or self._consume is None:
            raise CaptureError(f"module {name!r} received a second gradient in one backward pass; leave it out")
        self._received.add(name)
        gradient = gradient.detach()
        if activations.dim() != 3:  # some models flatten [N, T, I] to [N * T, I] around their linear maps
            activations = activations.reshape(self._num_examples, -1, activations.shape[-1])
            gradient = gradient.reshape(self._num_examples, -1, gradient.shape[-1])
        self._consume(name, activations, gradient)


def module_gradients(activations_NTI: Tensor, output_gradients_NTO: Tensor) -> Tensor:
    """Form every example's weight gradient from its factors.

    Args:
        activations_NTI: [N, T, I].
        output_gradients_NTO: [N, T, O].

    Returns:
        gradient_NOI [N, O, I], ``sum_t g_nt a_nt^T``.
    """
    return torch.bmm(output_gradients_NTO.transpose(1, 2), activations_NTI)
