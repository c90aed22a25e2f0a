"""Projections: by both routes the same numbers, fixed by the seed, unbiased."""

import numpy as np
import pytest
import torch

from tdasearch import projection
from tdasearch.errors import UsageError
from tdasearch.gradients import Dense, select
from tdasearch.operations import inner_products
from tdasearch.projection import CoordinateMask, DenseProjection, SparseSketch, TwoSidedProjection
from tdasearch.sketch import Sketch
from tests.factors import FORMS, random_gradient

CLOSE = {"rtol": 1e-10, "atol": 1e-10}


def make(kind, out_dim=6, in_dim=4, *, seed=0):
    in_rank = min(in_dim, 2)
    return {
        "two_sided": lambda: TwoSidedProjection(out_dim, in_dim, out_rank=3, in_rank=in_rank, seed=seed),
        "dense": lambda: DenseProjection(out_dim, in_dim, dim=5, seed=seed),
        "sketch": lambda: SparseSketch(out_dim, in_dim, dim=5, seed=seed),
        "mask": lambda: CoordinateMask(out_dim, in_dim, dim=5, seed=seed),
    }[kind]()


KINDS = ("two_sided", "dense", "sketch", "mask")


def matrix(project):
    """The map as a matrix [K, O * I]: what it does to each coordinate alone."""
    identity = torch.eye(project.out_dim * project.in_dim, dtype=torch.float64)
    return project(Dense(identity.view(-1, project.out_dim, project.in_dim))).T


@pytest.mark.parametrize("chunk_bytes", [1, 500, 1 << 28])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_route_is_the_same_linear_map(kind, form, chunk_bytes):
    gradient = random_gradient(form)
    project = make(kind, in_dim=1 if form == "scale" else 4)
    expected = gradient.dense().flatten(1) @ matrix(project).T
    for route in ("factored", "dense", None):
        torch.testing.assert_close(project(gradient, route=route, chunk_bytes=chunk_bytes), expected, **CLOSE)


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_and_slices_do_not_show(kind, monkeypatch):
    gradient = random_gradient("outer", out_dim=30, in_dim=20)
    project = make(kind, 30, 20)
    expected = gradient.dense().flatten(1) @ matrix(project).T
    for chunk_bytes in (1, 3000, 1 << 28):
        torch.testing.assert_close(project(gradient, route="factored", chunk_bytes=chunk_bytes), expected, **CLOSE)
    monkeypatch.setattr(projection, "_BLOCK_COORDINATES", 64)  # several blocks
    project = make(kind, 30, 20)
    expected = gradient.dense().flatten(1) @ matrix(project).T
    for chunk_bytes in (1, 3000, 1 << 28):
        torch.testing.assert_close(project(gradient, route="factored", chunk_bytes=chunk_bytes), expected, **CLOSE)


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_fixes_the_map_and_the_batch_does_not_matter(kind):
    gradient = random_gradient("outer", examples=4)
    together = make(kind)(gradient)
    alone = torch.cat([make(kind)(select(gradient, slice(row, row + 1))) for row in range(4)])
    torch.testing.assert_close(alone, together, **CLOSE)
    assert torch.equal(matrix(make(kind)), matrix(make(kind)))
    assert not torch.equal(matrix(make(kind)), matrix(make(kind, seed=1)))


@pytest.mark.parametrize("kind", KINDS)
def test_inner_products_are_kept_in_expectation(kind):
    left, right = random_gradient("outer", seed=3), random_gradient("outer", seed=4)
    exact = inner_products(left, right)
    found = torch.stack([project(left) @ project(right).T for project in (make(kind, seed=seed) for seed in range(3000))])
    error = (found.mean(0) - exact).abs() / (found.std(0) / len(found) ** 0.5)
    assert error.max() < 4.5, error  # in standard errors of the mean, 9 of them


def test_the_bits_are_fixed_for_ever():
    """On every machine and with every version: an index that was built with a seed goes on to be searched with it."""
    assert projection._signs(7, 1, 2, 8).tolist() == SIGNS
    assert projection._distinct(1000, 5, 7).tolist() == DISTINCT
    assert projection._distinct(10, 5, 7).tolist() == MOST


SIGNS = [-1, 1, 1, -1, 1, -1, -1, 1]
DISTINCT = [395, 415, 605, 982, 994]
MOST = [2, 3, 5, 7, 9]


@pytest.mark.parametrize(("num", "wanted"), [(10, 10), (10, 1), (1000, 200), (1000, 260), (1 << 40, 50)])
def test_coordinates_of_a_mask_are_distinct(num, wanted):
    found = projection._distinct(num, wanted, seed=5)
    assert len(set(found.tolist())) == wanted and (np.diff(found) > 0).all() and found.min() >= 0 and found.max() < num


def test_the_sparse_sketch_is_the_sketch_of_an_index():
    gradient = random_gradient("outer")
    whole = Sketch({"m": 24}, sketch_dim=5, seed=3)
    expected = torch.zeros(3, 5, dtype=torch.float64)
    whole.add(expected, "m", gradient.dense().flatten(1) * whole.signs("m"))
    torch.testing.assert_close(SparseSketch(6, 4, dim=5, seed=3)(gradient, chunk_bytes=1), expected, **CLOSE)


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_of_another_shape_is_refused(kind):
    with pytest.raises(UsageError, match="expected gradients of"):
        make(kind)(random_gradient("outer", in_dim=3))
    with pytest.raises(UsageError, match="at most the 24"):
        CoordinateMask(6, 4, dim=25, seed=0)
