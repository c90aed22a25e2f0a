"""Exact operations on example gradients in any form, each by two routes that give the same numbers.

The *factored* route never forms gradient_NOI: an inner product of ``sum_t g_t a_t^T`` and ``sum_s h_s b_s^T`` is
``sum_ts (g_t . h_s) (a_t . b_s)``, the sum over two Gram matrices. The *dense* route forms the matrices, a chunk of examples at
a time. Which is cheaper depends on positions against widths; the numbers differ by rounding alone. Everything is summed in the
widest type of the inputs, float32 at least.

Legend: N, M examples, T, S positions, I inputs, O outputs, G groups, V rows of a table.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from tdasearch import route_work
from tdasearch.cost_model import Route, cheaper
from tdasearch.errors import UsageError
from tdasearch.gradients import Dense, Grouped, Lookup, ModuleGradient, Outer, converted, device_of, select, size_of, wide_dtype
from tdasearch.route_work import gram_groups

CHUNK_BYTES = 1 << 28
"""Default bound on what is formed at once: the matrices of a chunk of examples, or the Gram matrices of a chunk of positions."""


def inner_products(
    left: ModuleGradient, right: ModuleGradient, *, route: Route | None = None, chunk_bytes: int = CHUNK_BYTES
) -> Tensor:
    """Inner products of every example of one batch with every one of another, through one module.

    Args:
        left: N examples, [O, I] each, in any form.
        right: M examples of the same shape, in any form.
        route: "factored" or "dense"; None: the one that the cost model predicts to be faster.
        chunk_bytes: Bound on what is formed at once.

    Returns:
        [N, M], in the widest type of both, float32 at least.

    Raises:
        UsageError: The matrices differ in shape.
    """
    one, two = size_of(left), size_of(right)
    if (one.out_dim, one.in_dim) != (two.out_dim, two.in_dim):
        raise UsageError(
            f"inner products: expected gradients of one module, found matrices of {[one.out_dim, one.in_dim]} and "
            f"{[two.out_dim, two.in_dim]}; pair each module with itself"
        )
    dtype = torch.promote_types(wide_dtype(left), wide_dtype(right))
    route = route or cheaper(
        route_work.inner_products, one, two, dtype.itemsize, chunk_bytes, device=device_of(left), dtype=dtype
    )
    if route == "dense":
        return _dense_products(left, right, dtype, chunk_bytes)
    match left, right:
        case Dense(), Dense():
            return _dense_products(left, right, dtype, chunk_bytes)
        case Dense(), _:
            return _against_matrices(right, left, dtype, chunk_bytes).T
        case _, Dense():
            return _against_matrices(left, right, dtype, chunk_bytes)
        case Lookup(), Lookup():
            return _lookup_products(left, right, dtype, chunk_bytes)
        case ((Outer() | Grouped()), (Outer() | Grouped())) if groups := gram_groups(one, two):
            return _gram_products(left, right, groups, dtype, chunk_bytes)
        case _:  # of two kinds: one keeps its positions, the other is formed
            return _against_matrices(left, right, dtype, chunk_bytes)


def squared_norms(gradient: ModuleGradient, *, route: Route | None = None, chunk_bytes: int = CHUNK_BYTES) -> Tensor:
    """Squared Frobenius norm of each example's gradient.

    Args:
        gradient: N examples, in any form.
        route: "factored" or "dense"; None: the one that the cost model predicts to be faster.
        chunk_bytes: Bound on what is formed at once.

    Returns:
        [N], in the gradient's type, float32 at least.
    """
    dtype = wide_dtype(gradient)
    size = size_of(gradient)
    route = route or cheaper(route_work.squared_norms, size, dtype.itemsize, device=device_of(gradient), dtype=dtype)
    if route == "dense" or isinstance(gradient, Dense):
        parts = [part.flatten(1).square().sum(1) for part in formed(gradient, dtype, chunk_bytes)]
        return torch.cat(parts)
    if isinstance(gradient, Lookup):
        indices_NT, outputs_NTO = gradient.indices_NT, gradient.output_gradients_NTO
        norms_N = outputs_NTO.new_zeros(gradient.num_examples, dtype=dtype)
        for n, t in _blocks(indices_NT.shape, _elements(chunk_bytes, dtype) // max(2 * indices_NT.shape[1], 1)):
            gram_NTT = outputs_NTO[n, t].to(dtype) @ outputs_NTO[n].to(dtype).transpose(1, 2)
            norms_N[n] += gram_NTT.masked_fill_(indices_NT[n, t, None] != indices_NT[n, None, :], 0).sum((1, 2))
        return norms_N
    activations_NGTI, outputs_NGTO = _by_group(gradient, size.num_groups)
    num_examples, num_groups, num_positions, _ = outputs_NGTO.shape
    norms_N = outputs_NGTO.new_zeros(num_examples, dtype=dtype)
    rows = _elements(chunk_bytes, dtype) // max(3 * num_groups * num_positions, 1)
    for n, t in _blocks((num_examples, num_positions), rows):
        grams = outputs_NGTO[n, :, t].to(dtype) @ outputs_NGTO[n].to(dtype).transpose(2, 3)
        grams *= activations_NGTI[n, :, t].to(dtype) @ activations_NGTI[n].to(dtype).transpose(2, 3)
        norms_N[n] += grams.sum((1, 2, 3))
    return norms_N.clamp_min_(0.0)


def position_contributions(gradient: ModuleGradient, direction_OI: Tensor, *, chunk_bytes: int = CHUNK_BYTES) -> Tensor:
    """Each position's share of the inner product of a gradient with a matrix: ``g_t^T P a_t``.

    Args:
        gradient: N examples, in a form that has positions.
        direction_OI: P, [O, I].
        chunk_bytes: Bound on what is formed at once.

    Returns:
        [N, T], in the widest type of both, float32 at least; summed over T it is ``inner_products`` with P.

    Raises:
        UsageError: The gradient is dense: its positions are summed already. Or P has another shape.
    """
    size = size_of(gradient)
    if isinstance(gradient, Dense):
        raise UsageError("contributions of positions: expected a gradient with positions, found one that is summed over them")
    if direction_OI.shape != (size.out_dim, size.in_dim):
        raise UsageError(
            f"contributions of positions: expected a direction of {[size.out_dim, size.in_dim]}, found {list(direction_OI.shape)}"
        )
    dtype = torch.promote_types(wide_dtype(gradient), direction_OI.dtype)
    direction_OI = direction_OI.to(dtype)
    if isinstance(gradient, Lookup):
        outputs = gradient.output_gradients_NTO
        contributions_NT = outputs.new_zeros(outputs.shape[:2], dtype=dtype)
        for n, t in _blocks(outputs.shape[:2], _elements(chunk_bytes, dtype) // (2 * size.out_dim)):
            contributions_NT[n, t] = (direction_OI.T[gradient.indices_NT[n, t]] * outputs[n, t].to(dtype)).sum(2)
        return contributions_NT
    activations_NGTI, outputs_NGTO = _by_group(gradient, size.num_groups)
    direction_GOI = direction_OI.unflatten(0, (size.num_groups, -1))
    contributions_NT = outputs_NGTO.new_zeros(size.num_examples, size.num_positions, dtype=dtype)
    rows = _elements(chunk_bytes, dtype) // (2 * size.in_dim * size.num_groups)
    for n, t in _blocks((size.num_examples, size.num_positions), rows):
        outputs, activations = outputs_NGTO[n, :, t].to(dtype), activations_NGTI[n, :, t].to(dtype)
        # One group: one large product of all positions, where a batched one would be many of each example's.
        back = outputs @ direction_GOI[0] if size.num_groups == 1 else outputs @ direction_GOI
        contributions_NT[n, t] = (back * activations).sum((1, 3))
    return contributions_NT


def output_rows(gradient: ModuleGradient, rows: slice) -> Tensor:
    """Form a few rows of each example's matrix, and no others.

    Args:
        gradient: N examples, in any form.
        rows: Which of the O rows; consecutive.

    Returns:
        [N, rows, I], float32 at least.
    """
    dtype = wide_dtype(gradient)
    match gradient:
        case Dense():
            return gradient.gradient_NOI[:, rows].to(dtype)
        case Outer() | Lookup():
            return converted(replace(gradient, output_gradients_NTO=gradient.output_gradients_NTO[..., rows]), dtype).dense()
        case Grouped():
            out_dim = gradient.output_gradients_NTGO.shape[3]
            start, stop, _ = rows.indices(size_of(gradient).out_dim)
            groups = slice(start // out_dim, -(-stop // out_dim))
            activations = gradient.activations_NTGI
            part = Grouped(
                activations if activations.shape[2] == 1 else activations[:, :, groups],
                gradient.output_gradients_NTGO[:, :, groups],
            )
            return converted(part, dtype).dense()[:, start - groups.start * out_dim : stop - groups.start * out_dim]


def formed(gradient: ModuleGradient, dtype: torch.dtype, chunk_bytes: int = CHUNK_BYTES) -> Iterator[Tensor]:
    """Form the matrices, a chunk of examples at a time.

    Args:
        gradient: N examples, in any form.
        dtype: Of the matrices; the factors are brought to it before they are multiplied.
        chunk_bytes: Bound on the matrices of a chunk; one example's is formed in any case.

    Yields:
        [n, O, I], the examples in order.
    """
    size = size_of(gradient)
    step = max(1, _elements(chunk_bytes, dtype) // max(size.out_dim * size.in_dim, 1))
    for start in range(0, max(size.num_examples, 1), step):
        yield converted(select(gradient, slice(start, start + step)), dtype).dense()


def _dense_products(left: ModuleGradient, right: ModuleGradient, dtype: torch.dtype, chunk_bytes: int) -> Tensor:
    # The side whose matrices are dearer to form is formed once; the other once for each of its chunks.
    forming = [route_work.forming(size_of(side), dtype.itemsize) for side in (left, right)]
    if forming[0].multiply_adds < forming[1].multiply_adds:
        return _dense_products(right, left, dtype, chunk_bytes).T
    rows = []
    for left_NOI in formed(left, dtype, chunk_bytes // 2):
        flat_NX = left_NOI.flatten(1)
        rows.append(torch.cat([flat_NX @ right_MOI.flatten(1).T for right_MOI in formed(right, dtype, chunk_bytes // 2)], dim=1))
    return torch.cat(rows)


def _against_matrices(left: ModuleGradient, right: ModuleGradient, dtype: torch.dtype, chunk_bytes: int) -> Tensor:
    columns = [
        position_contributions(left, matrix_OI, chunk_bytes=chunk_bytes // 2).sum(1).to(dtype)
        for chunk_MOI in formed(right, dtype, chunk_bytes // 2)
        for matrix_OI in chunk_MOI
    ]
    return torch.stack(columns, dim=1) if columns else torch.zeros(left.num_examples, 0, dtype=dtype)


def _lookup_products(left: Lookup, right: Lookup, dtype: torch.dtype, chunk_bytes: int) -> Tensor:
    products_NM = left.output_gradients_NTO.new_zeros(left.num_examples, right.num_examples, dtype=dtype)
    for (n, t), (m, s) in _block_pairs(left.indices_NT.shape, right.indices_NT.shape, _elements(chunk_bytes, dtype) // 2):
        one, two = left.indices_NT[n, t], right.indices_NT[m, s]
        left_rows, right_rows = left.output_gradients_NTO[n, t].flatten(0, 1), right.output_gradients_NTO[m, s].flatten(0, 1)
        gram = (left_rows.to(dtype) @ right_rows.to(dtype).T).masked_fill_(one.flatten()[:, None] != two.flatten()[None, :], 0)
        products_NM[n, m] += gram.view(*one.shape, *two.shape).sum((1, 3))
    return products_NM


def _gram_products(
    left: Outer | Grouped, right: Outer | Grouped, num_groups: int, dtype: torch.dtype, chunk_bytes: int
) -> Tensor:
    left_activations, left_outputs = _by_group(left, num_groups)
    right_activations, right_outputs = _by_group(right, num_groups)
    (num_left, _, left_positions, _), (num_right, _, right_positions, _) = left_outputs.shape, right_outputs.shape
    products_NM = left_outputs.new_zeros(num_left, num_right, dtype=dtype)
    budget = _elements(chunk_bytes, dtype) // (3 * num_groups)
    for (n, t), (m, s) in _block_pairs((num_left, left_positions), (num_right, right_positions), budget):
        grams_GRR = _rows(left_outputs[n, :, t], dtype) @ _rows(right_outputs[m, :, s], dtype).transpose(1, 2)
        grams_GRR *= _rows(left_activations[n, :, t], dtype) @ _rows(right_activations[m, :, s], dtype).transpose(1, 2)
        shape = (left_outputs[n, 0, t].shape[:2], right_outputs[m, 0, s].shape[:2])
        products_NM[n, m] += grams_GRR.sum(0).view(*shape[0], *shape[1]).sum((1, 3))
    return products_NM


def _rows(block_NGTX: Tensor, dtype: torch.dtype) -> Tensor:
    """Lay the positions of all examples below each other, [G, N * T, X]."""
    return block_NGTX.to(dtype).transpose(0, 1).flatten(1, 2)


def _by_group(gradient: Outer | Grouped, num_groups: int) -> tuple[Tensor, Tensor]:
    """Return activations [N, 1 or G, T, I] and output gradients [N, G, T, O], views."""
    if isinstance(gradient, Outer):
        outputs_NTGO = gradient.output_gradients_NTO.unflatten(2, (num_groups, -1))
        return gradient.activations_NTI[:, None], outputs_NTGO.transpose(1, 2)
    outputs_NTGO, activations_NTGI = gradient.output_gradients_NTGO, gradient.activations_NTGI
    if num_groups != outputs_NTGO.shape[2]:  # one group, beside a gradient of several
        outputs_NTGO = outputs_NTGO.flatten(2).unflatten(2, (num_groups, -1))
    activations_NTGI = activations_NTGI.expand(-1, outputs_NTGO.shape[1], -1, -1)
    return activations_NTGI.transpose(1, 2), outputs_NTGO.transpose(1, 2)


def _elements(chunk_bytes: int, dtype: torch.dtype) -> int:
    return chunk_bytes // dtype.itemsize


def _blocks(shape: tuple[int, ...], rows: int) -> Iterator[tuple[slice, slice]]:
    """Cut examples and positions so that each block has at most so many rows (one at least): whole examples where they fit."""
    (num_examples, num_positions), rows = shape, max(rows, 1)
    examples = max(1, rows // max(num_positions, 1))
    for start in range(0, num_examples, examples):
        for position in range(0, num_positions, min(rows, max(num_positions, 1))):
            yield slice(start, start + examples), slice(position, position + min(rows, num_positions))


def _block_pairs(
    left: tuple[int, ...], right: tuple[int, ...], elements: int
) -> Iterator[tuple[tuple[slice, slice], tuple[slice, slice]]]:
    """Cut two batches of [examples, positions] so that a block of one times a block of the other stays within a bound."""
    right_rows = min(math.prod(right), max(1, math.isqrt(max(elements, 1))))
    for left_block in _blocks(left, elements // max(right_rows, 1)):
        for right_block in _blocks(right, right_rows):
            yield left_block, right_block
