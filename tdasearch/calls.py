"""What a model was called with and what it returned, by name, and the gradient of what it returned."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from tdasearch.errors import CaptureError

Inputs = Mapping[str, Any]
"""What the model was called with, by the names of its ``forward``'s parameters."""
_EXAMPLES = ("input_ids", "inputs_embeds", "pixel_values", "input_features", "input_values")  # whose first dimension is N


def named_inputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Name what a model was called with after its ``forward``'s parameters."""
    signature = inspect.signature(module.forward)
    named: dict[str, Any] = {}
    for name, value in signature.bind_partial(*args, **kwargs).arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            named.update(value)
        elif kind is inspect.Parameter.VAR_POSITIONAL:
            named.update({f"{name}{position}": one for position, one in enumerate(value)})
        else:
            named[name] = value
    return named


def count_examples(inputs: Inputs) -> int:
    """Read N off the first dimension of the token ids, images or the like, or of the first tensor.

    Args:
        inputs: What the model was called with.

    Returns:
        N.

    Raises:
        CaptureError: There is no tensor.
    """
    named = [inputs[name] for name in _EXAMPLES if isinstance(inputs.get(name), Tensor)]
    tensors = named + [value for value in inputs.values() if isinstance(value, Tensor) and value.dim() > 0]
    if not tensors:
        raise CaptureError("expected the model to be called with a tensor whose first dimension counts the examples, found none")
    return int(tensors[0].shape[0])


def named_outputs(output: Any) -> dict[str, Tensor]:
    """Name the tensors that a model returned; one alone is taken for its logits."""
    if isinstance(output, Tensor):
        return {"logits": output}
    items = output.items() if isinstance(output, Mapping) else ((f"output {n}", value) for n, value in enumerate(output))
    return {name: value for name, value in items if isinstance(value, Tensor)}


def first_matrix(named: Mapping[str, Tensor]) -> str | None:
    """Return the name of the first output of two dimensions or more: the logits of a model that names none."""
    return next((name for name, tensor in named.items() if tensor.dim() >= 2), None)


def receive_gradient(tensor: Tensor, receive: Callable[[Tensor], None]) -> None:
    """Receive the gradient of an output as it was before casts: the loss may have been made of that (accelerate casts).

    Args:
        tensor: The output.
        receive: Called with the gradient in the backward pass.
    """
    node, output_number = tensor.grad_fn, tensor.output_nr
    while node is not None and node.name().startswith("ToCopyBackward") and node.next_functions[0][0] is not None:
        node, output_number = node.next_functions[0]
    if node is None or node is tensor.grad_fn:
        tensor.register_hook(receive)
        return

    def before(gradients: tuple[Tensor | None, ...]) -> None:
        gradient = gradients[output_number]
        if gradient is not None:
            receive(gradient)

    node.register_prehook(before)
