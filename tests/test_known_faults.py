"""Faults that attribution systems are known for, each as a test of the right behaviour.

Where another file tests it at length, the test here is the shortest that would fail if the fault were here.
"""

import gc
import json
import random
import weakref
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import tdasearch
from tdasearch.capture import Capture
from tdasearch.curvature import Covariance, ModuleFactors
from tdasearch.encoder import Encoder
from tdasearch.errors import StoreError
from tdasearch.indexer.fit import fit_factors
from tdasearch.indexer.readers_rows import content_hash
from tdasearch.language_model import LanguageModel, token_batches
from tdasearch.layers import kind_of, layer_of
from tdasearch.modules import choose_modules
from tdasearch.records import Content
from tests import models, reference

PROMPT, COMPLETION = "The old bridge over", " the river was closed"


def rows(num=24):
    return [{"id": f"d{n}", "text": text, "source": "wiki" if n % 2 else "web"} for n, text in enumerate(models.sentences(num))]


def build(corpus, path, *, kind="gpt2", **options):
    model, tokenizer = models.tiny(kind)
    return tdasearch.build_index(
        corpus, model=model, tokenizer=tokenizer, path=path, fit_documents="all", quiet=True, **{"fisher": "empirical", **options}
    )


def column(index, name):
    batches = index.table.latest().batches(["document_id", name])
    return {row["document_id"]: row[name] for batch in batches for row in batch.to_pylist()}


def codes(index):
    return column(index, "code")


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    return build(rows(), tmp_path_factory.mktemp("faults") / "x.tda")


@pytest.fixture(scope="module")
def language_model():
    return LanguageModel(*models.tiny("llama"))


def batch_of(language_model, num=4):
    token_ids = [language_model.tokenizer(text).input_ids for text in models.sentences(num)]
    return language_model.batch(token_ids, [[False] + [True] * (len(ids) - 1) for ids in token_ids])


# ---- the index ----


def test_a_torn_file_of_a_killed_build_hides_no_document(tmp_path):
    def dies():
        yield from rows(20)
        raise KeyboardInterrupt  # as a kill while the corpus is read

    with pytest.raises(KeyboardInterrupt):
        build(dies(), tmp_path / "x.tda", shard_documents=4)
    folder = tmp_path / "x.tda"
    folder.mkdir(exist_ok=True)
    (folder / ".manifest.json.tmp").write_text('{"format_ver')  # half a line, as a kill while it is written
    index = build(rows(), folder, shard_documents=4)
    assert sorted(codes(index)) == sorted(row["id"] for row in rows())


def test_a_build_that_is_run_again_doubles_nothing(index, tmp_path):
    again = build(rows(), tmp_path / "y.tda")
    before = {hit.document_id: hit.score for hit in again.search(PROMPT, COMPLETION, k=24, rescore="all").proponents}
    with pytest.raises(StoreError, match="an index is there already"):
        build(rows(), tmp_path / "y.tda")
    again.add(rows())  # all of them are there
    assert again.table.latest().num_rows == 24
    after = {hit.document_id: hit.score for hit in again.search(PROMPT, COMPLETION, k=24, rescore="all").proponents}
    assert after == before


def test_documents_of_equal_text_stay_two_rows(tmp_path):
    twins = [{"id": "a", "text": rows()[0]["text"]}, {"id": "b", "text": rows()[0]["text"]}, *rows(12)[1:]]
    index = build(twins, tmp_path / "x.tda")
    found = {hit.document_id: hit.score for hit in index.search(PROMPT, COMPLETION, k=13, rescore="all").proponents}
    assert len(found) == 13
    assert found["a"] == pytest.approx(found["b"], rel=1e-6)  # each has its own, not the sum


def test_equal_queries_have_each_their_answer(index):
    first, second = index.search_many([Content(PROMPT, COMPLETION)] * 2, k=5)
    assert [hit.document_id for hit in first.proponents] == [hit.document_id for hit in second.proponents]
    assert [hit.score for hit in first.proponents] == pytest.approx([hit.score for hit in second.proponents], rel=1e-5)


