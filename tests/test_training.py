"""Capture in a training loop: gradients equal those of each document's summed loss, and the loop does not notice."""

import copy
import gc
import weakref
from contextlib import nullcontext
from fnmatch import fnmatch
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tdasearch import capture_training
from tdasearch.errors import CaptureError, UsageError
from tdasearch.gradients import Dense, Grouped, Lookup, Outer
from tdasearch.loss_scale import scale_of_logits
from tdasearch.modules import choose_modules
from tdasearch.segments import find_segments, segments_of
from tests import models, reference
from tests.families import FAMILIES, family

IGNORED = -100
EVERY_KIND = ("linear", "convolution", "embedding", "norm", "experts")


def batch_of(tokenizer, start=0, num=4):
    """Return inputs of the documents, padded on the right, and the documents."""
    token_ids = [tokenizer(text).input_ids for text in models.sentences(start + num)[start:]]
    longest = max(len(ids) for ids in token_ids)
    padded = torch.tensor([ids + [0] * (longest - len(ids)) for ids in token_ids])
    is_token = torch.arange(longest) < torch.tensor([len(ids) for ids in token_ids])[:, None]
    return {
        "input_ids": padded,
        "attention_mask": is_token.long(),
        "labels": padded.masked_fill(~is_token, IGNORED),
    }, token_ids


def token_losses(model, inputs):
    """-log p of each target, [N, T - 1], zero where there is none, from the logits as they are."""
    logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], use_cache=False).logits
    labels = inputs["labels"][:, 1:]
    losses = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels.flatten(), reduction="none", ignore_index=IGNORED)
    return losses.view_as(labels), labels != IGNORED


def mean_over_tokens(model, inputs):
    losses, is_target = token_losses(model, inputs)
    return losses.sum() / is_target.sum()


def mean_over_batch(model, inputs):
    return token_losses(model, inputs)[0].sum(1).mean()


def mean_of_example_means(model, inputs):
    losses, is_target = token_losses(model, inputs)
    return (losses.sum(1) / is_target.sum(1)).mean()


def plain_sum(model, inputs):
    return token_losses(model, inputs)[0].sum()


def own_loss(model, inputs):
    return model(**inputs, use_cache=False).loss


def own_loss_over_items(model, inputs):
    return model(**inputs, use_cache=False, num_items_in_batch=torch.tensor(97)).loss / 3


REDUCTIONS = (mean_over_tokens, mean_over_batch, mean_of_example_means, plain_sum, own_loss, own_loss_over_items)


def dense(batch):
    return {name: gradient.dense() for name, gradient in batch.gradients.items()}


def assert_exact(found, model, token_ids, tolerance):
    """``found`` equals for-loop autograd on the model as it is, a document at a time."""
    exact = reference.reference_model(model)
    for row, ids in enumerate(token_ids):
        for name, expected in reference.module_gradients(exact, reference.whole_text(ids), list(found)).items():
            error = torch.as_tensor(expected) - found[name][row].double()
            assert float(error.norm()) <= tolerance * float(torch.as_tensor(expected).norm()), (row, name)


