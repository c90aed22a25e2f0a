"""Capture: batched gradients equal for-loop autograd, and the model is handed back as it came."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from tdasearch import head
from tdasearch import language_model as language_model_file
from tdasearch.capture import Capture
from tdasearch.errors import CaptureError, UsageError
from tdasearch.language_model import LanguageModel
from tdasearch.layers import kind_of, layer_of
from tdasearch.modules import choose_modules
from tests import models, reference


def gradients_of(language_model, names, token_ids, is_target, **batch_options):
    """Capture every module's gradient_NOI of one batch."""
    found = {}

    def consume(name, gradient):
        found[name] = gradient.dense()

    with Capture(language_model.model, names) as capture:
        losses = capture.backward(partial(language_model.losses, language_model.batch(token_ids, is_target)), consume)
    return losses, found


def examples(tokenizer, num=5):
    token_ids = [tokenizer(text).input_ids for text in models.sentences(num)]
    return token_ids, [[False] + [True] * (len(ids) - 1) for ids in token_ids]


@pytest.mark.parametrize("kind", models.KINDS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-4)])
def test_batched_gradients_equal_for_loop_autograd(kind, dtype, tolerance):
    model, tokenizer = models.tiny(kind)
    language_model = LanguageModel(model.to(dtype), tokenizer)
    names = choose_modules(model).names
    token_ids, is_target = examples(tokenizer)
    token_ids.append(token_ids[0] * 4)  # a neighbour several times longer
    token_ids[-1] = token_ids[-1][: models.MAX_TOKENS]
    is_target.append([False] * 4 + [True] * (len(token_ids[-1]) - 4))
    with reference.FullPrecision() if dtype == torch.float64 else torch.enable_grad():
        losses, found = gradients_of(language_model, names, token_ids, is_target)
    exact = reference.reference_model(model)
    for row, (ids, flags) in enumerate(zip(token_ids, is_target, strict=True)):
        example = reference.Example(ids, flags)
        assert float(losses[row]) == pytest.approx(float(reference.loss(exact, example)), rel=tolerance)
        for name, expected in reference.module_gradients(exact, example, names).items():
            error = torch.as_tensor(expected) - found[name][row].double()
            assert float(error.norm()) <= tolerance * float(torch.as_tensor(expected).norm()), name


def test_flattened_inputs_keep_their_examples_apart():
    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(3, 2)

        def forward(self, x_NTI):
            return self.inner(x_NTI.reshape(-1, 3)).reshape(*x_NTI.shape[:2], 2)

    torch.manual_seed(0)
    model, x_NTI = Flat(), torch.randn(4, 5, 3)
    found = {}
    with Capture(model, ["inner"]) as capture:
        capture.backward(lambda: model(x_NTI).square().sum((1, 2)), lambda name, gradient: found.update({name: gradient.dense()}))
    for row in range(4):
        model.zero_grad()
        model(x_NTI[row : row + 1]).square().sum().backward()
        expected = torch.cat([model.inner.weight.grad, model.inner.bias.grad[:, None]], dim=1)
        torch.testing.assert_close(found["inner"][row], expected)


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_handed_back_as_it_came(training):
    model, tokenizer = models.tiny("gpt2")
    model.train(training)
    model.transformer.h[0].train(not training)
    model.transformer.wte.weight.requires_grad_(False)
    seen = []
    handle = model.transformer.h[0].register_forward_hook(lambda *_: seen.append(1))
    modes = [module.training for module in model.modules()]
    flags = [parameter.requires_grad for parameter in model.parameters()]
    hooks = [len(module._forward_hooks) for module in model.modules()]
    torch.manual_seed(5)
    expected_draw = torch.rand(3)
    torch.manual_seed(5)
    language_model = LanguageModel(model, tokenizer)
    gradients_of(language_model, choose_modules(model).names, *examples(tokenizer))
    with pytest.raises(RuntimeError, match="consumer"), Capture(model, choose_modules(model).names) as capture:

        def broken(*_):
            raise RuntimeError("consumer")

        capture.backward(partial(language_model.losses, language_model.batch(*examples(tokenizer))), broken)
    assert torch.equal(torch.rand(3), expected_draw)
    assert [module.training for module in model.modules()] == modes
    assert [parameter.requires_grad for parameter in model.parameters()] == flags
    assert [len(module._forward_hooks) for module in model.modules()] == hooks
    assert all(parameter.grad is None for parameter in model.parameters())
    assert seen
    handle.remove()


def test_no_weight_gradient_is_computed_and_the_graph_begins_at_the_first_module():
    model, tokenizer = models.tiny("llama")
    language_model = LanguageModel(model, tokenizer)
    names = choose_modules(model, blocks="1").names
    inputs = []
    handle = model.model.layers[1].register_forward_pre_hook(lambda module, args: inputs.append(args[0].requires_grad))
    gradients_of(language_model, names, *examples(tokenizer))
    handle.remove()
    assert set(inputs) == {False}


def test_modules_that_read_one_tensor_are_given_one_object():
    model, tokenizer = models.tiny("qwen2")
    language_model = LanguageModel(model, tokenizer)
    given = {}
    with Capture(model, choose_modules(model).names) as capture:
        capture.backward(
            partial(language_model.losses, language_model.batch(*examples(tokenizer))),
            lambda name, gradient: given.update({name: gradient.activations_NTI}),
        )
    layer = "model.layers.0."
    assert given[layer + "self_attn.q_proj"] is given[layer + "self_attn.k_proj"] is given[layer + "self_attn.v_proj"]
    assert given[layer + "mlp.gate_proj"] is given[layer + "mlp.up_proj"]
    assert given[layer + "self_attn.o_proj"] is not given[layer + "self_attn.q_proj"]
    assert torch.all(given[layer + "self_attn.q_proj"][..., -1] == 1)