def test_two_writers_never_share_an_index(tmp_path):
    def meddling():
        yield from rows(8)
        with pytest.raises(StoreError, match="is being written by process"):
            build(rows(4), tmp_path / "x.tda")
        yield from rows(24)[8:]

    assert len(codes(build(meddling(), tmp_path / "x.tda"))) == 24


def test_searches_at_the_same_time_keep_their_answers_apart(index):
    queries = [(PROMPT, COMPLETION), ("A small boat", " was seen"), ("The market", " opened early")]
    alone = [[hit.document_id for hit in index.search(*query, k=5, rescore=0).proponents] for query in queries]
    readers = [tdasearch.open_index(index.path, model=(pair := models.tiny("gpt2"))[0], tokenizer=pair[1]) for _ in queries]
    with ThreadPoolExecutor(3) as threads:
        together = list(threads.map(lambda pair: pair[0].search(*pair[1], k=5, rescore=0), zip(readers, queries, strict=True)))
    assert [[hit.document_id for hit in hits.proponents] for hits in together] == alone


def test_samples_that_a_sampler_repeats_count_once(tmp_path):
    from torch.utils.data.distributed import DistributedSampler

    documents = rows(11)
    shares = [list(DistributedSampler(documents, num_replicas=4, rank=rank, shuffle=False)) for rank in range(4)]
    padded = [documents[row] for share in shares for row in share]
    assert max(Counter(row["id"] for row in padded).values()) == 2  # what the sampler does to fill its ranks
    assert sorted(codes(build(padded, tmp_path / "x.tda"))) == sorted(row["id"] for row in documents)


def test_scoring_reads_codes_and_no_gradient_of_a_document(index, monkeypatch):
    passes = []
    backward = Capture.backward
    monkeypatch.setattr(Capture, "backward", lambda self, *args, **kwargs: passes.append(1) or backward(self, *args, **kwargs))
    index.search(PROMPT, COMPLETION, k=5, rescore=0)
    assert len(passes) == 1  # the query's own


def test_a_hit_has_id_text_and_metadata_and_filters_come_before_the_top_k(index):
    hits = index.search(PROMPT, COMPLETION, k=24, where="source = 'wiki'").proponents
    assert {hit.document_id for hit in hits} == {row["id"] for row in rows() if row["source"] == "wiki"}
    by_id = {row["id"]: row for row in rows()}
    assert all(hit.text == by_id[hit.document_id]["text"] and hit.metadata == {"source": "wiki"} for hit in hits)


def test_an_index_refuses_an_encoder_that_is_not_its_own(tmp_path):
    index, other = build(rows(8), tmp_path / "a.tda"), build(rows(8), tmp_path / "b.tda", seed=1, damping_scale=0.5)
    (tmp_path / "a.tda" / "encoder.safetensors").write_bytes((other.path / "encoder.safetensors").read_bytes())
    model, tokenizer = models.tiny("gpt2")
    with pytest.raises(StoreError, match=r"encoder\.safetensors"):
        tdasearch.open_index(index.path, model=model, tokenizer=tokenizer).search(PROMPT, COMPLETION)


def test_documents_are_added_without_encoding_the_old_ones_again(tmp_path, monkeypatch):
    index = build(rows(12), tmp_path / "x.tda")
    before, seen = codes(index), []
    encode = Encoder.encode
    monkeypatch.setattr(Encoder, "encode", lambda self, *args: seen.append(found := encode(self, *args)) or found)
    index.add(rows(16))
    assert sum(len(encoded.losses_N) for encoded in seen) == 4
    assert {name: code for name, code in codes(index).items() if name in before} == before


# ---- gradients ----


