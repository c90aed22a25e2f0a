"""The reference has references of its own: second witnesses, finite differences, and cases where the answer is known."""

from __future__ import annotations

import ast
import copy
import dataclasses
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests import models, reference
from tests.reference import Array, Curvature, Example, Gradients

SHAPES = {
    "gpt2": {"attn.c_attn": (72, 25), "attn.c_proj": (24, 25), "mlp.c_fc": (40, 25), "mlp.c_proj": (24, 41)},
    "llama": {"q_proj": (24, 24), "k_proj": (12, 24), "o_proj": (24, 24), "gate_proj": (40, 24), "down_proj": (24, 40)},
    "qwen2": {"q_proj": (24, 25), "k_proj": (12, 25), "v_proj": (12, 25), "o_proj": (24, 24), "down_proj": (24, 40)},
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A model in float64 with 12 documents and a query of a prompt and a completion."""

    model: nn.Module
    names: list[str]
    documents: list[Example]
    gradients: list[Gradients]
    query: Example


@cache
def case(kind: str) -> Case:
    plain, tokenizer = models.tiny(kind)
    model = reference.reference_model(plain)
    names = reference.block_linear_names(model)
    documents = [reference.whole_text(tokenizer(text)["input_ids"]) for text in models.sentences(12)]
    prompt, completion = tokenizer("My teacher sings")["input_ids"], tokenizer(" to the moon")["input_ids"]
    query = Example(prompt + completion, [False] * len(prompt) + [True] * len(completion))
    return Case(model, names, documents, [reference.module_gradients(model, one, names) for one in documents], query)


@cache
def fitted(kind: str) -> dict[str, Curvature]:
    return reference.fit(case(kind).model, case(kind).documents, case(kind).names)


def relative_error(found: Array, expected: Array) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def exact_fisher(gradients: list[Array]) -> Array:
    """Return the mean over documents of vec(G) vec(G)^T: the empirical Fisher itself, no factors."""
    rows = np.stack([gradient.reshape(-1) for gradient in gradients])
    return rows.T @ rows / len(rows)


# ---- the models ----


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("kind", models.KINDS)
def test_saved_model_and_tokenizer_come_back_the_same(kind: str, bos: bool, tmp_path: Path) -> None:
    models.save_tiny(kind, tmp_path / "m", bos=bos)
    model, tokenizer = models.tiny(kind, bos=bos)
    read, read_tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path / "m"), AutoTokenizer.from_pretrained(tmp_path / "m")
    assert model.training and not read.training
    assert all(torch.equal(value, read.state_dict()[name]) for name, value in model.state_dict().items())
    texts = [*models.sentences(100), "e\u0301 \u00e9 \U0001f40d\r\n 42"]
    assert [read_tokenizer(text)["input_ids"] for text in texts] == [tokenizer(text)["input_ids"] for text in texts]
    ids = tokenizer("Rain was it.")["input_ids"]
    assert (ids[0] == tokenizer.bos_token_id) == bos
    assert tokenizer.decode(ids, skip_special_tokens=True) == "Rain was it."
    assert tokenizer.bos_token is None or bos


def test_sentences_are_distinct_small_and_seeded() -> None:
    texts, tokenizer = models.sentences(200, seed=3), models.tokenizer()
    lengths = [len(tokenizer(text)["input_ids"]) for text in texts]
    assert len(set(texts)) == 200 and min(lengths) >= 5 and max(lengths) <= 40 and len(set(lengths)) > 15
    assert texts[:7] == models.sentences(7, seed=3) != models.sentences(7, seed=4)


def test_model_depends_on_the_seed_and_leaves_the_global_generator_alone() -> None:
    before = torch.random.get_rng_state()
    first, second, other = (models.tiny("gpt2", seed=seed)[0].transformer.h[0].mlp.c_fc.weight for seed in (0, 0, 1))
    assert torch.equal(first, second) and not torch.equal(first, other)
    assert torch.equal(before, torch.random.get_rng_state())


# ---- losses and gradients ----


@pytest.mark.parametrize("kind", models.KINDS)
def test_loss_is_the_sum_that_transformers_averages(kind: str) -> None:
    here = case(kind)
    for example in [*here.documents[:3], here.query]:
        labels = [token if target else -100 for token, target in zip(example.token_ids, example.is_target, strict=True)]
        plain = copy.deepcopy(here.model).float()
        mean = plain(input_ids=torch.tensor([example.token_ids]), labels=torch.tensor([labels])).loss.item()
        assert reference.loss(here.model, example).item() == pytest.approx(mean * sum(example.is_target), rel=1e-5)


def test_query_loss_is_over_the_completion_only() -> None:
    here = case("gpt2")
    losses = reference.token_losses(here.model, here.query.token_ids)
    assert len(losses) == len(here.query.token_ids) - 1
    completion = sum(here.query.is_target)
    assert reference.loss(here.model, here.query).item() == pytest.approx(losses[-completion:].sum().item(), rel=1e-14)


@pytest.mark.parametrize("kind", models.KINDS)
def test_modules_and_shapes(kind: str) -> None:
    here = case(kind)
    assert len(here.names) == (8 if kind == "gpt2" else 14)
    for name in here.names:
        for ending, shape in SHAPES[kind].items():
            if name.endswith(ending):
                assert here.gradients[0][name].shape == shape


@pytest.mark.parametrize("kind", models.KINDS)
def test_captured_factors_give_the_weight_gradient(kind: str) -> None:
    here = case(kind)
    query_gradients = reference.module_gradients(here.model, here.query, here.names)
    for example, gradients in [(here.documents[1], here.gradients[1]), (here.query, query_gradients)]:
        for name, (activations_TI, gradients_TO) in reference.capture(here.model, example, here.names).items():
            assert len(activations_TI) == len(gradients_TO) == len(example.token_ids)
            assert relative_error(gradients_TO.T @ activations_TI, gradients[name]) < 1e-12


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("gpt2", "transformer.h.0.attn.c_attn"),
        ("llama", "model.layers.1.mlp.down_proj"),
        ("qwen2", "model.layers.0.self_attn.k_proj"),
    ],
)
def test_functional_call_is_a_second_witness(kind: str, name: str) -> None:
    here = case(kind)
    ids = torch.tensor([here.query.token_ids])
    picked = torch.tensor(here.query.is_target)[1:]

    def query_loss(parameters: dict[str, Tensor]) -> Tensor:
        with reference.FullPrecision():
            output = torch.func.functional_call(here.model, parameters, (), {"input_ids": ids, "use_cache": False})
            logits = output.logits[0, :-1]
        return nn.functional.cross_entropy(logits[picked], ids[0, 1:][picked], reduction="sum")

    module = here.model.get_submodule(name)
    parameters = {f"{name}.{part}": value.detach() for part, value in module.named_parameters()}
    witness = {part: value.detach().numpy() for part, value in torch.func.grad(query_loss)(parameters).items()}
    weight_OI = witness[f"{name}.weight"].T if kind == "gpt2" else witness[f"{name}.weight"]
    columns = [weight_OI] + [value[:, None] for part, value in witness.items() if part.endswith("bias")]
    gradient_OI = reference.module_gradients(here.model, here.query, [name])[name]
    assert relative_error(gradient_OI, np.concatenate(columns, axis=1)) < 1e-12


@pytest.mark.parametrize("kind", models.KINDS)
def test_full_precision_holds_throughout_the_model(kind: str) -> None:
    """A central difference agrees to 1e-8, which float32 inside a norm or a softmax would not allow."""
    here = case(kind)
    length = np.sqrt(reference.dot(here.gradients[1], here.gradients[1]))
    towards = {name: gradient / length for name, gradient in here.gradients[1].items()}
    up, down = (reference.influence_by_step(here.model, here.query, towards, step_size=size) for size in (1e-5, -1e-5))
    expected = reference.dot(reference.module_gradients(here.model, here.query, here.names), towards)
    assert (up + down) / 2 == pytest.approx(expected, rel=1e-8)


def test_dropout_and_float32_are_refused_and_the_model_is_left_alone() -> None:
    plain, _ = models.tiny("gpt2")
    reference.reference_model(plain)
    assert plain.training and plain.dtype == torch.float32
    with pytest.raises(ValueError, match="float64 and eval"):
        reference.loss(plain, Example([5, 6], [False, True]))
    with pytest.raises(ValueError, match="token 0 no target"):
        reference.loss(case("gpt2").model, Example([5, 6], [True, True]))


# ---- curvature ----


@pytest.mark.parametrize("kind", models.KINDS)
def test_identity_curvature_is_grad_dot(kind: str) -> None:
    here = case(kind)
    identity = {
        name: dataclasses.replace(one, eigenvalues=np.ones_like(one.eigenvalues), damping=0.0)
        for name, one in fitted(kind).items()
    }
    found = reference.influences(here.gradients[:2], here.gradients, identity)
    assert relative_error(found, reference.influences(here.gradients[:2], here.gradients)) < 1e-10


@pytest.mark.parametrize("kind", models.KINDS)
def test_dense_solve_equals_division_in_the_eigenbasis(kind: str) -> None:
    here = case(kind)
    for name, one in fitted(kind).items():
        U_S, U_A = one.gradient_eigenvectors, one.activation_eigenvectors
        gradient_OI = here.gradients[3][name]
        rotated_OI = U_S.T @ gradient_OI @ U_A
        expected = U_S @ (rotated_OI / (one.eigenvalues + one.damping)) @ U_A.T
        assert relative_error(reference.precondition([{name: gradient_OI}], {name: one})[0][name], expected) < 1e-9


def test_ekfac_on_independent_factors_is_the_exact_fisher() -> None:
    """Every g with every a, one position a document: F = S kron A exactly, so K-FAC and EK-FAC both are exact."""
    generator = np.random.default_rng(0)
    activations, gradients = generator.normal(size=(6, 4)), generator.normal(size=(7, 5))
    documents = [(a[None], g[None]) for a in activations for g in gradients]
    exact = exact_fisher([g_TO.T @ a_TI for a_TI, g_TO in documents])
    for method in ("kfac", "ekfac"):
        one = reference.fit_module(documents, method=method)
        assert relative_error(one.dense(), exact) < 1e-12
        assert one.damping == pytest.approx(0.1 * np.trace(exact) / 20, rel=1e-12)


def test_ekfac_of_one_position_is_the_exact_rank_one_fisher() -> None:
    """Checked with Sherman-Morrison: (v v^T + d)^-1 v = v / (|v|^2 + d)."""
    generator = np.random.default_rng(1)
    a, g = generator.normal(size=(1, 6)), generator.normal(size=(1, 4))
    one = reference.fit_module([(a, g)])
    gradient_OI = g.T @ a
    assert relative_error(one.dense(), exact_fisher([gradient_OI])) < 1e-12
    solved = reference.precondition([{"m": gradient_OI}], {"m": one})[0]["m"]
    assert relative_error(solved, gradient_OI / ((gradient_OI**2).sum() + one.damping)) < 1e-12


class Bigram(nn.Module):
    """A linear language model: logits = W onehot(token)."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(vocabulary, vocabulary, bias=False, dtype=torch.float64)])
        nn.init.zeros_(self.layers[0].weight)

    def forward(self, input_ids: Tensor, use_cache: bool) -> SimpleNamespace:
        del use_cache
        onehot = nn.functional.one_hot(input_ids, self.layers[0].in_features).double()
        return SimpleNamespace(logits=self.layers[0](onehot))


@pytest.mark.parametrize("method", ["kfac", "ekfac"])
def test_curvature_of_a_linear_model_is_exact_through_the_hooks(method: str) -> None:
    """At W = 0, over all pairs of tokens, g does not depend on a. Half of the positions have g = 0: units must still agree."""
    model = reference.reference_model(Bigram(5))
    documents = [reference.whole_text([x, y]) for x in range(5) for y in range(5)]
    gradients = [reference.module_gradients(model, one, ["layers.0"])["layers.0"] for one in documents]
    assert gradients[7] == pytest.approx(np.outer(np.full(5, 0.2) - np.eye(5)[2], np.eye(5)[1]))
    one = reference.fit(model, documents, ["layers.0"], method=method)["layers.0"]
    assert relative_error(one.dense(), exact_fisher(gradients)) < 1e-12


@pytest.mark.parametrize("kind", models.KINDS)
def test_ekfac_is_closer_to_the_exact_fisher_than_kfac(kind: str) -> None:
    """EK-FAC's eigenvalues are the diagonal of the exact Fisher in the Kronecker basis: same trace, least Frobenius error."""
    here = case(kind)
    kfac = reference.fit(here.model, here.documents, here.names, method="kfac")
    for name in [name for name in here.names if name.endswith(("attn.c_proj", "k_proj"))]:
        exact = exact_fisher([gradient[name] for gradient in here.gradients])
        one = fitted(kind)[name]
        basis = np.kron(one.gradient_eigenvectors, one.activation_eigenvectors)
        assert relative_error(np.diag(basis.T @ exact @ basis), one.eigenvalues.reshape(-1)) < 1e-10
        assert np.trace(one.dense()) == pytest.approx(np.trace(exact), rel=1e-10)
        assert relative_error(one.dense(), exact) < relative_error(kfac[name].dense(), exact)


@pytest.mark.parametrize("method", ["kfac", "ekfac"])
def test_repeating_the_documents_changes_nothing(method: str) -> None:
    """B26: the unit does not depend on how much was seen."""
    here = case("gpt2")
    name = here.names[1]
    once = reference.fit(here.model, here.documents[:5], [name], method=method)[name]
    twice = reference.fit(here.model, here.documents[:5] * 2, [name], method=method)[name]
    assert relative_error(twice.dense(), once.dense()) < 1e-10
    assert twice.damping == pytest.approx(once.damping, rel=1e-10)


def test_modules_that_read_the_same_tensor_share_the_activation_covariance() -> None:
    one = fitted("qwen2")
    q, k, v = (one[f"model.layers.0.self_attn.{part}_proj"].activation_covariance for part in "qkv")
    assert np.array_equal(q, k) and np.array_equal(q, v)


# ---- influence and search ----


@pytest.mark.parametrize("kind", models.KINDS)
def test_one_step_on_a_document_changes_the_query_loss_by_the_influence(kind: str) -> None:
    """R8: the sign and the scale, for the plain and for the preconditioned step, and an error that shrinks with the step."""
    here = case(kind)
    query_gradients = reference.module_gradients(here.model, here.query, here.names)
    plain = here.gradients[2]
    preconditioned_query, preconditioned = reference.precondition([query_gradients, plain], fitted(kind))
    directions = {"plain": plain, "ekfac": preconditioned}
    expected = {"plain": reference.dot(query_gradients, plain), "ekfac": reference.dot(preconditioned_query, plain)}
    for method, direction in directions.items():
        large, small = (reference.influence_by_step(here.model, here.query, direction, step_size=size) for size in (1e-6, 1e-7))
        assert small == pytest.approx(expected[method], rel=1e-3)
        assert abs(small - expected[method]) < 0.2 * abs(large - expected[method])


@pytest.mark.parametrize("kind", models.KINDS)
def test_self_influence_is_positive_and_a_document_finds_itself_by_cosine(kind: str) -> None:
    here = case(kind)
    one = {name: fitted(kind)[name] for name in here.names[1:4]}
    both_ways = reference.influences(here.gradients, here.gradients, one)
    lengths = reference.self_influences(here.gradients, one)
    assert (lengths > 0).all() and np.diag(both_ways) == pytest.approx(lengths)
    assert both_ways == pytest.approx(both_ways.T, rel=1e-6, abs=1e-9 * lengths.max())
    cosines = reference.cosines(here.gradients, here.gradients, one)
    assert cosines == pytest.approx(both_ways / np.sqrt(np.outer(lengths, lengths)))
    assert np.abs(cosines).max() <= 1 + 1e-9 and (cosines.argmax(axis=1) == np.arange(12)).all()
    assert reference.cosines(here.gradients[:1], here.gradients[1:], None).shape == (1, 11)


def test_search_sorts_by_score_then_id() -> None:
    scores = np.array([1.0, 3.0, 3.0, -2.0])
    assert reference.search(scores, ["d", "c", "b", "a"], 3) == [("b", 3.0), ("c", 3.0), ("d", 1.0)]
    assert reference.search(-scores, ["d", "c", "b", "a"], 1) == [("a", 2.0)]
    assert len(reference.search(scores, ["d", "c", "b", "a"], 9)) == 4


def test_reference_does_not_import_what_it_checks() -> None:
    for module in (reference, models):
        nodes = list(ast.walk(ast.parse(Path(module.__file__).read_text())))
        imported = [node.module for node in nodes if isinstance(node, ast.ImportFrom)]
        imported += [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
        assert imported and not [name for name in imported if name.startswith("tdasearch")]
