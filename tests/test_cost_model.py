"""The cost model: what is measured and kept, what is chosen, and that every choice gives the same numbers."""

import json
import warnings

import pytest
import torch

from tdasearch import cost_model, operations, projection, rotation
from tdasearch.cost_model import Constants, Work, cache_path, constants, product
from tdasearch.gradients import Dense, Outer, Size
from tdasearch.projection import CoordinateMask, TwoSidedProjection
from tdasearch.rotation import Rotation, between
from tdasearch.route_work import gram_groups, squared_norms
from tdasearch.route_work import inner_products as products_work
from tdasearch.route_work import rotation as rotation_work
from tests.factors import FORMS, random_gradient

CPU = torch.device("cpu")
FLAT = Constants(large_seconds=1e-10, small_seconds=1e-10, byte_seconds=1e-20, call_seconds=1e-20)
"""A machine on which multiply-adds are all that counts."""
CLOSE = {"rtol": 1e-10, "atol": 1e-10}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache folder, and how often it was measured."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cost_model._constants.cache_clear()
    measured = []
    measure = cost_model.measure

    def counted(*arguments):
        measured.append(arguments)
        return measure(*arguments)

    monkeypatch.setattr(cost_model, "measure", counted)
    yield measured
    cost_model._constants.cache_clear()


def again():
    """What another process does."""
    cost_model._constants.cache_clear()
    return constants("cpu", torch.float32)


def test_measured_once_and_kept(cache, tmp_path):
    found = constants("cpu", torch.float32)
    assert constants(CPU, torch.float32) is found and again() == found and len(cache) == 1
    assert cache_path() == tmp_path / "tdasearch" / "cost_constants.json"
    assert [path.name for path in cache_path().parent.iterdir()] == ["cost_constants.json"]
    assert found.small_seconds > 0 < found.byte_seconds and found.call_seconds < 1e-2
    constants("cpu", torch.float64)
    assert len(cache) == 2 and again() == found and len(cache) == 2  # both are kept


@pytest.mark.parametrize("what", ["device", "torch", "threads"])
def test_measured_again_where_the_machine_differs(cache, monkeypatch, what):
    constants("cpu", torch.float32)
    match what:
        case "device":
            monkeypatch.setattr(cost_model, "device_name", lambda device: "another")
        case "torch":
            monkeypatch.setattr(torch, "__version__", "99")
        case "threads":
            monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    again()
    assert len(cache) == 2


@pytest.mark.parametrize(
    "broken", ["", "{", "[]", "null", '{"format": 0, "constants": {}}', '{"format": 1}', "\x00\xff", "fields", "nan"]
)
def test_a_broken_cache_is_measured_again(cache, broken):
    constants("cpu", torch.float32)
    path = cache_path()
    if broken in ("fields", "nan"):
        rows = json.loads(path.read_text())
        for values in rows["constants"].values():
            values["large_seconds"] = float("nan")
            if broken == "fields":
                del values["small_seconds"]
        broken = json.dumps(rows)
    path.write_bytes(broken.encode("latin-1"))
    again()
    assert len(cache) == 2
    again()
    assert len(cache) == 2  # and mended


