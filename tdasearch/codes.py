"""Vectors to codes and back: how many bytes a vector takes, and what a code says its inner products are.

In: float32 vectors. Out: one row of bytes each, of the same length, which plain numpy can read. This module knows nothing of
gradients, tables or search indexes.

A code is a little-endian float32 ``scale`` (4 bytes) and a payload of ``sketch_dim`` coordinates, each times ``scale``:

* ``1bit``: one bit a coordinate, lowest bit of the first byte first; 1 means +1 (x >= 0), 0 means -1.
  ``scale = |x|_2^2 / |x|_1`` makes the inner product with x itself exact, and unbiased over random rotations
  (RaBitQ, arXiv 2405.12497, there for unit vectors).
* ``fp16``: IEEE half floats; ``scale = max|x|``, so that no coordinate overflows and only those below 6e-8 of it vanish.
* ``fp32``: IEEE single floats; ``scale = 1``.

Legend: N vectors, D = sketch_dim, B = bytes of a code, Q queries.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tdasearch.errors import UsageError

CODES = ("1bit", "fp16", "fp32")
SCALE_BYTES = 4
MIN_SKETCH_DIM = 64
"""Below this a code says nothing: the error of an inner product falls as 1/sqrt(D) only."""

_BITS = {"1bit": 1, "fp16": 16, "fp32": 32}
_BLOCK_VALUES = 1 << 22  # 32 MB of float64: what `scores` decodes at a time

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


def sketch_dim_for(code: str, budget_bytes: int) -> int:
    """The most coordinates whose code fits a budget.

    Args:
        code: One of ``CODES``.
        budget_bytes: Bytes for one code, its scale included.

    Returns:
        ``sketch_dim``; a multiple of 8 for ``1bit``.

    Raises:
        UsageError: An unknown code, or a budget too small for ``MIN_SKETCH_DIM`` coordinates.
    """
    bits = _bits(code)
    smallest = code_bytes(code, MIN_SKETCH_DIM)
    if budget_bytes < smallest:
        raise UsageError(f"budget of {budget_bytes} bytes is too small: code {code!r} needs at least {smallest} bytes a row")
    return (budget_bytes - SCALE_BYTES) * 8 // bits


def code_bytes(code: str, sketch_dim: int) -> int:
    """Bytes of one code.

    Args:
        code: One of ``CODES``.
        sketch_dim: Coordinates; a multiple of 8 for ``1bit``.

    Returns:
        The number of bytes, the scale included.

    Raises:
        UsageError: An unknown code, or a ``sketch_dim`` it cannot have.
    """
    bits = _bits(code)
    if sketch_dim < 1 or sketch_dim * bits % 8:
        raise UsageError(f"sketch_dim {sketch_dim}: code {code!r} needs a positive number{' divisible by 8' if bits < 8 else ''}")
    return SCALE_BYTES + sketch_dim * bits // 8


def encode(vectors_ND: npt.ArrayLike, code: str) -> Bytes:
    """Encode vectors.

    Args:
        vectors_ND: [N, D] finite vectors, none of them all zero; taken as float32.
        code: One of ``CODES``.

    Returns:
        uint8 [N, B]; the same vector gives the same bytes, whatever its neighbours.

    Raises:
        ValueError: The shape is not [N, D], or a row is not finite or all zero (it has no direction to keep).
    """
    vectors = np.asarray(vectors_ND, dtype=np.float32)
    if vectors.ndim != 2:
        raise ValueError(f"vectors: expected shape [N, D], found {list(vectors.shape)}")
    codes = np.empty((vectors.shape[0], code_bytes(code, vectors.shape[1])), dtype=np.uint8)
    magnitudes = np.abs(vectors)
    largest = magnitudes.max(axis=1, initial=0.0)
    usable = np.isfinite(largest) & (largest > 0)
    if not usable.all():
        bad = np.flatnonzero(~usable)
        raise ValueError(f"vectors: {bad.size} are not finite or all zero, the first in row {bad[0]}; leave them out first")
    if code == "1bit":
        # In units of the largest magnitude, in float64: the square of 1e30 or 1e-30 does not fit float32.
        relative = magnitudes.astype(np.float64) / largest[:, None]
        scale = (largest * (np.square(relative).sum(axis=1) / relative.sum(axis=1))).astype("<f4")
        payload = np.packbits(vectors >= 0, axis=1, bitorder="little")
    elif code == "fp16":
        scale = largest.astype("<f4")
        payload = (vectors.astype(np.float64) / largest[:, None]).astype("<f2").view(np.uint8)
    else:
        scale = np.ones(len(vectors), dtype="<f4")
        payload = np.ascontiguousarray(vectors, dtype="<f4").view(np.uint8)
    codes[:, SCALE_BYTES:] = payload
    return with_scales(codes, scale)


def scales(codes_NB: Bytes) -> Floats:
    """The scale of each code.

    Args:
        codes_NB: uint8 [N, B] of any code.

    Returns:
        float32 [N].
    """
    return np.ascontiguousarray(codes_NB[:, :SCALE_BYTES]).view("<f4").reshape(-1).astype(np.float32, copy=False)


def with_scales(codes_NB: Bytes, scales_N: npt.ArrayLike) -> Bytes:
    """Codes of the same payloads times other scales.

    Args:
        codes_NB: uint8 [N, B] of any code.
        scales_N: [N] scales, taken as float32.

    Returns:
        uint8 [N, B], a copy.
    """
    changed = codes_NB.copy()
    changed[:, :SCALE_BYTES] = np.asarray(scales_N, dtype="<f4").reshape(-1, 1).view(np.uint8)
    return changed


def decode(codes_NB: Bytes, *, sketch_dim: int, code: str) -> Floats:
    """Decode codes into the vectors that they stand for.

    Args:
        codes_NB: uint8 [N, B].
        sketch_dim: D.
        code: One of ``CODES``.

    Returns:
        float32 [N, D].

    Raises:
        ValueError: The codes are not uint8 [N, B] with the B of this code.
    """
    expected = code_bytes(code, sketch_dim)
    if codes_NB.dtype != np.uint8 or codes_NB.ndim != 2 or codes_NB.shape[1] != expected:
        found = f"{codes_NB.dtype} {list(codes_NB.shape)}"
        raise ValueError(f"codes: expected uint8 [N, {expected}] for code {code!r} of {sketch_dim} coordinates, found {found}")
    payload = np.ascontiguousarray(codes_NB[:, SCALE_BYTES:])
    if code == "1bit":
        vectors = np.unpackbits(payload, axis=1, bitorder="little").astype(np.float32)
        vectors *= 2
        vectors -= 1
    else:
        vectors = payload.view("<f2" if code == "fp16" else "<f4").astype(np.float32)
    vectors *= scales(codes_NB)[:, None]
    return vectors


def scores(codes_NB: Bytes, queries_QD: npt.ArrayLike, *, code: str, sketch_dim: int) -> Floats:
    """Inner products of queries with the vectors that codes stand for: the reference that every search index is held to.

    Summed in float64 and rounded once, so that equal codes have equal scores wherever they lie in the batch.

    Args:
        codes_NB: uint8 [N, B].
        queries_QD: [Q, D] queries, not encoded.
        code: One of ``CODES``.
        sketch_dim: D.

    Returns:
        float32 [N, Q]; besides it, memory stays bounded as N grows.

    Raises:
        ValueError: The shapes do not fit.
    """
    queries = np.asarray(queries_QD, dtype=np.float64)
    if queries.ndim != 2 or queries.shape[1] != sketch_dim:
        raise ValueError(f"queries: expected shape [Q, {sketch_dim}], found {list(queries.shape)}")
    result = np.empty((len(codes_NB), len(queries)), dtype=np.float32)
    block = max(1, _BLOCK_VALUES // sketch_dim)
    for start in range(0, max(len(codes_NB), 1), block):
        vectors = decode(codes_NB[start : start + block], sketch_dim=sketch_dim, code=code)
        result[start : start + block] = vectors.astype(np.float64) @ queries.T
    return result


def _bits(code: str) -> int:
    if code not in _BITS:
        raise UsageError(f"code: expected one of {', '.join(CODES)}; found {code!r}")
    return _BITS[code]
