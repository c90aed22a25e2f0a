"""The gradients of one module's parameters, example by example, in the form in which they are cheapest to hold.

Every module's example gradient is one matrix ``gradient_NOI`` in the end; the forms below say how it is made of what a backward
pass gives, and none of them forms it before it is asked to. Mathematics only: nothing here knows of models, text or storage.

Legend: N examples, T positions, I inputs (one more, the constant 1, where there is a bias), O outputs, G groups,
V rows of a table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Literal

import torch
from torch import Tensor


def _positions(output_gradients: Tensor, is_position_NT: Tensor | None) -> Tensor:
    # Where nobody says what is padding: a position through which no gradient flows is none.
    if is_position_NT is not None:
        return is_position_NT
    return (output_gradients.flatten(2) != 0).any(2)


@dataclass(frozen=True, slots=True)
class Outer:
    """A linear map: ``gradient_n = sum_t g_nt a_nt^T``.

    Attributes:
        activations_NTI: [N, T, I].
        output_gradients_NTO: [N, T, O], zero at padding.
        is_position_NT: [N, T] bool, False at padding; None: at positions with a gradient.
    """

    activations_NTI: Tensor
    output_gradients_NTO: Tensor
    is_position_NT: Tensor | None = None

    @property
    def num_examples(self) -> int:
        """N."""
        return self.output_gradients_NTO.shape[0]

    def positions(self) -> Tensor:
        """Which positions are not padding, [N, T] bool."""
        return _positions(self.output_gradients_NTO, self.is_position_NT)

    def dense(self) -> Tensor:
        """Form gradient_NOI [N, O, I]."""
        wide = torch.promote_types(self.activations_NTI.dtype, self.output_gradients_NTO.dtype)
        return torch.bmm(self.output_gradients_NTO.to(wide).transpose(1, 2), self.activations_NTI.to(wide))


@dataclass(frozen=True, slots=True)
class Grouped:
    """Many small linear maps side by side, as in grouped convolutions and (with one input and output a group) in norms.

    Attributes:
        activations_NTGI: [N, T, G, I]; G or T may be 1 and stand for all.
        output_gradients_NTGO: [N, T, G, O] a group.
        is_position_NT: As in ``Outer``.
    """

    activations_NTGI: Tensor
    output_gradients_NTGO: Tensor
    is_position_NT: Tensor | None = None

    @property
    def num_examples(self) -> int:
        """N."""
        return self.output_gradients_NTGO.shape[0]

    def positions(self) -> Tensor:
        """Which positions are not padding, [N, T] bool."""
        return _positions(self.output_gradients_NTGO, self.is_position_NT)

    def dense(self) -> Tensor:
        """Form gradient_NOI [N, G * O, I]: the groups' matrices one below the other."""
        wide = torch.promote_types(self.activations_NTGI.dtype, self.output_gradients_NTGO.dtype)
        activations, gradients = self.activations_NTGI.to(wide), self.output_gradients_NTGO.to(wide)
        if activations.shape[3] == gradients.shape[3] == 1:  # norms: no matrix to multiply
            return (activations * gradients).sum(1)
        return torch.einsum("ntgo,ntgi->ngoi", gradients, activations.expand(*gradients.shape[:3], -1)).flatten(1, 2)


@dataclass(frozen=True, slots=True)
class Lookup:
    """A table of vectors: the gradient of row v is the sum of g over the positions that read row v.

    Attributes:
        indices_NT: [N, T] int64 rows read.
        output_gradients_NTO: [N, T, O], zero where the row is not trained (padding_idx).
        num_rows: V; gradient_NOI has I = V.
        is_position_NT: As in ``Outer``.
    """

    indices_NT: Tensor
    output_gradients_NTO: Tensor
    num_rows: int
    is_position_NT: Tensor | None = None

    @property
    def num_examples(self) -> int:
        """N."""
        return self.output_gradients_NTO.shape[0]

    def positions(self) -> Tensor:
        """Which positions are not padding, [N, T] bool."""
        return _positions(self.output_gradients_NTO, self.is_position_NT)

    def dense(self) -> Tensor:
        """Form gradient_NOI [N, O, V]."""
        num_examples, _, out_dim = self.output_gradients_NTO.shape
        rows = self.output_gradients_NTO.new_zeros(num_examples, self.num_rows, out_dim)
        rows.scatter_add_(1, self.indices_NT[:, :, None].expand(-1, -1, out_dim), self.output_gradients_NTO)
        return rows.transpose(1, 2)