def without_dropout(kind, dtype=torch.float64, **options):
    model, tokenizer = models.tiny(kind, **options)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0
    return model.to(dtype), tokenizer


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("kind", models.KINDS)
def test_gradients_of_any_reduction_are_those_of_the_summed_loss(kind, reduction):
    model, tokenizer = without_dropout(kind)
    inputs, token_ids = batch_of(tokenizer)
    found = []
    with capture_training(model, found.append), reference.FullPrecision():
        reduction(model, inputs).backward()
    (batch,) = found
    assert (batch.number, batch.num_examples) == (0, 4)
    assert torch.equal(batch.inputs["input_ids"], inputs["input_ids"])
    assert list(batch.gradients) != sorted(choose_modules(model).names)
    assert set(batch.gradients) == set(choose_modules(model).names)
    assert_exact(dense(batch), model, token_ids, 1e-9)
    for name, gradient in dense(batch).items():  # what the loop itself got is the scaled sum
        weight = model.get_submodule(name).weight.grad
        of_weight = (gradient * batch.scale_N[:, None, None]).sum(0)[:, : gradient.shape[2] - (kind == "gpt2")]
        if kind != "qwen2":
            torch.testing.assert_close(weight.T if kind == "gpt2" else weight, of_weight, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", models.KINDS)
def test_gradients_in_single_precision(kind):
    model, tokenizer = without_dropout(kind, torch.float32)
    inputs, token_ids = batch_of(tokenizer)
    found = []
    with capture_training(model, found.append):
        own_loss(model, inputs).backward()
    assert_exact(dense(found[0]), model, token_ids, 1e-4)


def train(model, tokenizer, *, on_batch=None, steps=3, accumulate=2, dtype=None, loss=own_loss):
    """A loop that knows of no capture; returns what it drew and the documents' weights before each step."""
    torch.manual_seed(3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype == torch.float16, init_scale=1024.0)
    with capture_training(model, on_batch) if on_batch is not None else nullcontext() as capture:
        for step in range(steps):
            for micro in range(accumulate):
                inputs, _ = batch_of(tokenizer, 4 * (step * accumulate + micro), 3 if micro else 4)
                with torch.autocast("cpu", dtype) if dtype is not None else nullcontext():
                    value = loss(model, inputs) / accumulate
                scaler.scale(value).backward()
            with torch.no_grad():
                loss(model, inputs)
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return torch.rand(2), capture


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("checkpointing", [None, "reentrant", "not reentrant"])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_training_is_undisturbed(kind, checkpointing, dtype):
    weights, draws, delivered = [], [], []
    for on_batch in (None, delivered.append):
        model, tokenizer = models.tiny(kind)  # with dropout
        if checkpointing is not None:
            model.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
        num_hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
        draw, _ = train(model, tokenizer, on_batch=on_batch, dtype=dtype)
        draws.append(draw)
        weights.append(model.state_dict())
        assert [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()] == num_hooks
    assert torch.equal(*draws)
    assert all(torch.equal(weights[0][name], value) for name, value in weights[1].items())
    assert [batch.number for batch in delivered] == list(range(6))
    assert [batch.num_examples for batch in delivered] == [4, 3] * 3


@pytest.mark.parametrize("checkpointing", [None, "reentrant", "not reentrant"])
def test_accumulation_and_checkpointing_change_no_gradient(checkpointing):
    model, tokenizer = without_dropout("gpt2")  # whose blocks are float64 throughout, in the backward pass too
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
    original, found = copy.deepcopy(model), []
    original.gradient_checkpointing_disable()
    train(model, tokenizer, on_batch=found.append, steps=1, accumulate=3, loss=mean_over_tokens)
    assert len(found) == 3
    for micro, batch in enumerate(found):
        assert_exact(dense(batch), original, batch_of(tokenizer, 4 * micro, batch.num_examples)[1], 1e-9)


def test_checkpointing_keeps_no_activations_through_the_forward_pass():
    model, tokenizer = without_dropout("llama")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    inputs, _ = batch_of(tokenizer)
    seen = []
    handle = model.model.layers[0].mlp.down_proj.register_forward_pre_hook(lambda _, args: seen.append(weakref.ref(args[0])))
    with capture_training(model, lambda batch: None):
        loss = own_loss(model, inputs)
        gc.collect()
        assert seen[0]() is None
        loss.backward()
    handle.remove()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.1), (torch.float16, 0.03)])
def test_autocast_and_the_loss_scaler(dtype, tolerance):
    model, tokenizer = without_dropout("llama", torch.float32)
    original, found = copy.deepcopy(model), []
    train(model, tokenizer, on_batch=found.append, steps=1, accumulate=1, dtype=dtype)
    expected_scale = (1024.0 if dtype == torch.float16 else 1.0) / sum(len(ids) - 1 for ids in batch_of(tokenizer)[1])
    torch.testing.assert_close(found[0].scale_N, torch.full((4,), expected_scale, dtype=torch.float64), rtol=4e-3, atol=0)
    assert all(gradient.output_gradients_NTO.dtype == torch.float32 for gradient in found[0].gradients.values())
    assert_exact(dense(found[0]), original, batch_of(tokenizer)[1], tolerance)


