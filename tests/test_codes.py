"""Codes: their bytes, and what they keep of an inner product. The reference decodes them with struct and plain loops."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from tdasearch import codes
from tdasearch.errors import UsageError


def vectors(num: int, sketch_dim: int, *, seed: int = 0) -> np.ndarray:
    generator = np.random.default_rng(seed)
    lengths = 10.0 ** generator.uniform(-3, 3, (num, 1))
    return (generator.standard_normal((num, sketch_dim)) * lengths).astype(np.float32)


def decoded_by_hand(code_bytes: bytes, sketch_dim: int, code: str) -> np.ndarray:
    (scale,) = struct.unpack_from("<f", code_bytes)
    if code == "1bit":
        signs = [1.0 if code_bytes[4 + place // 8] >> (place % 8) & 1 else -1.0 for place in range(sketch_dim)]
        return np.array(signs) * scale
    return np.array(struct.unpack_from(f"<{sketch_dim}{'e' if code == 'fp16' else 'f'}", code_bytes, 4), dtype=np.float64) * scale


@pytest.mark.parametrize("code", codes.CODES)
def test_bytes_are_as_documented(code: str) -> None:
    given = vectors(5, 72)
    coded = codes.encode(given, code)
    assert coded.dtype == np.uint8 and coded.shape == (5, codes.code_bytes(code, 72))
    by_hand = np.stack([decoded_by_hand(row.tobytes(), 72, code) for row in coded])
    np.testing.assert_allclose(codes.decode(coded, sketch_dim=72, code=code), by_hand, rtol=2e-7)
    if code == "1bit":
        double = given.astype(np.float64)
        scale = np.square(double).sum(axis=1) / np.abs(double).sum(axis=1)
        np.testing.assert_allclose(by_hand, np.where(double >= 0, 1, -1) * scale[:, None], rtol=1e-6)
        np.testing.assert_allclose((by_hand * double).sum(axis=1), np.square(double).sum(axis=1), rtol=1e-6)  # exact with itself
    else:
        np.testing.assert_allclose(
            by_hand, given, rtol=5e-4 if code == "fp16" else 0, atol=1e-6 * np.abs(given).max(axis=1).min()
        )


@pytest.mark.parametrize("code", codes.CODES)
def test_scores_are_the_float64_products_of_the_decoded(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    coded, queries = codes.encode(vectors(100, 64), code), vectors(3, 64, seed=1)
    expected = codes.decode(coded, sketch_dim=64, code=code).astype(np.float64) @ queries.T.astype(np.float64)
    whole = codes.scores(coded, queries, code=code, sketch_dim=64)
    np.testing.assert_array_equal(whole, expected.astype(np.float32))
    monkeypatch.setattr(codes, "_BLOCK_VALUES", 64 * 7)
    np.testing.assert_array_equal(codes.scores(coded, queries, code=code, sketch_dim=64), whole)


def test_one_bit_is_unbiased_over_random_directions() -> None:
    """RaBitQ, theorem 3.2: no bias, also for a query close to the vector, and an error of the order of 1/sqrt(D)."""
    generator = np.random.default_rng(0)
    given = generator.standard_normal((400, 512))
    queries = 0.7 * given + generator.standard_normal((400, 512))
    coded = codes.encode(given, "1bit")
    estimates = np.array(
        [codes.scores(coded[n : n + 1], queries[n : n + 1], code="1bit", sketch_dim=512)[0, 0] for n in range(400)]
    )
    errors = (estimates - (given * queries).sum(axis=1)) / (np.linalg.norm(given, axis=1) * np.linalg.norm(queries, axis=1))
    assert abs(errors.mean()) < 3 * errors.std() / np.sqrt(400)
    assert errors.std() < 1 / np.sqrt(512)


@pytest.mark.parametrize("code", codes.CODES)
@pytest.mark.parametrize("magnitude", [1e-42, 1e-30, 1e-9, 1e5, 3e38])
def test_magnitudes_neither_vanish_nor_overflow(code: str, magnitude: float) -> None:
    """B20: half(1e5) is infinite, half(1e-9) is 0, and the square of neither 1e-30 nor 1e30 fits float32."""
    given = (np.random.default_rng(0).uniform(0.5, 1, (2, 64)) * magnitude).astype(np.float32)
    found = codes.decode(codes.encode(given, code), sketch_dim=64, code=code)
    np.testing.assert_allclose(found, given, rtol=1.0 if code == "1bit" else 1e-3)
    assert np.isfinite(found).all() and found.all()


@pytest.mark.parametrize("code", codes.CODES)
def test_a_row_does_not_depend_on_its_neighbours(code: str) -> None:
    given = vectors(9, 64)
    alone = np.concatenate([codes.encode(row[None], code) for row in given])
    np.testing.assert_array_equal(codes.encode(given, code), alone)
    assert codes.encode(given[:0], code).shape == (0, codes.code_bytes(code, 64))
    assert codes.scores(alone[:0], given, code=code, sketch_dim=64).shape == (0, 9)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 0.0])
def test_unusable_vectors_are_refused(bad: float) -> None:
    given = vectors(3, 64)
    given[1] = bad
    with pytest.raises(ValueError, match="in row 1"):
        codes.encode(given, "1bit")


def test_budgets() -> None:
    assert codes.sketch_dim_for("1bit", 1024) == 8160 and codes.code_bytes("1bit", 8160) == 1024
    for code in codes.CODES:
        for budget in (260, 261, 1023, 4097):
            sketch_dim = codes.sketch_dim_for(code, budget)
            step = 8 if code == "1bit" else 1
            assert codes.code_bytes(code, sketch_dim) <= budget < codes.code_bytes(code, sketch_dim + step)
        with pytest.raises(UsageError, match="at least"):
            codes.sketch_dim_for(code, 11)
    with pytest.raises(UsageError, match="divisible by 8"):
        codes.code_bytes("1bit", 65)
    with pytest.raises(UsageError, match="2bit"):
        codes.code_bytes("2bit", 64)


def test_codes_of_another_shape_are_refused() -> None:
    coded = codes.encode(vectors(2, 64), "1bit")
    with pytest.raises(ValueError, match=r"uint8 \[N, 132\]"):
        codes.decode(coded, sketch_dim=64, code="fp16")
    with pytest.raises(ValueError, match=r"\[Q, 64\]"):
        codes.scores(coded, vectors(1, 65), code="1bit", sketch_dim=64)