@dataclass(frozen=True, slots=True)
class Dense:
    """The matrices themselves.

    Attributes:
        gradient_NOI: [N, O, I].
    """

    gradient_NOI: Tensor

    @property
    def num_examples(self) -> int:
        """N."""
        return self.gradient_NOI.shape[0]

    def dense(self) -> Tensor:
        """Return gradient_NOI."""
        return self.gradient_NOI


ModuleGradient = Outer | Grouped | Lookup | Dense
"""One module's gradients of N examples; ``dense()`` forms gradient_NOI."""


def total(uses: Sequence[ModuleGradient]) -> ModuleGradient:
    """Sum the gradients of several uses of one parameter: a module that ran twice, or modules whose weights are tied.

    Args:
        uses: One at least; the same examples in all.

    Returns:
        Their sum. Factored uses of one kind stay factored: the positions of one follow those of the other.
    """
    return reduce(_add, uses)


def _add(first: ModuleGradient, second: ModuleGradient) -> ModuleGradient:
    match first, second:
        case Outer(), Outer():
            return Outer(
                torch.cat([first.activations_NTI, second.activations_NTI], dim=1),
                torch.cat([first.output_gradients_NTO, second.output_gradients_NTO], dim=1),
                torch.cat([first.positions(), second.positions()], dim=1),
            )
        case Lookup(), Lookup():
            return Lookup(
                torch.cat([first.indices_NT, second.indices_NT], dim=1),
                torch.cat([first.output_gradients_NTO, second.output_gradients_NTO], dim=1),
                first.num_rows,
                torch.cat([first.positions(), second.positions()], dim=1),
            )
        case _:
            return Dense(first.dense() + second.dense())


def select(gradient: ModuleGradient, examples: slice) -> ModuleGradient:
    """Return the gradients of some of the examples, without copying them.

    Args:
        gradient: N examples.
        examples: Which.

    Returns:
        The same form.
    """
    match gradient:
        case Dense():
            return Dense(gradient.gradient_NOI[examples])
        case Outer():
            mask = None if gradient.is_position_NT is None else gradient.is_position_NT[examples]
            return Outer(gradient.activations_NTI[examples], gradient.output_gradients_NTO[examples], mask)
        case Lookup():
            mask = None if gradient.is_position_NT is None else gradient.is_position_NT[examples]
            return replace(
                gradient,
                indices_NT=gradient.indices_NT[examples],
                output_gradients_NTO=gradient.output_gradients_NTO[examples],
                is_position_NT=mask,
            )
        case Grouped():
            mask = None if gradient.is_position_NT is None else gradient.is_position_NT[examples]
            return Grouped(gradient.activations_NTGI[examples], gradient.output_gradients_NTGO[examples], mask)


