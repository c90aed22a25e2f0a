"""The encoder: exact where nothing is compressed, faithful where it is, and blind to a document's neighbours."""

from functools import partial

import numpy as np
import pyarrow as pa
import pytest
import torch

from tdasearch.capture import Capture
from tdasearch.curvature import Covariance, ModuleFactors
from tdasearch.encoder import Encoder
from tdasearch.indexer.fit import fit_factors
from tdasearch.language_model import LanguageModel, sample_labels, token_batches, uniforms_for
from tdasearch.modules import choose_modules
from tdasearch.sketch import Sketch
from tdasearch.store.factors import load_factors, save_factors
from tests import models, reference

SEED = 3


def windows_of(texts, tokenizer):
    token_ids = [tokenizer(text).input_ids for text in texts]
    return pa.table({"token_ids": token_ids, "is_target": [[False] + [True] * (len(ids) - 1) for ids in token_ids]})


def fitted(kind, *, fisher="empirical", method="ekfac", num=12, batch_tokens=64, seed=SEED):
    model, tokenizer = models.tiny(kind)
    language_model = LanguageModel(model, tokenizer)
    windows = windows_of(models.sentences(num), tokenizer)
    names = choose_modules(model).names
    factors = fit_factors(
        language_model,
        windows,
        names,
        method=method,
        fisher=fisher,
        damping_scale=0.1,
        seed=seed,
        batch_tokens=batch_tokens,
        step=lambda amount: None,
    )
    return language_model, windows, names, factors


def encode(language_model, names, encoder, windows, rows):
    token_ids, is_target = windows["token_ids"].to_pylist(), windows["is_target"].to_pylist()
    batch = language_model.batch([token_ids[row] for row in rows], [is_target[row] for row in rows])
    with Capture(language_model.model, names) as capture:
        return encoder.encode(capture, partial(language_model.losses, batch))


@pytest.mark.parametrize("kind", models.KINDS)
@pytest.mark.parametrize("method", ["ekfac", "kfac"])
def test_inner_products_equal_the_reference_where_nothing_is_compressed(kind, method):
    language_model, windows, names, factors = fitted(kind, method=method)
    encoder = Encoder(factors, eigenbasis_share=1.0, sketch_dim=16_384, seed=SEED)
    encoded = encode(language_model, names, encoder, windows, range(windows.num_rows))
    exact = reference.reference_model(language_model.model)
    examples = [
        reference.Example(*pair) for pair in zip(windows["token_ids"].to_pylist(), windows["is_target"].to_pylist(), strict=True)
    ]
    curvature = reference.fit(exact, examples, names, method=method)
    gradients = [reference.module_gradients(exact, example, names) for example in examples]
    expected = reference.influences(gradients, gradients, curvature)
    got = (encoded.vectors_ND @ encoded.vectors_ND.T).double().numpy()
    assert np.abs(got - expected).max() < 1e-4 * np.abs(expected).max()
    np.testing.assert_allclose(encoded.self_influence_N.numpy(), np.diag(expected), rtol=1e-4)


def test_a_document_and_its_neighbours():
    """The same document alone, beside one ten times longer, at another batch size and in another order: the same vector."""
    language_model, windows, names, factors = fitted("gpt2")
    ids = windows["token_ids"].to_pylist()[0][:6]
    long = (windows["token_ids"].to_pylist()[1] * 12)[:60]
    several = pa.table(
        {
            "token_ids": [ids, long, ids[:4], ids],
            "is_target": [[False] + [True] * (len(x) - 1) for x in (ids, long, ids[:4], ids)],
        }
    )
    encoder = Encoder(factors, eigenbasis_share=0.5, sketch_dim=512, seed=SEED)
    alone = encode(language_model, names, encoder, several, [0]).vectors_ND[0]
    for rows in ([0, 1], [1, 0], [2, 1, 0], [3, 2, 1, 0]):
        vector = encode(language_model, names, encoder, several, rows).vectors_ND[rows.index(0)]
        assert float((vector - alone).norm()) <= 1e-5 * float(alone.norm())