def test_a_cache_that_cannot_be_written_is_said(cache, tmp_path):
    (tmp_path / "tdasearch").write_text("a file where the folder should be")
    with pytest.warns(UserWarning, match="set XDG_CACHE_HOME"):
        constants("cpu", torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        constants("cpu", torch.float32)  # said once


@pytest.mark.parametrize("root", ["", "relative/folder"])
def test_without_the_variable_it_is_the_folder_in_home(monkeypatch, tmp_path, root):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", root)
    assert cache_path() == tmp_path / ".cache" / "tdasearch" / "cost_constants.json"


def test_seconds_are_linear_in_the_work():
    found = Constants(large_seconds=1e-11, small_seconds=5e-11, byte_seconds=1e-10, call_seconds=1e-6)
    assert found.seconds(Work()) == 0.0
    small, large = product(10, 32, 32, 32), product(1, 4096, 4096, 4096)
    assert found.seconds(small) == pytest.approx(10 * 32**3 * 5e-11 + 1e-6)  # what was measured
    assert found.seconds(large) == pytest.approx(4096**3 * 1e-11 * (1 + 4 * 32 / 4096) + 1e-6)
    assert found.seconds(small + large.times(2)) == pytest.approx(found.seconds(small) + 2 * found.seconds(large))
    assert product(3, 0, 5, 5).multiply_adds == 0


def test_gram_matrices_pay_where_examples_are_short(monkeypatch):
    monkeypatch.setattr(cost_model, "constants", lambda device, dtype: FLAT)

    def norms(positions):
        size = Size("outer", 4, positions, 1, 100, 100)
        return cost_model.cheaper(squared_norms, size, 4, device=CPU, dtype=torch.float32)

    assert [norms(positions) for positions in (1, 20, 49, 51, 500)] == ["factored"] * 3 + [
        "dense"
    ] * 2  # T^2 * 2I against T * I^2


def test_rotating_first_pays_but_for_long_examples_and_a_full_basis(monkeypatch):
    monkeypatch.setattr(cost_model, "constants", lambda device, dtype: FLAT)

    def chosen(positions, rank, rotated=False):
        size = Size("outer", 4, positions, 1, 100, 100)
        return cost_model.cheaper(rotation_work, size, rank, rank, rotated, 4, device=CPU, dtype=torch.float32)

    assert chosen(90, 100) == "factored" and chosen(110, 100) == "dense"  # 3 T I^2 against T I^2 + 2 I^3
    assert chosen(5000, 25) == "factored"  # a quarter: always
    assert chosen(190, 100, rotated=True) == "factored" and chosen(210, 100, rotated=True) == "dense"
    assert chosen(5000, None) == "factored"  # nothing to rotate: a tie


@pytest.mark.parametrize(("positions", "out_dim", "in_dim"), [(5, 6, 4), (40, 6, 4), (3, 30, 20)])
def test_counts_are_those_of_the_products_that_run(positions, out_dim, in_dim):
    """Counted by torch's own counter of floating-point operations, two a multiply-add."""
    from torch.utils.flop_counter import FlopCounterMode

    sizes = {"positions": positions, "out_dim": out_dim, "in_dim": in_dim}
    left, right = random_gradient("outer", examples=3, **sizes), random_gradient("outer", examples=2, **sizes)
    matrix = Dense(right.dense())
    size, other, dense = (operations.size_of(gradient) for gradient in (left, right, matrix))
    basis_O, basis_I = torch.eye(out_dim, dtype=torch.float64), torch.eye(in_dim, dtype=torch.float64)

    def counted(run):
        with FlopCounterMode(display=False) as counter:
            run()
        return counter.get_total_flops() / 2

    for route in cost_model.ROUTES:
        found = counted(lambda route=route: operations.inner_products(left, right, route=route))
        assert found == products_work(size, other, 8, 1 << 28, route).multiply_adds
        found = counted(lambda route=route: operations.inner_products(left, matrix, route=route))
        assert found == products_work(size, dense, 8, 1 << 28, route).multiply_adds
        found = counted(lambda route=route: operations.squared_norms(left, route=route))
        assert found == squared_norms(size, 8, route).multiply_adds
        found = counted(lambda route=route: Rotation(torch.float64, route=route)(left, basis_O, basis_I).dense())
        assert found == rotation_work(size, out_dim, in_dim, False, 8, route).multiply_adds


@pytest.mark.parametrize("form", FORMS)
def test_rotation_by_every_route(form):
    gradient = random_gradient(form)
    generator = torch.Generator().manual_seed(9)
    in_dim = gradient.dense().shape[2]
    bases_O = [None, torch.randn(6, 3, generator=generator, dtype=torch.float64)]
    bases_I = [None, torch.randn(in_dim, 1, generator=generator, dtype=torch.float64)]
    for left in bases_O:
        for right in bases_I:
            expected = between(gradient.dense(), left, right)
            for route in ("factored", "dense", None):
                torch.testing.assert_close(Rotation(torch.float64, route=route)(gradient, left, right).dense(), expected, **CLOSE)


def test_a_batch_whose_matrices_are_too_many_is_rotated_first(monkeypatch):
    monkeypatch.setattr(cost_model, "constants", lambda device, dtype: FLAT)
    gradient, basis = random_gradient("outer", positions=50), torch.eye(6, dtype=torch.float64)
    rotate = Rotation(torch.float64)
    assert isinstance(rotate(gradient, basis, basis[:4, :4]), Dense)
    monkeypatch.setattr(rotation, "_CHUNK_BYTES", 3 * 6 * 4 * 8 - 1)
    assert isinstance(rotate(gradient, basis, basis[:4, :4]), Outer)


@pytest.mark.parametrize("form", FORMS)
def test_what_is_chosen_is_asked_of_the_model(form, monkeypatch):
    asked = []

    def cheaper(count, *arguments, device, dtype):
        asked.append(count.__name__)
        return "dense"

    for module in (operations, projection, rotation):
        monkeypatch.setattr(module, "cheaper", cheaper)
    gradient = random_gradient(form)
    operations.inner_products(gradient, gradient)
    operations.squared_norms(gradient)
    if form == "outer":
        TwoSidedProjection(6, 4, out_rank=2, in_rank=2, seed=0)(gradient)
        CoordinateMask(6, 4, dim=2, seed=0)(gradient)
        Rotation(torch.float64)(gradient, None, None)
    expected = ["inner_products", "squared_norms"] + (["rotation", "mask", "rotation"] if form == "outer" else [])
    assert asked == expected


def test_forms_that_cannot_be_matched_in_groups():
    outer, two, three = Size("outer", 1, 5, 1, 6, 4), Size("grouped", 1, 5, 2, 6, 4), Size("grouped", 1, 5, 3, 6, 4)
    assert gram_groups(outer, two) == gram_groups(two, outer) == gram_groups(two, two) == 2
    assert gram_groups(two, three) == 0 and gram_groups(outer, Size("dense", 1, 0, 1, 6, 4)) == 0
