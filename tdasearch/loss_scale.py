"""Which multiple of an example's summed loss a training loop differentiated, read off the gradient of its logits.

Training loops average: over tokens, over the batch, over accumulation steps; an fp16 loop multiplies by its scaler. All of it
ends in one factor s an example. For a cross entropy summed over target positions the gradient of the logits z of a position is
softmax(z) - onehot(label), so a loop's gradient is g = s (softmax(z) - onehot(label)): the label is where g has its own sign, s
is the quotient, and whatever is left over shows that the loss was another one.

Legend: N examples, R positions of all examples, V vocabulary or classes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tdasearch.errors import CaptureError

_TOLERANCE = {torch.float16: 2e-2, torch.bfloat16: 5e-2}  # rounding of the logits' gradient, and of a softmax in that type
_WIDE_TOLERANCE = 1e-4
_SMALLEST_HALF = 6e-8  # below it fp16 is zero
_CHUNK_BYTES = 64 << 20  # of softmax made at once
_NO_CROSS_ENTROPY = (
    "expected the training loss to be a multiple of the summed cross entropy of each example (mean over tokens, over the "
    "batch or over steps, a scaler's factor), found that {}; if the loss is another one "
    "(label smoothing, weighted tokens, an auxiliary term), give loss_scale: the number, or a function of the model's inputs, "
    "that the loss of an example was multiplied by "
    "(loss_scale=1.0 takes gradients as they are)"
)


def scale_of_logits(logits: Tensor, gradient: Tensor, example_R: Tensor, num_examples: int) -> Tensor:
    """Measure each example's factor from the gradient of its logits.

    Args:
        logits: [..., V], R positions in all.
        gradient: Of the logits, all finite.
        example_R: [R] int64, the example of each position; -1 at padding.
        num_examples: N.

    Returns:
        scale_N float64. 1 for an example without a target, whose gradients are zero.

    Raises:
        CaptureError: The gradient is no multiple of softmax - onehot, or not the same multiple at all positions of an example;
            or a position that belongs to no example has one.
    """
    logits_RV, gradients_RV = logits.reshape(-1, logits.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
    rows_K = (gradients_RV != 0).any(1).nonzero()[:, 0]
    if bool((example_R[rows_K] < 0).any()):
        raise CaptureError(
            "expected no loss at positions that belong to no example (padding of packed rows), found one; mend segments"
        )
    wide = torch.promote_types(logits.dtype, torch.float32)
    size = max(1, _CHUNK_BYTES // (logits_RV.shape[1] * wide.itemsize))
    measured = [_measure(logits_RV[rows].to(wide), gradients_RV[rows].to(wide)) for rows in rows_K.split(size)]
    scale_K, weight_K, rest_K, length_K = torch.cat(measured, dim=1).double()
    scale_N = _pooled(scale_K, weight_K, example_R[rows_K], num_examples)
    expected_K = scale_N[example_R[rows_K]]
    misfit_K = (rest_K.square() + weight_K * (scale_K - expected_K).square()).sqrt()
    underflow = _SMALLEST_HALF * logits_RV.shape[1] ** 0.5 if gradient.dtype == torch.float16 else 0.0
    tolerance = _TOLERANCE.get(gradient.dtype, _WIDE_TOLERANCE)
    allowed_K = tolerance * length_K + 1e-5 * expected_K.abs() + underflow  # the second: rounding of the softmax itself
    if bool((misfit_K > allowed_K).any()):
        worst = int((misfit_K - allowed_K).argmax())
        off = float(misfit_K[worst] / length_K[worst])
        raise CaptureError(
            _NO_CROSS_ENTROPY.format(
                f"the gradient of position {int(rows_K[worst])}'s logits is {off:.2%} off from "
                f"{float(expected_K[worst]):.6g} * (softmax(logits) - onehot(label))"
            )
        )
    return scale_N


def scale_of_log_probabilities(gradient: Tensor, example_R: Tensor, num_examples: int) -> Tensor:
    """Measure each example's factor from the gradient of its targets' log-probabilities.

    Args:
        gradient: [...] of log p(token), one a position, R in all; zero where there is no target; all finite.
        example_R: [R] int64, the example of each position; -1 at padding.
        num_examples: N.

    Returns:
        scale_N float64. 1 for an example without a target.

    Raises:
        CaptureError: Positions of one example have different factors.
    """
    scale_R = -gradient.reshape(-1).double()
    rows_K = ((scale_R != 0) & (example_R >= 0)).nonzero()[:, 0]  # those of ignored labels may have a gradient, without effect
    scale_K = scale_R[rows_K]
    scale_N = _pooled(scale_K, torch.ones_like(scale_K), example_R[rows_K], num_examples)
    expected_K = scale_N[example_R[rows_K]]
    tolerance = _TOLERANCE.get(gradient.dtype, _WIDE_TOLERANCE)
    if bool(((scale_K - expected_K).abs() > tolerance * expected_K.abs()).any()):
        low, high = float(scale_K.min()), float(scale_K.max())
        raise CaptureError(_NO_CROSS_ENTROPY.format(f"tokens are weighted differently, from {low:.6g} to {high:.6g}"))
    return scale_N


def _measure(logits_KV: Tensor, gradients_KV: Tensor) -> Tensor:
    """Fit g = s r with r = softmax - onehot: s, r.r, the length of what is left over, and that of g, [4, K]."""
    few_negative_K = (gradients_KV < 0).sum(1) <= (gradients_KV > 0).sum(1)  # where s > 0 only the label's entry is negative
    label_K = torch.where(few_negative_K, gradients_KV.argmin(1), gradients_KV.argmax(1))
    residuals_KV = logits_KV.softmax(1)
    residuals_KV.scatter_add_(1, label_K[:, None], residuals_KV.new_tensor(-1.0).expand(len(label_K), 1))
    weight_K = residuals_KV.square().sum(1)
    scale_K = (residuals_KV * gradients_KV).sum(1) / weight_K.clamp_min(torch.finfo(weight_K.dtype).tiny)
    rest_K = (gradients_KV - scale_K[:, None] * residuals_KV).norm(dim=1)
    return torch.stack([scale_K, weight_K, rest_K, gradients_KV.norm(dim=1)])


def _pooled(scale_K: Tensor, weight_K: Tensor, example_K: Tensor, num_examples: int) -> Tensor:
    """Weighted mean of the positions of each example, [N]; 1 where there are none."""
    weight_N = weight_K.new_zeros(num_examples).index_add(0, example_K, weight_K)
    sum_N = weight_K.new_zeros(num_examples).index_add(0, example_K, weight_K * scale_K)
    return torch.where(weight_N > 0, sum_N / weight_N.where(weight_N > 0, torch.ones_like(weight_N)), torch.ones_like(weight_N))