def test_query_and_document_are_encoded_alike():
    language_model, windows, names, factors = fitted("qwen2")
    encoder = Encoder(factors, eigenbasis_share=0.5, sketch_dim=512, seed=SEED)
    document = encode(language_model, names, encoder, windows, [4])
    batch = language_model.batch([windows["token_ids"][4].as_py()], [windows["is_target"][4].as_py()])
    with Capture(language_model.model, names) as capture:
        query = encoder.encode_query(capture, partial(language_model.losses, batch), num_targets=7)
    torch.testing.assert_close(query.vector_D, document.vectors_ND[0], rtol=1e-4, atol=1e-4 * float(query.vector_D.abs().max()))
    assert query.kept_self_influence == pytest.approx(float(document.self_influence_N[0]), rel=1e-4)
    assert query.self_influence > query.kept_self_influence
    whole = Encoder(factors, eigenbasis_share=1.0, sketch_dim=512, seed=SEED)
    assert float(encode(language_model, names, whole, windows, [4]).self_influence_N[0]) == pytest.approx(
        query.self_influence, rel=1e-4
    )


def test_factors_do_not_depend_on_batch_size_or_on_a_corpus_given_twice():
    language_model, windows, names, factors = fitted("llama", fisher="sampled", batch_tokens=40)
    doubled = pa.concat_tables([windows, windows])
    options = {"method": "ekfac", "fisher": "sampled", "damping_scale": 0.1, "seed": SEED, "step": lambda amount: None}
    for other in (
        fit_factors(language_model, windows, names, batch_tokens=4096, **options),
        fit_factors(language_model, doubled, names, batch_tokens=64, **options),
    ):
        for name in names:
            assert other[name].damping == pytest.approx(factors[name].damping, rel=1e-3)


def test_sampled_and_empirical_fisher_differ_and_the_seed_counts():
    _, _, names, empirical = fitted("gpt2")
    _, _, _, sampled = fitted("gpt2", fisher="sampled")
    _, _, _, again = fitted("gpt2", fisher="sampled")
    _, _, _, other = fitted("gpt2", fisher="sampled", seed=SEED + 1)
    assert sampled[names[0]].damping == again[names[0]].damping
    assert sampled[names[0]].damping != pytest.approx(other[names[0]].damping, rel=1e-3)
    assert sampled[names[0]].damping != pytest.approx(empirical[names[0]].damping, rel=1e-3)


def test_labels_are_drawn_from_the_model():
    logits = torch.log(torch.tensor([[0.5, 0.0, 0.3, 0.2]])).expand(20_000, 4)
    uniforms = torch.from_numpy(uniforms_for(range(20_000), seed=1))
    drawn = torch.bincount(sample_labels(logits, uniforms), minlength=4) / 20_000
    torch.testing.assert_close(drawn, torch.tensor([0.5, 0.0, 0.3, 0.2]), atol=0.015, rtol=0)
    assert drawn[1] == 0
    assert int(sample_labels(logits[:1], torch.tensor([1.0 - 2**-53], dtype=torch.float64))[0]) == 3
    assert not np.array_equal(uniforms_for([1, 2, 3], seed=1), uniforms_for([1, 2, 3], seed=2))
    assert not np.array_equal(uniforms_for([1, 2, 3], seed=1), uniforms_for([1, 2, 4], seed=1))


def test_fewer_samples_than_dimensions_and_a_dead_feature():
    torch.manual_seed(0)
    vectors = torch.randn(1, 5, 40)
    vectors[..., 7] = 0
    covariance = Covariance()
    covariance.add(vectors, torch.ones(1, 5, dtype=torch.bool))
    values, eigenvectors = covariance.eigen()
    assert float(values.min()) >= 0
    assert torch.all(values[:-1] >= values[1:])
    assert torch.allclose(eigenvectors.T @ eigenvectors, torch.eye(40), atol=1e-5)
    factors = ModuleFactors(eigenvectors, torch.eye(1), values[None].float(), damping=0.0)
    assert torch.isfinite(factors.inverse_sqrt()).all()