def test_an_overflow_is_reported_and_not_delivered():
    model, tokenizer = without_dropout("llama", torch.float32)
    inputs, token_ids = batch_of(tokenizer)
    found = []
    with pytest.warns(UserWarning, match="batch 0 .* not finite"), capture_training(model, found.append) as capture:
        for factor in (float("inf"), 1.0, float("nan")):
            (own_loss(model, inputs) * factor).backward()
    assert capture.nonfinite == [0, 2]
    assert [batch.number for batch in found] == [1]
    assert_exact(dense(found[0]), model, token_ids, 1e-4)


def test_an_overflow_behind_the_logits_is_seen():
    model, tokenizer = without_dropout("llama", torch.float32)
    inputs, _ = batch_of(tokenizer)
    handle = model.model.layers[1].register_forward_hook(
        lambda _, args, output: output.register_hook(lambda gradient: gradient * float("inf")) and None
    )
    with (
        pytest.warns(UserWarning, match="not finite"),
        capture_training(model, lambda batch: pytest.fail("delivered")) as capture,
    ):
        own_loss(model, inputs).backward()
    handle.remove()
    assert capture.nonfinite == [0]


def smoothed(logits, labels):
    return F.cross_entropy(logits, labels, label_smoothing=0.1)


def weighted(logits, labels):
    return (F.cross_entropy(logits, labels, reduction="none") * torch.linspace(1, 1.01, len(labels))).sum()


def squared(logits, labels):
    return logits.square().mean()


@pytest.mark.parametrize("loss", [smoothed, weighted, squared])
def test_another_loss_asks_for_its_scale(loss):
    model, tokenizer = without_dropout("gpt2", torch.float32)
    inputs, _ = batch_of(tokenizer)
    del inputs["attention_mask"]

    def run(**options):
        found = []
        with capture_training(model, found.append, **options):
            logits = model(input_ids=inputs["input_ids"]).logits
            loss(logits[:, :-1].flatten(0, 1), inputs["input_ids"][:, 1:].flatten()).backward()
        return found[0]

    with pytest.raises(CaptureError, match="give loss_scale"):
        run()
    plain = dense(run(loss_scale=1.0))
    half = run(loss_scale=lambda inputs: torch.full((len(inputs["input_ids"]),), 0.5))
    assert all(torch.equal(gradient, 2 * plain[name]) for name, gradient in dense(half).items())
    with pytest.raises(CaptureError, match="other than 0"):
        run(loss_scale=lambda inputs: 0.0)
    with pytest.raises(UsageError, match="loss_scale"):
        run(loss_scale="mean")


def test_an_auxiliary_loss_is_refused():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.head = nn.Linear(3, 4), nn.Linear(4, 5)

        def forward(self, x):
            hidden = self.inner(x)
            return {"logits": self.head(hidden), "aux_loss": hidden.square().mean()}

    model = Mixed()
    x_NTI = torch.randn(2, 3, 3)

    def run(factor, **options):
        with capture_training(model, lambda batch: None, modules=["inner"], **options):
            output = model(x_NTI)
            loss = F.cross_entropy(output["logits"].flatten(0, 1), torch.arange(6) % 5)
            (loss + factor * output["aux_loss"]).backward()

    run(0.0)
    run(0.1, loss_scale=1.0)
    with pytest.raises(CaptureError, match="aux_loss"):
        run(0.1)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.second(self.first(x).tanh())


