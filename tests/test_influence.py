"""Influence for any model and loss: equal to the formula in float64, whatever the batches are."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tdasearch
from tdasearch import Task
from tests import reference
from tests.families import family


def classifier():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3, bias=False)).double().train()
    rows = [(torch.randn(5, dtype=torch.float64), n % 3) for n in range(11)]
    task = Task(
        collate=lambda rows: (torch.stack([x for x, _ in rows]), torch.tensor([y for _, y in rows])),
        losses=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction="none"),
    )
    return model, task, rows


def factored_gradients(model, rows):
    """Each linear map's (activation, output gradient) a row, by hand: one plain backward pass each."""
    found = []
    for x, y in rows:
        hidden = model[0](x)
        hidden.retain_grad()
        squashed = hidden.tanh()
        logits = model[2](squashed)
        logits.retain_grad()
        F.cross_entropy(logits, torch.tensor(y)).backward()
        first = (np.append(x.numpy(), 1.0)[None], hidden.grad.numpy()[None])
        found.append({"0": first, "2": (squashed.detach().numpy()[None], logits.grad.numpy()[None])})
    return found


@pytest.mark.parametrize("method", ["ekfac", "kfac"])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_a_classifier_equals_the_formula(method, batch_size):
    model, task, rows = classifier()
    scores = tdasearch.influence(model, task, rows[:8], rows[8:], method=method, batch_size=batch_size, quiet=True)
    assert model.training
    parts = factored_gradients(model, rows)
    dense = [{name: g.T @ a for name, (a, g) in row.items()} for row in parts]
    curvature = {name: reference.fit_module([row[name] for row in parts[:8]], method=method) for name in ("0", "2")}
    expected = [[reference.dot(query, row) for row in dense[:8]] for query in reference.precondition(dense[8:], curvature)]
    np.testing.assert_allclose(scores.numpy(), expected, rtol=1e-7, atol=1e-10)


def test_the_true_fisher_and_a_smaller_sample_are_used_where_asked_for():
    model, task, rows = classifier()
    called = []

    def sampled(model, batch):
        called.append(len(batch[1]))
        return task.losses(model, (batch[0], (batch[1] + 1) % 3))

    plain = tdasearch.influence(model, task, rows[:8], rows[8:], quiet=True)
    other = tdasearch.influence(model, Task(task.collate, task.losses, sampled), rows[:8], rows[8:], fit_documents=4, quiet=True)
    assert sum(called) == 2 * 4
    assert not torch.allclose(plain, other)


@pytest.mark.parametrize(("name", "kinds"), [("bert", ()), ("t5", ("linear", "norm")), ("vit", ()), ("resnet", ())])
def test_other_models(name, kinds):
    """Scores do not depend on who shares a batch, a document helps itself, and a step on it lowers the query's loss as said."""
    case = family(name)
    model = case.model.double().eval()
    task = Task(collate=list, losses=case.losses)
    options = dict(kinds=kinds, quiet=True, damping_scale=1.0)
    with reference.FullPrecision() if name == "t5" else nullcontext():
        scores = tdasearch.influence(model, task, [0, 1, 2], [2, 0], batch_size=3, **options)
        alone = tdasearch.influence(model, task, [0, 1, 2], [2, 0], batch_size=1, **options)
    torch.testing.assert_close(scores, alone, rtol=1e-6, atol=1e-9)
    assert scores[0, 2] > 0
    assert scores[1, 0] > 0
    torch.testing.assert_close(scores[0, 0], scores[1, 2], rtol=1e-6, atol=1e-9)  # symmetric


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "exact"}, "method: expected one of"),
        ({"batch_size": 0}, "batch_size: expected at least 1"),
        ({"fit_documents": 0}, "fit_documents: expected at least 1"),
        ({"damping_scale": 0.0}, "damping_scale: expected above 0"),
        ({"modules": ["nothing"]}, "no module was chosen"),
    ],
)
def test_wrong_options(options, message):
    model, task, rows = classifier()
    with pytest.raises(tdasearch.UsageError, match=message):
        tdasearch.influence(model, task, rows, rows[:1], quiet=True, **options)
    with pytest.raises(tdasearch.UsageError, match="expected documents and queries, found 0"):
        tdasearch.influence(model, task, [], rows, quiet=True)
