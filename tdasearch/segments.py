"""Packed rows: several documents one after the other in a row of a batch, told apart again.

Where documents attend to themselves only (a block-diagonal mask, as packing needs anyway), the gradient of one is the sum over
its own positions, so a row's factors are cut into those of its documents.

Legend: N rows, T positions a row, S documents, L positions of the longest, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tdasearch.errors import CaptureError
from tdasearch.gradients import Dense, Grouped, Lookup, ModuleGradient, Outer, dense_bytes

_ENDS = ("cu_seq_lens_q", "cu_seqlens", "cu_seqlens_q")  # what variable-length attention is told


class Segments:
    """Where the documents of packed rows lie.

    Args:
        row_S: [S] int64, the row of each.
        start_S: [S] int64, its first position in the row.
        length_S: [S] int64, its positions.
        num_positions: T.
    """

    def __init__(self, row_S: Tensor, start_S: Tensor, length_S: Tensor, num_positions: int) -> None:
        self.row_S, self.start_S, self.length_S, self.num_positions = row_S, start_S, length_S, num_positions
        inside_L = torch.arange(int(length_S.max()) if len(length_S) else 0, device=length_S.device)
        self._inside_SL = inside_L < length_S[:, None]
        first_S = row_S * num_positions + start_S
        self._position_SL = torch.where(self._inside_SL, first_S[:, None] + inside_L, first_S[:, None])
        self._last: tuple[Tensor, Tensor] | None = None

    def __len__(self) -> int:
        return len(self.row_S)

    def of_positions(self, num_rows: int) -> Tensor:
        """Return the document of each position, [N, T] int64; -1 where there is none."""
        found = torch.full((num_rows * self.num_positions,), -1, device=self.row_S.device)
        found[self._position_SL[self._inside_SL]] = torch.arange(len(self), device=found.device).repeat_interleave(self.length_S)
        return found.view(num_rows, self.num_positions)

    def split(self, name: str, gradient: ModuleGradient) -> ModuleGradient:
        """Cut the rows' gradients into the documents'.

        Args:
            name: The part, for messages.
            gradient: Of N rows, with T positions each.

        Returns:
            Of S documents: padded to the longest, or formed where that takes less memory.

        Raises:
            CaptureError: The positions of this module are not those of the rows.
        """
        values = gradient.gradient_NOI if isinstance(gradient, Dense) else _output_gradients(gradient)
        if isinstance(gradient, Dense) or values.shape[1] != self.num_positions:
            found = "none" if isinstance(gradient, Dense) else str(values.shape[1])
            raise CaptureError(
                f"module {name!r}: expected {self.num_positions} positions a row, at which packed documents can be told apart, "
                f"found {found}; leave it out, or train without packing"
            )
        outputs = values.flatten(0, 1)[self._position_SL] * _fitted(self._inside_SL, values).to(values.dtype)
        match gradient:
            case Outer():
                activations = self._gathered(gradient.activations_NTI)
                padded = Outer(activations, outputs, self._inside_SL)
                padded_bytes = activations.numel() * activations.element_size() + outputs.numel() * outputs.element_size()
                return Dense(padded.dense()) if len(self) * dense_bytes(padded) < padded_bytes else padded
            case Lookup():
                return Lookup(self._gathered(gradient.indices_NT), outputs, gradient.num_rows, self._inside_SL)
            case Grouped():
                activations = gradient.activations_NTGI
                of_all = activations.shape[1] == 1 and self.num_positions > 1
                return Grouped(activations[self.row_S] if of_all else self._gathered(activations), outputs, self._inside_SL)

    def _gathered(self, tensor: Tensor) -> Tensor:
        """[N, T, ...] as [S, L, ...]; modules that read one tensor are given one object."""
        if self._last is None or self._last[0] is not tensor:
            self._last = (tensor, tensor.flatten(0, 1)[self._position_SL])
        return self._last[1]


def find_segments(inputs: Mapping[str, Any], num_rows: int) -> Segments | None:
    """Find packed documents in what a model was called with, by the rule by which transformers builds its masks.

    Args:
        inputs: By name. ``cu_seq_lens_q`` (or ``cu_seqlens``) gives the ends in a single row. Otherwise, without an attention
            mask, a document begins where ``position_ids`` does not count on.
        num_rows: N.

    Returns:
        The documents; None where no row holds several. Padding whose positions do not count on is taken for documents.

    Raises:
        CaptureError: Ends were given for several rows.
    """
    ends = next((inputs[name] for name in _ENDS if isinstance(inputs.get(name), Tensor)), None)
    if ends is not None:
        if num_rows != 1:
            raise CaptureError(f"expected one row where the ends of sequences are given, found {num_rows} rows; give segments")
        starts, lengths = ends.long()[:-1], ends.long().diff()
        kept = lengths > 0
        return Segments(torch.zeros_like(lengths)[kept], starts[kept], lengths[kept], int(ends[-1]))
    positions = inputs.get("position_ids")
    if not isinstance(positions, Tensor) or positions.dim() > 2 or inputs.get("attention_mask") is not None:
        return None
    positions_NT = positions.reshape(-1, positions.shape[-1])
    if bool((positions_NT.diff(dim=1) == 1).all()) or positions_NT.shape[0] != num_rows:
        return None
    starts = torch.ones_like(positions_NT, dtype=torch.bool)
    starts[:, 1:] = positions_NT.diff(dim=1) != 1
    return segments_of(starts.flatten().cumsum(0).view_as(starts))


def segments_of(ids_NT: Tensor) -> Segments:
    """Read documents off the number of each position's document.

    Args:
        ids_NT: [N, T] integers; a run of equal ones in a row is a document, a negative one none.

    Returns:
        The documents, row by row.

    Raises:
        CaptureError: It has another shape.
    """
    if ids_NT.dim() != 2 or ids_NT.is_floating_point():
        raise CaptureError(f"segments: expected integers [N, T], found {ids_NT.dtype} {list(ids_NT.shape)}")
    ids_NT = ids_NT.long()
    starts = torch.ones_like(ids_NT, dtype=torch.bool)
    starts[:, 1:] = ids_NT.diff(dim=1) != 0
    row_S, start_S = starts.nonzero().unbind(1)
    num_positions = ids_NT.shape[1]
    first_S = row_S * num_positions + start_S
    length_S = torch.cat([first_S[1:], first_S.new_tensor([ids_NT.numel()])]) - first_S
    kept = ids_NT[row_S, start_S] >= 0
    return Segments(row_S[kept], start_S[kept], length_S[kept], num_positions)


def _output_gradients(gradient: Outer | Lookup | Grouped) -> Tensor:
    return gradient.output_gradients_NTGO if isinstance(gradient, Grouped) else gradient.output_gradients_NTO


def _fitted(mask_SL: Tensor, values: Tensor) -> Tensor:
    return mask_SL.reshape(*mask_SL.shape, *[1] * (values.dim() - 2))