def test_a_classifier_and_several_passes_before_one_backward():
    torch.manual_seed(0)
    model = Classifier().double()
    x, y = torch.randn(7, 6, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1, 2, 0])
    found = []
    with capture_training(model, found.append):
        model(x)  # differentiated by nobody
        with torch.no_grad():
            model(x)
        first, second = F.cross_entropy(model(x[:3]), y[:3]), F.cross_entropy(model(x[3:]), y[3:])
        (first + second / 5).backward()
        checkpoint(model, x, use_reentrant=False).log_softmax(1)[torch.arange(7), y].sum().neg().backward()
        checkpoint(model, x.clone().requires_grad_(), use_reentrant=True).log_softmax(1)[0, 0].neg().backward()
    assert [batch.num_examples for batch in found] == [4, 3, 7, 7] or [batch.num_examples for batch in found] == [3, 4, 7, 7]
    halves = sorted(found[:2], key=lambda batch: batch.num_examples)
    assert halves[0].scale_N.tolist() == pytest.approx([1 / 3] * 3)
    assert halves[1].scale_N.tolist() == pytest.approx([1 / 20] * 4)
    assert not found[3].gradients["first"].dense()[1:].any()
    for row in range(7):
        model.zero_grad()
        F.cross_entropy(model(x[row : row + 1]), y[row : row + 1]).backward()
        for name in ("first", "second"):
            layer = model.get_submodule(name)
            expected = torch.cat([layer.weight.grad, layer.bias.grad[:, None]], dim=1)
            part = torch.cat([half.gradients[name].dense() for half in halves])
            torch.testing.assert_close(part[row], expected, rtol=1e-9, atol=1e-12)
            torch.testing.assert_close(found[2].gradients[name].dense()[row], expected, rtol=1e-9, atol=1e-12)


