"""The output head and the cross entropy in one: no logits of a whole batch are ever formed.

A vocabulary's logits are the widest tensor of a pass. Where the head is a frozen linear map, its losses and the gradient of its
input are made together, some rows at a time, so that the logits stay in the processor's cache and need no memory of a batch.

Legend: K rows (target positions), H width of the head's input, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

_CHUNK_BYTES = {"cpu": 2 << 20}  # logits formed at once: what a core's cache holds
_ACCELERATOR_CHUNK_BYTES = 256 << 20
_MIN_ROWS = 32  # fewer would starve the matrix products

Labels = Callable[[Tensor, slice], Tensor]
"""From the logits [k, V] of a slice of the rows to their labels [k] int64."""


class _HeadLoss(torch.autograd.Function):
    """-log p(label) a row; the gradient of the input is made in the forward pass, while the logits are at hand."""

    @staticmethod
    def forward(ctx: Any, hidden_KH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, labels: Labels, wanted: bool) -> Tensor:
        wide = torch.promote_types(hidden_KH.dtype, torch.float32)
        losses_K = hidden_KH.new_empty(hidden_KH.shape[0], dtype=wide)
        gradients_KH = torch.empty_like(hidden_KH) if wanted else None
        limit = _CHUNK_BYTES.get(hidden_KH.device.type, _ACCELERATOR_CHUNK_BYTES)
        size = max(_MIN_ROWS, limit // (weight_VH.shape[0] * wide.itemsize))
        for start in range(0, hidden_KH.shape[0], size):
            rows = slice(start, start + size)
            logits_kV = nn.functional.linear(hidden_KH[rows], weight_VH, bias_V).to(wide)
            labels_k1 = labels(logits_kV, rows)[:, None]
            logsumexp_k1 = logits_kV.logsumexp(1, keepdim=True)
            losses_K[rows] = (logsumexp_k1 - logits_kV.gather(1, labels_k1)).squeeze(1)
            if gradients_KH is not None:
                residuals_kV = logits_kV.sub_(logsumexp_k1).exp_()  # p(v) - [v is the label]
                residuals_kV.scatter_add_(1, labels_k1, residuals_kV.new_tensor(-1.0).expand_as(labels_k1))
                gradients_KH[rows] = residuals_kV.to(weight_VH.dtype) @ weight_VH
        ctx.save_for_backward(gradients_KH)
        return losses_K

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradients_KH,) = ctx.saved_tensors
        return gradients_KH * gradients[0][:, None].to(gradients_KH.dtype), None, None, None, None


def head_losses(head: nn.Linear, hidden_KH: Tensor, labels: Labels) -> Tensor:
    """Cross entropy of a frozen head's logits.

    Args:
        head: The head; its weights get no gradient.
        hidden_KH: [K, H] its inputs.
        labels: Gives the rows' labels.

    Returns:
        losses_K [K], nats, float32 or wider; differentiable in hidden_KH once.
    """
    wanted = torch.is_grad_enabled() and hidden_KH.requires_grad
    losses_K: Tensor = _HeadLoss.apply(hidden_KH, head.weight, head.bias, labels, wanted)  # type: ignore[no-untyped-call]
    return losses_K


def is_frozen(head: nn.Linear) -> bool:
    """Whether nothing looks at the head's logits: no gradient of its weights, and no hook (as of a capture) on it."""
    frozen = not torch.is_grad_enabled() or not any(parameter.requires_grad for parameter in head.parameters())
    return frozen and not (head._forward_hooks or head._forward_pre_hooks or head._backward_hooks)


def input_of(head: nn.Linear, run: Callable[[], object]) -> Tensor:
    """Run a model up to its head.

    Args:
        head: The head. It is given no position, so that what follows costs nothing.
        run: Runs the model.

    Returns:
        hidden_NTH, the head's input.
    """
    found: list[Tensor] = []

    def take(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        found.append(args[0])
        return (args[0][:, :0],)

    handle = head.register_forward_pre_hook(take)
    try:
        run()
    finally:
        handle.remove()
    (hidden_NTH,) = found
    return hidden_NTH


def plain_head(model: nn.Module, run: Callable[[], Tensor]) -> nn.Linear | None:
    """Find the head of a model whose logits are what the head puts out: not scaled, capped, or anything else.

    Args:
        model: A language model of transformers.
        run: Runs it on a short input, returns its logits.

    Returns:
        The head; None where there is no such one.
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward or "forward" in vars(head):
        return None
    seen: list[tuple[Tensor, Tensor]] = []
    handle = head.register_forward_hook(lambda module, args, output: seen.append((args[0], output)))
    try:
        with torch.no_grad():
            logits_NTV = run()
    finally:
        handle.remove()
    if len(seen) != 1 or seen[0][0].dim() != 3 or not torch.equal(seen[0][1], logits_NTV):
        return None
    try:
        with torch.no_grad():
            hidden_NTH = input_of(head, run)
    except (RuntimeError, IndexError, ValueError):  # a model that goes on with the logits needs them
        return None
    return head if hidden_NTH.shape == seen[0][0].shape else None
