"""Projections of example gradients to short vectors that keep inner products, in expectation or exactly.

Four kinds, each a fixed linear map of the matrix [O, I] of one module that is unbiased: the expectation of
``<project(x), project(y)>`` over the seeds is ``<x, y>``. All random bits are Philox's raw output, whose stream NumPy guarantees,
and every random matrix has entries +-1 (Achlioptas 2003), so a map is the same on every machine and device, and an example's
vector does not depend on the batch that it is in (but for rounding). Each projects by either route: from the factors, without
forming gradient_NOI, or from the matrices.

Legend: N examples, T positions, I inputs, O outputs; o, i their projected widths; K the width of the result.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tdasearch import route_work
from tdasearch.cost_model import Route, cheaper
from tdasearch.errors import UsageError
from tdasearch.gradients import Dense, Grouped, Lookup, ModuleGradient, Outer, converted, device_of, size_of, wide_dtype
from tdasearch.operations import CHUNK_BYTES, formed, output_rows
from tdasearch.rotation import Rotation, between
from tdasearch.sketch import Sketch

_BLOCK_COORDINATES = 1 << 12
"""Coordinates whose columns of a dense projection are drawn together; part of what a seed means."""

_LEFT, _RIGHT, _DENSE, _MASK = range(4)  # streams of one seed


class Projection(ABC):
    """A linear map of one module's gradients.

    Args:
        out_dim: O.
        in_dim: I.
        dim: K.
        seed: Of the random bits, 0 to 2^64 - 1. Modules of equal shape should get different seeds, lest their errors add up.
    """

    def __init__(self, out_dim: int, in_dim: int, *, dim: int, seed: int) -> None:
        if dim < 1:
            raise UsageError(f"projection: expected a width of at least 1, found {dim}")
        self.out_dim, self.in_dim, self.dim, self.seed = out_dim, in_dim, dim, seed

    def __call__(self, gradient: ModuleGradient, *, route: Route | None = None, chunk_bytes: int = CHUNK_BYTES) -> Tensor:
        """Project.

        Args:
            gradient: N examples [O, I], in any form.
            route: "factored" or "dense"; None: the one that the cost model predicts to be faster.
            chunk_bytes: Bound on what is formed at once.

        Returns:
            [N, K], in the gradient's type, float32 at least.

        Raises:
            UsageError: The gradient is of another shape.
        """
        size = size_of(gradient)
        if (size.out_dim, size.in_dim) != (self.out_dim, self.in_dim):
            raise UsageError(
                f"projection: expected gradients of {[self.out_dim, self.in_dim]}, found {[size.out_dim, size.in_dim]}; "
                "make one for each module"
            )
        if not isinstance(gradient, Dense) and (route or self._cheaper(gradient)) == "factored":
            return self._factored(gradient, chunk_bytes)
        dtype = wide_dtype(gradient)
        return torch.cat([self._dense(matrices, chunk_bytes) for matrices in formed(gradient, dtype, chunk_bytes // 2)])

    @abstractmethod
    def _cheaper(self, gradient: ModuleGradient) -> Route:
        """Which route is cheaper for a gradient that is factored."""

    @abstractmethod
    def _factored(self, gradient: ModuleGradient, chunk_bytes: int) -> Tensor:
        """Project without forming the whole matrices."""

    @abstractmethod
    def _dense(self, gradient_NOI: Tensor, chunk_bytes: int) -> Tensor:
        """Project matrices."""


class _RowByRow(Projection):
    """A map that reads the flattened gradient from its first coordinate to its last: in slices of rows, formed from factors."""

    def _cheaper(self, gradient: ModuleGradient) -> Route:
        return "factored"  # the same products, and the random bits are drawn once for all examples

    def _factored(self, gradient: ModuleGradient, chunk_bytes: int) -> Tensor:
        size = size_of(gradient)
        row_bytes = max(1, size.num_examples * size.in_dim * wide_dtype(gradient).itemsize)
        step = max(1, chunk_bytes // 2 // row_bytes)
        rows = (slice(start, start + step) for start in range(0, self.out_dim, step))
        return self._sum((row.start, output_rows(gradient, row).flatten(1)) for row in rows)

    def _dense(self, gradient_NOI: Tensor, chunk_bytes: int) -> Tensor:
        return self._sum(iter([(0, gradient_NOI.flatten(1))]))

    @abstractmethod
    def _sum(self, slices: Iterator[tuple[int, Tensor]]) -> Tensor:
        """Project slices of the flattened gradients, each given with its first row and as [N, rows * I]."""


class TwoSidedProjection(Projection):
    """``P_O^T G P_I`` with random signs (LoGra, Choe et al. 2024, arXiv 2405.13954): each factor is projected by itself.

    Args:
        out_dim: O.
        in_dim: I.
        out_rank: o.
        in_rank: i; K = o * i.
        seed: As in ``Projection``.
    """

    def __init__(self, out_dim: int, in_dim: int, *, out_rank: int, in_rank: int, seed: int) -> None:
        super().__init__(out_dim, in_dim, dim=out_rank * in_rank, seed=seed)
        left, right = _signs(seed, _LEFT, 0, out_dim * out_rank), _signs(seed, _RIGHT, 0, in_dim * in_rank)
        self.left_Oo = torch.from_numpy(left).view(out_dim, out_rank)
        self.right_Ii = torch.from_numpy(right).view(in_dim, in_rank)
        self._scale = 1 / math.sqrt(self.dim)

    def _cheaper(self, gradient: ModuleGradient) -> Route:
        dtype = wide_dtype(gradient)
        ranks = (self.left_Oo.shape[1], self.right_Ii.shape[1])
        arguments = (size_of(gradient), *ranks, False, dtype.itemsize)
        return cheaper(route_work.rotation, *arguments, device=device_of(gradient), dtype=dtype)

    def _factored(self, gradient: ModuleGradient, chunk_bytes: int) -> Tensor:
        dtype = wide_dtype(gradient)
        rotated = Rotation(dtype, route="factored")(converted(gradient, dtype), *self._sides(device_of(gradient), dtype))
        projected_NK = torch.cat([part.flatten(1) for part in formed(rotated, dtype, chunk_bytes)])
        return projected_NK.mul_(self._scale)

    def _dense(self, gradient_NOI: Tensor, chunk_bytes: int) -> Tensor:
        left_Oo, right_Ii = self._sides(gradient_NOI.device, gradient_NOI.dtype)
        return between(gradient_NOI, left_Oo, right_Ii).flatten(1).mul_(self._scale)

    def _sides(self, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return self.left_Oo.to(device, dtype), self.right_Ii.to(device, dtype)


class DenseProjection(_RowByRow):
    """``P vec(G)`` with random signs, drawn block by block of coordinates and never held whole (TRAK, arXiv 2303.14186)."""

    def _sum(self, slices: Iterator[tuple[int, Tensor]]) -> Tensor:
        projected: Tensor | None = None
        for first_row, flat_NC in slices:
            start, num = first_row * self.in_dim, flat_NC.shape[1]
            for block in range(start // _BLOCK_COORDINATES, -(-(start + num) // _BLOCK_COORDINATES)):
                first = block * _BLOCK_COORDINATES
                low, high = max(first, start), min(first + _BLOCK_COORDINATES, start + num)
                signs = _signs(self.seed, _DENSE, block, _BLOCK_COORDINATES * self.dim).reshape(_BLOCK_COORDINATES, self.dim)
                signs_CK = torch.from_numpy(signs[low - first : high - first]).to(flat_NC.device, flat_NC.dtype)
                part = flat_NC[:, low - start : high - start] @ signs_CK
                projected = part if projected is None else projected.add_(part)
        assert projected is not None
        return projected.mul_(1 / math.sqrt(self.dim))


class SparseSketch(_RowByRow):
    """A count sketch of the flattened gradient: each coordinate goes to one of K places with one sign (``sketch.Sketch``)."""

    def _sum(self, slices: Iterator[tuple[int, Tensor]]) -> Tensor:
        sketched: Tensor | None = None
        for first_row, flat_NC in slices:
            start, num = first_row * self.in_dim, flat_NC.shape[1]
            sketch = Sketch({"slice": num}, sketch_dim=self.dim, seed=self.seed, device=flat_NC.device, start=start)
            if sketched is None:
                sketched = flat_NC.new_zeros(flat_NC.shape[0], self.dim)
            sketch.add(sketched, "slice", flat_NC * sketch.signs("slice").to(flat_NC.dtype))
        assert sketched is not None
        return sketched


class CoordinateMask(Projection):
    """K fixed coordinates, drawn without repetition: from factors, ``T * K`` multiply-adds (GraSS, arXiv 2505.18976)."""

    def __init__(self, out_dim: int, in_dim: int, *, dim: int, seed: int) -> None:
        super().__init__(out_dim, in_dim, dim=dim, seed=seed)
        if dim > out_dim * in_dim:
            raise UsageError(f"coordinate mask: expected at most the {out_dim * in_dim} coordinates there are, found {dim}")
        self.coordinates_K = torch.from_numpy(_distinct(out_dim * in_dim, dim, seed))
        self._scale = math.sqrt(out_dim * in_dim / dim)

    def _cheaper(self, gradient: ModuleGradient) -> Route:
        dtype = wide_dtype(gradient)
        arguments = (size_of(gradient), self.dim, dtype.itemsize)
        return cheaper(route_work.mask, *arguments, device=device_of(gradient), dtype=dtype)

    def _factored(self, gradient: ModuleGradient, chunk_bytes: int) -> Tensor:
        size, dtype = size_of(gradient), wide_dtype(gradient)
        step = max(1, chunk_bytes // max(1, 3 * size.num_examples * size.num_positions * dtype.itemsize))
        parts = []
        for coordinates_K in self.coordinates_K.to(device_of(gradient)).split(step):
            rows_K, columns_K = coordinates_K // self.in_dim, coordinates_K % self.in_dim
            match gradient:
                case Outer():
                    products = gradient.output_gradients_NTO[..., rows_K].to(dtype)
                    products *= gradient.activations_NTI[..., columns_K].to(dtype)
                case Lookup():
                    products = gradient.output_gradients_NTO[..., rows_K].to(dtype)
                    products.masked_fill_(gradient.indices_NT[..., None] != columns_K, 0)
                case Grouped():
                    outputs, activations = gradient.output_gradients_NTGO, gradient.activations_NTGI
                    groups_K = rows_K // outputs.shape[3] if activations.shape[2] > 1 else torch.zeros_like(rows_K)
                    products = outputs.flatten(2)[..., rows_K].to(dtype) * activations[:, :, groups_K, columns_K].to(dtype)
                case Dense():
                    products = gradient.gradient_NOI[:, None, rows_K, columns_K].to(dtype)
            parts.append(products.sum(1))
        return torch.cat(parts, dim=1) * self._scale

    def _dense(self, gradient_NOI: Tensor, chunk_bytes: int) -> Tensor:
        return gradient_NOI.flatten(1)[:, self.coordinates_K.to(gradient_NOI.device)] * self._scale


def _raw(seed: int, stream: int, block: int, num: int) -> NDArray[np.uint64]:
    bits: NDArray[np.uint64] = np.random.Philox(key=[seed, stream], counter=[0, 0, 0, block]).random_raw(num)
    return bits


def _signs(seed: int, stream: int, block: int, num: int) -> NDArray[np.int8]:
    """Random signs, int8, one a bit of the raw output, lowest first."""
    words = _raw(seed, stream, block, -(-num // 64)).astype("<u8")
    bits: NDArray[np.uint8] = np.unpackbits(words.view(np.uint8), count=num, bitorder="little")
    return bits.astype(np.int8) * 2 - 1


def _distinct(num: int, wanted: int, seed: int) -> NDArray[np.int64]:
    """So many distinct numbers below ``num``, in rising order: memory grows with those wanted unless they are most of all."""
    if 4 * wanted > num:
        order: NDArray[Any] = np.argsort(_raw(seed, _MASK, 0, num), kind="stable")[:wanted]
        return np.sort(order).astype(np.int64)
    found: NDArray[Any] = np.empty(0, np.uint64)
    block = 0
    while len(found) < wanted:
        drawn = np.concatenate([found, _raw(seed, _MASK, block, 2 * wanted) % np.uint64(num)])
        found = drawn[np.sort(np.unique(drawn, return_index=True)[1])][:wanted]
        block += 1
    return np.sort(found).astype(np.int64)