def test_the_two_signs_and_examples_without_a_target():
    logits = torch.randn(6, 9, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([0, 3, IGNORED, IGNORED, 8, 1])
    example_R = torch.tensor([0, 0, 1, 1, 2, 2])
    for factor in (0.25, -7.0):
        loss = factor * F.cross_entropy(logits, labels, reduction="sum")
        (gradient,) = torch.autograd.grad(loss, logits)
        scale_N = scale_of_logits(logits.detach(), gradient, example_R, 3)
        torch.testing.assert_close(scale_N, torch.tensor([factor, 1.0, factor], dtype=torch.float64), rtol=1e-14, atol=0)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_kind_of_layer_in_every_family(name):
    case = family(name)
    model, rows = case.model.double().eval().requires_grad_(True), [0, 1, 2]
    names = choose_modules(model, patterns=["*"], kinds=EVERY_KIND).names
    names = [one for one in names if not any(fnmatch(one, pattern) for pattern in case.left_out)]
    found = []
    with capture_training(model, found.append, modules=names, kinds=EVERY_KIND) as capture, reference.FullPrecision():
        case.losses(model, rows).mean().backward()
        weights = {key: parameter.grad.clone() for key, parameter in model.named_parameters(remove_duplicate=False)}
    torch.testing.assert_close(found[0].scale_N, torch.full((3,), 1 / 3, dtype=torch.float64))
    total = {}
    for layer in capture.layers:
        for part in layer.parts:
            if part.name in found[0].gradients:  # of tied weights: one
                gradient = found[0].gradients[part.name].dense()
                for key, value in layer.parameter_gradients(part.name, gradient).items():
                    total[f"{layer.name}.{key}"] = value.mean(0)
    assert total
    for key, value in total.items():
        whole, _, index = key.partition("[")
        expected = weights[whole] if not index else weights[whole][int(index.rstrip("]"))]
        torch.testing.assert_close(value.view_as(expected), expected, rtol=1e-8, atol=1e-10, msg=key)


def test_gradients_are_transformed_as_they_come():
    model, tokenizer = without_dropout("llama")
    inputs, _ = batch_of(tokenizer)
    order, found = [], []

    def first_outputs(name, gradient):
        order.append(name)
        return type(gradient)(gradient.activations_NTI, gradient.output_gradients_NTO[:, :, :2], gradient.is_position_NT)

    for transform in (None, first_outputs):
        with capture_training(model, found.append, modules=["*.mlp.*"], transform=transform):
            own_loss(model, inputs).backward()
    assert order[0] == "model.layers.1.mlp.down_proj"
    for name, gradient in dense(found[1]).items():
        torch.testing.assert_close(gradient, dense(found[0])[name][:, :2])


def test_the_head_and_adapters_can_be_captured():
    from peft import LoraConfig, get_peft_model

    model, tokenizer = without_dropout("llama")
    inputs, token_ids = batch_of(tokenizer)
    found = []
    with capture_training(model, found.append, modules=["lm_head"]), reference.FullPrecision():
        own_loss(model, inputs).backward()
    assert_exact(dense(found[0]), model, token_ids, 1e-9)
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    names = [name for name, module in adapted.named_modules() if ".lora_" in name and type(module) is nn.Linear]
    with capture_training(adapted, found.append, modules=names), reference.FullPrecision():
        adapted(**inputs, use_cache=False).loss.backward()
    for name, gradient in dense(found[1]).items():
        weight = adapted.get_submodule(name).weight.grad
        torch.testing.assert_close((gradient * found[1].scale_N[:, None, None]).sum(0), weight, rtol=1e-9, atol=1e-12)


def test_misuse_is_named():
    model, tokenizer = without_dropout("llama", torch.float32)
    inputs, _ = batch_of(tokenizer)
    with pytest.raises(CaptureError, match=r"torch\.compile"):
        capture_training(torch.compile(model, backend="eager"), print)
    with pytest.raises(UsageError, match="no module was chosen"):
        capture_training(model, print, modules=["*.nothing"])
    with pytest.warns(UserWarning, match="nothing was captured"), capture_training(model, print):
        pass
    with capture_training(model, lambda batch: None):
        own_loss(model, inputs).backward()
        loss = own_loss(model, inputs)
    with pytest.raises(CaptureError, match="put backward"):
        loss.backward()
    with pytest.raises(CaptureError, match="differentiated twice"), capture_training(model, lambda batch: None):
        loss = own_loss(model, inputs)
        loss.backward(retain_graph=True)
        loss.backward()
    with pytest.raises(CaptureError, match="outermost"), capture_training(model, lambda batch: None):
        model.model(inputs["input_ids"])
    for loss_scale in ("auto", 1.0):
        expected = pytest.raises(CaptureError, match="no gradient reached") if loss_scale == "auto" else nullcontext()
        with expected, capture_training(model, lambda batch: None, loss_scale=loss_scale) as capture:
            output = model(input_ids=inputs["input_ids"], output_hidden_states=True)
            output.hidden_states[-1].sum().backward()
    assert capture.num_batches == 1
    with pytest.raises(ZeroDivisionError), capture_training(model, lambda batch: 1 / 0):
        own_loss(model, inputs).backward()
    found = []
    with capture_training(model, found.append):
        own_loss(model, inputs).backward()
    assert len(found) == 1


def test_a_model_that_is_compiled_around_the_capture_is_refused():
    model, tokenizer = without_dropout("llama", torch.float32)
    inputs, _ = batch_of(tokenizer)
    compiled = torch.compile(model, backend="eager")
    with pytest.raises(CaptureError, match=r"torch\.compile"), capture_training(model, lambda batch: None):
        own_loss(compiled, inputs).backward()


def test_nothing_is_held_after_the_pass():
    model, tokenizer = without_dropout("llama", torch.float32)
    inputs, _ = batch_of(tokenizer)
    seen = []
    handle = model.model.layers[0].mlp.down_proj.register_forward_pre_hook(lambda _, args: seen.append(weakref.ref(args[0])))
    with capture_training(model, lambda batch: None):
        own_loss(model, inputs).backward()
        partial(own_loss, model, inputs)()
        gc.collect()
        assert [one() for one in seen] == [None, None]
    handle.remove()


class TestPacked:
    """Documents packed in rows are told apart again: each has the gradients that it has alone."""

    @staticmethod
    def rows(tokenizer, layout):
        """Pack the documents; return input_ids, position_ids and labels, whose first of each document is ignored."""
        texts = iter(models.sentences(sum(layout)))
        rows = [[tokenizer(next(texts)).input_ids for _ in range(num)] for num in layout]
        longest = max(sum(map(len, row)) for row in rows)
        inputs = {name: torch.zeros(len(rows), longest, dtype=torch.int64) for name in ("input_ids", "position_ids")}
        inputs["labels"] = torch.full((len(rows), longest), IGNORED)
        for number, row in enumerate(rows):
            length = sum(map(len, row))
            inputs["input_ids"][number, :length] = torch.tensor([token for ids in row for token in ids])
            inputs["position_ids"][number, :length] = torch.cat([torch.arange(len(ids)) for ids in row])
            inputs["labels"][number, :length] = torch.tensor([one for ids in row for one in [IGNORED, *ids[1:]]])
        return inputs, [ids for row in rows for ids in row]

    @pytest.mark.parametrize(
        ("kind", "told_by", "reentrant"),
        [
            *((kind, told_by, None) for kind in models.KINDS for told_by in ("positions", "ends", "ids")),
            *((kind, "positions", reentrant) for kind in ("gpt2", "llama") for reentrant in (False, True)),
        ],
    )
    def test_a_packed_row_is_an_example_a_document(self, kind, told_by, reentrant):
        model, tokenizer = without_dropout(kind, torch.float64 if reentrant is None else torch.float32)
        if reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        inputs, token_ids = self.rows(tokenizer, [4])
        options, more = {}, {}
        if told_by == "ends":
            more["cu_seq_lens_q"] = torch.tensor([0, *map(len, token_ids)]).cumsum(0).int()
        elif told_by == "ids":
            numbers = torch.arange(4).repeat_interleave(torch.tensor([len(ids) for ids in token_ids]))[None]
            options["segments"] = lambda inputs: numbers
        found = []
        with capture_training(model, found.append, **options):
            with reference.FullPrecision() if reentrant is None else nullcontext():
                loss = model(**inputs, **more, use_cache=False).loss
            loss.backward()
        assert found[0].num_examples == 4
        assert found[0].segments.length_S.tolist() == [len(ids) for ids in token_ids]
        assert_exact(dense(found[0]), model, token_ids, 1e-9 if reentrant is None else 1e-4)

    def test_several_rows_with_padding_that_is_no_document(self):
        model, tokenizer = without_dropout("llama")
        inputs, token_ids = self.rows(tokenizer, [3, 1, 2])
        lengths = [len(ids) for ids in token_ids]

        def numbers(inputs):
            ids_NT = torch.full_like(inputs["input_ids"], -1)
            for row, documents in enumerate(([0, 1, 2], [3], [4, 5])):
                flat = torch.tensor([document for document in documents for _ in range(lengths[document])])
                ids_NT[row, : len(flat)] = flat
            return ids_NT

        found = []
        with capture_training(model, found.append, segments=numbers), reference.FullPrecision():
            model(**inputs, use_cache=False).loss.backward()
        assert found[0].segments.row_S.tolist() == [0, 0, 0, 1, 2, 2]
        assert_exact(dense(found[0]), model, token_ids, 1e-9)
        with (
            pytest.raises(CaptureError, match="belong to no example"),
            capture_training(model, print, segments=lambda inputs: numbers(inputs).masked_fill(numbers(inputs) == 3, -1)),
        ):
            model(**inputs, use_cache=False).loss.backward()

    def test_means_of_documents_and_rows_as_examples(self):
        model, tokenizer = without_dropout("llama")
        inputs, token_ids = self.rows(tokenizer, [3])
        lengths = torch.tensor([len(ids) for ids in token_ids])
        numbers = torch.arange(3).repeat_interleave(lengths)[:-1]
        found = []

        def run(use_cache=False, **options):
            with capture_training(model, found.append, **options), reference.FullPrecision():
                packed = {"input_ids": inputs["input_ids"], "position_ids": inputs["position_ids"]}
                logits = model(**packed, **({} if use_cache else {"use_cache": False})).logits[0, :-1]
                losses = F.cross_entropy(logits, inputs["labels"][0, 1:], reduction="none", ignore_index=IGNORED)
                (losses / (lengths - 1)[numbers]).sum().backward()

        run()
        torch.testing.assert_close(found[0].scale_N, 1 / (lengths - 1).double())
        assert_exact(dense(found[0]), model, token_ids, 1e-9)
        with pytest.raises(CaptureError, match="give loss_scale"):
            run(segments=None)
        with pytest.raises(CaptureError, match="use_cache=False"):  # transformers lets documents see each other then
            run(use_cache=True)
        run(segments=None, loss_scale=1.0)
        assert found[1].num_examples == 1
        for name, gradient in dense(found[0]).items():
            summed = (gradient * found[0].scale_N[:, None, None]).sum(0)
            torch.testing.assert_close(dense(found[1])[name][0], summed, rtol=1e-9, atol=1e-12)

    def test_a_mask_or_positions_that_count_on_mean_rows(self):
        ids = torch.tensor([[0, 1, 2, 0, 1]])
        assert len(find_segments({"position_ids": ids}, 1)) == 2
        assert find_segments({"position_ids": ids, "attention_mask": torch.ones(1, 5)}, 1) is None
        assert find_segments({"position_ids": torch.arange(5)[None]}, 3) is None
        assert find_segments({"position_ids": torch.arange(5)[None].expand(3, 1, 5)}, 1) is None
        assert find_segments({}, 2) is None
        assert find_segments({"cu_seqlens": torch.tensor([0, 2, 2, 5])}, 1).length_S.tolist() == [2, 3]
        with pytest.raises(CaptureError, match="one row"):
            find_segments({"cu_seqlens": torch.tensor([0, 2, 5])}, 2)
        with pytest.raises(CaptureError, match="integers"):
            segments_of(torch.ones(4))

    def test_every_form_is_split(self):
        torch.manual_seed(0)
        segments = segments_of(torch.tensor([[0, 0, 1, 1, 1, 2], [3, -1, 5, 5, 5, 5]]))
        bounds = [(0, 0, 2), (0, 2, 5), (0, 5, 6), (1, 0, 1), (1, 2, 6)]
        g_NTO, a_NTI = torch.randn(2, 6, 3), torch.randn(2, 6, 4)
        for one in (
            Outer(a_NTI, g_NTO),
            Outer(torch.randn(2, 6, 900), torch.randn(2, 6, 1)),
            Lookup(torch.randint(7, (2, 6)), g_NTO, 7),
            Grouped(torch.randn(2, 6, 2, 4), torch.randn(2, 6, 2, 3)),
            Grouped(torch.randn(2, 1, 2, 4), torch.randn(2, 6, 2, 3)),
        ):
            found = segments.split("x", one)
            assert found.num_examples == 5
            for document, (row, start, stop) in enumerate(bounds):
                fields = [getattr(one, name) for name in type(one).__dataclass_fields__]
                cut = [
                    value[row : row + 1, start:stop] if isinstance(value, torch.Tensor) and value.shape[1] == 6 else value
                    for value in fields
                ]
                cut = [value[row : row + 1] if isinstance(value, torch.Tensor) and len(value) == 2 else value for value in cut]
                torch.testing.assert_close(found.dense()[document], type(one)(*cut).dense()[0], rtol=1e-6, atol=1e-6)
        long = segments_of(torch.arange(40).repeat_interleave(torch.tensor([1] * 39 + [400]))[None])
        assert isinstance(long.split("x", Outer(torch.randn(1, 439, 4), torch.randn(1, 439, 4))), Dense)
        for wrong in (Dense(torch.ones(2, 3, 4)), Outer(a_NTI[:, :5], g_NTO[:, :5])):
            with pytest.raises(CaptureError, match="expected 6 positions"):
                segments.split("x", wrong)
