"""Every kind of layer and every family of models: batched example gradients equal for-loop autograd."""

from collections.abc import Callable
from contextlib import nullcontext
from fnmatch import fnmatchcase
from functools import partial

import pytest
import torch
from torch import nn

import tdasearch
from tdasearch.capture import Capture
from tdasearch.errors import CaptureError
from tdasearch.language_model import LanguageModel
from tdasearch.layers import kind_of, layer_of
from tdasearch.modules import choose_modules
from tdasearch.records import Content
from tdasearch.tokens import tokenise
from tests import models, reference
from tests.families import FAMILIES, family

PRECISIONS = pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-4)])
KINDS = ("linear", "convolution", "embedding", "norm", "experts", "adapter")


def captured(model: nn.Module, names: list[str], losses: Callable[[], torch.Tensor]):
    """Losses, and every captured parameter's example gradients by qualified name (``name[e]`` for a slice)."""
    found = {}
    with Capture(model, names) as capture:
        layers = {
            part.name: layer for name in names for layer in [layer_of(name, model.get_submodule(name))] for part in layer.parts
        }

        def consume(part, gradient):
            layer = layers[part]
            dense = gradient.dense()
            owner = next(one for one in layer.parts if one.name == part)
            assert dense.shape[1:] == (owner.out_dim, owner.in_dim)
            for key, value in layer.parameter_gradients(part, dense).items():
                found[f"{layer.name}.{key}"] = value

        values = capture.backward(losses, consume)
    return values, found


def check(model, names, losses, num_examples, tolerance):
    """Compare with one plain backward pass an example, run alone."""
    values, found = captured(model, names, partial(losses, model, list(range(num_examples))))
    assert found
    model.eval().requires_grad_(True)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for n in range(num_examples):
        model.zero_grad()
        alone = losses(model, [n])
        alone.sum().backward()
        torch.testing.assert_close(values[n], alone[0].detach(), rtol=tolerance, atol=tolerance)
        for key, gradients in found.items():
            name, _, index = key.partition("[")
            expected = parameters[name].grad
            expected = torch.zeros_like(parameters[name]) if expected is None else expected
            expected = expected[int(index[:-1])] if index else expected
            error = float((gradients[n] - expected).norm())
            assert error <= tolerance * max(float(expected.norm()), 1e-3), (key, error, float(expected.norm()))
    return found


@PRECISIONS
@pytest.mark.parametrize("name", FAMILIES)
def test_every_layer_of_a_family(name, dtype, tolerance):
    case = family(name)
    model = case.model.to(dtype)
    chosen = choose_modules(model, patterns=["*"], kinds=KINDS)
    names = [one for one in chosen.names if not any(fnmatchcase(one, pattern) for pattern in case.left_out)]
    with reference.FullPrecision() if dtype == torch.float64 else nullcontext():
        found = check(model, names, case.losses, 3, tolerance)
    covered = sum(value[0].numel() for value in found.values())
    assert covered >= 0.85 * chosen.num_parameters or name == "vit", (covered, chosen.num_parameters)
    if name in ("mixtral", "qwen2_moe"):
        unused = [key for key, value in found.items() if "down_proj[" in key and (value.flatten(1) == 0).all(1).any()]
        assert unused  # an expert that saw no token of an example has gradient exactly 0


def test_the_default_is_the_maps_inside_the_blocks():
    kinds = {
        name: {kind_of(layer.name, layer.module)[0] for layer in choose_modules(family(name).model).layers} for name in FAMILIES
    }
    assert kinds["llama"] == {"linear"}
    assert kinds["mixtral"] == {"linear", "experts"}
    assert kinds["resnet"] == {"convolution"}
    with pytest.raises(Exception, match="expected some of"):
        choose_modules(family("llama").model, kinds=("linears",))