def test_nothing_is_kept_of_passes_outside_the_capture(language_model):
    model, batch = language_model.model, batch_of(language_model)
    capture = Capture(model, choose_modules(model).names)
    made = []
    handle = model.model.layers[0].mlp.up_proj.register_forward_hook(
        lambda module, args, output: made.append(weakref.ref(output))
    )
    with capture:
        capture.backward(partial(language_model.losses, batch), lambda *_: None, is_token_NT=batch.is_token)
    for _ in range(3):
        language_model.losses(batch)
    handle.remove()
    gc.collect()
    assert len(made) >= 4
    assert not [ref for ref in made if ref() is not None]
    assert not [module for module in model.modules() if module._forward_hooks]


def test_covariances_of_narrow_types_are_summed_in_full_precision():
    torch.manual_seed(0)
    vectors = torch.randn(8, 64, 6).bfloat16()
    covariance = Covariance()
    for _ in range(50):
        covariance.add(vectors, torch.ones(8, 64, dtype=torch.bool))
    flat = vectors.double().flatten(0, 1)
    values = torch.linalg.eigvalsh(flat.T @ flat / len(flat)).flip(0)
    torch.testing.assert_close(covariance.eigen()[0], values, rtol=1e-5, atol=0)  # bfloat16 products are off by 4e-3


@pytest.mark.parametrize("batch_tokens", [1, 64, 4096])
def test_a_document_has_one_scale_whatever_the_batch(index, tmp_path, batch_tokens):
    other = build(rows(), tmp_path / "x.tda", batch_tokens=batch_tokens)
    expected = {hit.document_id: hit.score for hit in index.search(PROMPT, COMPLETION, k=24, rescore="all").proponents}
    found = {hit.document_id: hit.score for hit in other.search(PROMPT, COMPLETION, k=24, rescore="all").proponents}
    assert found == pytest.approx(expected, rel=2e-3, abs=1e-4 * max(map(abs, expected.values())))
    assert column(other, "self_influence") == pytest.approx(column(index, "self_influence"), rel=2e-3)


def test_a_subclass_with_another_forward_is_never_taken_for_its_parent():
    class Scaled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    class Plain(nn.Linear):
        pass

    assert kind_of("x", Scaled(2, 3))[0] == "other"  # run again as it is
    (part,) = layer_of("x", Plain(2, 3)).parts
    assert (part.out_dim, part.in_dim) == (3, 3)  # with its bias


def test_hashes_are_framed_and_take_every_type():
    contents = [Content("ab", "c"), Content("a", "bc"), Content("", "abc"), Content("abc", ""), Content(completion="ab\nc")]
    assert len({content_hash(content) for content in contents}) == len(contents)
    model, tokenizer = models.tiny("llama")
    fingerprints = {
        LanguageModel(model.to(dtype), tokenizer).weights_fingerprint for dtype in (torch.float32, torch.bfloat16, torch.float16)
    }
    assert len(fingerprints) == 3


def test_the_random_state_is_left_as_it_was(tmp_path):
    torch.manual_seed(7)
    np.random.seed(7)
    random.seed(7)
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    model, tokenizer = models.tiny("gpt2")
    torch.set_rng_state(before[0])
    index = tdasearch.build_index(rows(8), model=model, tokenizer=tokenizer, path=tmp_path / "x.tda", quiet=True)
    index.search(PROMPT, COMPLETION, k=3)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])
    assert random.getstate() == before[2]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_model_with_checkpointing_gives_the_same_gradients(use_reentrant):
    found = {}
    for checkpointing in (False, True):
        model, tokenizer = models.tiny("llama")
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
        language_model = LanguageModel(model.double(), tokenizer)
        batch = batch_of(language_model)
        with Capture(model, choose_modules(model).names) as capture:
            gradients = found.setdefault(checkpointing, {})
            capture.backward(
                partial(language_model.losses, batch), lambda name, gradient, to=gradients: to.update({name: gradient.dense()})
            )
        assert model.is_gradient_checkpointing is checkpointing
    for name, gradient in found[False].items():
        torch.testing.assert_close(found[True][name], gradient, rtol=1e-12, atol=1e-14)


