"""Every operation by every route equals what the formed matrices give."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tdasearch.errors import UsageError
from tdasearch.gradients import Dense, Grouped, Outer, converted
from tdasearch.operations import inner_products, output_rows, position_contributions, squared_norms
from tests.factors import FORMS, random_gradient

ROUTES = ("factored", "dense", None)
CHUNKS = (1, 600, 1 << 28)
CLOSE = {"rtol": 1e-10, "atol": 1e-10}


def pairs():
    return [(one, two) for one, two in itertools.product(FORMS, repeat=2) if ("scale" in (one, two)) == (one == two == "scale")]


@pytest.mark.parametrize("chunk_bytes", CHUNKS)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("one", "two"), pairs())
def test_inner_products_of_any_two_forms(one, two, route, chunk_bytes):
    left, right = random_gradient(one, examples=3, positions=5), random_gradient(two, examples=4, positions=7, seed=1)
    expected = torch.einsum("noi,moi->nm", left.dense(), right.dense())
    torch.testing.assert_close(inner_products(left, right, route=route, chunk_bytes=chunk_bytes), expected, **CLOSE)


@pytest.mark.parametrize("chunk_bytes", CHUNKS)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("form", FORMS)
def test_squared_norms(form, route, chunk_bytes):
    gradient = random_gradient(form)
    expected = gradient.dense().square().sum((1, 2))
    torch.testing.assert_close(squared_norms(gradient, route=route, chunk_bytes=chunk_bytes), expected, **CLOSE)


@pytest.mark.parametrize("chunk_bytes", CHUNKS)
@pytest.mark.parametrize("form", [form for form in FORMS if form != "dense"])
def test_contributions_of_positions_are_those_of_each_position_alone(form, chunk_bytes):
    gradient = random_gradient(form)
    direction = random_gradient("dense", examples=1, in_dim=1 if form == "scale" else 4, seed=2).gradient_NOI[0]
    contributions = position_contributions(gradient, direction, chunk_bytes=chunk_bytes)
    name = "output_gradients_NTGO" if isinstance(gradient, Grouped) else "output_gradients_NTO"
    for position in range(contributions.shape[1]):
        alone = torch.zeros_like(getattr(gradient, name))
        alone[:, position] = getattr(gradient, name)[:, position]
        factors = {slot: getattr(gradient, slot) for slot in gradient.__slots__} | {name: alone}
        expected = (type(gradient)(**factors).dense() * direction).sum((1, 2))
        torch.testing.assert_close(contributions[:, position], expected, **CLOSE)


@settings(deadline=None, max_examples=60)
@given(
    form=st.sampled_from(FORMS),
    examples=st.integers(1, 4),
    positions=st.integers(1, 9),
    out_dim=st.sampled_from([2, 4, 8]),
    in_dim=st.integers(1, 5),
    chunk_bytes=st.integers(1, 4000),
)
def test_routes_agree_at_any_size(form, examples, positions, out_dim, in_dim, chunk_bytes):
    sizes = {"positions": positions, "out_dim": out_dim, "in_dim": in_dim}
    left, right = random_gradient(form, examples=examples, **sizes), random_gradient(form, examples=2, seed=1, **sizes)
    by_route = [inner_products(left, right, route=route, chunk_bytes=chunk_bytes) for route in ("factored", "dense")]
    torch.testing.assert_close(*by_route, **CLOSE)
    norms = [squared_norms(left, route=route, chunk_bytes=chunk_bytes) for route in ("factored", "dense")]
    torch.testing.assert_close(*norms, **CLOSE)
    torch.testing.assert_close(inner_products(left, left).diagonal(), norms[0], **CLOSE)


@pytest.mark.parametrize("form", FORMS)
def test_rows_are_those_of_the_matrix(form):
    gradient = random_gradient(form)
    matrix = gradient.dense()
    for start, stop in itertools.combinations(range(7), 2):
        torch.testing.assert_close(output_rows(gradient, slice(start, stop)), matrix[:, start:stop], **CLOSE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("form", FORMS)
def test_narrow_types_are_summed_in_float32(form, dtype):
    gradient = random_gradient(form, positions=40, dtype=dtype)
    wide = converted(gradient, torch.float64)  # the same numbers
    for route in ("factored", "dense"):
        products, norms = inner_products(gradient, gradient, route=route), squared_norms(gradient, route=route)
        assert products.dtype == norms.dtype == torch.float32
        torch.testing.assert_close(products.double(), inner_products(wide, wide), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(products.diagonal(), norms, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("route", ROUTES)
def test_an_expert_that_saw_no_token_has_gradient_zero(route):
    empty = Outer(torch.zeros(3, 0, 4), torch.zeros(3, 0, 6))
    full = random_gradient("outer", dtype=torch.float32)
    assert inner_products(empty, full, route=route).eq(0).all()
    assert inner_products(full, empty, route=route).shape == (3, 3)
    assert squared_norms(empty, route=route).eq(0).all()
    assert position_contributions(empty, torch.zeros(6, 4)).shape == (3, 0)


def test_factors_of_another_module_are_refused():
    with pytest.raises(UsageError, match="one module"):
        inner_products(random_gradient("outer"), random_gradient("outer", in_dim=3))
    with pytest.raises(UsageError, match="direction"):
        position_contributions(random_gradient("outer"), torch.zeros(4, 6))
    with pytest.raises(UsageError, match="summed over"):
        position_contributions(Dense(torch.zeros(1, 6, 4)), torch.zeros(6, 4))
