"""The sketch: a seeded sparse projection that sums all modules' coordinates into one short vector.

The coordinates of all modules, laid end to end, are cut into blocks of ``sketch_dim``; within each block they are permuted,
their signs are flipped at random, and the blocks are added up. So each coordinate goes to one bucket with one sign (a count
sketch: Charikar, Chen and Farach-Colton 2002), inner products are kept in expectation, no two coordinates of a block collide, and
where everything fits one block the sketch is a signed permutation: exact.

Legend: N examples, C coordinates of one module, D index dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor


class Sketch:
    """A seeded map from the modules' coordinates to D index dimensions.

    Args:
        num_coordinates: Coordinates of each module, in the order in which they are laid end to end.
        sketch_dim: D.
        seed: Equal seeds give equal sketches on every machine and device: the random bits are Philox's raw output, whose stream
            NumPy guarantees.
        device: Where the vectors are.
        start: Coordinates that lie before the first module's: a part of a longer sketch.
    """

    def __init__(
        self,
        num_coordinates: Mapping[str, int],
        *,
        sketch_dim: int,
        seed: int,
        device: torch.device | str = "cpu",
        start: int = 0,
    ) -> None:
        self.sketch_dim = sketch_dim
        self._seed = seed
        self._buckets: dict[str, Tensor] = {}
        self._signs: dict[str, Tensor] = {}
        for name, count in num_coordinates.items():
            buckets, signs = self._draw(start, start + count)
            self._buckets[name] = torch.from_numpy(buckets).to(device)
            self._signs[name] = torch.from_numpy(signs).to(device)
            start += count

    def _draw(self, start: int, end: int) -> tuple[np.ndarray[Any, np.dtype[np.int32]], np.ndarray[Any, np.dtype[np.int8]]]:
        """Buckets and signs of the coordinates start to end, block by block."""
        first, last = start // self.sketch_dim, (end - 1) // self.sketch_dim
        buckets, signs = [], []
        for block in range(first, last + 1):
            bits = np.random.Philox(key=[self._seed, block]).random_raw(2 * self.sketch_dim)
            buckets.append(np.argsort(bits[: self.sketch_dim], kind="stable").astype(np.int32))
            signs.append(((bits[self.sketch_dim :] >> np.uint64(63)).astype(np.int8) * 2 - 1).astype(np.int8))
        offset = first * self.sketch_dim
        part = slice(start - offset, end - offset)
        return np.concatenate(buckets)[part], np.concatenate(signs)[part]

    def signs(self, name: str) -> Tensor:
        """Return the signs of a module's coordinates, int8 [C]: the caller multiplies them into a scale it applies anyway."""
        return self._signs[name]

    def add(self, out_ND: Tensor, name: str, signed_NC: Tensor) -> None:
        """Add a module's coordinates, already multiplied by their signs, to the sketch, in place.

        Args:
            out_ND: [N, D], the sum so far.
            name: The module.
            signed_NC: [N, C] coordinates times ``signs(name)``.
        """
        buckets_C = self._buckets[name].long()  # kept as int32: half the memory, and the conversion is once a batch
        out_ND.scatter_add_(1, buckets_C.expand(signed_NC.shape[0], -1), signed_NC)