def test_a_compiled_model_is_captured_through_its_original():
    model, tokenizer = models.tiny("gpt2")
    names = choose_modules(model).names
    token_ids, is_target = examples(tokenizer)
    _, eager = gradients_of(LanguageModel(model, tokenizer), names, token_ids, is_target)
    compiled = torch.compile(model, backend="eager")
    compiled(input_ids=torch.tensor([token_ids[0]]))
    _, found = gradients_of(LanguageModel(compiled, tokenizer), names, token_ids, is_target)
    for name in names:
        assert torch.equal(found[name], eager[name])


class _Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused, self.ignored = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x):
        self.ignored(x)
        return self.used(self.used(x)) if self.training is None else self.used(x)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["used", "unused"], "never ran forward"),
        (["used", "ignored"], "got no gradient"),
        (["nothing"], "no module of that name"),
        ([""], "expected a layer"),
    ],
)
def test_a_module_without_a_gradient_is_an_error(names, message):
    model = _Odd()
    with pytest.raises(CaptureError, match=message), Capture(model, names) as capture:
        capture.backward(lambda: model(torch.ones(3, 1, 2)).sum((1, 2)), lambda *_: None)


def test_the_uses_of_a_module_that_runs_twice_are_summed():
    torch.manual_seed(0)
    linear = nn.Linear(2, 2).double()
    model, x_NTI = nn.Sequential(linear, nn.Tanh(), linear), torch.randn(3, 4, 2, dtype=torch.float64)
    found = {}
    with Capture(model, ["0"]) as capture:
        capture.backward(lambda: model(x_NTI).square().sum((1, 2)), lambda name, gradient: found.update({name: gradient}))
    assert found["0"].activations_NTI.shape == (3, 8, 3)
    for row in range(3):
        model.zero_grad()
        model(x_NTI[row : row + 1]).square().sum().backward()
        expected = torch.cat([linear.weight.grad, linear.bias.grad[:, None]], dim=1)
        torch.testing.assert_close(found["0"].dense()[row], expected)


def test_a_subclass_with_another_forward_is_no_linear_map():
    class Scaled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    assert kind_of("x", Scaled(2, 2))[0] == "other"
    assert [part.num_parameters for part in layer_of("x", nn.Linear(2, 3)).parts] == [9]


def test_modules_are_chosen_by_block_and_pattern():
    model, _ = models.tiny("gpt2")
    everything = choose_modules(model)
    assert everything.names == reference.block_linear_names(model)
    assert "lm_head" not in everything.names
    assert 0 < everything.share < 1
    assert choose_modules(model, blocks="-1:").names == choose_modules(model, blocks="1").names
    assert choose_modules(model, blocks="0").names + choose_modules(model, blocks="1:2").names == everything.names
    assert choose_modules(model, patterns=["*.mlp.*"], blocks="0").names == [
        "transformer.h.0.mlp.c_fc",
        "transformer.h.0.mlp.c_proj",
    ]
    for wrong in ({"blocks": "x"}, {"blocks": "7"}, {"blocks": "1:2:3"}, {"patterns": ["*.nothing"]}):
        with pytest.raises(UsageError):
            choose_modules(model, **wrong)


class TestHead:
    """Losses without logits equal those with them; the route is taken only where the logits are the head's own."""

    @staticmethod
    def gradients(language_model, batch, *, weights_wanted):
        hidden = []
        block = language_model.model.get_submodule("model.layers.0.mlp.down_proj")
        handle = block.register_forward_hook(lambda module, args, output: hidden.append(output.requires_grad_(True)))
        for parameter in language_model.model.parameters():
            parameter.requires_grad_(weights_wanted)
        losses_N = language_model.losses(batch)
        handle.remove()
        return losses_N, torch.autograd.grad((losses_N * torch.arange(1.0, 1 + len(losses_N))).sum(), hidden[-1])[0]

    @pytest.mark.parametrize("sampled", [False, True])
    @pytest.mark.parametrize("bias", [False, True])
    def test_losses_and_gradients_equal_those_of_the_logits(self, sampled, bias, monkeypatch):
        model, tokenizer = models.tiny("llama")
        language_model = LanguageModel(model.double().eval(), tokenizer)
        if bias:
            model.lm_head.bias = nn.Parameter(torch.randn(model.lm_head.out_features, dtype=torch.float64))
        monkeypatch.setattr("tdasearch.head._MIN_ROWS", 7)  # several chunks, the last one short
        monkeypatch.setitem(head._CHUNK_BYTES, "cpu", 1)
        batch = language_model.batch(*examples(tokenizer))
        if sampled:
            batch = replace(batch, uniforms=torch.rand(batch.input_ids.shape, dtype=torch.float64))
        calls = []
        monkeypatch.setattr(language_model_file, "head_losses", lambda *args: calls.append(1) or head.head_losses(*args))
        expected = self.gradients(language_model, batch, weights_wanted=True)
        assert not calls
        found = self.gradients(language_model, batch, weights_wanted=False)
        assert calls
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        with torch.no_grad():
            torch.testing.assert_close(language_model.losses(batch), expected[0].detach(), rtol=1e-12, atol=1e-12)

    def test_a_model_that_changes_its_logits_takes_the_other_route(self):
        class Capped(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = nn.Linear(4, 4)
                self.head = nn.Linear(4, 9)

            def get_output_embeddings(self):
                return self.head

            def forward(self, x_NTH):
                return self.head(self.inner(x_NTH)).mul(0.1).tanh()

        model, x_NTH = Capped(), torch.randn(1, 3, 4)
        assert head.plain_head(model, lambda: model(x_NTH)) is None
        assert head.plain_head(model, lambda: model.head(model.inner(x_NTH))) is model.head