def in_chunks(gradient: ModuleGradient, chunk_bytes: int) -> Iterator[ModuleGradient]:
    """Cut a batch so that the matrices formed at once stay within a bound.

    Args:
        gradient: N examples.
        chunk_bytes: The bound; one example's matrix is formed in any case.

    Yields:
        The examples in order, in the same form.
    """
    num_examples, one_bytes = gradient.num_examples, dense_bytes(gradient)
    size = max(1, chunk_bytes // max(one_bytes, 1))
    if size >= num_examples:
        yield gradient
        return
    for start in range(0, num_examples, size):
        yield select(gradient, slice(start, start + size))


def dense_bytes(gradient: ModuleGradient) -> int:
    """Bytes of one example's matrix, formed."""
    match gradient:
        case Dense():
            return gradient.gradient_NOI[0].numel() * gradient.gradient_NOI.element_size()
        case Grouped():
            g = gradient.output_gradients_NTGO
            return g.shape[2] * g.shape[3] * gradient.activations_NTGI.shape[3] * g.element_size()
        case Outer() | Lookup():
            g = gradient.output_gradients_NTO
            in_dim = gradient.num_rows if isinstance(gradient, Lookup) else gradient.activations_NTI.shape[2]
            return g.shape[2] * in_dim * g.element_size()


def transposed(gradient: ModuleGradient) -> ModuleGradient:
    """Return the gradients of the transposed matrix, [N, I, O]."""
    match gradient:
        case Outer():  # (g a^T)^T = a g^T
            return Outer(gradient.output_gradients_NTO, gradient.activations_NTI, gradient.positions())
        case _:
            return Dense(gradient.dense().transpose(1, 2))


def scaled(gradient: ModuleGradient, scale_N: Tensor) -> ModuleGradient:
    """Multiply each example's gradient by a number.

    Args:
        gradient: N examples.
        scale_N: [N].

    Returns:
        The same form.
    """
    match gradient:
        case Dense():
            return Dense(gradient.gradient_NOI * scale_N[:, None, None].to(gradient.gradient_NOI.dtype))
        case Grouped():
            g = gradient.output_gradients_NTGO
            return replace(gradient, output_gradients_NTGO=g * scale_N[:, None, None, None].to(g.dtype))
        case Outer() | Lookup():
            g = gradient.output_gradients_NTO
            return replace(gradient, output_gradients_NTO=g * scale_N[:, None, None].to(g.dtype))


@dataclass(frozen=True, slots=True)
class Size:
    """The form and sizes of a batch of gradients of one module, from which costs are counted.

    Attributes:
        form: Of the gradients.
        num_examples: N.
        num_positions: T; 0 where the gradients are dense.
        num_groups: G.
        out_dim: O of gradient_NOI, of all groups together.
        in_dim: I of gradient_NOI.
    """

    form: Literal["outer", "grouped", "lookup", "dense"]
    num_examples: int
    num_positions: int
    num_groups: int
    out_dim: int
    in_dim: int

    @property
    def num_elements(self) -> int:
        """Numbers in all examples' matrices."""
        return self.num_examples * self.out_dim * self.in_dim


def size_of(gradient: ModuleGradient) -> Size:
    """Return the form and sizes of a batch of gradients."""
    match gradient:
        case Dense():
            num_examples, out_dim, in_dim = gradient.gradient_NOI.shape
            return Size("dense", num_examples, 0, 1, out_dim, in_dim)
        case Grouped():
            num_examples, num_positions, num_groups, out_dim = gradient.output_gradients_NTGO.shape
            in_dim = gradient.activations_NTGI.shape[3]
            return Size("grouped", num_examples, num_positions, num_groups, num_groups * out_dim, in_dim)
        case Lookup():
            num_examples, num_positions, out_dim = gradient.output_gradients_NTO.shape
            return Size("lookup", num_examples, num_positions, 1, out_dim, gradient.num_rows)
        case Outer():
            num_examples, num_positions, out_dim = gradient.output_gradients_NTO.shape
            return Size("outer", num_examples, num_positions, 1, out_dim, gradient.activations_NTI.shape[2])


def converted(gradient: ModuleGradient, dtype: torch.dtype) -> ModuleGradient:
    """Bring the factors (or the matrices) to a type."""
    match gradient:
        case Dense():
            return Dense(gradient.gradient_NOI.to(dtype))
        case Outer():
            return replace(
                gradient,
                activations_NTI=gradient.activations_NTI.to(dtype),
                output_gradients_NTO=gradient.output_gradients_NTO.to(dtype),
            )
        case Lookup():
            return replace(gradient, output_gradients_NTO=gradient.output_gradients_NTO.to(dtype))
        case Grouped():
            return replace(
                gradient,
                activations_NTGI=gradient.activations_NTGI.to(dtype),
                output_gradients_NTGO=gradient.output_gradients_NTGO.to(dtype),
            )


def wide_dtype(gradient: ModuleGradient) -> torch.dtype:
    """Return the widest type of the gradient's tensors, float32 at least."""
    match gradient:
        case Dense():
            tensors = [gradient.gradient_NOI]
        case Outer():
            tensors = [gradient.activations_NTI, gradient.output_gradients_NTO]
        case Lookup():
            tensors = [gradient.output_gradients_NTO]
        case Grouped():
            tensors = [gradient.activations_NTGI, gradient.output_gradients_NTGO]
    return reduce(torch.promote_types, (tensor.dtype for tensor in tensors), torch.float32)


def device_of(gradient: ModuleGradient) -> torch.device:
    """Return where the gradient is."""
    match gradient:
        case Dense():
            return gradient.gradient_NOI.device
        case Grouped():
            return gradient.output_gradients_NTGO.device
        case Outer() | Lookup():
            return gradient.output_gradients_NTO.device