def test_eigenvalues_are_clamped_and_the_inverse_is_finite():
    covariance = Covariance()
    covariance.add(torch.randn(1, 2, 40), torch.ones(1, 2, dtype=torch.bool))  # rank 2 of 40: rounding makes negative ones
    values, vectors = covariance.eigen()
    assert (values >= 0).all()
    factors = ModuleFactors(vectors, torch.eye(3), torch.outer(torch.ones(3), values).float(), damping=0.0)
    assert torch.isfinite(factors.inverse_sqrt()).all()
    assert torch.isfinite(factors.precondition(torch.randn(3, 40))).all()


def test_a_vocabulary_is_never_decomposed(monkeypatch):
    model, tokenizer = models.tiny("llama")
    language_model = LanguageModel(model, tokenizer)
    monkeypatch.setattr("tdasearch.curvature.MAX_EIGENBASIS_DIM", 100)  # the tiny vocabulary has 300
    monkeypatch.setattr("tdasearch.fitting.MAX_EIGENBASIS_DIM", 100)
    sample = [tokenizer(text).input_ids for text in models.sentences(6)]
    windows = pa.table({"token_ids": sample, "is_target": [[False] + [True] * (len(ids) - 1) for ids in sample]})
    products = _Products()
    with products, pytest.warns(UserWarning, match="too wide for an eigenbasis"):
        factors = fit_factors(
            language_model,
            windows,
            ["lm_head"],
            method="ekfac",
            fisher="empirical",
            damping_scale=0.1,
            seed=0,
            batch_tokens=64,
            step=lambda _: None,
        )
    assert factors["lm_head"].gradient_eigenvectors is None
    assert factors["lm_head"].eigenvalues.shape == (models.VOCABULARY, 24)
    assert products.shapes
    assert (models.VOCABULARY, models.VOCABULARY) not in products.shapes


class _Products(TorchDispatchMode):
    """Notes the shapes of all products of matrices."""

    def __init__(self):
        super().__init__()
        self.shapes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default):
            self.shapes.add(tuple(made.shape))
        return made


def test_no_weight_gradient_is_computed(language_model):
    model, batch = language_model.model, batch_of(language_model)
    coverage = choose_modules(model)
    weights = {tuple(module.weight.shape) for name, module in model.named_modules() if name in coverage.names}
    num_positions = batch.is_token.numel()
    assert num_positions not in {side for shape in weights for side in shape}
    products = _Products()
    with Capture(model, coverage.names, check=False) as capture, products:
        capture.backward(partial(language_model.losses, batch), lambda *_: None, is_token_NT=batch.is_token)
    assert products.shapes  # forward and activation gradients
    assert not products.shapes & (weights | {shape[::-1] for shape in weights})
    assert all(parameter.grad is None for parameter in model.parameters())


def test_examples_that_a_model_mixes_are_refused():
    class Mixing(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(3, 3)

        def forward(self, x_TNI):  # the batch is the second dimension
            return self.inner(x_TNI)

    model, x_TNI = Mixing(), torch.randn(4, 4, 3)
    with pytest.raises(tdasearch.errors.CaptureError, match="another one's rows"), Capture(model, ["inner"]) as capture:
        capture.backward(lambda: model(x_TNI).square().sum((0, 2)), lambda *_: None)


def test_batches_hold_what_they_are_given_once():
    lengths = [random.Random(0).randint(1, 60) for _ in range(200)]
    batches = list(token_batches(lengths, batch_tokens=128))
    assert sorted(row for batch in batches for row in batch) == list(range(200))
    assert all(len(batch) * max(lengths[row] for row in batch) <= 128 for batch in batches)


def test_json_is_strict_everywhere(index):
    described = json.loads(json.dumps(index.info(), allow_nan=False))
    assert described["documents"] == 24
    assert reference.block_linear_names(index.language_model.model) == index.manifest.plan.modules
