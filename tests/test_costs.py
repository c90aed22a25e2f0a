"""What the cost model chooses for an index: rows piped, a table on a terminal, without the model."""

import shutil

import pytest
import torch

import tdasearch
from tdasearch import cost_model, route_work
from tdasearch.gradients import Size
from tests import models
from tests.commands import error, on_a_terminal, rows


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    folder = tmp_path_factory.mktemp("costs")
    model = models.save_tiny("llama", folder / "model")
    corpus = [{"id": str(n), "text": text} for n, text in enumerate(models.sentences(8))]
    path = folder / "x.tda"
    tdasearch.build_index(corpus, model=str(model), path=path, window_tokens=32, eigenbasis_share=0.5, quiet=True)
    shutil.rmtree(model)  # it is not needed any more
    return path


def test_rows(index):
    found = rows("explain", index, "--costs", "--batch-tokens", 100)
    assert found == tdasearch.open_index(index).explain_costs(batch_tokens=100)
    modules = tdasearch.open_index(index).manifest.plan.modules
    assert sorted((row["module"], row["step"]) for row in found) == sorted(
        (module, step) for module in modules for step in ("encode", "fit", "rescore")
    )
    constants = cost_model.constants("cpu", torch.float32)
    for row in found:
        assert (row["num_examples"], row["num_positions"]) == (3, 32)
        assert row["route"] == min(cost_model.ROUTES, key=lambda route: row[f"{route}_seconds"])
    (down,) = (row for row in found if row["module"] == "model.layers.1.mlp.down_proj" and row["step"] == "encode")
    assert (down["out_dim"], down["in_dim"], down["out_rank"], down["in_rank"]) == (24, 40, 12, 20)
    for route in cost_model.ROUTES:
        work = route_work.rotation(Size("outer", 3, 32, 1, 24, 40), 12, 20, False, 4, route)
        assert down[f"{route}_seconds"] == constants.seconds(work)


def test_activations_that_several_modules_read_are_rotated_once(index):
    seconds = {
        row["module"].rsplit(".")[-1]: row["factored_seconds"]
        for row in rows("explain", index, "--costs")
        if row["step"] == "fit" and ".layers.0." in row["module"]
    }
    assert seconds["k_proj"] < seconds["v_proj"] and seconds["gate_proj"] < seconds["up_proj"]  # of equal shape, later


def test_a_table_on_a_terminal(index, tmp_path):
    shown = on_a_terminal(tmp_path, "explain", index, "--costs")
    assert "Predicted for batches of 64 x 32 tokens" in " ".join(shown.split())
    for word in ("encode", "fit", "rescore", "factored", "dense", "ms *", "alike"):
        assert word in shown


def test_errors(index, tmp_path):
    assert "--costs" in error("explain", index, status=2)
    assert "device: expected" in error("explain", index, "--costs", "--device", "abacus", status=2)
    error("explain", tmp_path / "no.tda", "--costs", status=1)
    (damaged := tmp_path / "damaged.tda").mkdir()
    shutil.copytree(index, damaged, dirs_exist_ok=True)
    (damaged / "encoder.safetensors").write_bytes(b"no")
    assert "not a file of factors" in error("explain", damaged, "--costs", status=1)
