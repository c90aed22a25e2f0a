"""How much memory a build needs, and the batch that fits what the user can afford.

The tensors that a backward pass needs are counted, not guessed: a pass over one window is run, and whatever autograd keeps
for it is summed. They grow in proportion to the windows of a batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from tdasearch.capture import Capture
from tdasearch.curvature import rotated_sides
from tdasearch.errors import UsageError
from tdasearch.indexer.job import Job
from tdasearch.language_model import LanguageModel
from tdasearch.layers import Part
from tdasearch.progress import note
from tdasearch.store.manifest import Plan

RUNTIME_BYTES = 700 << 20  # Python, torch, transformers, Lance and its bounded caches
CHUNK_BYTES = 1 << 29  # gradients formed at once (256 MiB), and their squares


def within_memory(job: Job, plan: Plan) -> Job:
    """Lower the batch size until a build fits the memory that the job states.

    Args:
        job: The run; returned as it is if it states none.
        plan: The plan: which modules, how long the windows.

    Returns:
        The run, with at most as many tokens a batch as before.

    Raises:
        UsageError: Not even one window at a time fits.
    """
    if job.memory is None:
        return job
    with Capture(job.language_model.model, plan.modules) as capture:
        fixed = fixed_bytes(job.language_model, capture.parts.values())
        window = window_bytes(job.language_model, capture, num_tokens=plan.window_tokens)
    num_windows = int((job.memory - fixed) // window)
    if num_windows < 1:
        raise UsageError(
            f"memory: expected at least {_gigabytes(fixed + window)} (the weights, the factors of the covered modules, and one "
            f"window of {plan.window_tokens} tokens), found {_gigabytes(job.memory)}; give more, shorten --window, or cover "
            "fewer modules (--blocks, --modules)"
        )
    batch_tokens = min(job.batch_tokens, num_windows * plan.window_tokens)
    expected = fixed + window * batch_tokens / plan.window_tokens
    note(f"memory: {batch_tokens:,} tokens at once, about {_gigabytes(expected)} at most", quiet=job.quiet)
    return replace(job, batch_tokens=batch_tokens)


def fixed_bytes(language_model: LanguageModel, parts: Iterable[Part]) -> int:
    """Bytes that a build holds whatever its batches are.

    Args:
        language_model: The model.
        parts: The covered parts.

    Returns:
        The weights, the covariances (float64) with what their decomposition needs, the eigenbases and the eigenvalues.
    """
    state = language_model.model.state_dict()
    weights = {tensor.data_ptr(): tensor.numel() * tensor.element_size() for tensor in state.values()}
    factors = widest = 0
    for part in parts:
        sides = [dim for dim, rotated in zip((part.in_dim, part.out_dim), rotated_sides(part), strict=True) if rotated]
        factors += sum(8 * dim * dim for dim in sides) + 12 * part.num_parameters
        widest = max([widest, *(4 * 8 * dim * dim for dim in sides)])
    return int(sum(weights.values())) + factors + widest + RUNTIME_BYTES + CHUNK_BYTES


def window_bytes(language_model: LanguageModel, capture: Capture, *, num_tokens: int) -> int:
    """Bytes that a forward and backward pass holds for one window.

    Args:
        language_model: The model.
        capture: Its entered capture.
        num_tokens: Of the window.

    Returns:
        Bytes of every tensor kept for the backward pass but the weights, and as much again for what is made of the widest.
    """
    tokens = torch.arange(num_tokens) % 2
    batch = language_model.batch([tokens.tolist()], [[False] + [True] * (num_tokens - 1)])
    weights = {parameter.untyped_storage().data_ptr() for parameter in language_model.model.parameters()}
    seen: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    def losses() -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return language_model.losses(batch)

    capture.backward(losses, lambda name, gradient: None)
    return sum(seen.values()) + 4 * max(seen.values(), default=0)


def _gigabytes(num_bytes: float) -> str:
    return f"{num_bytes / (1 << 30):.2f} GB"