def test_the_sketch_is_exact_where_everything_fits():
    torch.manual_seed(0)
    sizes = {"a": 30, "b": 50, "c": 16}
    parts = {name: torch.randn(2, size, dtype=torch.float64) for name, size in sizes.items()}
    sketch = Sketch(sizes, sketch_dim=96, seed=1)
    out = torch.zeros(2, 96, dtype=torch.float64)
    for name, part in parts.items():
        sketch.add(out, name, part * sketch.signs(name))
    whole = torch.cat(list(parts.values()), dim=1)
    torch.testing.assert_close(out @ out.T, whole @ whole.T)
    assert torch.equal(out.abs().sort(dim=1).values, whole.abs().sort(dim=1).values)


def test_the_sketch_keeps_inner_products_in_expectation():
    torch.manual_seed(0)
    sizes = {"a": 700, "b": 1300}
    x, y = torch.randn(2, 1, 2000, dtype=torch.float64)
    y = y + 0.5 * x
    estimates = []
    for seed in range(200):
        sketch = Sketch(sizes, sketch_dim=256, seed=seed)
        outs = []
        for vector in (x, y):
            out = torch.zeros(1, 256, dtype=torch.float64)
            for name, part in zip(sizes, vector.split(list(sizes.values()), dim=1), strict=True):
                sketch.add(out, name, part * sketch.signs(name))
            outs.append(out)
        estimates.append(float(outs[0] @ outs[1].T))
    exact = float(x @ y.T)
    error = np.std(estimates) / np.sqrt(len(estimates))
    assert abs(np.mean(estimates) - exact) < 4 * error
    # A dense random projection to D dimensions has variance (|x|^2 |y|^2 + <x, y>^2) / D; this one is no worse.
    assert np.var(estimates) < 1.3 * (float(x @ x.T) * float(y @ y.T) + exact**2) / 256


def test_seeds_and_sketches():
    one, same, other = (Sketch({"a": 500}, sketch_dim=128, seed=seed) for seed in (1, 1, 2))
    x = torch.ones(1, 500)
    sums = []
    for sketch in (one, same, other):
        sums.append(torch.zeros(1, 128))
        sketch.add(sums[-1], "a", x * sketch.signs("a"))
    assert torch.equal(sums[0], sums[1])
    assert not torch.equal(sums[0], sums[2])


def test_factors_survive_the_disk_and_another_file_is_refused(tmp_path):
    from tdasearch.errors import StoreError

    _, _, names, factors = fitted("llama")
    fingerprint = save_factors(tmp_path, factors)
    loaded = load_factors(tmp_path, fingerprint=fingerprint)
    for name in names:
        assert torch.equal(loaded[name].eigenvalues, factors[name].eigenvalues)
        assert torch.equal(loaded[name].activation_eigenvectors, factors[name].activation_eigenvectors)
        assert loaded[name].damping == factors[name].damping
    layer = "model.layers.0.self_attn."
    assert loaded[layer + "q_proj"].activation_eigenvectors is loaded[layer + "v_proj"].activation_eigenvectors
    path = tmp_path / "encoder.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(StoreError, match="expected SHA-256"):
        load_factors(tmp_path, fingerprint=fingerprint)
    path.unlink()
    with pytest.raises(StoreError, match="no such file"):
        load_factors(tmp_path, fingerprint=fingerprint)


def test_batches_hold_every_window_once_and_keep_the_bound():
    lengths = [3, 50, 7, 7, 100, 1, 20]
    batches = list(token_batches(lengths, batch_tokens=64))
    assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[row] for row in batch) <= 64