class _Scaled(nn.Module):
    """A norm by its name that is none by what it does."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(6) + 0.5)

    def forward(self, x):
        return x * self.weight.square()


class ScaledNorm(_Scaled):
    pass


class GatedNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(6))

    def forward(self, x, gate=None):
        return (1 + self.weight) * torch.nn.functional.rms_norm(x, (6,)) * torch.sigmoid(x.flip(-1) if gate is None else gate)


class Gru(nn.Module):
    """A module whose cell is of no kind but "other"."""

    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(6, 5)

    def forward(self, x):
        return torch.stack([self.cell(x[:, t]) for t in range(x.shape[1])], 1)


def reals(*shape):
    return lambda: torch.randn(*shape, dtype=torch.float64)


def indices(*shape):
    return lambda: torch.randint(0, 7, shape)


LAYERS = {
    "linear": (lambda: nn.Linear(6, 5), reals(4, 3, 6)),
    "linear, one position": (lambda: nn.Linear(6, 5, bias=False), reals(4, 6)),
    "linear, many axes": (lambda: nn.Linear(6, 5), reals(4, 2, 3, 6)),
    "conv1d": (lambda: nn.Conv1d(6, 4, 3, stride=2, padding=2, dilation=2), reals(4, 6, 11)),
    "conv1d same": (lambda: nn.Conv1d(6, 4, 4, padding="same", groups=2, padding_mode="circular"), reals(4, 6, 11)),
    "conv2d": (lambda: nn.Conv2d(6, 4, (3, 2), stride=(2, 1), padding=(1, 2), dilation=(1, 2), bias=False), reals(4, 6, 7, 8)),
    "conv2d groups": (lambda: nn.Conv2d(6, 9, 3, groups=3, padding=1, padding_mode="reflect"), reals(4, 6, 5, 5)),
    "conv2d depthwise": (lambda: nn.Conv2d(6, 6, 3, groups=6), reals(4, 6, 5, 5)),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2, stride=2, padding=1), reals(4, 2, 4, 3, 5)),
    "transposed conv1d": (lambda: nn.ConvTranspose1d(6, 4, 3, stride=2, padding=1, output_padding=1), reals(4, 6, 7)),
    "transposed conv2d": (
        lambda: nn.ConvTranspose2d(6, 4, (3, 2), stride=3, dilation=2, groups=2, output_padding=2),
        reals(4, 6, 3, 4),
    ),
    "transposed conv3d": (lambda: nn.ConvTranspose3d(2, 3, 2, bias=False), reals(4, 2, 3, 2, 3)),
    "embedding": (lambda: nn.Embedding(7, 5, padding_idx=2), indices(4, 9)),
    "embedding bag, sum": (lambda: nn.EmbeddingBag(7, 5, mode="sum", padding_idx=2), indices(4, 9)),
    "embedding bag, mean": (lambda: nn.EmbeddingBag(7, 5, mode="mean", padding_idx=2), indices(4, 9)),
    "layer norm": (lambda: nn.LayerNorm(6), reals(4, 3, 6)),
    "layer norm of two axes": (lambda: nn.LayerNorm((3, 6), bias=False), reals(4, 5, 3, 6)),
    "rms norm": (lambda: nn.RMSNorm(6), reals(4, 3, 6)),
    "rms norm of heads": (lambda: nn.RMSNorm(6), reals(4, 3, 2, 6)),
    "gated norm": (GatedNorm, reals(4, 3, 6)),
    "group norm": (lambda: nn.GroupNorm(2, 6), reals(4, 6, 5)),
    "instance norm": (lambda: nn.InstanceNorm2d(6, affine=True), reals(4, 6, 3, 4)),
    "batch norm": (lambda: nn.BatchNorm2d(6), reals(4, 6, 3, 4)),
    "other: prelu": (lambda: nn.PReLU(6), reals(4, 6, 5)),
    "other: a gru's cell, several uses": (Gru, reals(4, 3, 6)),
}


@PRECISIONS
@pytest.mark.parametrize("name", LAYERS)
def test_every_type_of_layer(name, dtype, tolerance):
    torch.manual_seed(3)
    make, inputs = LAYERS[name]
    model, x = nn.Sequential(make()).to(dtype), inputs()
    x = x.to(dtype) if x.is_floating_point() else x
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))

    def losses(model, rows):
        out = model(x[rows]).flatten(1)
        return (out.sin() * torch.arange(1.0, 1 + out.shape[1], dtype=dtype)).sum(1)

    names = [one for one, module in model.named_modules() if layer_of(one, module) is not None]
    found = check(model, names, losses, 4, tolerance)
    assert set(found) == {key for key, _ in model.named_parameters()}


@pytest.mark.parametrize(
    ("module", "inputs", "message"),
    [
        (nn.Embedding(7, 5, scale_grad_by_freq=True), indices(4, 9), "scale_grad_by_freq"),
        (nn.Embedding(7, 5, max_norm=1.0), indices(4, 9), "max_norm"),
        (nn.EmbeddingBag(7, 5, mode="max"), indices(4, 9), "mode='max'"),
        (nn.EmbeddingBag(7, 5), lambda: torch.arange(6), "offsets"),
        (nn.GRU(6, 5, batch_first=True), lambda: torch.randn(4, 3, 6), "expected one tensor"),
        (ScaledNorm(), lambda: torch.randn(4, 3, 6), "something else"),
        (nn.Conv1d(6, 4, 3), lambda: torch.randn(6, 8), "expected inputs"),
    ],
)
def test_what_cannot_be_captured_is_refused(module, inputs, message):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = module

        def forward(self, x):
            if isinstance(self.inner, nn.EmbeddingBag) and x.dim() == 1:
                return self.inner(x, torch.tensor([0, 2, 3]))
            return self.inner(x)

    model, x = Model(), inputs()
    with pytest.raises(CaptureError, match=message), Capture(model, ["inner"]) as capture:
        capture.backward(lambda: model(x).flatten(1).sum(1), lambda *_: None)


def test_positions_that_all_examples_share_are_refused():
    case = family("gpt2")
    ids = torch.randint(3, 60, (3, 6))
    with pytest.raises(CaptureError, match="position_ids"), Capture(case.model, ["transformer.wpe"]) as capture:
        capture.backward(lambda: case.model(input_ids=ids).logits.logsumexp(2).sum(1), lambda *_: None)


def peft_model(config, name="llama"):
    peft = pytest.importorskip("peft")
    case = family(name)
    torch.manual_seed(1)
    model = peft.get_peft_model(case.model, config(peft))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model, case


ADAPTERS = {
    "lora": lambda peft: peft.LoraConfig(r=3, target_modules=["q_proj", "v_proj", "up_proj"], lora_dropout=0.1),
    "rslora": lambda peft: peft.LoraConfig(r=3, target_modules="all-linear", use_rslora=True),
    "dora": lambda peft: peft.LoraConfig(r=3, target_modules=["q_proj"], use_dora=True),
    "lora of an embedding": lambda peft: peft.LoraConfig(r=3, target_modules=["v_proj", "embed_tokens"]),
    "ia3": lambda peft: peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "vera": lambda peft: peft.VeraConfig(r=3, target_modules=["q_proj"]),
}


@PRECISIONS
@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters(name, dtype, tolerance):
    model, case = peft_model(ADAPTERS[name])
    model = model.to(dtype)
    trained = {key for key, parameter in model.named_parameters() if parameter.requires_grad}
    names = choose_modules(model, patterns=["*"] if "embedding" in name else (), kinds=("linear", "adapter")).names
    if "embedding" in name:
        names = [one for one in names if "lora" in one or one.endswith("embed_tokens")]
    with reference.FullPrecision() if dtype == torch.float64 else nullcontext():
        found = check(model, names, case.losses, 3, tolerance)
    assert set(found) == trained


@pytest.mark.parametrize("state", ["merged", "disabled"])
def test_an_adapter_that_does_not_run_is_refused(state):
    model, case = peft_model(ADAPTERS["lora"])
    names = choose_modules(model).names
    model.merge_adapter() if state == "merged" else model.base_model.disable_adapter_layers()
    with pytest.raises(CaptureError, match=f"{state}.*call model"):
        Capture(model, names)
    base = [one for one in choose_modules(model, patterns=["*q_proj.base_layer"]).names]
    with Capture(model, base) as capture:  # the merged weights are weights like others
        capture.backward(partial(case.losses, model, [0, 1]), lambda *_: None)
    model.unmerge_adapter() if state == "merged" else model.base_model.enable_adapter_layers()
    Capture(model, names)


@pytest.mark.parametrize("kinds", [(), ("linear", "experts", "norm", "embedding")])
def test_an_index_over_every_kind_of_layer(kinds, tmp_path):
    """Exact scores of the index equal those of dense gradients and the factors, whatever form the gradients have."""
    _, tokenizer = models.tiny("llama")
    model = family("mixtral").model
    model.resize_token_embeddings(models.VOCABULARY)
    corpus = [{"id": f"d{n}", "text": text} for n, text in enumerate(models.sentences(12))]
    options = dict(model=model, tokenizer=tokenizer, path=tmp_path / "x.tda", fit_documents="all", fisher="empirical", quiet=True)
    index = tdasearch.build_index(corpus, kinds=kinds, modules=["*"] if kinds else (), code="fp32", budget="4KB", **options)
    covered = {kind_of(name, model.get_submodule(name))[0] for name in index.manifest.plan.modules}
    assert covered == ({"linear", "experts"} if not kinds else set(kinds))
    hits = index.search("The old fox", " sees the sea.", rescore="all", k=12)
    scores = {hit.document_id: hit.score for hit in hits.proponents}
    language_model = LanguageModel(model, tokenizer)
    names, factors = index.manifest.plan.modules, index.encoder.factors

    def gradient(prompt, text):
        content = tokenise(tokenizer, Content(prompt=prompt, completion=text))
        found = {}
        with Capture(model, names) as capture:
            batch = language_model.batch([content.token_ids], [content.is_target])
            capture.backward(
                partial(language_model.losses, batch), lambda name, one: found.update({name: one.dense()[0].double()})
            )
        return found

    query = gradient("The old fox", " sees the sea.")
    for row in corpus[:4]:
        document = gradient("", row["text"])
        exact = sum(float((factors[name].precondition(query[name].float()).double() * document[name]).sum()) for name in query)
        assert scores[row["id"]] == pytest.approx(exact, rel=1e-3, abs=1e-4 * abs(max(scores.values())))
    assert len(scores) == 12
